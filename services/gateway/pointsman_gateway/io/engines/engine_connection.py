"""The protocol of one connection to an instance, and the answer that is read from the connection or piped to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, cast

import httptools

from pointsman_gateway.core.dead_connections import Peer
from pointsman_gateway.core.http_message import Headers, ResponseWriter

# Buffered bytes of an answer from which reading from the instance is paused.
HIGH_WATER = 256 << 10
# Maximum size of an answer's header fields, bytes. Further fields are ignored.
MAX_HEAD_BYTES = 64 << 10
# Length of a chunk with its framing -> its size line. Longer chunks, and other forms of the line, are left to the parser.
_SIZE_LINES = {len(line) + size + 2: line for size in range(1, 4096) for line in (b"%x\r\n" % size,)}


class UpstreamError(Exception):
    """Raised if a request to an instance fails. The text contains no address.

    `status` is 0 if the instance did not answer. `sent`: the instance may have received the request. `refused`: the instance
    answered 5xx, which may be the fault of the request or of the instance. `broke`: the connection broke after the instance may
    have received the request. `instance_id`: the instance, if Upstream.post_for_body() raised it.
    """

    instance_id = ""

    def __init__(
        self, text: str, status: int = 0, *, sent: bool = True, refused: bool = False, broke: bool = False
    ) -> None:
        super().__init__(text)
        self.text = text
        self.status = status
        self.sent = sent
        self.refused = refused
        self.broke = broke

    @property
    def instance_failed(self) -> bool:
        """Whether the instance is certainly at fault."""
        return not 400 <= self.status < 500 and not self.refused


class StaleConnection(Exception):
    """Raised if a kept connection ended before the first byte of the answer."""


@dataclass(frozen=True)
class Origin:
    """The host, the port and the scheme of an instance."""

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class Passthrough:
    """A shortcut past the parser: of a chunk that arrives whole and alone `out` gets what `pass_whole` returns, with its framing;
    if that is empty, the chunk is parsed."""

    pass_whole: Callable[[bytes], bytes]
    out: ResponseWriter


class Carrier(Protocol):
    """What brings an answer: the connection to its instance, or a proxy that has it."""

    heard_at: float  # when the last byte came, monotonic s

    def pause(self) -> None:
        """Pause reading the answer."""

    def resume(self) -> None:
        """Resume reading the answer."""

    def give_up(self, text: str) -> None:
        """End the answer with an UpstreamError of this text."""

    def abort(self) -> None:
        """End the answer; nobody reads it any more."""


class UpstreamResponse:
    """One answer whose head has arrived. Its body is read piece by piece (`read`) or passed to a function as it arrives (`pipe`).

    Call `close` if the rest is not needed. An answer that was read to its end has returned its connection to the pool.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.status = 0
        self.headers = Headers()
        self.whole = False
        self._carrier: Carrier | None = carrier
        self._error: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self.paused = False  # whether reading is
        self._changed: asyncio.Future[None] | None = None
        self.sink: Callable[[bytes], None] | None = None  # receives the pieces of a body that is piped
        self.passthrough: Passthrough | None = None

    @property
    def heard_at(self) -> float:
        """When the last byte of an answer that has not ended came, monotonic s; 0 after its end."""
        return self._carrier.heard_at if self._carrier is not None else 0.0

    async def read(self) -> bytes:
        """Return the bytes that arrived since the last call, at least one; b"" at the end. Raises UpstreamError."""
        await self.begun()
        taken = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        self.resume()
        return taken

    async def begun(self, is_preamble: Callable[[bytes], bool] | None = None) -> bool:
        """Wait for unread bytes of the body, for more than a preamble; return False if it ended without. Raises UpstreamError."""
        while not (begun := bool(self._pieces) and not (is_preamble and is_preamble(self.arrived))) and not self.whole:
            if self._error is not None:
                raise self._error
            self.resume()  # a preamble may have more than HIGH_WATER
            await self._change()
        return begun

    @property
    def arrived(self) -> bytes:
        """The bytes of the body that have arrived and are not read yet."""
        return b"".join(self._pieces)

    async def pipe(
        self, sink: Callable[[bytes], None], passthrough: Passthrough | None = None, *, paused: bool = False
    ) -> None:
        """Call `sink` with each piece of the body as it arrives, until the end. Chunks that take the `passthrough` are omitted.
        `paused`: nothing is read until resume(). Raises UpstreamError."""
        if self._pieces:
            taken, self._pieces = b"".join(self._pieces), []
            sink(taken)
        self.sink, self.passthrough = sink, passthrough
        if paused:
            self.pause()
        else:
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
        """Pause reading the answer from the instance."""
        if self._carrier is not None and not self.paused:
            self.paused = True
            self._carrier.pause()

    def resume(self) -> None:
        """Resume reading the answer from the instance."""
        if self.paused and self._carrier is not None:
            self.paused = False
            self._carrier.resume()

    def give_up(self, text: str) -> None:
        """End an answer that has not ended with an UpstreamError of this text."""
        if self._carrier is not None:
            self._carrier.give_up(text)

    def close(self) -> None:
        """Close the connection unless the answer was read to its end. An instance stops its work only at the connection's end."""
        self.sink = self.passthrough = None
        if self._carrier is not None:
            self._carrier.abort()

    # Calls from the connection.

    def take(self, piece: bytes) -> None:
        """Buffer a piece of a body that is not piped."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > HIGH_WATER:
            self.pause()
        self._wake()

    def end(self, error: UpstreamError | None) -> None:
        """End the answer: its body is complete, or `error` has ended it."""
        self._carrier = None
        self.whole, self._error = error is None, error
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Keeper(Protocol):
    """The pool of a connection."""

    connections: set[UpstreamConnection]

    def keep(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a connection that has ended."""


