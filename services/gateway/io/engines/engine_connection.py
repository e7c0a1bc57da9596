"""The protocol of one connection to an instance, and the answer that is read from it or piped on as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from pointsman.gateway.core.dead_connections import Peer
from pointsman.gateway.core.http_message import Headers

HIGH_WATER = 256 << 10  # bytes of an answer that nobody has taken yet before no more is read
MAX_HEAD_BYTES = 64 << 10
# A chunk's length with all framing -> the line that it begins with. The parser knows longer chunks, and other ways to write one.
_SIZE_LINES = {len(line) + size + 2: line for size in range(1, 4096) for line in (b"%x\r\n" % size,)}


class UpstreamError(Exception):
    """The instance failed. The text names no address; `status` is 0 when it never answered; `sent`: it may have the request;
    `refused`: it answered 5xx, which may be the request's fault as well as its own."""

    def __init__(self, text: str, status: int = 0, *, sent: bool = True, refused: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.status = status
        self.sent = sent
        self.refused = refused

    @property
    def instance_failed(self) -> bool:
        """Whether the instance is to blame, for certain."""
        return not 400 <= self.status < 500 and not self.refused


class StaleConnection(Exception):
    """A kept connection ended before a byte of the answer."""


@dataclass(frozen=True)
class Origin:
    """Where to connect."""

    host: str
    port: int
    tls: bool


class Out(Protocol):
    """Where bytes of a body leave as they came."""

    @property
    def send(self) -> Callable[[bytes], None]: ...


@dataclass(frozen=True, slots=True)
class Passthrough:
    """A way past the parser for a chunk that has come whole and alone, with its framing: to `out`, if it `passes`."""

    pass_unchanged: Callable[[bytes], bool]
    out: Out


class UpstreamResponse:
    """One answer, from its head on. Read it piece by piece (`read`), or have the pieces handed over as they come (`pipe`).

    `close` when it is not wanted any more; an answer that was read to its end has returned its connection by itself.
    """

    def __init__(self, connection: UpstreamConnection) -> None:
        self.status = 0
        self.headers = Headers()
        self.whole = False
        self._connection: UpstreamConnection | None = connection
        self._error: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._changed: asyncio.Future[None] | None = None
        self.sink: Callable[[bytes], None] | None = None  # of a body that is piped
        self.passthrough: Passthrough | None = None

    @property
    def media_type(self) -> str:
        """The body's type in lower case, without parameters."""
        return self.headers.get("content-type").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """What has come since the last call, at least one byte; b"" at the end. Raises UpstreamError."""
        await self.begun()
        taken = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        self.resume()
        return taken

    async def begun(self) -> bool:
        """Wait for the first byte of the body, which stays to be read; False where there is none. Raises UpstreamError."""
        while not self._pieces and not self.whole:
            if self._error is not None:
                raise self._error
            await self._change()
        return bool(self._pieces)

    @property
    def arrived(self) -> bytes:
        """What of the body has come and was not taken yet; it stays to be read."""
        return b"".join(self._pieces)

    async def pipe(self, sink: Callable[[bytes], None], passthrough: Passthrough | None = None) -> None:
        """Hand every piece to `sink` as it comes, until the end, but for the chunks that take the `shortcut`. Raises
        UpstreamError."""
        if self._pieces:
            taken, self._pieces = b"".join(self._pieces), []
            sink(taken)
        self.sink, self.passthrough = sink, passthrough
        self.resume()
        while not self.whole:
            if self._error is not None:
                raise self._error
            await self._change()

    async def _change(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        try:
            await self._changed
        finally:
            self._changed = None

    def pause(self) -> None:
        """Read no more of it for now."""
        if self._connection is not None and not self._paused:
            self._paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self._connection is not None:
            self._paused = False
            self._connection.resume()

    def close(self) -> None:
        """Close its connection, unless it was read to the end: an instance stops its work only for that."""
        self.sink = self.passthrough = None
        if self._connection is not None:
            self._connection.abort()

    # From the connection.

    def take(self, piece: bytes) -> None:
        """More of a body that is not piped."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > HIGH_WATER:
            self.pause()
        self._wake()

    def end(self, error: UpstreamError | None) -> None:
        """The body is whole, or will never be."""
        self._connection = None
        self.whole, self._error = error is None, error
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Keeper(Protocol):
    """Keeps the connections to instances."""

    connections: set[UpstreamConnection]

    def keep(self, connection: UpstreamConnection) -> None:
        """A connection is free for the next request."""

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is over."""


class UpstreamConnection(asyncio.Protocol):
    """The protocol of one connection to an instance; `pool` is told when it is free and when it is over."""

    __slots__ = (
        "_answer",
        "_between",
        "_complete",
        "_ends",
        "_head",
        "_head_size",
        "_headers",
        "_keep",
        "_parser",
        "_passthrough",
        "_paused",
        "_pieces",
        "_pool",
        "_touched",
        "_transport",
        "_until_close",
        "heard",
        "on_body",
        "origin",
        "since",
    )

    def __init__(self, pool: Keeper, origin: Origin) -> None:
        self.origin = origin
        self.since = 0.0  # idle, or silent
        self.heard = False  # since the last sweep
        self._pool = pool
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser's callback, without a frame of ours
        self._parser = httptools.HttpResponseParser(self)
        self._answer: UpstreamResponse | None = None
        self._head: asyncio.Future[UpstreamResponse] | None = None
        self._headers = Headers()
        self._head_size = 0
        self._touched = False
        self._until_close = False
        self._keep = False
        self._complete = False
        self._ends = 0
        self._paused = False
        self._between = False  # the parser has seen the end of a chunk, and nothing after it
        self._passthrough: Passthrough | None = None  # of an answer that is between two chunks

    # From the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._answer is not None and self._until_close and exc is None:
            self._end(None)
        elif self._head is not None and not self._touched:
            self._fail_head(StaleConnection())
        else:
            self._fail("broke off")

    def data_received(self, data: bytes) -> None:
        if (passthrough := self._passthrough) is not None:
            # Called by a name of their own: calling what a slot holds takes a slow way to it.
            pass_unchanged = passthrough.pass_unchanged
            line = _SIZE_LINES.get(len(data))
            if line is not None and data.startswith(line) and data[-2:] == b"\r\n" and pass_unchanged(data):
                send = passthrough.out.send
                send(data)
                self.heard = True
                return
        self.heard = self._touched = True
        if self._head is None and self._answer is None:
            # Nothing was asked: whose answer would this be?
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("not valid HTTP/1.1")
            self.abort()
            return
        pieces = self._pieces
        if self._complete:
            del pieces[self._ends :]  # an answer too many
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._answer is not None:
                (self._answer.sink or self._answer.take)(piece)
        if self._complete:
            self._end(None)
        elif self._answer is not None:
            # A size line that has only begun has no line's end yet.
            self._passthrough = self._answer.passthrough if self._between and data.endswith(b"\n") else None

    # From the parser. None of these may raise.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size <= MAX_HEAD_BYTES:
            self._headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, Headers()
        if status < 200 or self._head is None or self._head.done():
            return
        self._keep = self._parser.should_keep_alive() and self._head_size <= MAX_HEAD_BYTES
        framed = "content-length" in headers or "transfer-encoding" in headers or status in (204, 304)
        self._until_close = not framed
        answer = self._answer = UpstreamResponse(self)
        answer.status, answer.headers = status, headers
        self.since = time.monotonic()
        self._head.set_result(answer)
        self._head = None

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._complete:
            self._complete, self._ends = True, len(self._pieces)

    # An exchange.

    async def exchange(self, message: list[bytes]) -> UpstreamResponse:
        """Send a request, await the head of its answer. Raises UpstreamError, or Stale where not a byte of one came."""
        self._head = asyncio.get_running_loop().create_future()
        self.heard, self.since = False, time.monotonic()
        self._touched = self._complete = self._keep = self._until_close = self._between = False
        self._head_size = 0
        self._transport.writelines(message)
        try:
            return await self._head
        except asyncio.CancelledError:
            self.abort()
            raise

    def _end(self, error: UpstreamError | None) -> None:
        answer, self._answer = self._answer, None
        self._passthrough = None
        if answer is None:
            return
        if self._paused:
            self.resume()
        # A request that the instance did not read to its end is still in the way of the next one.
        if (
            error is None
            and self._keep
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        ):
            self._pool.keep(self)
        else:
            self._transport.abort()
        answer.end(error)

    def _fail(self, text: str) -> None:
        if self._answer is not None:
            self._end(UpstreamError(text, self._answer.status))
        else:
            self._fail_head(UpstreamError(f"no answer: {text}"))

    def _fail_head(self, error: Exception) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self._head = None

    def pause(self) -> None:
        """Read nothing for now."""
        self._paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._paused, self.heard = False, True
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # From the pool, now and then.

    @property
    def peer(self) -> Peer | None:
        """The address that it leads to; None where its transport has none."""
        found: Peer | None = self._transport.get_extra_info("peername")
        return found

    @property
    def answers(self) -> bool:
        """Whether an answer has begun and is not whole."""
        return self._answer is not None

    def silence(self, now: float) -> float:
        """For how many seconds nothing has come of an answer that is due, as far as the calls of this tell; 0 where none is due,
        or where we do not listen. Mutates."""
        if self._answer is None and self._head is None:
            return 0.0
        if self.heard or self._paused:
            self.heard, self.since = False, now
        return now - self.since

    def give_up(self, text: str) -> None:
        """Fail the answer that is due, as if the connection had broken."""
        self._fail(text)
        self.abort()
