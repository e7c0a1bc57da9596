"""Converts between the routers' messages and the records of a request's state machine."""

from __future__ import annotations

from google.protobuf import duration_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY
from pointsman_common.core.engine_identity_wire import identity_of
from pointsman_gateway.core.request.continuation import continued_placement, copy_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import PlacementRefused, StepAssigned, Target
from pointsman_gateway.core.request.transfer_params import MOONCAKE, NIXL
from pointsman_gateway.core.tokens.token_cache import TokenIds

_PROTOCOLS = {agent_pb2.KV_PROTOCOL_MOONCAKE: MOONCAKE, agent_pb2.KV_PROTOCOL_NIXL: NIXL}


def attempt_request(
    context: RequestContext, attempt_id: str, exclude: tuple[str, ...], answer: TokenIds
) -> placement_pb2.PlacementRequest:
    """Return the placement request of one attempt. `exclude`: instances that failed. `answer`: the tokens of the answer so far,
    which the attempt continues."""
    request = continued_placement(context, answer) if answer else copy_of(context.placement)
    request.request_id = attempt_id
    request.exclude.extend(exclude)
    if answer:
        # A server that is gone has taken all of its ranks with it.
        instances = context.state.pool.instances
        gone = {instance.url for instance in instances if instance.instance_id in exclude}
        ranks = (instance.instance_id for instance in instances if instance.url in gone)
        request.exclude.extend(instance_id for instance_id in ranks if instance_id not in exclude)
    if context.trace is not None:
        request.traceparent = context.trace.placement_context(attempt_id).traceparent
    return request


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
        step.doubted,
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
        identity_of(instance.identity) if instance.HasField("identity") else UNKNOWN_IDENTITY,
    )


def _seconds(wire: duration_pb2.Duration) -> float:
    # A conversion through timedelta takes ten times as long.
    return wire.seconds + wire.nanos / 1e9
