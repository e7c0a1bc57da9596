"""Carries out one request's choreography: asks, sends, passes the answer on, and reports, whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from services.gateway import moves as mv
from services.gateway.attempt import Attempt
from services.gateway.choreography import Choreography, Phase
from services.gateway.dialects import DialectError
from services.gateway.errands import Errands
from services.gateway.http.message import Request, Response
from services.gateway.job import Job, Tools
from services.gateway.kv_transfer import is_direct
from services.gateway.placing import RETRY_S, Placing

log = structlog.get_logger()

# google.rpc.Code (or our own FAILED, TIMED_OUT) -> HTTP status, error type, error code
_FAILURES = {
    mv.SATURATED: (429, "rate_limit_error", "saturated"),
    mv.UNAVAILABLE: (503, "server_error", "no_instance"),
    mv.FAILED: (502, "server_error", "instance_failed"),
    mv.TIMED_OUT: (503, "server_error", "placement_timeout"),
}


class Conductor:
    """One request's run. `run` returns the answer (None: it was streamed), or raises DialectError; in each case the router has
    been told the end."""

    def __init__(self, tools: Tools, job: Job, request: Request) -> None:
        limits = tools.limits if job.call.stream else tools.whole_limits
        self._tools = tools
        self._job = job
        self._out = request.outgoing
        self._machine = Choreography(job.request_id, limits, direct=is_direct(job.call))
        self._placing = Placing(tools, job)
        self._errands = Errands(tools, job, request)
        self._begun: list[Coroutine[Any, Any, mv.Event]] = []  # and not awaited yet
        self._ops: set[asyncio.Task[mv.Event]] = set()  # two, where the step after a PREFILL is sent ahead
        self._attempt = Attempt()
        self._failure: mv.Fail | None = None
        self._broken = False

    async def run(self) -> Response | None:
        """The answer to the client. Raises DialectError, and CancelledError when the client left."""
        try:
            self._do(self._machine.start(time.monotonic()))
            while self._machine.phase is not Phase.DONE:
                streaming = self._machine.phase is Phase.STREAMING
                self._handle(await (self._pass_on() if streaming else self._next_event()))
            return self._answer()
        except (asyncio.CancelledError, DialectError):
            raise
        except Exception:
            if not self._out.begun:
                raise
            # The head is sent: an error answer would only be more bytes of this one. A connection that breaks is understood.
            log.exception("a fault in the gateway, in the middle of a stream", request_id=self._job.request_id)
            self._out.abort()
            return None
        finally:
            # Reached with an open attempt when the client left, or by a fault of our own: the router must hear of the end.
            self._handle(mv.ClientGone())
            self._abort()
            self._trace(self._failure.message if self._failure is not None else "", time.monotonic())
            self._errands.attempt_over()

    def _answer(self) -> Response | None:
        if self._failure is not None:
            raise _as_error(self._failure)
        if self._errands.reply is not None:
            return self._errands.reply
        if self._broken:
            self._errands.tell_failure()
        self._out.end()
        return None

    def _handle(self, event: mv.Event) -> None:
        now = time.monotonic()
        if isinstance(event, mv.Tick) and self._machine.deadline is not None:
            now = max(now, self._machine.deadline)  # the loop counts in ms
        self._do(self._machine.handle(event, now))

    def _do(self, effects: list[mv.Effect]) -> None:
        router, placing, errands = self._tools.router, self._placing, self._errands
        for effect in effects:
            match effect:
                case mv.Ask():
                    self._attempt.ask(effect.attempt_id, time.monotonic())
                    self._begin(placing.ask(effect))
                case mv.AskLocally():
                    self._attempt.ask(effect.attempt_id, time.monotonic())
                    self._begin(placing.ask_locally(effect))
                case mv.AwaitNext():
                    self._attempt.next(effect.error, time.monotonic())
                    if effect.error:
                        errands.step_failed()
                        log.info("a step failed", request_id=effect.attempt_id, step=effect.index, error=effect.error)
                    self._begin(placing.await_next(effect))
                case mv.Prefill():
                    self._note(effect.step)
                    self._begin(errands.prefill(effect.step))
                case mv.Pull():
                    self._note(effect.step, ahead=effect.ahead)
                    self._begin(errands.pull(effect.step, ahead=effect.ahead))
                case mv.Serve():
                    self._note(effect.step, ahead=effect.ahead)
                    headers = self._headers(effect.step)
                    self._begin(errands.serve(effect.step, self._attempt, headers, ahead=effect.ahead))
                case mv.TakeUp():
                    self._note(effect.step)
                case mv.StepOver():
                    self._attempt.next("", time.monotonic())
                    placing.step_over(effect)
                case mv.Abort():
                    self._attempt.ahead = 0.0
                    self._abort()
                case mv.FirstToken():
                    # A whole answer's end follows at once, and says as much.
                    if errands.reply is None:
                        router.first_token(effect.attempt_id)
                    self._tools.telemetry.ttft.observe(self._attempt.first - self._job.received)
                case mv.Finished():
                    self._report(effect)
                case mv.Fail():
                    self._failure = effect
                case mv.BreakStream():
                    self._broken = True

    def _begin(self, operation: Coroutine[Any, Any, mv.Event]) -> None:
        self._begun.append(operation)

    def _note(self, step: mv.StepGiven, *, ahead: bool = False) -> None:
        if ahead:
            self._attempt.ahead = time.monotonic()
            return
        self._attempt.begin(step, time.monotonic())
        self._placing.note(step)

    async def _next_event(self) -> mv.Event:
        """The end of something that was begun, or Tick at the deadline. An operation that is alone needs no task of its own;
        it is given up at the deadline, by which everything that waits for one thing ends that."""
        assert self._machine.deadline is not None
        left = max(0.0, self._machine.deadline - time.monotonic())
        if not self._ops and len(self._begun) == 1:
            return await _within(left, self._begun.pop())
        self._ops |= {asyncio.create_task(operation) for operation in self._begun}
        self._begun.clear()
        done, _ = await asyncio.wait(self._ops, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return mv.Tick()
        ended = done.pop()
        self._ops.remove(ended)
        return ended.result()

    async def _pass_on(self) -> mv.Event:
        self._job.forget_prompt()
        self._tools.router.watch(self._machine.attempt_id, lambda: self._errands.streamed_tokens)
        try:
            assert self._machine.step is not None
            return await self._errands.pass_on(self._attempt, self._headers(self._machine.step))
        except asyncio.CancelledError:
            # Clients hang up at [DONE], often before the engine's own end is read here: they had the whole answer. So they do
            # at an error.
            ending = self._errands.ended(self._attempt)
            if ending.complete or ending.error:
                self._handle(mv.AnswerEnded(ending.error))
            raise

    def _abort(self) -> None:
        for begun in self._begun:
            begun.close()
        self._begun.clear()
        for op in self._ops:
            op.cancel()
        self._ops.clear()
        self._errands.drop()

    def _report(self, effect: mv.Finished) -> None:
        job, attempt, tools, now = self._job, self._attempt, self._tools, time.monotonic()
        usage, ok = attempt.usage, effect.outcome is mv.Outcome.OK
        status = 200 if ok else effect.status or self._errands.status
        prompt = job.placement.input_tokens if usage.prompt is None else usage.prompt
        output = self._errands.streamed_tokens if usage.output is None else usage.output
        job.grant.charge(prompt + output, now)
        self._errands.attempt_over()
        tools.router.finished(attempt.finished(effect, job, status, now))
        tools.telemetry.outcomes.labels(effect.outcome.name.lower()).inc()
        if ok:
            tools.telemetry.total.observe(now - job.received)
            if job.call.stream and attempt.first and output > 1:
                tools.telemetry.tpot.observe((now - attempt.first) / (output - 1))
            if job.known_tokens and usage.prompt is not None:
                tools.pools.counted(job.state, job.call.kind, job.known_tokens, usage.prompt)
        if effect.outcome is mv.Outcome.FAILED:
            log.warning(
                "attempt failed",
                request_id=effect.attempt_id,
                instance=attempt.instance_id,
                error=effect.error,
                status=status,
            )
        if tools.breakdown.on:
            tools.breakdown.write(attempt.broken_down(effect, job, status, now, tools.breakdown.unix))
        self._trace(effect.error, now)
        # What comes next is another attempt, with times and usage of its own.
        self._attempt = Attempt()

    def _trace(self, error: str, now: float) -> None:
        """Send the spans of the attempt that is over, unless there is none or they are sent."""
        if self._attempt.asked and self._job.traced is not None:
            self._job.traced.ended(self._attempt, error, self._job.placement.input_tokens, now)

    def _headers(self, step: mv.StepGiven) -> dict[str, str]:
        """What the client is told of its answer's placement."""
        headers = {"X-Request-ID": self._job.up_headers["X-Request-ID"]}
        if self._tools.tell_placement:
            headers["X-Pointsman-Instance"] = step.target.instance_id
            if step.decision_id:
                headers["X-Pointsman-Decision"] = step.decision_id
            if step.degraded:
                headers["X-Pointsman-Degraded"] = "1"
        return headers


async def _within(limit_s: float, operation: Coroutine[Any, Any, mv.Event]) -> mv.Event:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await operation
    except TimeoutError:
        if not limit.expired():
            raise
        return mv.Tick()


def _as_error(failure: mv.Fail) -> DialectError:
    status, type_, code = _FAILURES.get(failure.code, (503, "server_error", "unavailable"))
    wait = failure.retry_after_s if failure.retry_after_s is not None else RETRY_S if status in (429, 503) else None
    return DialectError(status, failure.message, type_=type_, code=code, retry_after_s=wait)
