"""HTTP calls to instances (clients' requests, PREFILL steps, /tokenize), and the relay of streamed answers to clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman_gateway.core.api import ApiRequestError, ErrorFormat, was_aborted
from pointsman_gateway.core.http_message import JSON_FIELDS, ResponseWriter
from pointsman_gateway.core.json_object import json_object
from pointsman_gateway.core.memory_budget import Holding
from pointsman_gateway.core.request.request_events import Target
from pointsman_gateway.core.streaming.rest_of_text import RestOfText
from pointsman_gateway.core.streaming.sse import SseFilter
from pointsman_gateway.io.engines.connection_pool import ConnectionPool
from pointsman_gateway.io.engines.engine_connection import Passthrough, UpstreamResponse
from pointsman_gateway.io.engines.engine_connection import UpstreamError as UpstreamError
from pointsman_gateway.io.settings import GatewaySettings

# Timeout of a connection attempt to an instance, s.
CONNECT_S = 3.0
# Maximum size of an error answer or of an answer to the gateway itself, bytes.
MAX_ERROR_BYTES = 1 << 20
# Maximum size of an answer that is not streamed, bytes. The largest are batches of embeddings.
MAX_ANSWER_BYTES = 256 << 20


class AbortedByEngine(UpstreamError):
    """Raised if an instance ended an answer that the gateway did not cancel, as a vLLM does when it is stopped."""

    def __init__(self) -> None:
        super().__init__("the instance aborted the request", 503)


class AnswerTooLong(UpstreamError):
    """Raised if an answer that is not streamed is larger than the limit for one answer."""


class NoRoomForAnswer(ApiRequestError):
    """Raised if the memory for answers that are not streamed is used up; a later try may succeed."""

    def __init__(self) -> None:
        message = "The gateway has no memory left for another answer: request a stream, or try again."
        super().__init__(503, message, code="no_room")


class Upstream:
    """HTTP client of all instances. Call start() first and close() at the end."""

    def __init__(self, settings: GatewaySettings, pool: ConnectionPool | None = None) -> None:
        """`pool`: replaces the default ConnectionPool. Raises OSError and ValueError for an engine_ca that cannot be used."""
        self._pool = pool or ConnectionPool(CONNECT_S, settings.idle_timeout_s, settings.engine_ca)
        key = settings.engine_api_key.get_secret_value()
        self._own = {"Authorization": f"Bearer {key}"} if key else {}

    async def start(self) -> None:
        """Start the connection pool."""
        self._pool.start()

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    async def send(
        self, target: Target, method: str, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> UpstreamResponse:
        """Send a request; return the answer after its head. The caller must read the answer to its end or close it. Raises
        UpstreamError."""
        return await self._pool.send(method, target.url, path, self.fields(target, headers), payload)

    def fields(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the header fields with which a request is sent to an instance: `headers`, and what the instance needs."""
        sent = {**headers, **self._own}
        if target.rank is not None:
            sent["X-data-parallel-rank"] = str(target.rank)
        return sent

    def lost(self, target: Target) -> None:
        """Note that the router has lost the agent of an instance: its answers fail if it is silent and takes no connections."""
        self._pool.lost(target.url)

    async def read_all(self, answer: UpstreamResponse, limit: int | None = None, held: Holding | None = None) -> bytes:
        """Return the whole body. `held` counts its size instead of an earlier answer's.

        For an answer with a Content-Length the whole size is reserved first, so that answers that have begun can end. Raises
        UpstreamError; AnswerTooLong if the body exceeds `limit` (None: MAX_ANSWER_BYTES) or the memory for all answers;
        NoRoomForAnswer. Mutates `held`.
        """
        limit = MAX_ANSWER_BYTES if limit is None else limit
        if held is not None:
            held.let_go()
            # An answer larger than the whole budget is too long, not to be retried later.
            limit = min(limit, held.limit)
        parts: list[bytes] = []
        size, counted = 0, int(answer.headers.get("content-length", "0"))
        try:
            if counted > limit:
                raise AnswerTooLong("the answer is too long", answer.status)
            if held is not None and not held.take(counted):
                raise NoRoomForAnswer
            while piece := await answer.read():
                parts.append(piece)
                size += len(piece)
                if size > limit:
                    raise AnswerTooLong("the answer is too long", answer.status)
                if held is not None and size > counted:
                    if not held.take(size - counted):
                        raise NoRoomForAnswer
                    counted = size
        except BaseException:
            if held is not None:
                held.let_go()
            answer.close()
            raise
        return b"".join(parts)

    async def post_for_body(self, target: Target, path: str, payload: bytes, headers: Mapping[str, str]) -> bytes:
        """Send a POST request and return the body of its answer with status 200. Raises UpstreamError. An error or a cancellation
        closes the connection, by which the engine notices that the request was dropped."""
        try:
            body = await self._whole(await self.send(target, "POST", path, payload, headers))
            if was_aborted(ErrorFormat.OPENAI, body):
                raise AbortedByEngine
        except UpstreamError as error:
            error.instance_id = target.instance_id
            raise
        return body

    async def get(self, url: str, path: str) -> bytes:
        """Send GET `url` + `path` and return the body of its answer with status 200. Raises UpstreamError."""
        return await self._whole(await self._pool.send("GET", url, path, {}))

    async def _whole(self, answer: UpstreamResponse) -> bytes:
        try:
            body = await self.read_all(answer, MAX_ERROR_BYTES)
        finally:
            answer.close()
        if answer.status != 200:
            raise UpstreamError(f"status {answer.status}", answer.status, refused=answer.status >= 500)
        return body

    async def tokenize(self, url: str, body: dict[str, Any], timeout_s: float) -> list[int] | None:
        """Return the token ids from the engine's /tokenize; None if it refuses the body (400 or 422). Raises UpstreamError."""
        try:
            async with asyncio.timeout(timeout_s):
                asked = msgspec.json.encode(body)
                answer = await self.post_for_body(Target("", url), "/tokenize", asked, JSON_FIELDS)
        except TimeoutError as error:
            raise UpstreamError("/tokenize took too long") from error
        except UpstreamError as error:
            if error.status in (400, 422):
                return None
            raise
        if not isinstance(tokens := json_object(answer).get("tokens"), list):
            raise UpstreamError("/tokenize answered without token ids")
        return tokens


async def relay_stream(answer: UpstreamResponse, events: SseFilter | RestOfText, out: ResponseWriter) -> None:
    """Write the parts of the answer's body that pass the filter `events` to `out` as they arrive. `out` must have begun. Raises
    UpstreamError."""

    def write(piece: bytes) -> None:
        if whole := events.feed(piece):
            out.write(whole)

    fast = Passthrough(events.pass_whole, out) if out.chunked and isinstance(events, SseFilter) else None
    await answer.pipe(write, fast, paused=out.full)
    if flush := events.flush():
        out.write(flush)
