"""The spans of a request: the request itself, each placement by the router, and each step.

The router's own span is the child of a placement span, and the engine's span is the child of a step span. Both continue span
contexts that are derived from the request's (by `core.request_trace`) and are sent before the spans of this module are built. The
step that answers is a model call by OpenTelemetry's conventions (`core.request.gen_ai_attributes`). No other span of the gateway
has an operation name or usage, so that nothing is counted twice.
"""

from __future__ import annotations

from pointsman_common.core.tracing import Span, SpanEvent, SpanKind, Value, known_attributes
from pointsman_gateway.core.request.attempt import Attempt, StepRun
from pointsman_gateway.core.request.gen_ai_attributes import answer_attributes, span_name
from pointsman_gateway.core.request_trace import RequestTrace

_STREAM = "gen_ai.request.stream"


def request_span(trace: RequestTrace, route: str, model: str, status: int, now: float) -> Span:
    """Return the span of a client's request that ends at `now`. `route` and `model` are those of this gateway, or empty.
    `status`: HTTP status of the answer, 499 if the client disconnected."""
    failed = status >= 500
    return Span(
        f"POST {route}",
        trace.context,
        trace.parent_id,
        SpanKind.SERVER,
        trace.clock(trace.received_at),
        trace.clock(now),
        known_attributes(
            {
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": status,
                "error.type": str(status) if failed else None,
                **trace.known,
                "gen_ai.request.model": model,
            }
        ),
        (SpanEvent("tokenised", trace.clock(trace.tokenised)),) if trace.tokenised else (),
        f"status {status}" if failed else "",
    )


def attempt_spans(trace: RequestTrace, attempt: Attempt, error: str, input_tokens: int, now: float) -> list[Span]:
    """Return the spans of an attempt that ended at `now`: its placement and its steps. `error`: how the attempt failed ("": it
    did not)."""
    first = attempt.step_runs[0].step if attempt.step_runs else None
    question = Span(
        "place",
        trace.placement_context(attempt.id),
        trace.context.span_id,
        SpanKind.CLIENT,
        trace.clock(attempt.asked_at),
        trace.clock(attempt.placed_at or now),
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
        _step_span(trace, attempt, run, error if at == last else "", now) for at, run in enumerate(attempt.step_runs)
    ]


def _step_span(trace: RequestTrace, attempt: Attempt, run: StepRun, error: str, now: float) -> Span:
    step, serves, asked = run.step, not run.step.prefill_tokens, trace.asked
    error, events, gen_ai = run.error or error, [], dict[str, Value]()
    if serves:
        events = [("sent", attempt.sent_at), ("first token", attempt.first_byte_at)]
        first_s = attempt.first_byte_at - attempt.sent_at if attempt.first_byte_at and asked.get(_STREAM) else None
        gen_ai = {**asked, **answer_attributes(attempt.usage, step.target.url, first_s, error)}
    return Span(
        span_name(asked) if serves else "prefill",
        trace.step_context(attempt.id, step.index),
        trace.context.span_id,
        SpanKind.CLIENT,
        trace.clock(run.began_at),
        trace.clock(run.ended_at or now),
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
        tuple(SpanEvent(name, trace.clock(at)) for name, at in events if at),
        error,
    )
