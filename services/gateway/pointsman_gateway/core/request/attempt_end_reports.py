"""The reports of an ended attempt: the message to the router, and the line of the breakdown log."""

from __future__ import annotations

from collections.abc import Callable

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.enum_words import values
from pointsman_common.core.request_timing import RequestTiming
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import ReportFinished

_FINISH_REASONS = {name.lower(): number for name, number in values(placement_pb2.FinishReason).items() if number}


class AttemptBreakdown(RequestTiming, kw_only=True, omit_defaults=True):
    """One placed attempt, without prompts and sessions. Times of events that did not happen are absent. `prompt_tokens`,
    `cached_tokens` and `output_tokens` are the engine's own counts."""

    request_id: str  # the attempt's id: the gateway's id of the request, from the second attempt on with .1, .2 ...
    decision_id: str  # of the first step that has one; empty: no router placed the attempt
    model: str  # name of the pool, also for an adapter
    stream: bool  # as the client requested
    outcome: str  # name of an Outcome, such as OK or FAILED
    status: int  # HTTP status of the instance's answer; 0 without one
    instances: list[str]  # instances of the steps, in order
    fetched_from: str = ""  # instance from whose cache a step fetched the prompt's first tokens, or was to
    fallback: str = ""  # error of the last step that failed
    error: str = ""  # how the attempt ended, without addresses; empty: the answer is complete
    degraded: bool = False  # of the last step, as in StepAssigned
    input_tokens: int = 0  # as counted for the placement
    predicted_cached_tokens: int = 0  # of the prompt, at the last step's instance
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    own_cached_tokens: int = 0  # of cached_tokens, those that the request's own steps computed
    output_tokens: int | None = None
    finish_reason: str = ""  # in the terms of chat completions; empty: not reported


def finished(
    attempt: Attempt, effect: ReportFinished, context: RequestContext, status: int, now: float
) -> placement_pb2.Finished:
    """Return the message that reports the end of `attempt` to the router. Of an attempt that continues an answer the prompt was
    placed with the answer so far, and its times are those since it began."""
    usage, before = attempt.usage, attempt.continues
    since = attempt.asked_at if before else context.received_at
    report = placement_pb2.Finished(
        request_id=effect.attempt_id,
        outcome=placement_pb2.Outcome.ValueType(effect.outcome.value),
        prompt_tokens=None if usage.prompt is None else usage.prompt + before,
        # Of several sequences engines tell the cached tokens of one, which may include what another has just computed.
        cached_tokens=usage.cached if context.call.sequences == 1 else None,
        own_cached_tokens=None if usage.cached is None or context.call.sequences > 1 else attempt.own_cached,
        output_tokens=None if usage.output is None else max(usage.output - before, 0),
        error=effect.error,
        http_status=status,
        refused=effect.refused,
        refused_by=effect.refused_by,
        broke=effect.broke,
        alike=effect.alike,
        finish_reason=placement_pb2.FinishReason.ValueType(_FINISH_REASONS.get(attempt.usage.finish_reason, 0)),
    )
    report.timings.placed_ms = _ms(attempt.placed_at, since)
    report.timings.sent_ms = _ms(attempt.sent_at, since)
    if context.call.stream:
        # The first byte of an answer that is not streamed arrives with its last: it gives no time to first token.
        report.timings.first_token_ms = _ms(attempt.first_byte_at, since)
    report.timings.done_ms = _ms(now, since)
    return report


def breakdown(
    attempt: Attempt,
    effect: ReportFinished,
    context: RequestContext,
    status: int,
    now: float,
    unix: Callable[[float], float],
) -> AttemptBreakdown:
    """Return the attempt's line of the breakdown log. `unix` converts monotonic times to Unix s."""

    def at(moment: float) -> float | None:
        return unix(moment) if moment else None

    last = attempt.steps[-1] if attempt.steps else None
    prefills = [run for run in attempt.step_runs if run.step.prefill_tokens]
    return AttemptBreakdown(
        request_id=effect.attempt_id,
        decision_id=next((step.decision_id for step in attempt.steps if step.decision_id), ""),
        model=context.state.pool.model,
        stream=context.call.stream,
        outcome=effect.outcome.name,
        status=status,
        instances=[step.target.instance_id for step in attempt.steps],
        fetched_from=next(
            (step.kv_source.instance_id for step in attempt.steps if step.fetches and step.kv_source), ""
        ),
        fallback=attempt.fallback,
        error=effect.error,
        degraded=last is not None and last.degraded,
        input_tokens=context.placement.input_tokens,
        predicted_cached_tokens=last.cached_tokens if last is not None else 0,
        prompt_tokens=attempt.usage.prompt,
        cached_tokens=attempt.usage.cached,
        own_cached_tokens=attempt.own_cached,
        output_tokens=attempt.usage.output,
        finish_reason=attempt.usage.finish_reason,
        t_recv=at(context.received_at),
        t_placed=at(attempt.placed_at),
        t_prefill_sent=at(prefills[0].began_at) if prefills else None,
        t_prefill_done=at(prefills[-1].ended_at) if prefills else None,
        t_sent=at(attempt.sent_at),
        t_first_token=at(attempt.first_byte_at),
        t_done=at(now),
    )


def _ms(at: float, since: float) -> float:
    return max(0.0, (at - since) * 1e3) if at else 0.0
