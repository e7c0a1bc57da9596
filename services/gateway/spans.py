"""What a request's way through the gateway looks like as spans: itself, each question to the router, each step. Pure.

Below a question is the router's own span, below a step that of the engine which does it: both go on from places that are derived
from the request's (`question_place`, `step_place`), and are sent along before the spans here are made.
"""

from __future__ import annotations

from collections.abc import Callable

from services.common.tracing import Kind, Moment, Place, Span, Value, told
from services.gateway.attempt import Attempt, StepRun

# Moments are monotonic seconds, as unix ns.
Clock = Callable[[float], int]


def question_place(request: Place, attempt_id: str) -> Place:
    """Where the router goes on from."""
    return request.child(f"{attempt_id} place")


def step_place(request: Place, attempt_id: str, index: int) -> Place:
    """Where the engine that does a step goes on from."""
    return request.child(f"{attempt_id} {index}")


def request_span(
    place: Place,
    parent_id: int,
    route: str,
    status: int,
    received: float,
    understood: float,
    now: float,
    clock: Clock,
    **values: Value,
) -> Span:
    """A client's request. `understood`: when its prompt was tokenised, 0 for never; `status`: of the answer, 499 for a client
    that left."""
    return Span(
        f"POST {route}",
        place,
        parent_id,
        Kind.SERVER,
        clock(received),
        clock(now),
        told({"http.request.method": "POST", "http.route": route, "http.response.status_code": status, **values}),
        (Moment("tokenised", clock(understood)),) if understood else (),
        f"status {status}" if status >= 500 else "",
    )


def attempt_spans(
    request: Place, attempt: Attempt, error: str, input_tokens: int, now: float, clock: Clock
) -> list[Span]:
    """An attempt that ended `now`: the question where it goes, and the steps that it came to. `error` is how it failed."""
    first = attempt.runs[0].step if attempt.runs else None
    question = Span(
        "place",
        question_place(request, attempt.id),
        request.span_id,
        Kind.CLIENT,
        clock(attempt.asked),
        clock(attempt.placed or now),
        told(
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
    last = len(attempt.runs) - 1
    return [question] + [
        _step_span(request, attempt, run, error if at == last else "", now, clock)
        for at, run in enumerate(attempt.runs)
    ]


def _step_span(request: Place, attempt: Attempt, run: StepRun, error: str, now: float, clock: Clock) -> Span:
    step, serves = run.step, not run.step.prefill_tokens
    moments = []
    if serves:
        moments = [("sent", attempt.sent), ("first token", attempt.first)]
    return Span(
        "serve" if serves else "prefill",
        step_place(request, attempt.id, step.index),
        request.span_id,
        Kind.CLIENT,
        clock(run.began),
        clock(run.ended or now),
        told(
            {
                "pointsman.request_id": attempt.id,
                "pointsman.instance": step.target.instance_id,
                "pointsman.step": step.index,
                "pointsman.prefix_tokens": step.prefill_tokens or None,
                "pointsman.kv_source": step.kv_source.instance_id if step.kv_source else None,
                "pointsman.kv_target": step.kv_target.instance_id if step.kv_target else None,
                # The engine's own counts.
                "gen_ai.usage.input_tokens": attempt.usage.prompt if serves else None,
                "pointsman.cached_tokens": attempt.usage.cached if serves else None,
                "gen_ai.usage.output_tokens": attempt.usage.output if serves else None,
            }
        ),
        tuple(Moment(name, clock(at)) for name, at in moments if at),
        run.error or error,
    )
