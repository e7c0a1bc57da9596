"""The steps of one request at their instances: slices and prefills, pulls of KV, and the answer on its way to the client."""

from __future__ import annotations

import time

from services.gateway.attempt import Attempt
from services.gateway.dialects import begins_with_error, engine_error, given_up
from services.gateway.dialects.endings import Ending, usage_of
from services.gateway.events import EventStream
from services.gateway.http.exchange import Answer
from services.gateway.http.message import Request, Response
from services.gateway.job import Job, Tools
from services.gateway.kv_transfer import TransferError, fell_short, slice_request
from services.gateway.moves import (
    AnswerBegan,
    AnswerEnded,
    AnswerRejected,
    Event,
    PrefillEnded,
    PullEnded,
    StepGiven,
    UpstreamFailed,
)
from services.gateway.offload import Offload
from services.gateway.passage import pass_on
from services.gateway.placing import target_of
from services.gateway.upstream import GIVEN_UP, UpstreamError, down_headers


class Errands:
    """What is sent to instances for one request, one errand at a time, and what came back. Each errand ends in an event; those
    of the answer note its moments and usage in the attempt that it belongs to."""

    def __init__(self, tools: Tools, job: Job, request: Request) -> None:
        self._tools = tools
        self._job = job
        self._out = request.outgoing
        self._offload = Offload(
            tools.upstream,
            tools.bootstraps,
            tools.releases,
            job.call,
            job.headers_of,
            lambda: [target_of(one) for one in job.state.pool.instances],
        )
        self._sliced: tuple[str, int] | None = None  # the last slice: where, and up to which token
        self._upstream: Answer | None = None
        self._events = EventStream(job.call.kind, withhold_usage=job.call.usage_is_ours)
        self.reply: Response | None = None  # a whole answer: a rejection, or one that is not streamed

    @property
    def status(self) -> int:
        """HTTP status of the answer that is open; 0 without one."""
        return self._upstream.status if self._upstream is not None else 0

    @property
    def streamed_tokens(self) -> int:
        """How many tokens have gone out, an event for each."""
        return self._events.count

    def step_failed(self) -> None:
        """A step of the plan failed; if it was a transfer, the next one begins from nothing."""
        self._offload.failed()

    def attempt_over(self) -> None:
        """No further step of this attempt follows."""
        self._offload.over()
        self._sliced = None

    def drop(self) -> None:
        """Close the answer that is open."""
        if self._upstream is not None:
            # close(), not release(): an engine notices that nobody waits only by the connection's end.
            self._upstream.close()
            self._upstream = None

    async def prefill(self, step: StepGiven) -> Event:
        """A PREFILL step, for its own instance or another one."""
        try:
            await (self._offload.prefill(step) if step.kv_target is not None else self._slice(step))
        except TransferError as error:
            return PrefillEnded(str(error), error.instance_failed)
        except UpstreamError as error:
            return PrefillEnded(error.text, not 400 <= error.status < 500)
        return PrefillEnded()

    async def _slice(self, step: StepGiven) -> None:
        """The prompt's first tokens into the instance's own cache. Raises TransferError, UpstreamError."""
        job = self._job
        if job.ids is None or step.prefill_tokens > len(job.ids):
            raise TransferError("tokens unknown")
        path, body = slice_request(job.call, job.ids[: step.prefill_tokens].tolist())
        answer = await self._tools.upstream.whole(step.target, path, body, job.headers_of(step))
        before, self._sliced = self._sliced, (step.target.instance_id, step.prefill_tokens)
        if before is not None and before[0] == step.target.instance_id and fell_short(answer, before[1]):
            raise TransferError("an earlier slice is not cached any more")

    async def pull(self, step: StepGiven, *, ahead: bool) -> Event:
        """The KV of the step's source into its instance."""
        try:
            await self._offload.pull(step, ahead=ahead)
        except TransferError as error:
            return PullEnded(str(error))
        return PullEnded()

    async def serve(self, step: StepGiven, attempt: Attempt, headers: dict[str, str], *, ahead: bool) -> Event:
        """The client's request, up to the first byte of a stream or a whole answer; `headers` tell of the placement."""
        call, upstream = self._job.call, self._tools.upstream
        attempt.sent = time.monotonic()
        self.reply = None
        try:
            payload = await self._offload.payload(step, self._job.payload_at(step.target.instance_id), ahead=ahead)
            with self._offload.fetching(step):
                headers_up = self._job.headers_of(step)
                answer = self._upstream = await upstream.post(step.target, call.kind.value, payload, headers_up)
                if answer.status >= 500 or 300 <= answer.status < 400:
                    raise UpstreamError(f"status {answer.status}", answer.status)
                streamed = answer.status < 400 and answer.media_type == "text/event-stream"
                if streamed and not await answer.begun():
                    raise UpstreamError("an empty answer", answer.status)
                # What a failed transfer looks like behind a status of 200.
                if streamed and step.kv_source is not None and begins_with_error(answer.arrived):
                    raise UpstreamError("the answer began with an error", 500)
                if streamed and given_up(answer.arrived):
                    raise UpstreamError(GIVEN_UP, 503)
            if not streamed:
                body = await upstream.read_all(answer)
                if given_up(body):
                    raise UpstreamError(GIVEN_UP, 503)
                headers = down_headers(answer.headers) | headers
                if answer.status >= 400:
                    body = engine_error(call.kind.form, answer.status, body)
                    headers["Content-Type"] = "application/json"
                self.reply = Response(answer.status, body, headers)
                if answer.status >= 400:
                    return AnswerRejected(answer.status)
                attempt.usage = usage_of(body, call.kind)
        except TransferError as error:
            return UpstreamFailed(str(error), 500)
        except UpstreamError as error:
            return UpstreamFailed(error.text, error.status)
        attempt.first = time.monotonic()
        return AnswerBegan()

    async def pass_on(self, attempt: Attempt, headers: dict[str, str]) -> Event:
        """Everything after the first byte. A client that leaves cancels it; see ended()."""
        if self.reply is not None:
            return AnswerEnded()
        assert self._upstream is not None
        upstream = self._upstream
        self._out.begin(upstream.status, down_headers(upstream.headers) | headers, upstream)
        try:
            await pass_on(upstream, self._events, self._out)
        except UpstreamError as error:
            return UpstreamFailed(error.text, error.status)
        ending = self.ended(attempt)
        if not ending.complete:
            return UpstreamFailed("the stream ended early", upstream.status)
        return AnswerEnded(ending.error)

    def ended(self, attempt: Attempt) -> Ending:
        """How the stream ended, as far as it has come; its usage is noted."""
        ending = self._events.ending()
        attempt.usage = ending.usage
        return ending

    def tell_failure(self) -> None:
        """End the client's stream with an error event."""
        self._out.write(self._events.failure())
