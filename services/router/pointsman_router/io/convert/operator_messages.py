"""Conversions of FleetService's messages: instances, orders, decisions, policies, what-if results."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from google.protobuf import struct_pb2

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.enum_words import values
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.analysis.decision_replay import inputs_digest
from pointsman_router.core.analysis.outcome_stats import OutcomeGroup, quantile
from pointsman_router.core.analysis.policy_comparison import PolicyComparison, ttft_change_s
from pointsman_router.core.instances.instance_orders import InstanceOrder, OrderChange
from pointsman_router.core.instances.instance_registry import RIVAL_SHOWN_S, InstanceRecord
from pointsman_router.core.kv_load import KvLoad
from pointsman_router.core.learning.pool_facts import PoolChoice
from pointsman_router.core.placement_types import Candidate, Decision, InstanceState, PolicyRef, PrefixSource
from pointsman_router.core.policy.base import Policy, bounds, settings_of, summary
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.convert import gateway_messages, instance_and_load_messages
from pointsman_router.io.convert.times import change, duration, timestamp
from pointsman_router.io.telemetry.decision_log import LoggedDecision

_CLASSES = values(fleet_pb2.RouteClass)
_MODES = values(fleet_pb2.PlacementMode)
_OUTCOMES = values(fleet_pb2.DecisionOutcome)


def policy_to_wire(ref: PolicyRef) -> fleet_pb2.Policy:
    """Convert a policy's name and settings."""
    settings = struct_pb2.Struct()
    settings.update(dict(ref.settings))
    return fleet_pb2.Policy(name=ref.name, settings=settings)


def policy_etag(ref: PolicyRef) -> str:
    """Return a digest of a policy's name and settings in the form of an HTTP entity tag. Equal policies have equal tags."""
    text = msgspec.json.encode((ref.name, sorted(dict(ref.settings).items())))
    return f'"{hashlib.sha256(text).hexdigest()[:16]}"'


def policy_settings(wire: struct_pb2.Struct) -> dict[str, object]:
    """Return the settings as they were sent. A value of a kind that no setting has (null, a list, a message) becomes None."""
    scalars = ("number_value", "string_value", "bool_value")
    kinds = {name: value.WhichOneof("kind") for name, value in wire.fields.items()}
    return {name: getattr(wire.fields[name], kind) if kind in scalars else None for name, kind in kinds.items()}


def what_if_to_wire(comparison: PolicyComparison) -> fleet_pb2.WhatIfResponse:
    """Convert what another policy would have changed, in total and by route class and reason."""
    return fleet_pb2.WhatIfResponse(
        decided=comparison.decided,
        changed=comparison.changed,
        held=comparison.held,
        cached_tokens_change=comparison.cached_tokens_change,
        timed=comparison.timed,
        ttft_change=change(comparison.ttft_change_s),
        groups=[
            fleet_pb2.WhatIfResponse.Group(
                route_class=_CLASSES[group.route_class],
                reason=group.reason,
                decided=group.decided,
                changed=group.changed,
                cached_tokens_change=group.cached_tokens_change,
                timed=group.timed,
                ttft_change=change(group.ttft_change_s),
            )
            for group in comparison.groups()
        ],
    )


def changed_to_wire(was: Decision, would: Decision) -> fleet_pb2.WhatIfResponse.Change:
    """Convert a decision that another policy would have made otherwise."""
    change_s = ttft_change_s(was, would)
    return fleet_pb2.WhatIfResponse.Change(
        decision_id=was.decision_id,
        from_instance_id=was.instance_id,
        to_instance_id=would.instance_id,
        cached_tokens_change=would.cached_tokens - was.cached_tokens,
        reason=would.result.reason,
        from_mode=_MODES[was.mode],
        to_mode=_MODES[would.mode],
        to_prefill_instance_id=_prefills_elsewhere(would),
        ttft_change=None if change_s is None else change(change_s),
    )


def group_to_wire(group: OutcomeGroup) -> fleet_pb2.SummarizeDecisionsResponse.Group:
    """Convert the statistics of how a group's decisions ended, or all decisions."""
    wire = fleet_pb2.SummarizeDecisionsResponse.Group(
        route_class=_CLASSES[group.route_class],
        mode=_MODES[group.mode],
        reason=group.reason,
        decided=group.decided,
        outcomes=[
            fleet_pb2.SummarizeDecisionsResponse.OutcomeCount(outcome=_OUTCOMES[name], decided=decided)
            for name, decided in group.outcomes.items()
        ],
        fell_back=group.fell_back,
        held=group.held,
        input_tokens=group.input_tokens,
        reported=group.reported,
        reported_input_tokens=group.reported_input_tokens,
        predicted_cached_tokens=group.predicted_cached_tokens,
        reported_cached_tokens=group.reported_cached_tokens,
    )
    if (half := quantile(group.first_tokens_s, 0.5)) is not None:
        wire.ttft_p50.CopyFrom(duration(half))
    if (most := quantile(group.first_tokens_s, 0.95)) is not None:
        wire.ttft_p95.CopyFrom(duration(most))
    return wire


