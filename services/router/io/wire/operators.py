"""What operators read: instances, decisions, what another policy would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from google.protobuf import struct_pb2

from pointsman.router.v1 import fleet_pb2
from services.router.domain import Candidate, Decision, InstanceState, PolicyRef, PrefixSource
from services.router.fleet import InstanceRecord
from services.router.hindsight import Revision, grouped
from services.router.io.decision_log import LoggedDecision
from services.router.io.wire import agents, gateways
from services.router.io.wire.times import duration, timestamp
from services.router.outcomes import Group, quantile
from services.router.policy.base import Policy, bounds, summary
from services.router.replay import inputs_digest
from services.router.state import RouterState

MAX_CHANGES = 100


def policy_to_wire(ref: PolicyRef) -> fleet_pb2.Policy:
    """A policy's name and settings."""
    settings = struct_pb2.Struct()
    settings.update(dict(ref.settings))
    return fleet_pb2.Policy(name=ref.name, settings=settings)


def policy_settings(wire: struct_pb2.Struct) -> dict[str, object]:
    """Settings as they were sent; None for what no setting can be (null, a list, a message)."""
    scalars = ("number_value", "string_value", "bool_value")
    kinds = {name: value.WhichOneof("kind") for name, value in wire.fields.items()}
    return {name: getattr(wire.fields[name], kind) if kind in scalars else None for name, kind in kinds.items()}


def what_if_to_wire(made_again: Sequence[Revision]) -> fleet_pb2.WhatIfResponse:
    """What another policy would have changed, in all, by class and reason, and one by one."""
    changed = [one for one in made_again if one.changed]
    return fleet_pb2.WhatIfResponse(
        decided=len(made_again),
        changed=len(changed),
        held=sum(not one.would.ruling.steps for one in changed),
        cached_tokens_change=sum(one.cached_tokens_change for one in made_again),
        groups=[
            fleet_pb2.WhatIfResponse.Group(
                route_class=group.route_class,
                reason=group.reason,
                decided=group.decided,
                changed=group.changed,
                cached_tokens_change=group.cached_tokens_change,
            )
            for group in grouped(made_again)
        ],
        changes=[
            fleet_pb2.WhatIfResponse.Change(
                decision_id=one.was.decision_id,
                from_instance_id=one.was.instance_id,
                to_instance_id=one.would.instance_id,
                cached_tokens_change=one.would.cached_tokens - one.was.cached_tokens,
                reason=one.would.ruling.reason,
                from_mode=one.was.mode,
                to_mode=one.would.mode,
                to_prefill_instance_id=_prefills_elsewhere(one.would),
            )
            for one in changed[:MAX_CHANGES]
        ],
    )


def groups_to_wire(groups: Sequence[Group]) -> list[fleet_pb2.SumUpDecisionsResponse.Group]:
    """How decisions ended."""
    wires = []
    for group in groups:
        wire = fleet_pb2.SumUpDecisionsResponse.Group(
            route_class=group.route_class,
            mode=group.mode,
            reason=group.reason,
            decided=group.decided,
            outcomes=group.outcomes,
            fell_back=group.fell_back,
            held=group.held,
            input_tokens=group.input_tokens,
            reported=group.reported,
            reported_input_tokens=group.reported_input_tokens,
            predicted_cached_tokens=group.predicted_cached_tokens,
            reported_cached_tokens=group.reported_cached_tokens,
        )
        if (half := quantile(group.first_tokens_s, 0.5)) is not None:
            wire.first_token_p50.CopyFrom(duration(half))
        if (most := quantile(group.first_tokens_s, 0.95)) is not None:
            wire.first_token_p95.CopyFrom(duration(most))
        wires.append(wire)
    return wires


def policy_description(kind: type[Policy]) -> fleet_pb2.PolicyDescription:
    """A policy that can be chosen: the first sentence of its docstring, and its settings."""
    wire = fleet_pb2.PolicyDescription(name=kind.name, summary=summary(kind))
    for one in fields(kind):
        setting = wire.settings.add(name=one.name, bounds=bounds(one), meaning=one.metadata["doc"])
        default: Any = one.default
        match default:
            case bool():
                setting.default_value.bool_value = default
            case str():
                setting.default_value.string_value = default
            case _:
                setting.default_value.number_value = default
    return wire


def _prefills_elsewhere(decision: Decision) -> str:
    first = decision.ruling.steps[0].instance_id if decision.ruling.steps else ""
    return first if first != decision.instance_id else ""


