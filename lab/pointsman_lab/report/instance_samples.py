"""Samples of a run's instances over time. Pure."""

from __future__ import annotations

import msgspec


class GpuSample(msgspec.Struct, frozen=True):
    """One GPU of an instance at one moment; utilisation 0 to 1, memory in bytes."""

    index: int
    utilisation: float
    memory_used: int
    memory_total: int


class InstanceSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance at one moment of a run."""

    t: float  # s from the run's start
    instance: str
    num_requests: int = 0  # from here on the router's own state
    pending_prefill_tokens: int = 0
    ongoing_decode_tokens: int = 0
    keys: int = 0
    sessions: int = 0

    running: int = 0  # from here on the engine's last report, with counters since its start
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    gpus: tuple[GpuSample, ...] = ()