def policy_description(kind: type[Policy]) -> fleet_pb2.PolicyDescription:
    """Describe a policy that can be set: the first sentence of its docstring, and its settings."""
    wire = fleet_pb2.PolicyDescription(name=kind.name, summary=summary(kind))
    for field in settings_of(kind):
        setting = wire.settings.add(name=field.name, bounds=bounds(field), meaning=field.metadata["doc"])
        default: Any = field.default
        match default:
            case bool():
                setting.default_value.bool_value = default
            case str():
                setting.default_value.string_value = default
            case _:
                setting.default_value.number_value = default
    return wire


def _prefills_elsewhere(decision: Decision) -> str:
    first = decision.result.steps[0].instance_id if decision.result.steps else ""
    return first if first != decision.instance_id else ""


def state_to_wire(state: InstanceState) -> fleet_pb2.InstanceState.ValueType:
    """Convert an instance's state."""
    return fleet_pb2.InstanceState.Value(f"INSTANCE_STATE_{state}")


def _source(source: PrefixSource) -> fleet_pb2.PrefixSource.ValueType:
    return fleet_pb2.PrefixSource.Value(f"PREFIX_SOURCE_{source}")


def instance_status(state: RouterState, record: InstanceRecord, now: float) -> fleet_pb2.InstanceStatus:
    """Return an instance's status as the router sees it at `now`, monotonic s."""
    info, load, counters = record.info, record.load, state.reservations.counters(record.info.instance_id)
    wire = fleet_pb2.InstanceStatus(
        instance=instance_and_load_messages.instance_to_wire(info),
        state=state_to_wire(record.state),
        circuit_open=bool(record.life.opened),
        life=_life(record, now),
        num_requests=counters.num_requests,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        ongoing_decode_tokens=counters.ongoing_decode_tokens,
        ongoing_tokens=counters.ongoing_tokens,
        keys=state.index.count(info.instance_id),
        report_age=duration(now - record.heard_at),
        sessions=state.affinity.sessions_of(info.instance_id),
        prefix_source=_source(state.prefix_knowledge.source(record, now)),
        prefix_reason=record.prefix_reason,
        events_contradicted=record.follows_events and record.trust.is_logged,
        approximate_keys=state.prefix_knowledge.computed_prompts.count(info.instance_id),
        provisional_keys=state.prefix_knowledge.provisional.count(info.instance_id),
        prediction_audit_failures=record.audit_failures,
        cordoned=record.order.cordoned,
        weight=record.order.weight,
        cordon_reason=record.order.cordon_reason,
        weight_reason=record.order.weight_reason,
        underlying_state=state_to_wire(record.underlying_state),
        stale=load is not None and now > load.sampled_at + state.settings.stale_report_s,
        rival=record.rival[0] if now - record.rival[1] < RIVAL_SHOWN_S else "",
        differences=[said for _, said in sorted(state.instances.differing(record).items())],
    )
    if load is not None:
        wire.load.CopyFrom(instance_and_load_messages.load_to_wire(load, now))
    return wire


def life_reason(record: InstanceRecord) -> str:
    """Return what is unusual about why an instance gets requests, or none, by the evidence of its requests; empty if nothing."""
    if (why := record.life.why()) != "":
        return why
    if record.kept:
        return "it stays in the fleet without an agent, since it answers or no other instance of its pool has one"
    if record.underlying_state is InstanceState.UNHEALTHY:
        return "its agent does not reach it; it gets requests while it answers, or if no other instance is healthy"
    return ""


def _life(record: InstanceRecord, now: float) -> fleet_pb2.Life:
    life = record.life
    return fleet_pb2.Life(
        out_cause=life.cause,
        reason=life_reason(record),
        out_age=duration(now - life.out_since) if life.opened else None,
        next_trial=duration(max(life.until - now, 0.0)) if life.opened and not life.trial else None,
        answers=life.answers,
        last_answer_age=duration(now - life.answered_at) if life.answers else None,
        failures=life.failures,
        errors=life.errors,
        status=life.status,
        waiting=len(life.streams) + len(life.wholes),
    )


def pool_policy_to_wire(choice: PoolChoice, now: float) -> fleet_pb2.PoolPolicy:
    """Convert the policy that decides for a pool, and what is known of the pool. `now`: s on the state's clock."""
    taken, since, facts, asked = choice
    return fleet_pb2.PoolPolicy(
        name=taken.policy.name,
        reason=taken.reason,
        ready_instances=facts.instances,
        exact_instances=facts.exact,
        learned_instances=facts.learned,
        mean_cost=facts.mean_cost,
        age=duration(now - since),
        asked_name=asked.policy.name if asked is not None else "",
        asked_reason=asked.reason if asked is not None else "",
    )


def policy_change_to_wire(unix_s: float, taken: ev.PolicyTaken) -> fleet_pb2.PolicyChange:
    """Convert the event that another policy decides for a pool since `unix_s`."""
    return fleet_pb2.PolicyChange(
        time=timestamp(unix_s),
        model=taken.pool,
        name=taken.policy,
        reason=taken.reason,
        name_before=taken.before,
        reason_before=taken.before_reason,
    )


