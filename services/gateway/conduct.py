"""Carries out one request's choreography: asks, sends, passes the answer on, and reports, whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from services.gateway import choreography as ch
from services.gateway.answer import Tail
from services.gateway.breakdown import Breakdown, BreakdownLog
from services.gateway.dialects import Call, DialectError, Kind, engine_error, error_event, with_fields
from services.gateway.dialects.endings import Ending, Usage, usage_of
from services.gateway.dialects.responses import response_id
from services.gateway.events import EventStream
from services.gateway.http.client import Answer
from services.gateway.http.message import Request, Response
from services.gateway.kv_transfer import (
    MOONCAKE,
    NIXL,
    TransferError,
    begins_with_error,
    fell_short,
    is_direct,
    slice_request,
)
from services.gateway.limits import Grant
from services.gateway.offload import Bootstraps, Offload
from services.gateway.pools import Pools, PoolState
from services.gateway.router_client import RouterAway, RouterClient, Step
from services.gateway.telemetry import Telemetry
from services.gateway.token_cache import Ids
from services.gateway.upstream import Upstream, UpstreamError, down_headers

log = structlog.get_logger()

# google.rpc.Code (or our own FAILED, TIMED_OUT) -> HTTP status, error type, error code
_FAILURES = {
    ch.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    ch.SATURATED: (429, "rate_limit_error", "saturated"),
    ch.UNAVAILABLE: (503, "server_error", "no_instance"),
    ch.FAILED: (502, "server_error", "instance_failed"),
    ch.TIMED_OUT: (503, "server_error", "placement_timeout"),
}
_RETRY_S = 1.0
_PROTOCOLS = {agent_pb2.KV_PROTOCOL_MOONCAKE: MOONCAKE, agent_pb2.KV_PROTOCOL_NIXL: NIXL}


@dataclass
class Tools:
    """What every request works with."""

    router: RouterClient
    upstream: Upstream
    bootstraps: Bootstraps
    pools: Pools
    telemetry: Telemetry
    limits: ch.Limits
    answer_timeout_s: float
    breakdown: BreakdownLog
    tell_placement: bool
    turn: int = 0  # round-robin among equals for placements of our own


@dataclass
class Job:
    """One request, understood: what to send and what to place it by. `received` is monotonic seconds."""

    request_id: str
    call: Call
    state: PoolState
    placement: placement_pb2.PlacementRequest
    ids: Ids | None  # the prompt's tokens, None where they are only estimated
    up_headers: dict[str, str]
    received: float
    grant: Grant

    def payload_at(self, instance_id: str) -> bytes:
        """What to send to an instance. A response's id says where it is stored, so that is known only now."""
        if self.call.kind is not Kind.RESPONSES:
            return self.call.payload
        id_ = response_id(instance_id, self.placement.tenant, self.request_id)
        return with_fields(self.call.payload, {"request_id": id_})


@dataclass
class _Attempt:
    """What an attempt leaves for its report. Moments are monotonic seconds, 0 for never."""

    placed: float = 0.0
    prefill_sent: float = 0.0
    prefill_done: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    steps: list[ch.StepGiven] = field(default_factory=list)
    fallback: str = ""


