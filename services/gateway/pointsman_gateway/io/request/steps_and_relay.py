"""Executes the steps of one request on instances: prefills, fetches and pulls of KV, and the answer itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_gateway.core.api import ApiRequestError, Endpoint, begins_with_error, redact_error, was_aborted
from pointsman_gateway.core.forwarded_headers import client_headers, error_headers
from pointsman_gateway.core.http_message import JSON_FIELDS, Request, Response
from pointsman_gateway.core.memory_budget import Holding
from pointsman_gateway.core.request import request_events as ev
from pointsman_gateway.core.request import transfer_params as kv
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.continuation import ids_of, with_answer_record
from pointsman_gateway.core.request.local_placement import fallbacks, unfit
from pointsman_gateway.core.request.own_prefills import OwnPrefills
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.text_continuation import TextContinuation, continued_text
from pointsman_gateway.core.stored_responses import says_not_stored
from pointsman_gateway.core.streaming import answer_form
from pointsman_gateway.core.streaming.id_comments import without_comments
from pointsman_gateway.core.streaming.parse_stream_end import StreamEnd, Usage, usage_of
from pointsman_gateway.core.streaming.rest_of_text import RestOfText
from pointsman_gateway.core.streaming.sse import RECORD_STEP, RECORD_TOKEN_BYTES, SseFilter
from pointsman_gateway.core.tokens.token_cache import TokenIds
from pointsman_gateway.io.engines.engine_client import (
    MAX_ERROR_BYTES,
    AbortedByEngine,
    AnswerTooLong,
    NoRoomForAnswer,
    UpstreamError,
    relay_stream,
)
from pointsman_gateway.io.engines.engine_connection import UpstreamResponse
from pointsman_gateway.io.engines.remote_prefill import RemotePrefill
from pointsman_gateway.io.request.ext_proc_request import InnocentFailure, OtherInstanceAnswered, Proxy
from pointsman_gateway.io.request.shared_context import SharedContext

# Maximum number of chunks that are kept of an answer whose ids the engine does not send, and the size of a chunk as it is kept,
# bytes.
TEXT_TOKENS, TEXT_TOKEN_BYTES = 2_048, 130
NOT_FOUND = 404
# Number of events after which an answer that breaks off has not been broken by what broke it before.
PROGRESS_TOKENS = 16
# Maximum time for which a begun text waits to be tokenised, s. Then its stream ends with an error: clients that wait do better to
# ask again.
TEXT_WAIT_S = 30.0
NO_ANSWER = 500  # what an answer with status 200 counts as that has none
NOT_IMPLEMENTED = 501  # not retried: no other instance of the model implements it either


class EngineSteps:
    """Sends the steps of one request to instances and returns an event for the end of each.

    The methods for the answer also record its times and usage in the attempt.
    """

    def __init__(
        self, shared: SharedContext, context: RequestContext, request: Request, proxy: Proxy | None = None
    ) -> None:
        """`proxy`: sends the client's request in place of the gateway."""
        self._shared = shared
        self._proxy = proxy
        self._context = context
        self._writer = request.writer
        self._held = request.held_answer
        self._remote_prefill = RemotePrefill(shared.upstream, shared.engine_ids, shared.releases, context)
        self._last_prefix: tuple[str, int] | None = None  # instance id and end of the last slice or fetch, in tokens
        self._own_prefills = OwnPrefills()
        self._upstream: UpstreamResponse | None = None
        # A proxy sends a request once, so its answer cannot go on elsewhere.
        self._tells = proxy is None and context.call.continuable and bool(shared.kept_bodies.limit)
        context.placement.movable = self._tells
        context.placement.streamed = context.call.stream
        self._sse = SseFilter(context.call.endpoint, hide_usage=context.call.hide_usage, tells=self._tells)
        self._kept = Holding(shared.kept_bodies)
        self._kept.holder = request.holder
        self._moved = False  # operators have moved this attempt
        self._text: TextContinuation | None = None  # of an answer that goes on by its text
        self.whole_response: Response | None = None  # a rejection or an answer that is not streamed

    @property
    def status(self) -> int:
        """HTTP status of the open answer; 0 if there is none."""
        return self._upstream.status if self._upstream is not None else 0

    @property
    def streamed_tokens(self) -> int:
        """Number of tokens sent to the client, one for each event."""
        return self._sse.count

    @property
    def answer_record(self) -> bytes:
        """What the client has of an answer, by the token ids that its engines sent (continuation.py)."""
        return bytes(self._sse.record or b"")

    @property
    def answer_ids(self) -> TokenIds:
        """The token ids of the answer so far, as the engine that goes on with it gets them."""
        return ids_of(self.answer_record) if self._text is None else self._text.ids

    def keep_prompt(self) -> None:
        """Release what only sending needs, but for the body of an answer that may be continued elsewhere, while there is memory
        for it. Call it when an answer begins."""
        if not self._context.kept_payload:
            keep = self._tells and self._upstream is not None and self._keeps_answer(self._upstream)
            self._context.drop_prompt(keep=keep)

    def _keeps_answer(self, upstream: UpstreamResponse) -> bool:
        """Begin to collect what the client gets of an answer; return False if it cannot be continued, or there is no memory for
        it. Mutates."""
        call, sse = self._context.call, self._sse
        size = len(call.payload)
        if answer_form.without_preamble(upstream.arrived).startswith(b":"):
            # Few answers are as long as they may be. The record of a longer one takes more memory as it grows.
            limit = min(RECORD_TOKEN_BYTES * call.max_output_tokens or RECORD_STEP, RECORD_STEP)
            if keep := self._kept.take(size + limit):
                sse.record, sse.record_limit, sse.more = bytearray(), limit, self._kept.take
            return keep
        # An engine without the connector package.
        limit = TEXT_TOKEN_BYTES * (min(call.max_output_tokens or TEXT_TOKENS, TEXT_TOKENS) + 8)
        keep = call.continuable_by_text and bool(self._context.exact_tokens) and self._kept.take(size + limit)
        if keep:
            sse.texts, sse.texts_limit = bytearray(), limit
        return keep

    def release_prompt(self) -> None:
        """Release the kept body: nothing more is sent."""
        self._kept.let_go()
        self._context.kept_payload, self._text = b"", None

    def step_failed(self) -> None:
        """Handle the failure of a step: state of a transfer is discarded, so that the next transfer starts anew."""
        self._remote_prefill.failed()

    def attempt_ended(self) -> None:
        """Handle the end of an attempt: no further step of it follows."""
        self._remote_prefill.transfer_ended()
        self._last_prefix = None
        self._moved = False

    def move(self, step: ev.StepAssigned) -> None:
        """End the open answer of a SERVE, such that another instance is asked, if that one can go on. Else no effect."""
        if self._upstream is None or self._proxy is not None:
            return
        # An answer whose first event has arrived, and is not read yet, has neither begun nor can it be asked anew.
        fresh = step.kv_source is None and answer_form.is_preamble(self._upstream.arrived)
        if not (self._sse.can_continue if self._writer.begun else fresh):
            return
        self._moved = True
        self._upstream.give_up("moved to another instance")

    def waits_for_head(self, step: ev.StepAssigned) -> bool:
        """Return whether the open request of a SERVE has no answer yet, not even a status, and can be asked anew elsewhere."""
        return self._upstream is None and self._proxy is None and step.kv_source is None and not self._writer.begun

    def waits_for_bytes(self) -> bool:
        """Return whether the gateway waits for the next bytes of an open answer, and not for its client to read. Of a proxy's
        answer this is unknown."""
        return self._proxy is None and self._upstream is not None and not self._upstream.paused

    def heard_at(self) -> float:
        """Return when the last byte of the open answer came, monotonic s; 0 without one."""
        return self._upstream.heard_at if self._upstream is not None else 0.0

    def instance_lost(self, step: ev.StepAssigned) -> None:
        """Handle that the router has lost the agent of a step's instance: what is silent there fails if nobody is there any
        more."""
        self._shared.upstream.lost(step.target)
        if self._proxy is not None:
            self._proxy.instance_lost()

    def close_upstream(self) -> None:
        """Close the open answer."""
        if self._upstream is not None:
            # Closes the connection: an engine stops its work only when the connection ends.
            self._upstream.close()
            self._upstream = None

    async def prefill(self, step: ev.StepAssigned) -> ev.Event:
        """Execute a PREFILL step: its instance computes KV for itself or for another one, or fetches it."""
        try:
            if step.kv_source is not None:
                await self._fetch(step, step.kv_source)
            elif step.kv_target is not None:
                await self._prefill_for(step.kv_target, step)
            else:
                await self._slice(step)
        except kv.TransferError as error:
            return ev.PrefillEnded(str(error))
        except UpstreamError as error:
            return ev.PrefillEnded(error.text, error.instance_failed, error.refused, error.broke, error.instance_id)
        return ev.PrefillEnded()

    async def _prefill_for(self, other: ev.Target, step: ev.StepAssigned) -> None:
        """Prefill the prompt at the step's instance for another one. Raises TransferError and UpstreamError."""
        answer = await self._remote_prefill.prefill(step)
        self._own_prefills.ended(other.instance_id, step.prefill_tokens, 0, _cached(answer))

    async def _slice(self, step: ev.StepAssigned) -> None:
        """Prefill the prompt's first tokens into the instance's own cache. Raises TransferError and UpstreamError."""
        context = self._context
        path, body = kv.prefix_request(context.call, self._beginning(step.prefill_tokens))
        instance_id, own = step.target.instance_id, self._own_prefills
        computed = own.end(instance_id)
        try:
            answer = await self._shared.upstream.post_for_body(step.target, path, body, context.headers_of(step))
        except UpstreamError as error:
            if error.broke:  # the engine may have computed it
                own.begun(instance_id, step.prefill_tokens, step.cached_tokens)
            raise
        if not answer_form.has_json_form(answer):
            raise UpstreamError("an answer that is no JSON", 200)
        own.ended(instance_id, step.prefill_tokens, computed, _cached(answer))
        before, self._last_prefix = self._last_prefix, (instance_id, step.prefill_tokens)
        if before is not None and before[0] == instance_id and kv.earlier_slices_evicted(answer, before[1]):
            raise kv.TransferError("an earlier slice is not cached any more")

    async def _fetch(self, step: ev.StepAssigned, source: ev.Target) -> None:
        """Fetch the prompt's first tokens from `source`, which has them cached, into the cache of the step's instance. Raises
        TransferError and UpstreamError."""
        wanted, instance_id, own = step.prefill_tokens, step.target.instance_id, self._own_prefills
        before = own.end(instance_id)
        outcome = "given_up"
        try:
            # An engine computes at least one token of a prompt. With one more than it has cached, it computes no block anew.
            prefix = self._beginning(wanted + 1)
            # The instance computes the tokens if they do not arrive, also if its answer is not waited for.
            own.begun(instance_id, wanted, step.cached_tokens)
            # The key of the last tokens stands for all of the prefix.
            last = wanted // KEY_TOKENS
            name = (source.instance_id, instance_id, *self._context.placement.keys[last - 1 : last])
            async with self._shared.first_fetches.turn(name):
                answers = await self._remote_prefill.fetch(step, prefix)
            sent, received = (min(_cached(answer), wanted) for answer in answers)
            # What the source has computed for this request is no cache hit anywhere.
            own.ended(source.instance_id, wanted, own.end(source.instance_id), sent)
            own.ended(instance_id, wanted, before, min(sent, received))
            # Engines that do not report cached tokens look like engines without any.
            if received < wanted and (sent or received):
                raise kv.TransferError("the prefix did not arrive")
            outcome = "computed" if sent < received else "cached"
            self._last_prefix = instance_id, wanted
        except (kv.TransferError, UpstreamError):
            outcome = "failed"
            raise
        finally:
            self._shared.telemetry.kv_fetches.labels(outcome).inc()

    def _beginning(self, tokens: int) -> list[int]:
        """Return the ids of the prompt's first `tokens` tokens. Raises TransferError if they are not known."""
        ids = self._context.ids
        if ids is None or tokens > len(ids):
            raise kv.TransferError("tokens unknown")
        return ids[:tokens].tolist()

    async def pull(self, step: ev.StepAssigned, *, early: bool) -> ev.Event:
        """Pull KV from the step's source into its instance. `early`: while the source still computes."""
        try:
            await self._remote_prefill.pull(step, early=early)
        except (kv.TransferError, UpstreamError) as error:
            return ev.PullEnded(str(error))
        return ev.PullEnded()

    async def serve(self, step: ev.StepAssigned, attempt: Attempt, headers: dict[str, str], *, early: bool) -> ev.Event:
        """Send the client's request and wait for the first event of a stream or for a whole answer. `headers`: fields about the
        placement for the answer. `early`: the KV's source still computes."""
        call, upstream, stored = self._context.call, self._shared.upstream, self._context.continues
        attempt.sent_at = time.monotonic()
        self.whole_response = None
        if stored is not None and step.target.instance_id != stored.instance.instance_id:
            # It is new: the gateway did not exclude it. It has not failed.
            return ev.UpstreamFailed("the instance does not store the response", innocent=True)
        if self._text is not None and (step.target.url, step.target.incarnation) not in self._context.state.verified:
            # Its prompt may have other tokens than the gateway's. It has not failed.
            return ev.UpstreamFailed("the instance's tokens are not verified", innocent=True)
        if (self._text is not None or self.answer_record) and not self._context.may_go_on(step.target):
            return ev.UpstreamFailed("the instance differs from the one that began the answer", innocent=True)
        try:
            payload = self._context.payload_at(step.target) if self._text is None else self._text.payload
            if self._context.ends_session and self._shared.mark_session_ends and step.kv_source is None:
                payload = kv.with_session_end(call.endpoint, payload)
            payload = await self._remote_prefill.payload(step, payload, early=early)
            record = self.answer_record
            if self._tells and self._text is None:
                payload = with_answer_record(payload, record)
            with self._remote_prefill.fetching(step):
                answer = self._upstream = await self._post(step, payload)
                if 300 <= answer.status < 400:
                    raise UpstreamError(f"status {answer.status}", answer.status)
                if answer.status >= 500 and answer.status != NOT_IMPLEMENTED:
                    await self._keep_error(answer)
                    raise UpstreamError(f"status {answer.status}", answer.status, refused=True)
                adapter = self._context.lora and not call.previous_response_id and not self._proxy
                if answer.status == NOT_FOUND and adapter:
                    # It has unloaded the adapter, which its agent has not seen yet; others may have it.
                    await self._keep_error(answer)
                    return ev.UpstreamFailed("the instance does not have the adapter", answer.status, innocent=True)
                streamed = answer.status < 400 and answer.headers.media_type == "text/event-stream"
                if streamed and not await answer.begun(answer_form.is_preamble):
                    raise UpstreamError("an empty answer", answer.status, broke=True)
                if streamed and not answer_form.begins_as_events(answer.arrived):
                    raise UpstreamError("an answer without events", answer.status)
                arrived = answer_form.without_preamble(answer.arrived) if streamed else b""
                # After a failed KV transfer an engine answers 200, and the stream starts with an error.
                if step.kv_source is not None and begins_with_error(without_comments(arrived)):
                    raise UpstreamError("the answer began with an error", 500)
                if was_aborted(call.endpoint.error_format, arrived):
                    raise AbortedByEngine
                if record and not arrived.startswith(b":"):
                    # Its events would repeat what the client has. It has not failed.
                    answer.close()
                    return ev.UpstreamFailed("the instance cannot continue an answer", answer.status, innocent=True)
            if not streamed:
                body = await upstream.read_all(answer, held=self._held)
                in_bytes = answer_form.is_in_bytes(call.endpoint, answer.headers.media_type)
                if answer.status == 200 and not in_bytes and not answer_form.has_json_form(body):
                    raise UpstreamError("an answer that is no JSON", answer.status)
                if answer.status == 200 and not in_bytes and not answer_form.has_answer(call.endpoint, body):
                    # As a 500 with this body, which may be the fault of the request, too.
                    self._set_error(NO_ANSWER, body, answer)
                    raise UpstreamError("status 200 without an answer", NO_ANSWER, refused=True)
                if answer.status == NOT_FOUND and stored is not None and says_not_stored(body):
                    # The engine is right. Errors in a row would put it out: it is the one that is asked for all that it lost.
                    self.close_upstream()
                    return self._reject(stored.missing(step.target.incarnation))
                if answer.status >= 400:
                    self._set_error(answer.status, body, answer, headers)
                    return ev.ResponseRejected(answer.status)
                counted = answer.headers.get(answer_form.METADATA).encode("latin-1") if in_bytes else body
                usage = usage_of(counted, call.endpoint)
                # Of Messages that are aborted vLLM tells no reason.
                if usage.finish_reason == ("" if call.endpoint is Endpoint.MESSAGES else "abort"):
                    raise AbortedByEngine
                self._record_usage(attempt, usage)
                body = self._own_prefills.corrected(step.target.instance_id, body)
                self.whole_response = Response(answer.status, body, client_headers(answer.headers) | headers)
        except kv.TransferError as error:
            return ev.UpstreamFailed(str(error), 500)
        except OtherInstanceAnswered as other:
            return ev.OtherAnswered(other.target)
        except AnswerTooLong:
            # Not retried: the answer of another instance would be as long.
            too_long = "The answer is too long: request it as a stream."
            return self._reject(ApiRequestError(502, too_long, code="too_long"))
        except NoRoomForAnswer as no_room:
            return self._reject(no_room)
        except UpstreamError as error:
            return ev.UpstreamFailed(
                error.text,
                error.status,
                error.refused,
                innocent=isinstance(error, InnocentFailure),
                moved=self._moved,
                broke=error.broke and not self._moved,
                unreached=not error.sent,
            )
        attempt.first_byte_at = time.monotonic()
        self._context.answer_begun(step.target)
        return ev.ResponseStarted()

    async def _post(self, step: ev.StepAssigned, payload: bytes) -> UpstreamResponse:
        """Send the client's request to the step's instance. Raises UpstreamError and OtherInstanceAnswered."""
        path, headers = self._context.call.endpoint.value, self._context.headers_of(step)
        if self._proxy is None:
            return await self._shared.upstream.send(step.target, "POST", path, payload, headers)
        context, count = self._context, self._shared.proxy_fallbacks
        pool = context.state.pool
        # Not every instance has an adapter, or stores this response.
        alike = context.call.endpoint is not Endpoint.RESPONSES and context.call.model not in pool.lora_names
        others: list[ev.Target] = []
        if count and alike:
            load = self._shared.router.inflight()
            excluded = {*context.placement.exclude, *unfit(context.placement, pool.instances)}
            others = fallbacks(step, pool.instances, excluded, load, count)
        fields = self._shared.upstream.fields(step.target, headers)
        targets = [step.target, *others]
        return await self._proxy.post(targets, path, payload, fields, lambda: list(map(target_of, pool.instances)))

    def _reject(self, error: ApiRequestError) -> ev.ResponseRejected:
        """Set `error` as the answer. The instance did not fail."""
        body = error.body(self._context.call.endpoint.error_format)
        self.whole_response = Response(error.status, body, JSON_FIELDS | error.headers())
        return ev.ResponseRejected(error.status, own=True)

    async def _keep_error(self, answer: UpstreamResponse) -> None:
        """Keep an error answer for the client, in case no other instance succeeds."""
        try:
            body = await self._shared.upstream.read_all(answer, MAX_ERROR_BYTES, self._held)
        except (UpstreamError, NoRoomForAnswer):
            body = b""
        self._set_error(answer.status, body, answer)

    def _set_error(
        self, status: int, body: bytes, answer: UpstreamResponse, headers: Mapping[str, str] | None = None
    ) -> None:
        redacted = redact_error(self._context.call.endpoint.error_format, status, body)
        self.whole_response = Response(status, redacted, {**error_headers(answer.headers), **(headers or {})})

    async def relay_response(self, attempt: Attempt, headers: dict[str, str]) -> ev.Event:
        """Relay the answer from its first byte to its end. If the client disconnects this is cancelled; see stream_end()."""
        if self.whole_response is not None:
            return ev.ResponseEnded()
        assert self._upstream is not None
        upstream = self._upstream
        events = self._sse if self._text is None else RestOfText(self._sse, self._text.prompt_tokens)
        if self._writer.begun:
            self._sse.begin_again()
            self._writer.go_on(upstream)
        else:
            self._writer.begin(upstream.status, client_headers(upstream.headers) | headers, upstream)
        before = self._sse.count
        corrected = partial(self._own_prefills.corrected_events, attempt.instance_id)
        self._sse.correct_usage = corrected if self._own_prefills else None
        failed = ev.UpstreamFailed("the stream ended early", upstream.status, broke=True)
        try:
            await relay_stream(upstream, events, self._writer)
        except UpstreamError as error:
            moved = self._moved and self._sse.can_continue
            failed = ev.UpstreamFailed(error.text, error.status, moved=moved, broke=error.broke and not self._moved)
        stream_end = self.stream_end(attempt)
        if stream_end.complete:
            # Whatever has happened to the connection after the answer's last event: the client has all of it.
            return ev.ResponseEnded(stream_end.error)
        progressed = self._sse.count - before >= PROGRESS_TOKENS
        return replace(failed, continuable=failed.moved or await self._may_continue(), progressed=progressed)

    async def _may_continue(self) -> bool:
        """Return whether another instance may go on with the answer; prepare it if only its text is known. Mutates."""
        known = self._sse.can_continue
        if not (known or self._sse.has_text) or self._shared.continuations.take("", time.monotonic()):
            return False
        return known or await self._continues_text()

    async def _continues_text(self) -> bool:
        context = self._context
        tokenizer = context.state.tokenizer_for(context.call.endpoint)
        if tokenizer is None:
            return False
        texts = bytes(self._sse.texts or b"")
        # One after the other: further threads would take time from the event loop. The turn lasts as long as the thread's work,
        # also if the client leaves.
        try:
            async with asyncio.timeout(TEXT_WAIT_S):
                await self._shared.text_turns.take(context.client)
        except TimeoutError:
            return False
        continuing = asyncio.get_running_loop().run_in_executor(
            None, continued_text, context.call.endpoint, context.kept_payload, texts, tokenizer
        )
        continuing.add_done_callback(lambda _: self._shared.text_turns.give_back())
        self._text = await asyncio.shield(continuing)
        return self._text is not None

    def stream_end(self, attempt: Attempt) -> StreamEnd:
        """Return the end of the stream as far as it was relayed, and record its usage in the attempt."""
        stream_end = self._sse.stream_end()
        self._record_usage(attempt, stream_end.usage)
        return stream_end

    def _record_usage(self, attempt: Attempt, usage: Usage) -> None:
        attempt.usage = usage
        attempt.own_cached = self._own_prefills.among(attempt.instance_id, usage.cached)

    def write_error_event(self) -> None:
        """End the client's stream with an error event."""
        self._writer.write(self._sse.failure_event())


def _cached(answer: bytes) -> int:
    """Return the cached tokens of the answer to a prefill. vLLM leaves their number out if it is 0."""
    return usage_of(answer, Endpoint.COMPLETION).cached or 0
