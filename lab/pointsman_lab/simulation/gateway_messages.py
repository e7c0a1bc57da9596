"""Converts between the types of a simulation's gateway and those of its routers. Pure.

In production these are messages on the wire. Fields that are left out here have no effect in a simulation.
"""

from __future__ import annotations

from pointsman_gateway.core.request import request_events as ge
from pointsman_lab.report.request_record import RequestRecord
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import Decision, StepKind
from pointsman_router.core.requests.placement_plans import kv_target

# google.rpc.Code by the router's name for it, for the codes that a gateway distinguishes.
_CODES = {
    "NOT_FOUND": ge.NOT_FOUND,
    "RESOURCE_EXHAUSTED": ge.RESOURCE_EXHAUSTED,
    "DEADLINE_EXCEEDED": ge.DEADLINE_EXCEEDED,
}


def target_named(instance_id: str) -> ge.Target:
    """Return the target for an instance's name."""
    return ge.Target(instance_id, f"sim://{instance_id}")


def assigned(placed: ev.Placed) -> ge.StepAssigned:
    """Convert a router's next step to the gateway's type."""
    step, target = placed.step, kv_target(placed.decision.result.steps, placed.step_index)
    return ge.StepAssigned(
        placed.request_id,
        target_named(step.instance_id),
        placed.step_index,
        step.prefix_tokens if step.kind is StepKind.PREFILL else 0,
        placed.decision.decision_id,
        placed.decision.cached_tokens,
        placed.decision.degraded,
        target_named(target) if target else None,
        target_named(step.kv_source) if step.kv_source else None,
    )


def refused(refusal: ev.Refused) -> ge.PlacementRefused:
    """Convert a router's refusal to the gateway's type."""
    code = _CODES.get(refusal.code, ge.UNAVAILABLE)
    return ge.PlacementRefused(refusal.request_id, code, refusal.message, refusal.retry_after_s, refusal.place)


def finished(record: RequestRecord, own_cached: int, effect: ge.ReportFinished) -> ev.Finished:
    """Convert the end of an attempt to the router's type. `own_cached`: tokens that the engine found cached because
    earlier steps of the request had computed them."""
    ok = effect.outcome is ge.Outcome.OK
    hits = record.cached_tokens if ok else None
    return ev.Finished(
        effect.attempt_id,
        effect.outcome.name,
        record.prompt_tokens if ok else None,
        None if hits is None else hits + own_cached,
        record.output_tokens if ok else None,
        error=effect.error,
        http_status=200 if ok else effect.status,
        refused=effect.refused,
        refused_by=effect.refused_by,
        own_cached_tokens=None if hits is None else own_cached,
    )


def note_decision(record: RequestRecord, decision: Decision) -> None:
    """Copy a request's first decision into its record; later decisions are ignored. Mutates."""
    if record.decision:
        return
    record.decision = decision.decision_id
    record.mode = decision.mode
    record.route_class = decision.route_class
    record.reason = decision.result.reason
    record.rule = decision.result.steps[-1].reason
    record.predicted_cached_tokens = decision.cached_tokens
