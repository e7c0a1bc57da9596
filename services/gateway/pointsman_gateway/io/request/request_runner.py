"""Runs one request: executes the effects of its state machine and passes the resulting events to it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiRequestError
from pointsman_gateway.core.api.errors import RETRY_S
from pointsman_gateway.core.http_message import Request, Response
from pointsman_gateway.core.request import request_events as ev
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.attempt_end_reports import breakdown, finished
from pointsman_gateway.core.request.failures import error_for
from pointsman_gateway.core.request.placement_messages import attempt_request, event_of, target_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_spans import attempt_spans
from pointsman_gateway.core.request.request_state_machine import Phase, RequestStateMachine
from pointsman_gateway.core.tokens.token_cache import TokenIds
from pointsman_gateway.io.request.ext_proc_request import ExtProcRequest
from pointsman_gateway.io.request.shared_context import SharedContext
from pointsman_gateway.io.request.steps_and_relay import EngineSteps
from pointsman_gateway.io.routing.router_client import NoRouter, OpenAnswer, PlacementReply, WithoutRouter

log = structlog.get_logger()


class RequestRunner:
    """The run of one request. `run` returns the answer (None: it was streamed) or raises ApiRequestError; in either case the end
    of the request has been reported to the router."""

    def __init__(self, shared: SharedContext, context: RequestContext, request: Request) -> None:
        timeouts = shared.timeouts if context.call.stream else shared.whole_timeouts
        # A proxy sends the client's request in place of the gateway, once. So KV is transferred before.
        proxy = request.proxy if isinstance(request, ExtProcRequest) else None
        inline = context.inline_kv_transfer and proxy is None
        if proxy is not None or context.continues is not None:
            timeouts = replace(timeouts, max_retries=0)
        self._shared = shared
        self._context = context
        self._writer = request.writer
        self._usage = request.usage
        self._state_machine = RequestStateMachine(context.request_id, timeouts, inline_kv_transfer=inline)
        self._requests: dict[str, placement_pb2.PlacementRequest] = {}  # attempt id -> what is placed
        self._answer_ids: TokenIds = array("I")  # the answer so far, which the next attempt continues
        self._steps = EngineSteps(shared, context, request, proxy)
        self._pending: list[Coroutine[Any, Any, ev.Event]] = []  # coroutines that are created but not awaited yet
        self._tasks: set[asyncio.Task[ev.Event]] = set()  # two while an early step runs together with its PREFILL
        self._attempt = Attempt()
        self._failure: ev.FailRequest | None = None
        self._stream_broken = False
        self._limit: asyncio.Timeout | None = None  # of the operation that is awaited alone
        self._gave_up: ev.Event | None = None  # how that operation ends, if it is ended before its time

    async def run(self) -> Response | None:
        """Run the request and return its answer. Raises ApiRequestError, and CancelledError when the client disconnects."""
        try:
            self._shared.router.session_begins(self._context.placement)
            self._apply(self._state_machine.start(time.monotonic()))
            while self._state_machine.phase is not Phase.DONE:
                streaming = self._state_machine.phase is Phase.STREAMING
                self._handle(await (self._relay_response() if streaming else self._next_event()))
            return self._answer()
        except asyncio.CancelledError:
            if self._writer.begun and not self._writer.ended and not self._writer.lost:
                # The drain has ended. The stream ends with an error event, because some clients take a broken one for complete.
                if self._state_machine.phase is not Phase.DONE:
                    self._steps.write_error_event()
                self._writer.end()
            raise
        except ApiRequestError:
            raise
        except Exception:
            if not self._writer.begun:
                raise
            # The response head is sent, so an error response would be read as part of the body. Closing the connection tells the
            # client that the response is incomplete.
            log.exception("a fault in the gateway, in the middle of a stream", request_id=self._context.request_id)
            self._writer.abort()
            return None
        finally:
            # If the client disconnected, or the gateway has a fault, an attempt is still open: its end is reported to the router.
            self._handle(ev.ClientDisconnected())
            self._abort()
            if self._context.ends_session:
                placement = self._context.placement
                self._shared.router.end_session(placement.tenant, placement.session_id)
                self._shared.telemetry.session_ends.labels("header").inc()
            self._trace(self._failure.message if self._failure is not None else "", time.monotonic())
            self._steps.attempt_ended()
            self._steps.release_prompt()

    def _answer(self) -> Response | None:
        response = self._steps.whole_response
        if self._stream_broken:
            self._steps.write_error_event()
            self._writer.end()
            return None
        if self._failure is not None and (response is None or self._failure.code != ev.INTERNAL):
            if self._context.continues is not None and self._failure.code == ev.UNAVAILABLE:
                raise self._context.continues.unavailable()
            raise error_for(self._failure)
        if response is not None:
            # If all instances failed, the last instance's error answer says more than a general message.
            return response
        self._writer.end()
        return None

    def _handle(self, event: ev.Event) -> None:
        now = time.monotonic()
        if isinstance(event, ev.Tick) and self._state_machine.deadline is not None:
            now = max(now, self._state_machine.deadline)  # the loop's timers are rounded to ms and may fire early
        self._apply(self._state_machine.handle(event, now))

    def _apply(self, effects: list[ev.Effect]) -> None:
        router, steps = self._shared.router, self._steps
        for effect in effects:
            match effect:
                case ev.AskRouter():
                    self._attempt.begin_placement(effect.attempt_id, time.monotonic())
                    self._pending.append(self._ask_router(effect))
                case ev.AdoptInstance():
                    self._attempt.begin_placement(effect.step.attempt_id, time.monotonic())
                    self._request_of(effect.step.attempt_id, ())
                case ev.AskNextStep():
                    self._attempt.end_step(effect.error, time.monotonic())
                    if effect.error:
                        steps.step_failed()
                        log.info("a step failed", request_id=effect.attempt_id, step=effect.index, error=effect.error)
                    self._pending.append(self._ask_next_step(effect))
                case ev.Prefill():
                    self._record_step(effect.step)
                    self._pending.append(steps.prefill(effect.step))
                case ev.PullKv():
                    self._record_step(effect.step, early=effect.early)
                    self._pending.append(steps.pull(effect.step, early=effect.early))
                case ev.Serve():
                    self._record_step(effect.step, early=effect.early)
                    headers = self._headers(effect.step)
                    self._pending.append(steps.serve(effect.step, self._attempt, headers, early=effect.early))
                case ev.AdoptEarlyStep():
                    self._record_step(effect.step)
                case ev.ReportStepDone():
                    self._attempt.end_step("", time.monotonic())
                    router.step_done(effect.attempt_id, effect.index)
                case ev.AbortUpstream():
                    self._attempt.early_sent_at = 0.0
                    self._abort()
                case ev.ReportServedAlone():
                    router.served_alone(effect.attempt_id)
                case ev.ReportFirstToken():
                    # The end of a whole answer follows at once and implies the first token; only `refused_by` would be lost.
                    if steps.whole_response is None or effect.refused_by:
                        router.first_token(effect.attempt_id, effect.refused_by)
                    if self._context.call.stream and not self._attempt.continues:
                        self._shared.telemetry.ttft.observe(self._attempt.first_byte_at - self._context.received_at)
                case ev.ReportFinished():
                    self._account_for_end(effect)
                case ev.FailRequest():
                    self._failure = effect
                case ev.EndStreamWithError():
                    self._stream_broken = True

    def _record_step(self, step: ev.StepAssigned, *, early: bool = False) -> None:
        if early:
            self._attempt.early_sent_at = time.monotonic()
            return
        self._attempt.begin_step(step, time.monotonic())
        # From now on the request counts as open on the step's instance.
        self._shared.router.placed(self._requests[step.attempt_id], step.target.instance_id, step.cached_tokens)
        self._shared.router.on_move(step.attempt_id, self._move)

    def _request_of(self, attempt_id: str, exclude: tuple[str, ...]) -> placement_pb2.PlacementRequest:
        request = self._requests[attempt_id] = attempt_request(self._context, attempt_id, exclude, self._answer_ids)
        return request

    async def _ask_router(self, effect: ev.AskRouter) -> ev.Event:
        """Ask the router for an attempt's first step."""
        shared, began = self._shared, time.monotonic()
        if effect.exclude:
            shared.telemetry.retries.inc()
        # The client of a continued answer has had its first token.
        first_token_by = None if self._answer_ids else self._context.first_token_by
        request, parked = self._request_of(effect.attempt_id, effect.exclude), partial(self._parked, effect.attempt_id)
        limit_s = shared.timeouts.placement_s
        reply = await shared.router.first_step(request, limit_s, first_token_by, parked, effect.computed_at)
        if isinstance(reply, WithoutRouter):
            if reply.instance is None:
                return ev.PlacementRefused(effect.attempt_id, reply.code, reply.message, RETRY_S)
            shared.telemetry.local.inc()
            log.debug("placed without a router", request_id=effect.attempt_id, instance=reply.instance.instance_id)
            return ev.StepAssigned(effect.attempt_id, target_of(reply.instance), degraded=True)
        shared.telemetry.place.observe(time.monotonic() - began)
        return self._reply(effect.attempt_id, reply)

    async def _ask_next_step(self, effect: ev.AskNextStep) -> ev.Event:
        """Report the end of a step and wait for the next one."""
        asked = effect.attempt_id, effect.index, effect.error, effect.instance_failed
        try:
            reply = await self._shared.router.next_step(*asked, self._shared.timeouts.placement_s)
        except NoRouter:
            return ev.RouterLost(effect.attempt_id)
        return self._reply(effect.attempt_id, reply)

    def _reply(self, attempt_id: str, reply: PlacementReply) -> ev.Event:
        if isinstance(reply, placement_pb2.Refusal):
            self._shared.telemetry.refused(reply.code)
        return event_of(attempt_id, reply)

    def _move(self, asked: placement_pb2.Move) -> None:
        """Let the request leave its instance."""
        machine = self._state_machine
        if machine.step is None:
            return
        if asked.reason == placement_pb2.MOVE_REASON_LOST:
            self._steps.instance_lost(machine.step)
        elif asked.unbegun and machine.phase is Phase.STREAMING:
            return  # The router learns of the beginning, and asks again if there is an instance for the rest.
        elif machine.phase in (Phase.SERVING, Phase.STREAMING):
            if machine.phase is Phase.SERVING and self._limit is not None and self._steps.waits_for_head(machine.step):
                self._gave_up = ev.UpstreamFailed("moved to another instance", moved=True)
                self._end_within(0.0)
            else:
                self._steps.move(machine.step)

    async def _next_event(self) -> ev.Event:
        """Wait for the next operation to end and return its event, or Tick at the deadline.

        A single operation runs without a task and is cancelled at the deadline. This is correct because the state machine ends
        an operation that it waits for alone when its deadline passes.
        """
        assert self._state_machine.deadline is not None
        left = max(0.0, self._state_machine.deadline - time.monotonic())
        if not self._tasks and len(self._pending) == 1:
            return await self._alone(left, self._pending.pop())
        self._tasks |= {asyncio.create_task(operation) for operation in self._pending}
        self._pending.clear()
        done, _ = await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return ev.Tick()
        ended = done.pop()
        self._tasks.remove(ended)
        return ended.result()

    async def _alone(self, limit_s: float, operation: Coroutine[Any, Any, ev.Event]) -> ev.Event:
        limit = self._limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await operation
        except TimeoutError:
            if not limit.expired():
                raise
            return self._gave_up or ev.Tick()
        finally:
            self._limit = self._gave_up = None

    def _parked(self, attempt_id: str, bound_s: float) -> None:
        """Wait for at most `bound_s` longer, because the router has parked the request."""
        self._handle(ev.RequestParked(attempt_id, bound_s))
        if (deadline := self._state_machine.deadline) is not None:
            self._end_within(deadline - time.monotonic())

    def _end_within(self, left_s: float) -> None:
        """End the operation that is awaited alone in `left_s`, unless its time is over: then it is just being cancelled."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + max(0.0, left_s))

    async def _relay_response(self) -> ev.Event:
        self._steps.keep_prompt()
        steps, before = self._steps, self._steps.streamed_tokens
        answer = OpenAnswer(lambda: steps.streamed_tokens - before, steps.waits_for_bytes, steps.heard_at)
        self._shared.router.answer_begins(self._state_machine.attempt_id, answer)
        try:
            assert self._state_machine.step is not None
            return await self._steps.relay_response(self._attempt, self._headers(self._state_machine.step))
        except asyncio.CancelledError:
            # Clients disconnect after [DONE], or after an error event, often before the gateway has read the end of the engine's
            # stream. Such a client has received the whole answer.
            stream_end = self._steps.stream_end(self._attempt)
            if stream_end.complete or stream_end.error:
                self._handle(ev.ResponseEnded(stream_end.error))
            raise

    def _abort(self) -> None:
        for operation in self._pending:
            operation.close()
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._steps.close_upstream()

    def _account_for_end(self, effect: ev.ReportFinished) -> None:
        context, attempt, shared, now = self._context, self._attempt, self._shared, time.monotonic()
        usage, ok = attempt.usage, effect.outcome is ev.Outcome.OK
        status = 200 if ok else effect.status or self._steps.status
        prompt = context.prompt_tokens if usage.prompt is None else usage.prompt
        output = self._steps.streamed_tokens if usage.output is None else usage.output
        # Each attempt's charge replaces the one before: the attempt that ends the answer has the usage of the whole.
        context.key_charge.charge(prompt + output, now)
        self._usage.outcome = effect.outcome.name.lower()
        # A request that no instance began to answer has no usage, whatever its rate limit was charged with.
        if attempt.first_byte_at or attempt.continues:
            self._usage.prompt_tokens, self._usage.completion_tokens = prompt, output
            self._usage.cached_tokens = attempt.cache_hits
        self._steps.attempt_ended()
        shared.router.finished(finished(attempt, effect, context, status, now))
        shared.telemetry.outcomes.labels(effect.outcome.name.lower()).inc()
        if ok:
            shared.telemetry.total.observe(now - context.received_at)
            alone = not attempt.continues and context.call.sequences == 1
            if context.call.stream and attempt.first_byte_at and output > 1 and alone:
                shared.telemetry.tpot.observe((now - attempt.first_byte_at) / (output - 1))
            # An engine that is known to have another tokenizer says nothing of the gateway's.
            if context.exact_tokens and usage.prompt is not None and context.answered_exactly is not False:
                shared.pools.check_token_count(context.state, context.call.endpoint, context.exact_tokens, usage.prompt)
        if effect.continued:
            self._answer_ids = self._steps.answer_ids
            shared.telemetry.continued.inc()
        if effect.outcome is ev.Outcome.FAILED:
            log.warning(
                "attempt failed",
                continued=effect.continued,
                request_id=effect.attempt_id,
                instance=attempt.instance_id,
                error=effect.error,
                status=status,
            )
        if shared.breakdown.on:
            shared.breakdown.write(breakdown(attempt, effect, context, status, now, shared.breakdown.unix))
        self._trace(effect.error, now)
        # A later attempt has its own times and usage.
        self._attempt = Attempt(continues=len(self._answer_ids))

    def _trace(self, error: str, now: float) -> None:
        """Send the spans of the attempt that has ended. No effect if there is none or its spans are sent."""
        trace = self._context.trace
        if trace is not None and trace.context.sampled and self._attempt.asked_at:
            trace.send(attempt_spans(trace, self._attempt, error, self._context.placement.input_tokens, now))

    def _headers(self, step: ev.StepAssigned) -> dict[str, str]:
        """Return the answer's header fields about its placement."""
        headers = {}
        if self._shared.expose_placement:
            headers["X-Pointsman-Instance"] = step.target.instance_id
            if step.decision_id:
                headers["X-Pointsman-Decision"] = step.decision_id
            if step.degraded:
                headers["X-Pointsman-Degraded"] = "1"
        return headers
