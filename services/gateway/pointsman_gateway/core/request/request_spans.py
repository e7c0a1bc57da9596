"""The spans of a request: the request itself, each placement by the router, and each step.

The router's own span is the child of a placement span, and the engine's span is the child of a step span. Both continue span
contexts that are derived from the request's (by `core.request_trace`) and are sent before the spans of this module are built. The
step that answers is a model call by OpenTelemetry's conventions (`core.request.gen_ai_attributes`). No other span of the gateway
has an operation name or usage, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pointsman_common.core.tracing import Span, SpanContext, SpanEvent, SpanKind, Value, known_attributes
from pointsman_gateway.core.request.attempt import Attempt, StepRun
from pointsman_gateway.core.request.gen_ai_attributes import answer_attributes, span_name
from pointsman_gateway.core.request_trace import placement_context, step_context

# Converts a monotonic time in s to Unix ns.
Clock = Callable[[float], int]
_STREAM = "gen_ai.request.stream"


def request_span(
    context: SpanContext,
    parent_id: int,
    route: str,
    status: int,
    received_at: float,
    prepared_at: float,
    now: float,
    clock: Clock,
    **values: Value,
) -> Span:
    """Return the span of a client's request. `prepared_at`: when its prompt was tokenised, 0 for never. `status`: HTTP status of
    the answer, 499 if the client disconnected."""
    return Span(
        f"POST {route}",
        context,
        parent_id,
        SpanKind.SERVER,
        clock(received_at),
        clock(now),
        known_attributes(
            {
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": status,
                "error.type": str(status) if status >= 500 else None,
                **values,
            }
        ),
        (SpanEvent("tokenised", clock(prepared_at)),) if prepared_at else (),
        f"status {status}" if status >= 500 else "",
    )


def attempt_spans(
    request: SpanContext,
    attempt: Attempt,
    asked: Mapping[str, Value],
    error: str,
    input_tokens: int,
    now: float,
    clock: Clock,
) -> list[Span]:
    """Return the spans of an attempt that ended at `now`: its placement and its steps. `asked`: attributes of the request's
    parameters. `error`: how the attempt failed ("": it did not)."""
    first = attempt.step_runs[0].step if attempt.step_runs else None
    question = Span(
        "place",
        placement_context(request, attempt.id),
        request.span_id,
        SpanKind.CLIENT,
        clock(attempt.asked_at),
        clock(attempt.placed_at or now),
        known_attributes(
            {
                "pointsman.request_id": attempt.id,
                "pointsman.decision_id": first.decision_id if first else None,
                "pointsman.instance": first.target.instance_id if first else None,
                "pointsman.cached_tokens": first.cached_tokens if first else None,
                "pointsman.new_tokens": max(input_tokens - first.cached_tokens, 0) if first else None,
                "pointsman.degraded": first.degraded if first else None,
            }
        ),
        error="" if first else error,
    )
    last = len(attempt.step_runs) - 1
    return [question] + [
        _step_span(request, attempt, asked, run, error if at == last else "", now, clock)
        for at, run in enumerate(attempt.step_runs)
    ]


def _step_span(
    request: SpanContext,
    attempt: Attempt,
    asked: Mapping[str, Value],
    run: StepRun,
    error: str,
    now: float,
    clock: Clock,
) -> Span:
    step, serves = run.step, not run.step.prefill_tokens
    error, events, gen_ai = run.error or error, [], dict[str, Value]()
    if serves:
        events = [("sent", attempt.sent_at), ("first token", attempt.first_byte_at)]
        first_s = attempt.first_byte_at - attempt.sent_at if attempt.first_byte_at and asked.get(_STREAM) else None
        gen_ai = {**asked, **answer_attributes(attempt.usage, step.target.url, first_s, error)}
    return Span(
        span_name(asked) if serves else "prefill",
        step_context(request, attempt.id, step.index),
        request.span_id,
        SpanKind.CLIENT,
        clock(run.began_at),
        clock(run.ended_at or now),
        known_attributes(
            {
                "pointsman.request_id": attempt.id,
                "pointsman.instance": step.target.instance_id,
                "pointsman.step": step.index,
                "pointsman.prefix_tokens": step.prefill_tokens or None,
                "pointsman.kv_source": step.kv_source.instance_id if step.kv_source else None,
                "pointsman.kv_target": step.kv_target.instance_id if step.kv_target else None,
                **gen_ai,
            }
        ),
        tuple(SpanEvent(name, clock(at)) for name, at in events if at),
        error,
    )
