"""Conversions of the messages from and to gateways: requests, steps, ends of requests."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Mapping, Sequence

from google.rpc import code_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY
from pointsman_common.core.engine_identity_wire import identity_of, identity_to_wire
from pointsman_common.core.enum_words import values
from pointsman_common.core.session_names import session_name
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.ownership import Owner
from pointsman_router.core.placement_types import InstanceInfo, Phase, PlacementRequest, Step, StepKind
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.placement_plans import kv_target
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.convert import instance_and_load_messages
from pointsman_router.io.convert.times import duration, finite, seconds

# Number of open streams that are converted per turn of the event loop, which takes about 2 ms.
STREAMS_AT_ONCE = 500
# Outcomes by number. An unset outcome, or one of a newer gateway, becomes UNKNOWN: it does not end the stream, and counts
# neither as success nor as failure of the instance.
_OUTCOMES: dict[int, str] = {number: name for name, number in values(placement_pb2.Outcome).items() if number}

_FINISH_REASONS = {number: name for name, number in values(placement_pb2.FinishReason).items() if number}
_TIERS = frozenset(number for number in agent_pb2.Tier.values() if number)
# Priority classes with their numbers. An unset class, or one of a newer gateway, becomes STANDARD.
_PRIORITIES = {Priority(word): number for word, number in values(placement_pb2.Priority).items() if number}
_OF_PRIORITIES: dict[int, Priority] = {number: priority for priority, number in _PRIORITIES.items()}
# Maximum length of the ids of an agent and of the session that started it.
_MAX_LINEAGE = 128
# Maximum number of sequences that a request counts as, so that sums of many requests fit their fields.
_MAX_SEQUENCES = 1 << 16
# Maximum weight of a tenant. With a larger one, a tenant would keep all others of its class from being served.
_MAX_WEIGHT = 1_000


def _cached_by_tier(wire: placement_pb2.Finished) -> Mapping[int, int] | None:
    """Return the cached tokens by tier; None if none are reported or the report is impossible."""
    by_tier: dict[int, int] = {cached.tier: cached.tokens for cached in wire.cached_by_tier}
    fits = (
        len(by_tier) == len(wire.cached_by_tier)
        and by_tier.keys() <= _TIERS
        and sum(by_tier.values()) <= wire.cached_tokens
    )
    return by_tier if by_tier and fits else None


def _keys(wire: placement_pb2.PlacementRequest) -> array[int]:
    # A packed field is an array of little-endian words on the wire. Copying it is 20 times faster than one Python int per key.
    alone = placement_pb2.PlacementRequest()
    alone.keys.MergeFrom(wire.keys)
    keys = array("Q")
    keys.frombytes(alone.SerializeToString()[-8 * len(wire.keys) :] if wire.keys else b"")
    if sys.byteorder != "little":
        keys.byteswap()
    return keys


def placement_request(wire: placement_pb2.PlacementRequest) -> PlacementRequest:
    """Convert a gateway's placement request."""
    return PlacementRequest(
        request_id=wire.request_id,
        model=wire.model,
        input_tokens=wire.input_tokens,
        keys=_keys(wire),
        tenant=wire.tenant,
        session_id=wire.session_id,
        max_output_tokens=wire.max_output_tokens,
        exclude=tuple(wire.exclude),
        deadline_s=seconds(wire.deadline) if wire.HasField("deadline") else None,
        age_s=max(seconds(wire.age), 0.0) if wire.HasField("age") else 0.0,
        sliceable_tokens=min(wire.sliceable_tokens, wire.input_tokens),
        single_instance=wire.single_instance,
        priority=_OF_PRIORITIES.get(wire.priority, Priority.STANDARD),
        weight=float(min(max(wire.weight, 1), _MAX_WEIGHT)),
        ttft_deadline_s=seconds(wire.ttft_deadline) if wire.HasField("ttft_deadline") else None,
        continues=wire.continues_session,
        parent=session_name(wire.tenant, wire.parent_session_id),
        parkable=wire.parkable,
        parked_s=max(seconds(wire.parked), 0.0) if wire.HasField("parked") else 0.0,
        resumed=wire.resumed,
        movable=wire.movable,
        begun_by=identity_of(wire.begun_by) if wire.HasField("begun_by") else UNKNOWN_IDENTITY,
        longest_prompt_tokens=wire.longest_prompt_tokens,
        sequences=min(max(wire.sequences, 1), _MAX_SEQUENCES),
        sequence_tokens=wire.sequence_tokens,
        streamed=wire.streamed,
        agent_id=wire.agent_id[:_MAX_LINEAGE],
        agent_parent=wire.agent_parent_session_id[:_MAX_LINEAGE],
    )


