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
    """One instance at one moment of a run, `t` in s from the run's start.

    The first group of fields is the router's own state. The second is the engine's last report, with counters since its start.
    """

    t: float
    instance: str
    num_requests: int = 0
    pending_prefill_tokens: int = 0
    ongoing_decode_tokens: int = 0
    keys: int = 0
    sessions: int = 0

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    gpus: tuple[GpuSample, ...] = ()