class Conductor:
    """One request's run. `run` returns the answer (None: it was streamed), or raises DialectError; in each case the router has
    been told the end."""

    def __init__(self, tools: Tools, job: Job, request: Request) -> None:
        limit = tools.limits.first_byte_s if job.call.stream else tools.answer_timeout_s
        self._tools = tools
        self._job = job
        self._out = request.outgoing
        self._machine = ch.Choreography(
            job.request_id, replace(tools.limits, first_byte_s=limit), direct=is_direct(job.call)
        )
        self._offload = Offload(tools.upstream, tools.bootstraps, job.call, job.up_headers)
        self._sliced: tuple[str, int] | None = None  # the last slice: where, and up to which token
        self._op: asyncio.Task[ch.Event] | None = None
        self._upstream: Answer | None = None
        self._placed: dict[str, placement_pb2.PlacementRequest] = {}
        self._times = _Attempt()
        self._usage = Usage()
        self._reply: Response | None = None  # a whole answer: a rejection, or one that is not streamed
        self._tail = Tail(job.call.kind)
        self._events = EventStream(self._tail, withhold_usage=job.call.usage_is_ours)
        self._failure: ch.Fail | None = None
        self._tried = ""  # the instance of the last step, which a new attempt has already forgotten
        self._broken = False

    async def run(self) -> Response | None:
        """The answer to the client. Raises DialectError, and CancelledError when the client left."""
        try:
            self._do(self._machine.start(time.monotonic()))
            while self._machine.phase is not ch.Phase.DONE:
                streaming = self._machine.phase is ch.Phase.STREAMING
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
            self._handle(ch.ClientGone())
            self._drop_upstream()

    def _answer(self) -> Response | None:
        if self._failure is not None:
            raise _as_error(self._failure)
        if self._reply is not None:
            return self._reply
        if self._broken:
            event = error_event(
                "The instance failed while it answered.",
                self._job.call.kind.form,
                "instance_failed",
                self._tail.ending().sequence_number + 1,
            )
            self._out.write(b"\n\n" + event if self._events.torn else event)
        self._out.end()
        return None

    def _handle(self, event: ch.Event) -> None:
        self._do(self._machine.handle(event, time.monotonic()))

    def _do(self, effects: list[ch.Effect]) -> None:
        tools = self._tools
        for effect in effects:
            match effect:
                case ch.Ask():
                    if effect.exclude:
                        tools.telemetry.retries.inc()
                    self._begin(self._ask(effect))
                case ch.AskLocally():
                    self._begin(self._ask_locally(effect))
                case ch.AwaitNext():
                    if effect.error:
                        self._times.fallback = effect.error
                        self._offload.failed()
                        log.info("a step failed", request_id=effect.attempt_id, step=effect.index, error=effect.error)
                    self._begin(self._await_next(effect))
                case ch.Prefill():
                    self._note_step(effect.step)
                    self._begin(self._prefill(effect.step))
                case ch.Pull():
                    self._note_step(effect.step)
                    self._begin(self._pull(effect.step))
                case ch.Serve():
                    self._note_step(effect.step)
                    self._begin(self._serve(effect.step))
                case ch.Abort():
                    if self._op is not None:
                        self._op.cancel()
                    self._drop_upstream()
                case ch.FirstToken():
                    tools.router.first_token(effect.attempt_id)
                    tools.telemetry.ttft.observe(self._times.first - self._job.received)
                case ch.Finished():
                    self._report(effect)
                case ch.Fail():
                    self._failure = effect
                case ch.BreakStream():
                    self._broken = True

    def _begin(self, operation: Coroutine[Any, Any, ch.Event]) -> None:
        self._op = asyncio.create_task(operation)

    async def _next_event(self) -> ch.Event:
        """The end of what was begun, or Tick at the deadline."""
        assert self._op is not None
        assert self._machine.deadline is not None
        done, _ = await asyncio.wait({self._op}, timeout=max(0.0, self._machine.deadline - time.monotonic()))
        if not done:
            return ch.Tick()
        return self._op.result()

    def _drop_upstream(self) -> None:
        if self._op is not None and not self._op.done():
            self._op.cancel()
        if self._upstream is not None:
            # close(), not release(): an engine notices that nobody waits only by the connection's end.
            self._upstream.close()
            self._upstream = None

    # Placement.

    def _request_for(self, attempt_id: str, exclude: tuple[str, ...]) -> placement_pb2.PlacementRequest:
        request = placement_pb2.PlacementRequest()
        request.CopyFrom(self._job.placement)
        request.request_id = attempt_id
        request.exclude.extend(exclude)
        self._placed[attempt_id] = request
        return request

    async def _ask(self, ask: ch.Ask) -> ch.Event:
        began = time.monotonic()
        try:
            step = await self._tools.router.first_step(
                self._request_for(ask.attempt_id, ask.exclude), self._tools.limits.place_s
            )
        except RouterAway:
            return ch.RouterLost(ask.attempt_id)
        self._tools.telemetry.place.observe(time.monotonic() - began)
        return self._understood(ask.attempt_id, step)

    async def _await_next(self, effect: ch.AwaitNext) -> ch.Event:
        try:
            step = await self._tools.router.next_step(
                effect.attempt_id, effect.index, effect.error, effect.instance_failed
            )
        except RouterAway:
            return ch.RouterLost(effect.attempt_id)
        return self._understood(effect.attempt_id, step)

    async def _ask_locally(self, ask: ch.AskLocally) -> ch.Event:
        request = self._request_for(ask.attempt_id, ask.exclude)
        instances = {one.instance_id: one for one in self._job.state.pool.instances}
        self._tools.turn += 1
        chosen = ch.least_inflight(
            sorted(instances), self._tools.router.inflight(), tuple(request.exclude), self._tools.turn
        )
        if chosen is None:
            return ch.Refused(ask.attempt_id, ch.UNAVAILABLE, "No instance is ready for this model.", _RETRY_S)
        self._tools.telemetry.local.inc()
        log.debug("placed without a router", request_id=request.request_id, instance=chosen)
        return ch.StepGiven(ask.attempt_id, target_of(instances[chosen]), degraded=True)

    def _understood(self, attempt_id: str, step: Step) -> ch.Event:
        if isinstance(step, placement_pb2.Refusal):
            self._tools.telemetry.refusals.labels(str(step.code)).inc()
            wait = step.retry_after.ToTimedelta().total_seconds() if step.HasField("retry_after") else None
            return ch.Refused(attempt_id, step.code, step.message, wait)
        given = step.step
        prefill = given.prefix_tokens if given.kind == placement_pb2.STEP_KIND_PREFILL else 0
        return ch.StepGiven(
            attempt_id,
            target_of(given.instance),
            given.index,
            prefill,
            given.deadline.ToTimedelta().total_seconds() if given.HasField("deadline") else 0.0,
            step.decision_id,
            step.cached_tokens,
            step.degraded,
            target_of(given.kv_target) if given.HasField("kv_target") else None,
            target_of(given.kv_source) if given.HasField("kv_source") else None,
        )

    def _note_step(self, step: ch.StepGiven) -> None:
        if not self._times.placed:
            self._times.placed = time.monotonic()
        if step not in self._times.steps:
            self._times.steps.append(step)
        self._tried = step.target.instance_id
        self._tools.router.placed(self._placed[step.attempt_id], step.target.instance_id, step.cached_tokens)
        self._tools.telemetry.open.set(self._tools.router.open_count)

    # Upstream.

    async def _prefill(self, step: ch.StepGiven) -> ch.Event:
        times = self._times
        times.prefill_sent = times.prefill_sent or time.monotonic()
        try:
            await (self._offload.prefill(step) if step.kv_target is not None else self._slice(step))
        except TransferError as error:
            return ch.PrefillEnded(str(error), error.instance_failed)
        except UpstreamError as error:
            return ch.PrefillEnded(error.text, not 400 <= error.status < 500)
        finally:
            times.prefill_done = time.monotonic()
        return ch.PrefillEnded()

    async def _slice(self, step: ch.StepGiven) -> None:
        """The prompt's first tokens into the instance's own cache. Raises TransferError, UpstreamError."""
        job = self._job
        if job.ids is None:
            raise TransferError("tokens unknown")
        path, body = slice_request(job.call, job.ids[: step.prefill_tokens].tolist())
        answer = await self._tools.upstream.whole(step.target, path, body, job.up_headers)
        before, self._sliced = self._sliced, (step.target.instance_id, step.prefill_tokens)
        if before is not None and before[0] == step.target.instance_id and fell_short(answer, before[1]):
            raise TransferError("an earlier slice is not cached any more")

    async def _pull(self, step: ch.StepGiven) -> ch.Event:
        try:
            await self._offload.pull(step)
        except TransferError as error:
            return ch.PullEnded(str(error))
        return ch.PullEnded()

    async def _serve(self, step: ch.StepGiven) -> ch.Event:
        call, upstream = self._job.call, self._tools.upstream
        self._times.sent = time.monotonic()
        try:
            payload = self._offload.payload(step, self._job.payload_at(step.target.instance_id))
            answer = await upstream.post(step.target, call.kind.value, payload, self._job.up_headers)
            self._upstream = answer
            if answer.status >= 500 or 300 <= answer.status < 400:
                return ch.UpstreamFailed(f"status {answer.status}", answer.status)
            if answer.status < 400 and answer.media_type == "text/event-stream":
                if not await answer.begun():
                    return ch.UpstreamFailed("an empty answer", answer.status)
                if step.kv_source is not None and begins_with_error(answer.arrived):
                    return ch.UpstreamFailed("the answer began with an error", answer.status)
            else:
                body = await upstream.read_all(answer)
                headers = down_headers(answer.headers) | self._decision_headers()
                if answer.status >= 400:
                    body = engine_error(call.kind.form, answer.status, body)
                    headers["Content-Type"] = "application/json"
                self._reply = Response(answer.status, body, headers)
                if answer.status >= 400:
                    return ch.AnswerRejected(answer.status)
                self._usage = usage_of(body, call.kind)
        except TransferError as error:
            return ch.UpstreamFailed(str(error), 500)
        except UpstreamError as error:
            return ch.UpstreamFailed(error.text, error.status)
        self._times.first = time.monotonic()
        return ch.AnswerBegan()

    async def _pass_on(self) -> ch.Event:
        """Everything after the first byte."""
        if self._reply is not None:
            return ch.AnswerEnded()
        assert self._upstream is not None
        upstream, events, tail, out = self._upstream, self._events, self._tail, self._out
        out.begin(upstream.status, down_headers(upstream.headers) | self._decision_headers(), upstream)
        self._tools.router.watch(self._machine.attempt_id, lambda: tail.events)

        def relay(piece: bytes) -> None:
            if whole := events.feed(piece):
                out.write(whole)

        try:
            await upstream.pipe(relay)
            if rest := events.rest():
                out.write(rest)
        except UpstreamError as error:
            return ch.UpstreamFailed(error.text, error.status)
        except asyncio.CancelledError:
            # Clients hang up at [DONE], often before the engine's own end is read here: they had the whole answer.
            ending = self._ended()
            if ending.complete:
                self._handle(ch.AnswerEnded(ending.error))
            raise
        ending = self._ended()
        if not ending.complete:
            return ch.UpstreamFailed("the stream ended early", upstream.status)
        return ch.AnswerEnded(ending.error)

    def _ended(self) -> Ending:
        ending = self._tail.ending()
        self._usage = ending.usage
        return ending

    # Reports.

    def _report(self, effect: ch.Finished) -> None:
        job, times, usage = self._job, self._times, self._usage
        status = effect.status or (self._upstream.status if self._upstream is not None else 0)
        if effect.outcome is ch.Outcome.OK:
            status = 200
        finished = placement_pb2.Finished(
            request_id=effect.attempt_id,
            outcome=placement_pb2.Outcome.ValueType(effect.outcome.value),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            error=effect.error,
            http_status=status,
        )
        now = time.monotonic()
        prompt = job.placement.input_tokens if usage.prompt is None else usage.prompt
        job.grant.charge(prompt + (self._tail.events if usage.output is None else usage.output), now)
        finished.timings.placed_ms = _ms(times.placed, job.received)
        finished.timings.sent_ms = _ms(times.sent, job.received)
        finished.timings.first_token_ms = _ms(times.first, job.received)
        finished.timings.done_ms = _ms(now, job.received)
        self._tools.router.finished(finished)
        telemetry = self._tools.telemetry
        telemetry.outcomes.labels(effect.outcome.name.lower()).inc()
        telemetry.open.set(self._tools.router.open_count)
        if effect.outcome is ch.Outcome.OK:
            telemetry.total.observe(now - job.received)
            if job.ids is not None and usage.prompt is not None:
                self._tools.pools.counted(job.state, job.call.kind, len(job.ids), usage.prompt)
        if effect.outcome is ch.Outcome.FAILED:
            log.warning(
                "attempt failed", request_id=effect.attempt_id, instance=self._tried, error=effect.error, status=status
            )
        if self._tools.breakdown.on:
            self._tools.breakdown.write(self._broken_down(effect, status, now))
        # What comes next is another attempt, with times and usage of its own.
        self._times, self._usage = _Attempt(), Usage()

    def _broken_down(self, effect: ch.Finished, status: int, now: float) -> Breakdown:
        job, times, usage, unix = self._job, self._times, self._usage, self._tools.breakdown.unix
        last = times.steps[-1] if times.steps else None
        return Breakdown(
            request_id=effect.attempt_id,
            decision_id=next((step.decision_id for step in times.steps if step.decision_id), ""),
            model=job.state.pool.model,
            stream=job.call.stream,
            outcome=effect.outcome.name,
            status=status,
            instances=[step.target.instance_id for step in times.steps],
            fallback=times.fallback,
            error=effect.error,
            degraded=last is not None and last.degraded,
            input_tokens=job.placement.input_tokens,
            predicted_cached_tokens=last.cached_tokens if last is not None else 0,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            t_recv=unix(job.received),
            t_placed=unix(times.placed),
            t_prefill_sent=unix(times.prefill_sent),
            t_prefill_done=unix(times.prefill_done),
            t_sent=unix(times.sent),
            t_first_token=unix(times.first),
            t_done=unix(now),
        )

    def _decision_headers(self) -> dict[str, str]:
        headers = {"X-Request-ID": self._job.up_headers["X-Request-ID"]}
        step = self._machine.step
        if step is not None and self._tools.tell_placement:
            headers["X-Pointsman-Instance"] = step.target.instance_id
            if step.decision_id:
                headers["X-Pointsman-Decision"] = step.decision_id
            if step.degraded:
                headers["X-Pointsman-Degraded"] = "1"
        return headers


def target_of(instance: placement_pb2.InstanceRef) -> ch.Target:
    """Where to send for `instance`."""
    rank = instance.data_parallel_rank if instance.HasField("data_parallel_rank") else None
    kv = instance.kv_transfer
    return ch.Target(
        instance.instance_id,
        instance.url,
        rank,
        instance.incarnation,
        _PROTOCOLS.get(kv.protocol, ""),
        kv.bootstrap_url,
    )


def _ms(at: float, since: float) -> float:
    return max(0.0, (at - since) * 1e3) if at else 0.0


def _as_error(failure: ch.Fail) -> DialectError:
    status, type_, code = _FAILURES.get(failure.code, (503, "server_error", "unavailable"))
    wait = failure.retry_after_s if failure.retry_after_s is not None else _RETRY_S if status in (429, 503) else None
    return DialectError(status, failure.message, type_=type_, code=code, retry_after_s=wait)
