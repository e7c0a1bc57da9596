"""Converts routers' answers into events of a request's state machine."""

from __future__ import annotations

from google.protobuf import duration_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.request.request_events import PlacementRefused, StepAssigned, Target
from pointsman_gateway.core.request.transfer_params import MOONCAKE, NIXL

_PROTOCOLS = {agent_pb2.KV_PROTOCOL_MOONCAKE: MOONCAKE, agent_pb2.KV_PROTOCOL_NIXL: NIXL}


def event_of(attempt_id: str, step: placement_pb2.Placement | placement_pb2.Refusal) -> StepAssigned | PlacementRefused:
    """Return the event for a router's answer about an attempt."""
    if isinstance(step, placement_pb2.Refusal):
        wait = _seconds(step.retry_after) if step.HasField("retry_after") else None
        return PlacementRefused(attempt_id, step.code, step.message, wait, step.place)
    given = step.step
    prefill = given.prefix_tokens if given.kind == placement_pb2.STEP_KIND_PREFILL else 0
    return StepAssigned(
        attempt_id,
        target_of(given.instance),
        given.index,
        prefill,
        step.decision_id,
        step.cached_tokens,
        step.degraded,
        target_of(given.kv_target) if given.HasField("kv_target") else None,
        target_of(given.kv_source) if given.HasField("kv_source") else None,
        step.runner_up,
    )


def target_of(instance: placement_pb2.InstanceRef) -> Target:
    """Return the Target of `instance`."""
    rank = instance.data_parallel_rank if instance.HasField("data_parallel_rank") else None
    kv = instance.kv_transfer
    return Target(
        instance.instance_id,
        instance.url,
        rank,
        instance.incarnation,
        _PROTOCOLS.get(kv.protocol, ""),
        kv.bootstrap_url,
        kv.layerwise,
        kv.role != agent_pb2.KV_ROLE_PRODUCER,
    )


def _seconds(wire: duration_pb2.Duration) -> float:
    # A conversion through timedelta takes ten times as long.
    return wire.seconds + wire.nanos / 1e9