def request_fault(wire: placement_pb2.PlacementRequest) -> tuple[str, str] | None:
    """Return the first invalid field of a placement request and what is wrong with it; None if the request is valid."""
    if not wire.request_id:
        return "request_id", "must not be empty"
    return keys_fault(wire)


def keys_fault(wire: placement_pb2.PlacementRequest) -> tuple[str, str] | None:
    """Return what is wrong with the request's keys, as `request_fault` does; None if they are valid. With more keys than the
    prompt has full blocks, more tokens would count as cached than the prompt has."""
    blocks = wire.input_tokens // KEY_TOKENS
    if len(wire.keys) <= blocks:
        return None
    return (
        "keys",
        f"{len(wire.keys)} keys, and {wire.input_tokens} input_tokens have {blocks} full blocks of {KEY_TOKENS}",
    )


def priority_to_wire(priority: Priority) -> placement_pb2.Priority.ValueType:
    """Convert a priority class."""
    number: placement_pb2.Priority.ValueType = _PRIORITIES[priority]
    return number


async def gateway_hello(wire: placement_pb2.GatewayHello) -> ev.GatewayHello:
    """Convert a gateway's hello with its open streams. Yields to the event loop after every STREAMS_AT_ONCE streams."""
    streams = []
    for number, stream in enumerate(wire.open_streams, 1):
        streams.append(open_stream(stream))
        if not number % STREAMS_AT_ONCE:
            await asyncio.sleep(0)
    return ev.GatewayHello(
        wire.gateway_id,
        tuple(streams),
        frozenset(wire.waiting_request_ids),
        frozenset(wire.known_instance_ids),
    )


def open_stream(wire: placement_pb2.OpenStream) -> ev.OpenStream:
    """Convert a gateway's report of a running request."""
    return ev.OpenStream(
        placement_request(wire.request),
        wire.instance_id,
        Phase.DECODE if wire.phase == placement_pb2.PHASE_DECODE else Phase.PREFILL,
        wire.cached_tokens,
    )


def step_done(wire: placement_pb2.StepDone) -> ev.StepDone:
    """Convert the end of a PREFILL step, or of a SERVE step that did not get the KV that it needs."""
    return ev.StepDone(
        wire.request_id,
        wire.step_index,
        wire.ok,
        wire.error,
        wire.instance_failed,
        seconds(wire.deadline) if wire.HasField("deadline") else None,
    )


def heard(wire: placement_pb2.Heard) -> ev.Heard:
    """Convert a report of what instances send."""
    ago_ms = wire.ago_ms or [0] * len(wire.instance_ids)
    return ev.Heard(
        {name: ago / 1e3 for name, ago in zip(wire.instance_ids, ago_ms, strict=False)}, tuple(wire.stalled)
    )


def finished(wire: placement_pb2.Finished) -> ev.Finished:
    """Convert the end of a request."""
    timings = wire.timings
    return ev.Finished(
        request_id=wire.request_id,
        outcome=_OUTCOMES.get(wire.outcome, ev.UNKNOWN),
        prompt_tokens=wire.prompt_tokens if wire.HasField("prompt_tokens") else None,
        cached_tokens=wire.cached_tokens if wire.HasField("cached_tokens") else None,
        output_tokens=wire.output_tokens if wire.HasField("output_tokens") else None,
        error=wire.error,
        http_status=wire.http_status,
        timings_ms={
            "placed": finite(timings.placed_ms),
            "sent": finite(timings.sent_ms),
            "first_token": finite(timings.first_token_ms),
            "done": finite(timings.done_ms),
        }
        if wire.HasField("timings")
        else None,
        refused=wire.refused,
        refused_by=tuple(dict.fromkeys(wire.refused_by)),
        finish_reason=_FINISH_REASONS.get(wire.finish_reason, ""),
        cached_by_tier=_cached_by_tier(wire),
        broke=wire.broke,
        alike=tuple(dict.fromkeys(wire.alike)),
        own_cached_tokens=wire.own_cached_tokens if wire.HasField("own_cached_tokens") else None,
    )


def first_token(wire: placement_pb2.FirstToken) -> ev.FirstToken:
    """Convert the report of a response's first token."""
    return ev.FirstToken(wire.request_id, tuple(dict.fromkeys(wire.refused_by)))


