"""The HTTP calls to instances: clients' requests, PREFILL steps, /tokenize; and how a streamed answer goes on to its client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.gateway.core.api import ApiRequestError, was_aborted
from pointsman.gateway.core.http_message import ResponseWriter
from pointsman.gateway.core.memory_budget import Holding
from pointsman.gateway.core.request.request_events import Target
from pointsman.gateway.core.streaming.sse import SseFilter
from pointsman.gateway.io.engines.connection_pool import ConnectionPool
from pointsman.gateway.io.engines.engine_connection import Passthrough, UpstreamResponse
from pointsman.gateway.io.engines.engine_connection import UpstreamError as UpstreamError
from pointsman.gateway.io.settings import GatewaySettings

# Until an instance accepts the connection.
CONNECT_S = 3.0
MAX_ERROR_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256 << 20  # of an answer that is not streamed; the largest are batches of embeddings


class AbortedByEngine(UpstreamError):
    """The instance ended an answer that nobody asked it to end, as a vLLM does that is told to stop."""

    def __init__(self) -> None:
        super().__init__("the instance gave the request up", 503)


class AnswerTooLong(UpstreamError):
    """An answer that is not streamed has more bytes than are held of one."""


class NoRoomForAnswer(ApiRequestError):
    """As many answers are held as may be; whoever asks again later may find room."""

    def __init__(self) -> None:
        message = "The gateway holds as many answers as it has room for: stream it, or try again."
        super().__init__(503, message, type_="server_error", code="no_room", retry_after_s=1.0)


class Upstream:
    """HTTP client of all instances. start() and close() bracket its life."""

    def __init__(self, settings: GatewaySettings, pool: ConnectionPool | None = None) -> None:
        """`pool`: connections of another make. Raises OSError and ValueError for an engine_ca that cannot be used."""
        self._pool = pool or ConnectionPool(CONNECT_S, settings.idle_timeout_s, settings.engine_ca)
        key = settings.engine_api_key.get_secret_value()
        self._own = {"Authorization": f"Bearer {key}"} if key else {}

    async def start(self) -> None:
        """Open the pool."""
        self._pool.start()

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    @property
    def connections(self) -> int:
        """How many connections to instances are open, idle ones included."""
        return len(self._pool.connections)

    async def post(self, target: Target, path: str, payload: bytes, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send one request; the answer's head. The caller reads it to its end or closes it. Raises UpstreamError."""
        return await self.send(target, "POST", path, payload, headers)

    async def send(
        self, target: Target, method: str, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> UpstreamResponse:
        """post() with any method."""
        sent = {**headers, **self._own}
        if target.rank is not None:
            sent["X-data-parallel-rank"] = str(target.rank)
        return await self._pool.send(method, target.url, path, sent, payload)

    async def read_all(self, answer: UpstreamResponse, limit: int | None = None, held: Holding | None = None) -> bytes:
        """The whole body, which `held` counts from now on, and nothing else. An answer that says how long it is finds room for
        all of it or for none, so that those that have begun can end. Raises UpstreamError, AnswerTooLong when it has more bytes
        than `limit`, else MAX_ANSWER_BYTES, or than all answers may, and NoRoomForAnswer. Mutates `held`."""
        limit = MAX_ANSWER_BYTES if limit is None else limit
        if held is not None:
            held.let_go()
            # What never finds room is not to be tried again.
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
        """The body of a 200 answer to one request. Raises UpstreamError; whoever fails or is cancelled in here closes the
        connection, by which the engine notices."""
        body = await self._whole(await self.post(target, path, payload, headers))
        if was_aborted(body):
            raise AbortedByEngine
        return body

    async def get(self, url: str, path: str) -> bytes:
        """The same of GET `url` + `path`."""
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
        """The engine's own token ids, None when it refuses this body (4xx). Raises UpstreamError."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.post(Target("", url), "/tokenize", msgspec.json.encode(body), headers)
                try:
                    raw = await self.read_all(answer)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise UpstreamError("/tokenize took too long") from error
        if answer.status in (400, 422):
            return None
        if answer.status != 200:
            raise UpstreamError(f"/tokenize answered {answer.status}", answer.status)
        try:
            return msgspec.json.decode(raw, type=_Tokenized).tokens
        except msgspec.MsgspecError as error:
            raise UpstreamError("/tokenize answered no token ids") from error


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def relay_stream(answer: UpstreamResponse, events: SseFilter, out: ResponseWriter) -> None:
    """Everything of the answer's body that `events` lets out, as it comes; `out` has begun. Raises UpstreamError."""

    def write(piece: bytes) -> None:
        if whole := events.feed(piece):
            out.write(whole)

    await answer.pipe(write, Passthrough(events.pass_unchanged, out) if out.chunked else None)
    if flush := events.flush():
        out.write(flush)
