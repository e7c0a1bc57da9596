"""Tracing of placements: one span for each placement of a sampled trace, from its request to its answer, the hold included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pointsman_common.core.tracing import Span, SpanContext, SpanKind, Value, known_attributes, parse_traceparent
from pointsman_router.core import events_and_effects as ev

Send = Callable[[Iterable[Span]], None]


@dataclass(frozen=True, slots=True)
class _Question:
    place: SpanContext
    gateway_id: str
    asked_ns: int


class PlacementSpans:
    """The unanswered placement requests of sampled traces, by request id. An entry is removed when its answer is sent, its
    request ends, or its gateway's stream ends."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[str, _Question] = {}

    def asked(self, request_id: str, gateway_id: str, traceparent: str) -> None:
        """Record that a gateway asks for a placement. Ignored unless `traceparent` belongs to a sampled trace."""
        parent = parse_traceparent(traceparent)
        if parent is not None and parent.sampled:
            self._open[request_id] = _Question(parent, gateway_id, time.time_ns())

    def answered(self, answer: ev.Placed | ev.Refused) -> None:
        """Send the span of a placement request, which ends now with `answer`."""
        question = self._open.pop(answer.request_id, None)
        if question is not None:
            self._send([_span(question, answer, time.time_ns())])

    def ended(self, request_id: str) -> None:
        """Forget a request that ended, whether it was answered or not."""
        self._open.pop(request_id, None)

    def gateway_left(self, gateway_id: str) -> None:
        """Forget the requests of a gateway whose stream ended: it asks again on another stream."""
        for request_id in [name for name, question in self._open.items() if question.gateway_id == gateway_id]:
            del self._open[request_id]


def _span(question: _Question, answer: ev.Placed | ev.Refused, now_ns: int) -> Span:
    return Span(
        "decide",
        question.place.child("decide"),
        question.place.span_id,
        SpanKind.SERVER,
        question.asked_ns,
        # Wall clock, not monotonic, to be comparable with gateways' spans. The wall clock may be set back in between.
        max(now_ns, question.asked_ns),
        known_attributes(_placed(answer) if isinstance(answer, ev.Placed) else {"pointsman.refusal": answer.code}),
        error=answer.message if isinstance(answer, ev.Refused) else "",
    )


def _placed(placed: ev.Placed) -> dict[str, Value | None]:
    decision = placed.decision
    return {
        "pointsman.request_id": placed.request_id,
        "pointsman.decision_id": decision.decision_id,
        "pointsman.policy": decision.policy.name,
        "pointsman.taken_policy": decision.result.policy,
        "pointsman.reason": decision.result.reason,
        "pointsman.route_class": decision.route_class,
        "pointsman.mode": decision.mode,
        "pointsman.instance": decision.instance_id,
        "pointsman.runner_up": decision.runner_up,
        "pointsman.cached_tokens": decision.cached_tokens,
        "pointsman.new_tokens": max(decision.request.input_tokens - decision.cached_tokens, 0),
        "pointsman.loaded_tokens": decision.kv_load.tokens,
        "pointsman.held_s": decision.held_s,
        "pointsman.degraded": decision.degraded,
        "gen_ai.request.model": decision.pool,
    }