class UpstreamConnection(asyncio.Protocol):
    """The protocol of one connection to an instance. It notifies `pool` when it is free and when it has ended."""

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
        "heard_at",
        "on_body",
        "origin",
        "since",
    )

    def __init__(self, pool: Keeper, origin: Origin) -> None:
        self.origin = origin
        self.since = 0.0  # start of the idle time, monotonic s
        self.heard_at = 0.0  # when the last data arrived, or was first waited for, monotonic s
        self._pool = pool
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser's callback, without the cost of a Python function
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
        self._passthrough: Passthrough | None = None  # set while the answer is between two chunks

    # Calls from the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
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
            # Bound to a local name first: calling the content of a slot directly is slower.
            pass_whole = passthrough.pass_whole
            line = _SIZE_LINES.get(len(data))
            if line is not None and data.startswith(line) and data[-2:] == b"\r\n" and (passed := pass_whole(data)):
                send = passthrough.out.send
                send(passed)
                self.heard_at = monotonic()
                return
        self.heard_at, self._touched = monotonic(), True
        if self._head is None and self._answer is None:
            # Data without a request cannot belong to any answer.
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
            del pieces[self._ends :]  # data of a second answer, for which there was no request
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._answer is not None:
                (self._answer.sink or self._answer.take)(piece)
        if self._complete:
            self._end(None)
        elif self._answer is not None:
            # If the data does not end with a line end, the parser is inside a size line, and the next data continues it.
            self._passthrough = self._answer.passthrough if self._between and data.endswith(b"\n") else None

    # Calls from the parser. None of these methods may raise.

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
        """Send a request and return the answer after its head. Raises UpstreamError, or StaleConnection if the connection ended
        before the first byte of the answer."""
        self._head = asyncio.get_running_loop().create_future()
        self.heard_at = monotonic()
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
        # The connection is not kept if the instance has not read the whole request, because the rest would precede the next one.
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

    def _fail(self, text: str, *, broke: bool = True) -> None:
        if self._answer is not None:
            self._end(UpstreamError(text, self._answer.status, broke=broke))
        else:
            self._fail_head(UpstreamError(f"no answer: {text}", broke=broke))

    def _fail_head(self, error: Exception) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self._head = None

    def pause(self) -> None:
        """Pause reading."""
        self._paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        self._paused, self.heard_at = False, monotonic()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # Calls from the pool's sweep.

    @property
    def peer(self) -> Peer | None:
        """The address of the peer; None if the transport has none."""
        found: Peer | None = self._transport.get_extra_info("peername")
        return found

    @property
    def answers(self) -> bool:
        """Whether an answer has begun and is not complete."""
        return self._answer is not None

    def silence(self, now: float) -> float:
        """Return for how long no data of a due answer has arrived, s; 0 if no answer is due or reading is paused."""
        if self._paused or (self._answer is None and self._head is None):
            return 0.0
        return now - self.heard_at

    def give_up(self, text: str) -> None:
        """Fail the due answer with `text`, as if the connection had broken, and close the connection."""
        self._fail(text, broke=False)
        self.abort()
