"""The message that an engine pushes to its agent after each step: a msgpack map with these field names."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Counts since the engine's start. Cache queries and hits are in tokens. `connector` has the sums of the KV connector's own
    statistics (seconds, bytes, counts) by name."""

    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    evictions: int = 0
    connector: dict[str, float] = msgspec.field(default_factory=dict)


class StepLoad(msgspec.Struct):
    """Load of an engine directly after a step. `process` is its process_start_time_seconds, `ports` are the TCP ports on which
    that process listens, `rank` is its data-parallel rank, `kv_usage` is the used share of its KV blocks, 0 to 1."""

    process: float
    ports: list[int]
    rank: int
    running: int
    waiting: int
    kv_usage: float
    counters: Counters