def state_to_wire(state: InstanceState) -> fleet_pb2.InstanceState.ValueType:
    """An instance's state."""
    return fleet_pb2.InstanceState.Value(f"INSTANCE_STATE_{state}")


def _source(source: PrefixSource) -> fleet_pb2.PrefixSource.ValueType:
    return fleet_pb2.PrefixSource.Value(f"PREFIX_SOURCE_{source}")


def instance_status(state: RouterState, record: InstanceRecord, now: float) -> fleet_pb2.InstanceStatus:
    """An instance as the router sees it at `now`."""
    info, load, counters = record.info, record.load, state.reservations.counters(record.info.instance_id)
    wire = fleet_pb2.InstanceStatus(
        instance=agents.instance_to_wire(info),
        state=state_to_wire(record.state),
        circuit_open=bool(record.circuit.opened),
        num_requests=counters.num_requests,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        ongoing_decode_tokens=counters.ongoing_decode_tokens,
        ongoing_tokens=counters.ongoing_tokens,
        keys=state.index.count(info.instance_id),
        report_age=duration(now - record.heard_at),
        sessions=state.affinity.sessions_of(info.instance_id),
        prefix_source=_source(state.truth.source(record, now)),
        prefix_reason=record.prefix_reason,
        believed_keys=state.truth.approximate.count(info.instance_id),
        credited_keys=state.truth.credit.count(info.instance_id),
        distrusts=record.trust.distrusts,
        stale=load is not None and now > load.sampled_at + state.settings.stale_report_s,
    )
    if load is not None:
        wire.load.CopyFrom(agents.load_to_wire(load, now))
    return wire


def _candidate(candidate: Candidate, age_s: float | None, score: float | None) -> fleet_pb2.Candidate:
    return fleet_pb2.Candidate(
        instance_id=candidate.instance_id,
        incarnation=candidate.incarnation,
        state=state_to_wire(candidate.state),
        cached_tokens=candidate.cached_tokens,
        new_tokens=candidate.new_tokens,
        num_requests=candidate.num_requests,
        pending_prefill_tokens=candidate.pending_prefill_tokens,
        ongoing_decode_tokens=candidate.ongoing_decode_tokens,
        ongoing_tokens=candidate.ongoing_tokens,
        running=candidate.running,
        waiting=candidate.waiting,
        kv_usage=candidate.kv_usage,
        report_age=None if age_s is None else duration(age_s),
        score=score,
        excluded=candidate.excluded,
        exact=candidate.exact,
        recent_migrations=candidate.recent_migrations,
        kv_capacity_tokens=candidate.kv_capacity_tokens,
        stale=candidate.stale,
        credited_tokens=candidate.credited_tokens,
        prefix_source=_source(candidate.prefix_source),
    )


def decision_to_wire(state: RouterState, logged: LoggedDecision, *, candidates: bool = True) -> fleet_pb2.Decision:
    """A logged decision, with or without its candidates and the digest of its inputs, which is a sum over them."""
    decision = logged.decision
    request, ruling = decision.request, decision.ruling
    wire = fleet_pb2.Decision(
        decision_id=decision.decision_id,
        request_id=request.request_id,
        time=timestamp(logged.unix_s),
        policy=policy_to_wire(decision.policy),
        model=decision.pool,
        tenant=request.tenant,
        session_id=request.session_id,
        input_tokens=request.input_tokens,
        key_count=decision.key_count,
        route_class=decision.route_class,
        mode=decision.mode,
        reason=ruling.reason,
        steps=[gateways.step_to_wire(state, ruling.steps, index) for index in range(len(ruling.steps))],
        cached_tokens=decision.cached_tokens,
        session_owner=decision.view.session_owner,
        runner_up=decision.runner_up,
        margin=decision.margin,
        inputs_digest=inputs_digest(decision) if candidates else 0,
        degraded=decision.degraded,
        outcome=logged.outcome,
        decide_time=duration(logged.decide_s),
        held=duration(decision.held_s),
        notes=decision.notes,
        figures=ruling.figures,
        next_owner=decision.next_owner if request.session else "",
    )
    if candidates:
        view = decision.view
        wire.candidates.extend(
            _candidate(one, view.report_age_s(one), ruling.scores.get(one.instance_id)) for one in view.candidates
        )
    if logged.finished is not None:
        wire.finished.CopyFrom(gateways.finished_to_wire(logged.finished))
    return wire