def finished_to_wire(done: ev.Finished) -> placement_pb2.Finished:
    """The inverse of `finished`."""
    wire = placement_pb2.Finished(
        request_id=done.request_id,
        outcome=values(placement_pb2.Outcome)["" if done.outcome == ev.UNKNOWN else done.outcome],
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        output_tokens=done.output_tokens,
        error=done.error,
        http_status=done.http_status,
        refused=done.refused,
        refused_by=done.refused_by,
        broke=done.broke,
        alike=done.alike,
        own_cached_tokens=done.own_cached_tokens,
        finish_reason=values(placement_pb2.FinishReason)[done.finish_reason],
        cached_by_tier=[
            placement_pb2.CachedTokens(tier=agent_pb2.Tier.ValueType(tier), tokens=tokens)
            for tier, tokens in (done.cached_by_tier or {}).items()
        ],
    )
    if done.timings_ms is not None:
        wire.timings.CopyFrom(placement_pb2.Timings(**{f"{name}_ms": value for name, value in done.timings_ms.items()}))
    return wire


def instance_ref(info: InstanceInfo) -> placement_pb2.InstanceRef:
    """Return what a gateway needs to reach an instance."""
    return placement_pb2.InstanceRef(
        instance_id=info.instance_id,
        url=info.url,
        incarnation=info.incarnation,
        data_parallel_rank=info.data_parallel_rank,
        kv_transfer=instance_and_load_messages.kv_to_wire(info.kv_transfer),
        identity=identity_to_wire(info.identity),
        model_root=info.model_root,
        max_model_len=info.max_model_len,
        lora_names=info.lora_names,
    )


def _ref(state: RouterState, instance_id: str) -> placement_pb2.InstanceRef:
    record = state.instances.get(instance_id)
    return instance_ref(record.info) if record else placement_pb2.InstanceRef(instance_id=instance_id)


_KINDS = {kind: placement_pb2.StepKind.Value(f"STEP_KIND_{kind}") for kind in StepKind}


def step_to_wire(state: RouterState, plan: Sequence[Step], index: int) -> placement_pb2.Step:
    """Convert a step of a plan, with the current addresses of its instances."""
    step = plan[index]
    wire = placement_pb2.Step(
        index=index,
        kind=_KINDS[step.kind],
        instance=_ref(state, step.instance_id),
        prefix_tokens=step.prefix_tokens,
        reason=step.reason,
    )
    if step.kv_source:
        wire.kv_source.CopyFrom(_ref(state, step.kv_source))
    if target := kv_target(plan, index):
        wire.kv_target.CopyFrom(_ref(state, target))
    return wire


def placement_to_wire(state: RouterState, placed: ev.Placed) -> placement_pb2.Placement:
    """Convert a request's next step."""
    return placement_pb2.Placement(
        request_id=placed.request_id,
        decision_id=placed.decision.decision_id,
        step=step_to_wire(state, placed.decision.result.steps, placed.step_index),
        last=placed.last,
        cached_tokens=placed.decision.cached_tokens,
        degraded=placed.decision.degraded,
        runner_up=placed.decision.runner_up,
        doubted=state.instances.doubts(placed.step.instance_id),
    )


def refusal_to_wire(refused: ev.Refused, owner: Owner | None) -> placement_pb2.Refusal:
    """Convert the refusal of a request, with the `owner` to ask instead, if known."""
    retry = refused.retry_after_s
    return placement_pb2.Refusal(
        request_id=refused.request_id,
        code=int(code_pb2.Code.Value(refused.code)),
        message=refused.message,
        retry_after=None if retry is None else duration(retry),
        owner=owner_to_wire(owner),
        not_serving=refused.not_serving,
        place=refused.place,
    )


def parked_to_wire(parked: ev.Parked) -> placement_pb2.Parked:
    """Convert the report that a request is parked."""
    return placement_pb2.Parked(request_id=parked.request_id, bound=duration(parked.bound_s), place=parked.place)


def move_to_wire(move: ev.Move) -> placement_pb2.Move:
    """Convert the order that a request leaves its instance."""
    reason = placement_pb2.MOVE_REASON_LOST if move.lost else placement_pb2.MOVE_REASON_DRAIN
    return placement_pb2.Move(request_id=move.request_id, reason=reason, unbegun=move.unbegun)


def owner_to_wire(owner: Owner | None) -> placement_pb2.Owner | None:
    """Convert a pool's owner; None if the pool has none."""
    if owner is None:
        return None
    return placement_pb2.Owner(router_id=owner.router_id, address=owner.address, epoch=owner.epoch)
