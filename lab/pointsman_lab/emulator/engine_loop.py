"""Runs an engine model in real time: one task steps the model, waits for each step's duration and passes tokens to streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from pointsman_lab.emulator.openai_api import ApiError
from pointsman_lab.emulator.vllm_metrics import EngineMetrics
from pointsman_lab.engine.interface import (
    EngineRequest,
    Finished,
    FirstToken,
    StepResult,
    TokenGenerated,
    WaitingForRemoteKv,
)
from pointsman_lab.engine.model import EngineModel

# Waits until the KV of this number of tokens has come from another instance. Raises ApiError if it does not.
FetchKv = Callable[[int], Awaitable[None]]

# Shortest sleep, s. A shorter one costs more than it waits. The error does not add up: each step's end is computed from the last.
SHORTEST_SLEEP_S = 0.0005
# Maximum lag of the loop behind the model's time, s. A greater lag is dropped, so that the loop does not run faster than the
# profile for long.
LATEST_S = 0.25
# Interval at which the writers run while the loop catches up, s. Their chunks then carry several tokens, as vLLM's do to a slow
# client.
YIELD_EVERY_S = 0.004


class Stream:
    """One request's tokens on their way to the client. Tokens that are not read in time are read together later; none is lost."""

    def __init__(self, request: EngineRequest, now: float, fetch: FetchKv | None) -> None:
        self.request = request
        self.fetch = fetch
        self.cached_tokens = 0
        self.reason = ""
        self.output_tokens = 0
        self.submitted_at = now
        self.scheduled_at = now
        self.first_at = now
        self.last_at = now
        self._error: ApiError | None = None
        self._tokens: list[int] = []
        self._news = asyncio.Event()

    async def read(self) -> list[int]:
        """Wait for tokens and return them. An empty list is the end; `reason` is set then. Raises ApiError if the request
        failed."""
        while not self._tokens and not self.reason:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return tokens

    def feed(self, token_id: int) -> None:
        """Add a token."""
        self._tokens.append(token_id)
        self.output_tokens += 1
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """Mark the request as failed: no more tokens will come."""
        self._error = error
        self._news.set()

    def end(self, reason: str) -> None:
        """Mark the end of the answer."""
        self.reason = reason
        self._news.set()


class EngineLoop:
    """Runs the model. `publish` is called at each step's end with that step's events."""

    def __init__(
        self, model: EngineModel, metrics: EngineMetrics, speedup: float, publish: Callable[[Sequence[object]], None]
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._speedup = speedup
        self._publish = publish
        self.slowness = 1.0
        """How many times as long as the model says a step takes."""
        self._streams: dict[str, Stream] = {}
        self._unscheduled: set[str] = set()
        self._wake = asyncio.Event()
        self._computes = asyncio.Event()
        self._computes.set()
        self._fetching: set[asyncio.Task[None]] = set()

    def open(self, request: EngineRequest, fetch: FetchKv | None = None) -> Stream:
        """Submit a request; `fetch` gets the KV of its remote tokens. Raises ValueError if the model rejects it. Every stream
        must be closed."""
        now = time.monotonic()
        self._model.submit(request, now * self._speedup)
        stream = self._streams[request.request_id] = Stream(request, now, fetch)
        self._unscheduled.add(request.request_id)
        self._wake.set()
        return stream

    def close(self, stream: Stream) -> None:
        """Remove a stream. One that has not ended is aborted, and its blocks are freed at once."""
        request_id = stream.request.request_id
        if self._streams.pop(request_id, None) is None:
            return
        self._unscheduled.discard(request_id)
        # The model may have finished the request in a step that has not ended. For the client it is still an abort.
        self._model.abort(request_id, time.monotonic() * self._speedup)
        self._metrics.finished["abort"] += 1

    @property
    def suspended(self) -> bool:
        """Whether no step is computed until `resume`."""
        return not self._computes.is_set()

    def suspend(self, *, abort: bool) -> None:
        """Compute no further step until `resume`. The open requests end with the reason "abort", or are kept."""
        self._computes.clear()
        if abort:
            for stream in list(self._streams.values()):
                self.close(stream)
                stream.end("abort")

    def resume(self) -> None:
        """Compute steps again."""
        self._computes.set()

    async def run(self) -> None:
        """Run steps until cancelled."""
        try:
            await self._run()
        finally:
            for task in self._fetching:
                task.cancel()

    async def _run(self) -> None:
        end = yielded = time.monotonic()
        while True:
            if not self._model.has_work:
                await self._idle()
                end = yielded = time.monotonic()
            if not self._computes.is_set():
                await self._computes.wait()
                end = yielded = time.monotonic()
                continue
            started = max(end, time.monotonic() - LATEST_S)
            # The model's time runs faster than the clock by the speed-up.
            result = self._model.step(started * self._speedup)
            for awaited in result.awaited:
                task = asyncio.create_task(self._fetch(self._streams[awaited.request_id], awaited))
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
            for request_id in self._unscheduled.intersection(result.scheduled):
                self._unscheduled.discard(request_id)
                self._streams[request_id].scheduled_at = started
            end = started + result.duration_s * self.slowness / self._speedup
            now = time.monotonic()
            if end - now > SHORTEST_SLEEP_S:
                await asyncio.sleep(end - now)
                yielded = time.monotonic()
            elif now - yielded > YIELD_EVERY_S:
                await asyncio.sleep(0)
                yielded = now
            self._model.finish_step()
            self._deliver(result, time.monotonic())

    async def _idle(self) -> None:
        """Wait until a request arrives or receives its KV, or a transfer of the host tier has ended."""
        self._wake.clear()
        ends_at = self._model.next_transfer_end
        seconds = None if ends_at is None else ends_at / self._speedup - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _fetch(self, stream: Stream, awaited: WaitingForRemoteKv) -> None:
        assert stream.fetch is not None, "remote tokens that nobody fetches"
        try:
            await stream.fetch(awaited.tokens)
        except ApiError as error:
            # As in vLLM with kv_load_failure_policy "fail".
            self._model.abort(awaited.request_id, time.monotonic() * self._speedup)
            stream.fail(error)
        self._model.receive(awaited.request_id, time.monotonic() * self._speedup)
        self._wake.set()

    def _deliver(self, result: StepResult, now: float) -> None:
        self._publish(result.events)
        observe = self._metrics.histograms
        gaps = observe["inter_token_latency_seconds"]
        for event in result.events:
            if isinstance(event, TokenGenerated):
                stream = self._streams.get(event.request_id)
                if stream is None:
                    continue
                if event.index:
                    gaps.observe(now - stream.last_at)
                stream.last_at = now
                stream.feed(event.token_id)
            elif isinstance(event, FirstToken):
                stream = self._streams.get(event.request_id)
                if stream is None:
                    continue
                loaded = event.remote_tokens + event.host_tokens + event.storage_tokens
                stream.cached_tokens = event.cached_tokens + loaded
                stream.first_at = now
                observe["time_to_first_token_seconds"].observe(now - stream.submitted_at)
                observe["request_queue_time_seconds"].observe(stream.scheduled_at - stream.submitted_at)
                observe["request_prefill_time_seconds"].observe(now - stream.scheduled_at)
            elif isinstance(event, Finished):
                stream = self._streams.pop(event.request_id, None)
                if stream is None:
                    continue
                observe["request_decode_time_seconds"].observe(now - stream.first_at)
                observe["e2e_request_latency_seconds"].observe(now - stream.submitted_at)
                self._metrics.finished[event.reason] += 1
                stream.end(event.reason)
