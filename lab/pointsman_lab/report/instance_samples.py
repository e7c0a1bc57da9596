"""Samples of a run's instances over time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # The module that reads a bundle need not import what a run is made of.
    from pointsman.agent.v1 import agent_pb2
    from pointsman.router.v1 import fleet_pb2
    from pointsman_router.core.load.reservations import Counters
    from pointsman_router.core.placement_types import Load


class GpuSample(msgspec.Struct, frozen=True):
    """One GPU of an instance at one moment; utilisation 0 to 1, memory in bytes."""

    index: int
    utilisation: float
    memory_used: int
    memory_total: int


class InstanceSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance at one moment of a run."""

    t: float  # s from the run's start
    instance: str  # its id
    num_requests: int = 0  # from here on the router's own state
    pending_prefill_tokens: int = 0  # prompt tokens that are placed and not computed yet
    ongoing_decode_tokens: int = 0  # prompt tokens of the sequences past their first token
    keys: int = 0  # number of block keys, of 16 tokens each, in the exact index; in a simulation, as the agent has them
    sessions: int = 0  # number of sessions that it owns

    running: int = 0  # from here on the engine's last report, with counters since its start
    waiting: int = 0  # requests in the engine's queue
    kv_usage: float = 0.0  # share of the KV blocks in use, 0 to 1
    prefix_queries: int = 0  # prompt tokens looked up in the local prefix cache
    prefix_hits: int = 0  # those of them that were found
    external_queries: int = 0  # prompt tokens looked up through a KV connector
    external_hits: int = 0  # those of them that were found
    gpus: tuple[GpuSample, ...] = ()  # empty if the agent reports none


def sample(
    t: float,
    instance: str,
    counters: Counters | fleet_pb2.InstanceStatus,
    keys: int,
    sessions: int,
    load: Load | agent_pb2.Load,
) -> InstanceSample:
    """Return the sample at `t` of an instance with the router's sums, keys and sessions, and with the engine's last load."""
    return InstanceSample(
        t=round(t, 3),
        instance=instance,
        num_requests=counters.num_requests,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        ongoing_decode_tokens=counters.ongoing_decode_tokens,
        keys=keys,
        sessions=sessions,
        running=load.running or 0,
        waiting=load.waiting or 0,
        kv_usage=round(load.kv_usage or 0.0, 6),
        prefix_queries=load.prefix_cache_queries or 0,
        prefix_hits=load.prefix_cache_hits or 0,
        external_queries=load.external_prefix_cache_queries or 0,
        external_hits=load.external_prefix_cache_hits or 0,
        gpus=tuple(GpuSample(gpu.index, gpu.utilisation, gpu.memory_used, gpu.memory_total) for gpu in load.gpus),
    )