def order_to_wire(instance_id: str, order: InstanceOrder, *, known: bool) -> fleet_pb2.InstanceOrder:
    """Convert an operator's order for an instance. `known`: whether the router knows the instance."""
    return fleet_pb2.InstanceOrder(
        instance_id=instance_id,
        cordoned=order.cordoned,
        weight=order.weight,
        cordon_reason=order.cordon_reason,
        cordon_time=timestamp(order.cordon_set_at) if order.cordoned and order.cordon_set_at else None,
        instance_known=known,
        weight_reason=order.weight_reason,
        weight_time=timestamp(order.weight_set_at) if order.weight < 1.0 and order.weight_set_at else None,
    )


def order_change(wire: fleet_pb2.SetInstanceOrderRequest, now: float) -> OrderChange:
    """Convert the change that an operator requests at `now`, unix s."""
    return OrderChange(
        wire.instance_id,
        now,
        cordoned=wire.cordoned if wire.HasField("cordoned") else None,
        weight=wire.weight if wire.HasField("weight") else None,
        reason=wire.reason if wire.HasField("reason") else None,
    )


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
        running=candidate.running or 0,
        waiting=candidate.waiting or 0,
        kv_usage=candidate.kv_usage or 0.0,
        unknown=[name for name in ("running", "waiting", "kv_usage") if getattr(candidate, name) is None],
        report_age=None if age_s is None else duration(age_s),
        score=score,
        excluded=candidate.excluded,
        exact=candidate.exact,
        recent_migrations=candidate.recent_migrations,
        kv_capacity_tokens=candidate.kv_capacity_tokens,
        stale=candidate.stale,
        provisional_tokens=candidate.provisional_tokens,
        prefix_source=_source(candidate.prefix_source),
        kv_load=_kv_load(candidate.kv_load),
    )


def _kv_load(load: KvLoad) -> fleet_pb2.KvLoad | None:
    if not load.tokens:
        return None
    return fleet_pb2.KvLoad(
        host_tokens=load.host_tokens,
        storage_tokens=load.storage_tokens,
        load_time=duration(load.seconds),
        price_tokens=load.price_tokens,
    )


def _admission(record: AdmissionRecord) -> fleet_pb2.Admission:
    view = record.view
    return fleet_pb2.Admission(
        reason=record.verdict.reason,
        size=view.size,
        weighted=view.weighted,
        capacity=view.capacity,
        largest=view.largest,
        before=view.before,
        waited=duration(view.waited_s),
        bound=duration(view.bound_s),
    )


def admission_status(state: RouterState, pool: str, now: float) -> fleet_pb2.AdmissionStatus | None:
    """Return the session admission of a pool at `now` (s on the state's clock); None if its sessions are not admitted, or if it
    is not this replica's."""
    if not state.owned.owns(pool) or not state.admission.applies(pool, now):
        return None
    status = state.admission.status(pool, now)
    return fleet_pb2.AdmissionStatus(
        armed=status.armed,
        off_reason=status.off_reason,
        sessions=status.sessions,
        weighted=status.weighted,
        capacity=status.capacity,
        recomputed_share=status.recomputed_share,
    )


def decision_to_wire(state: RouterState, logged: LoggedDecision, *, candidates: bool = True) -> fleet_pb2.Decision:
    """Convert a logged decision, with or without its candidates and the digest of its inputs. The digest is computed over the
    candidates, so both cost time for each of them."""
    decision = logged.decision
    request, result = decision.request, decision.result
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
        route_class=_CLASSES[decision.route_class],
        mode=_MODES[decision.mode],
        reason=result.reason,
        steps=[gateway_messages.step_to_wire(state, result.steps, index) for index in range(len(result.steps))],
        cached_tokens=decision.cached_tokens,
        session_owner=decision.view.session_owner,
        runner_up=decision.runner_up,
        margin=decision.margin,
        inputs_digest=inputs_digest(decision) if candidates else 0,
        degraded=decision.degraded,
        outcome=_OUTCOMES[logged.outcome],
        decide_time=duration(logged.decide_s),
        held=duration(decision.held_s),
        notes=decision.notes,
        figures=result.figures,
        next_owner=decision.next_owner if request.session else "",
        other_instances=decision.view.unseen.instances,
        priority=gateway_messages.priority_to_wire(request.priority),
        weight=int(request.weight),
        taken_policy=result.policy,
        taken_policy_reason=result.policy_reason,
        kv_load=_kv_load(decision.kv_load),
        agent_id=request.agent_id,
        agent_parent_session_id=request.agent_parent,
    )
    if candidates:
        view = decision.view
        wire.candidates.extend(
            _candidate(candidate, view.report_age_s(candidate), result.scores.get(candidate.instance_id))
            for candidate in view.candidates
        )
    if request.admitted is not None:
        wire.admission.CopyFrom(_admission(request.admitted))
    if logged.finished is not None:
        wire.finished.CopyFrom(gateway_messages.finished_to_wire(logged.finished))
    return wire
