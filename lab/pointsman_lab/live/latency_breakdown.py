"""Latency breakdown of each request of a replay, from the router's decisions or, more precisely, the gateway's log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.enum_words import word
from pointsman_common.core.request_timing import RequestTiming
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import percentiles

# Each part of a request's time -> the moments of its begin and end.
PARTS = {
    "placing": ("t_recv", "t_placed"),
    "prefill_elsewhere": ("t_prefill_sent", "t_prefill_done"),
    "until_first_token": ("t_sent", "t_first_token"),
    "streaming": ("t_first_token", "t_done"),
    "total": ("t_recv", "t_done"),
}


class RequestBreakdown(RequestTiming, kw_only=True):
    """The timing of one request, with the decision that placed it."""

    session: str  # as the trace names it
    turn: int  # as the trace has it, from 1
    decision: str  # id, from the answer's X-Pointsman-Decision header
    policy: str  # the policy that decided, without its settings
    mode: str  # COLOCATED or OFFLOAD
    route_class: str  # on the chosen instance: LIGHT, MEDIUM or HEAVY
    reason: str  # of the choice, one word, as the policy gives it
    rule: str  # reason of the plan's last step, which answers; empty: the plan has no steps
    outcome: str  # OK, CANCELLED, REJECTED, FAILED or UNKNOWN; OPEN: the router has no report of the end
    status: int  # HTTP status that the client got; 0: no response
    # Instances of the plan's steps, in their order.
    instances: list[str]
    # The instance with the second-best score.
    runner_up: str = ""
    session_owner: str = ""  # instance that owned the session before the decision; empty: none
    degraded: bool = False  # the decision was made while the shared store was away
    notes: list[str] = msgspec.field(default_factory=list)  # other influences: owner_draining, hold_expired, ...
    # The part of the plan that failed.
    fallback: str = ""
    held_s: float = 0.0  # how long the router had held the request when it decided
    decide_s: float = 0.0  # how long the decision itself took
    input_tokens: int = 0  # of the prompt, as counted for the placement
    predicted_cached_tokens: int = 0  # prompt tokens that were predicted to be cached on the chosen instance
    prompt_tokens: int | None = None  # as the engine counted them and the gateway reported; None: not reported
    cached_tokens: int | None = None  # the same, without what the request's own earlier steps computed
    output_tokens: int | None = None  # as prompt_tokens


def break_down(
    records: Iterable[RequestRecord],
    decisions: Mapping[str, fleet_pb2.Decision],
    gateway_lines: Mapping[str, Mapping[str, Any]],
) -> list[RequestBreakdown]:
    """Return a row for every record whose decision is known.

    A gateway's line has all moments of its decision. Without one the moments are those that the gateway reported to the router,
    in ms from its receipt of the request. The receipt is then dated by the decision's time: late by one message from gateway to
    router.
    """
    rows = []
    for record in records:
        if (decision := decisions.get(record.decision)) is None:
            continue
        row = _of_decision(record, decision)
        line = gateway_lines.get(record.decision)
        for name in (*RequestTiming.__struct_fields__, "fallback"):
            if line is not None and line.get(name) is not None:
                setattr(row, name, line[name])
        rows.append(row)
    return rows


def parts(rows: Sequence[RequestBreakdown]) -> dict[str, dict[str, float] | None]:
    """Return p50, p90, p99, mean (s) and count of each part of the rows' time; None for a part that no row has."""
    return {
        name: percentiles(
            [
                getattr(row, end) - getattr(row, begin)
                for row in rows
                if getattr(row, begin) is not None and getattr(row, end) is not None
            ]
        )
        for name, (begin, end) in PARTS.items()
    }


def _of_decision(record: RequestRecord, decision: fleet_pb2.Decision) -> RequestBreakdown:
    done = decision.finished
    row = RequestBreakdown(
        session=record.session,
        turn=record.turn,
        decision=record.decision,
        policy=decision.policy.name,
        mode=word(fleet_pb2.PlacementMode, decision.mode),
        route_class=word(fleet_pb2.RouteClass, decision.route_class),
        reason=decision.reason,
        rule=rule_of(decision),
        outcome=word(fleet_pb2.DecisionOutcome, decision.outcome),
        status=record.status,
        instances=[step.instance.instance_id for step in decision.steps],
        runner_up=decision.runner_up,
        session_owner=decision.session_owner,
        degraded=decision.degraded,
        notes=list(decision.notes),
        held_s=decision.held.ToNanoseconds() / 1e9,
        decide_s=decision.decide_time.ToNanoseconds() / 1e9,
        input_tokens=decision.input_tokens,
        predicted_cached_tokens=decision.cached_tokens,
        prompt_tokens=done.prompt_tokens if done.HasField("prompt_tokens") else None,
        cached_tokens=done.cached_tokens - done.own_cached_tokens if done.HasField("cached_tokens") else None,
        output_tokens=done.output_tokens if done.HasField("output_tokens") else None,
    )
    if decision.HasField("finished"):
        timings = done.timings
        row.t_recv = round(decision.time.ToNanoseconds() / 1e9 - row.held_s - row.decide_s, 6)
        for name, ms in (
            ("t_placed", timings.placed_ms),
            ("t_sent", timings.sent_ms),
            ("t_first_token", timings.first_token_ms),
            ("t_done", timings.done_ms),
        ):
            if ms:
                setattr(row, name, round(row.t_recv + ms / 1e3, 6))
    return row


def rule_of(decision: fleet_pb2.Decision) -> str:
    """Return the rule that chose the answering instance; empty without steps."""
    return decision.steps[-1].reason if decision.steps else ""
