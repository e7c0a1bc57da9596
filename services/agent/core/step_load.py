"""The message that an engine with the connector package's stat logger pushes after each step: a msgpack map. Pure."""

from __future__ import annotations

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb


class Counters(msgspec.Struct, frozen=True):
    """Counts since the engine's start; queries and hits are in tokens. The engine's `connector` statistics are not part of them;
    they are only in its own metrics."""

    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    external_prefix_cache_queries: int
    external_prefix_cache_hits: int


class StepLoad(msgspec.Struct, frozen=True):
    """Load of an engine directly after a step. `process` is its process_start_time_seconds, `ports` are the TCP ports on which
    that process listens, `rank` is its data-parallel rank."""

    process: float
    ports: list[int]
    rank: int
    running: int
    waiting: int
    kv_usage: float
    counters: Counters

    def to_wire(self, gpus: list[pb.Gpu], suspended: str = "") -> pb.Load:
        """Return the load in the form that routers receive. `gpus` and `suspended` are of the last scrape."""
        counters = self.counters
        return pb.Load(
            running=self.running,
            waiting=self.waiting,
            kv_usage=self.kv_usage,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            external_prefix_cache_queries=counters.external_prefix_cache_queries,
            external_prefix_cache_hits=counters.external_prefix_cache_hits,
            preemptions=counters.preemptions,
            healthy=True,
            gpus=gpus,
            suspended=suspended,
        )
