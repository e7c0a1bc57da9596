"""The protocol of one client connection: it parses requests, enforces their limits and deadlines, and frames answers.

Requests on a connection are answered one by one. Data that arrives while a request is being answered is read and dropped, so
that a disconnect is noticed at once. If the data was more than blank lines, it is refused after the answer. No input of a client
raises an error: the client receives a 4xx, or its connection is closed.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import math
import secrets
import struct
import termios
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import httptools
import structlog

from pointsman_gateway.core.body_decompression import BodyDecoder, BodyTooDense, UndecodableBody, encoding_of
from pointsman_gateway.core.http_message import Headers, Request, Response, Source, fault_of, head_bytes, path_of
from pointsman_gateway.core.memory_budget import Holding, MemoryBudget
from pointsman_gateway.io.http.connection_limit import ConnectionLimit, Place
from pointsman_gateway.io.http.server_types import (
    BODY_TOO_LARGE,
    NO_ROOM_FOR_BODY,
    NO_ROOM_FOR_REQUEST,
    SHUTTING_DOWN,
    TOO_SLOW,
    UNDECODABLE_BODY,
    HttpHandler,
    ServerLimits,
)
from pointsman_gateway.io.http.silence_timer import SilenceTimer

log = structlog.get_logger()

# Unsent bytes for a slow client from which the gateway stops reading from the instance.
HIGH_WATER = 64 << 10
# Maximum body of a refused request that is read to its end so that the connection can be kept, bytes.
SMALL_BODY = 64 << 10
# Time for which data of a refused client is still read before the connection is closed, s. Closing at once would destroy the
# answer on its way.
LINGER_S = 2.0
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class Listener(Protocol):
    """The server of a connection: the state that all of its connections share."""

    handler: HttpHandler  # of the requests of all connections
    limits: ServerLimits  # from the settings; constant
    connections: set[ClientConnection]  # open ones; a connection adds itself
    limit: ConnectionLimit  # bounds `connections` and the TLS handshakes before them
    closing: bool  # the drain has begun: connections end after their answers
    date: dict[str, str]  # the answers' header Date, set anew every half a second or more often
    bodies: MemoryBudget  # bytes of requests' bodies, until their answers begin
    answers: MemoryBudget  # bytes of answers that are not streamed, until they are sent
    busy: MemoryBudget  # connections with a known client's request, until it is answered

    def forget(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed and whose request has ended."""


class _State(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    BUSY = "busy"  # a request is being answered
    FLUSHING = "flushing"  # the answer is complete and more than HIGH_WATER of it is unsent; reading is paused
    ENDING = "ending"  # the connection is closing: input is ignored and no request starts


class ResponseWriter:
    """Writes one streamed answer to its client; implements pointsman_gateway.core.http_message.ResponseWriter."""

    __slots__ = (
        "_connection",
        "_head",
        "_mid_event",
        "_silence",
        "_write",
        "begun",
        "chunked",
        "ended",
        "lost",
        "opened",
        "send",
    )

    def __init__(self, connection: ClientConnection, transport: asyncio.Transport, *, chunked: bool) -> None:
        self._connection = connection
        self._write = transport.write
        self.send: Callable[[bytes], None] = self._write
        self.chunked = chunked  # whether the client accepts chunked framing
        self._head = b""
        self._silence: SilenceTimer | None = None  # set if the client gets pings
        self._mid_event = False  # of a client that gets pings: part of an event has been sent, but not its end
        self.opened = False
        self.begun = False
        self.ended = False
        self.lost = False

    def begin(self, status: int, headers: dict[str, str], source: Source) -> None:
        """Set the head, which is sent with the first piece. `source` is paused while the client reads slowly."""
        self.begun = True
        self._connection.let_go()
        self._connection.source = source
        if not self.opened:
            self._set_head(status, headers)
        self.opened = False

    def ping_in_silence(self, interval_s: float, since: float, headers: dict[str, str], ping: bytes) -> None:
        """Send `ping` whenever the client has had no byte for `interval_s`; before the first one the head, if it has none."""
        if not self.lost:
            self._silence = SilenceTimer(interval_s, since, partial(self._ping, headers, ping))

    def stop_pings(self) -> None:
        """Send no further pings."""
        if self._silence is not None:
            self._silence.stop()

    def _ping(self, headers: dict[str, str], ping: bytes) -> None:
        # A client that does not read gets no ping: it has bytes that it has not read.
        if self._mid_event or self._connection.full:
            return
        if not self.begun and not self.opened:
            self.opened = True
            self._set_head(200, headers)
        self.write(ping)

    def _set_head(self, status: int, headers: dict[str, str]) -> None:
        framing = ["Transfer-Encoding: chunked"] if self.chunked else []
        if not self._connection.keep_alive:
            framing.append("Connection: close")
        self._head = head_bytes(status, headers | self._connection.common_fields(), *framing)
        if not self._connection.lost:
            self.send = self._send_first

    @property
    def full(self) -> bool:
        """Whether so much is unsent that the source is paused."""
        return self._connection.full

    def go_on(self, source: Source) -> None:
        """Replace the source, which is paused while the client reads slowly."""
        self._connection.source = source

    def write(self, piece: bytes) -> None:
        """Send one non-empty piece of the body."""
        if self._silence is not None:
            self._mid_event = not piece.endswith(_EVENT_ENDS)
        self.send(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)

    def end(self) -> None:
        """Send the end of the body."""
        self.send(b"0\r\n\r\n" if self.chunked else b"")
        self.ended = True
        self.stop_pings()

    def lose(self) -> None:
        """Discard all further writes: the client has disconnected."""
        self.lost = True
        self.send = lambda piece: None
        self.stop_pings()

    def _send_first(self, piece: bytes) -> None:
        head, self._head = self._head, b""
        self.send = self._write if self._silence is None else self._send_noted
        self.send(head + piece)

    def _send_noted(self, piece: bytes) -> None:
        assert self._silence is not None
        self._silence.sent()
        self._write(piece)

    def abort(self) -> None:
        """Close the connection before the end of the body, so that the client sees an incomplete answer."""
        self._connection.abort()


_NOTHING = memoryview(b"")


def _kernel_holds(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send buffer that the client has not acknowledged.

    Data that TLS has encrypted but not passed to the kernel is missing here and in the transport's buffer size.
    """
    socket = transport.get_extra_info("socket")
    if socket is None:
        return 0
    try:
        (held,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return 0  # the socket is closed
    return int(held)


class ClientConnection(asyncio.Protocol):
    """The protocol of one client connection."""

    def __init__(self, server: Listener) -> None:
        self.server = server
        self.lost = False
        self.source: Source | None = None
        self.full = False  # more than HIGH_WATER bytes are unsent
        self.deadline = math.inf
        self._limits = server.limits
        self._surplus = False
        self._state = _State.IDLE
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._more = False  # bytes came while a request was being answered
        self._rest = _NOTHING  # the part of a whole answer that the transport has not received yet
        self._watched = 0  # unsent bytes at `_watched_at`, the reference for the client's read rate
        self._watched_at = 0.0
        self._held_body = Holding(server.bodies)
        self._held_answer = Holding(server.answers)
        self._held_place = Holding(server.busy)
        self._body_until = math.inf
        self._new_message()

    def _new_message(self) -> None:
        self._url = b""
        self._fields: list[tuple[str, str]] = []
        self._head_size = 0
        self._fed = 0
        self._body: list[bytes] = []
        self._body_size = 0  # as received
        self._decoder: BodyDecoder | None = None
        self._came = 0  # received bytes of the body with its framing
        self._chunks = 0
        self._plain = b""  # a head with only the body's framing, set if the request also asks for a protocol upgrade
        self._muted = False  # the parser is reading `_plain`, not data of the client
        self._request: Request | None = None
        self._writer: ResponseWriter | None = None
        self._refusal: Response | None = None
        self.keep_alive = False

    # From the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self.server.connections.add(self)
        now = time.monotonic()
        place = self.server.limit.enter(self, now)
        self._surplus = place is not Place.WITHIN
        if place is Place.NONE:
            self._transport.abort()
        self.deadline = now + (self._limits.head_s if self._surplus else self._limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._state, self.deadline = _State.ENDING, math.inf
        self._rest = _NOTHING
        if self._writer is not None:
            self._writer.lose()
        if self._task is not None:
            self._task.cancel()
        else:
            self.let_go()
            self._answer_sent()
            self.server.forget(self)

    def eof_received(self) -> None:
        # A client that ends its side while its request is answered has left. Returning None closes the transport, but close()
        # would first wait until a buffer is sent that nobody reads; abort() does not.
        if self._state in (_State.BUSY, _State.FLUSHING):
            self._transport.abort()

    def pause_writing(self) -> None:
        self.full = True
        if self._state is _State.BUSY:
            self._watch(time.monotonic())
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        self.full = False
        if self._state is _State.BUSY:
            self.deadline = math.inf
        elif self._state is _State.FLUSHING:
            self._flush()
        if self.source is not None:
            self.source.resume()

    def data_received(self, data: bytes) -> None:
        if self._state in (_State.BUSY, _State.FLUSHING):
            self._more = self._more or bool(data.strip(b"\r\n"))
            return
        if self._state is _State.ENDING:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # No upgrade is supported, so the request is answered as HTTP/1.1; RFC 9110 7.8 lets a server ignore an upgrade.
            self._parser = httptools.HttpRequestParser(self)
            if self._plain:
                # The parser stops before the body. A new one reads the body after a head with only its framing. (Java's client
                # asks for an upgrade to HTTP/2.)
                head, self._plain = self._plain, b""
                self._muted = True
                self._parser.feed_data(head)
                self._muted = False
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
        except httptools.HttpParserError:
            if self._task is not None:
                self._more = True
            else:
                self._refuse(400, "The request is not valid HTTP/1.1.", "bad_request")
        if self._state is _State.HEAD:
            # A field without an end stays in the parser and is in no count of fields, so all received bytes are counted here.
            self._fed += len(data)
            if self._fed > self._limits.max_head_bytes:
                self._too_large()
        elif self._state is _State.BODY:
            # Limits chunk extensions and trailers, which are in no other count. As in Go's net/http, framing may be twice as long
            # as the data, plus some more.
            self._came += len(data)
            if self._came - 3 * self._body_size - 16 * self._chunks > 2 * self._limits.max_head_bytes:
                self._refuse(400, "The request body has too much framing.", "bad_request")

    # From the parser. None of these may raise.

    def on_message_begin(self) -> None:
        if self._muted:
            return
        if self._state is not _State.IDLE:
            self._more = True
            return
        self._new_message()
        self._state = _State.HEAD
        if not self._surplus:
            self.server.limit.works(self)
        self.deadline = time.monotonic() + self._limits.head_s

    def on_url(self, url: bytes) -> None:
        if self._state is _State.HEAD:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is not _State.HEAD:
            return  # a trailer, or a field of a refused request
        self._head_size += len(name) + len(value) + 4
        if (
            self._head_size + len(self._url) > self._limits.max_head_bytes
            or len(self._fields) >= self._limits.max_headers
        ):
            self._too_large()
            return
        self._fields.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._state is not _State.HEAD:
            return
        if len(self._url) + self._head_size > self._limits.max_head_bytes:
            self._too_large()
            return
        version, method = self._parser.get_http_version(), self._parser.get_method().decode()
        hosts = sum(name.lower() == "host" for name, _ in self._fields)
        headers, self._fields = Headers(self._fields), []
        wrong = fault_of(method, version, self._url, headers, hosts)
        if wrong is not None:
            self._refuse(*wrong)
            return
        self.keep_alive = version == "1.1" and self._parser.should_keep_alive() and not self._surplus
        target, _, query = self._url.decode("ascii").partition("?")
        writer = ResponseWriter(self, self._transport, chunked=version == "1.1")
        request = Request(method, path_of(target), query, headers, writer, self._held_answer)
        length = int(headers.get("content-length", "0"))
        has_body = length > 0 or "transfer-encoding" in headers
        self._request, self._writer = request, writer
        request.surplus = self._surplus
        refusal = self.server.handler.admit(request)
        self._held_body.holder = self._held_answer.holder = self._held_place.holder = request.holder
        if refusal is None and length > self._limits.max_body_bytes:
            refusal = self._error(*BODY_TOO_LARGE)
        elif refusal is None and not self.server.bodies.has_room(request.holder, length):
            refusal = self._error(*NO_ROOM_FOR_BODY)
        elif refusal is None and request.holder and not self._held_place.take(1):
            refusal = self._error(*NO_ROOM_FOR_REQUEST)
        if refusal is None and (encoding := encoding_of(headers.get("content-encoding"))):
            self._decoder = BodyDecoder(encoding)
        waits = headers.get("expect").lower() == "100-continue" and has_body
        self._state = _State.BODY
        self._body_until = time.monotonic() + self._limits.body_s
        # Probes have no body: one more connection than there may be must not be held by a body that does not come.
        stall_s = LINGER_S if self._surplus else self._limits.body_stall_s
        self.deadline = min(self._body_until, time.monotonic() + stall_s)
        self._refusal = refusal
        if has_body and self._parser.should_upgrade():
            framing = "Transfer-Encoding: chunked" if "transfer-encoding" in headers else f"Content-Length: {length}"
            self._plain = f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode()
        if refusal is not None and has_body and (waits or not 0 < length <= SMALL_BODY):
            self._end_with(refusal)
        elif waits:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        if self._state is not _State.BODY:
            return
        self._body_size += len(body)
        if self._refusal is not None or not body:
            return
        refusal = self._keep_body(body)
        if refusal is not None:
            self._end_with(refusal)
            return
        self.deadline = min(self._body_until, time.monotonic() + self._limits.body_stall_s)

    def _keep_body(self, received: bytes) -> Response | None:
        """Keep a received piece of the body, decoded; return the refusal if it cannot be."""
        try:
            for piece in (received,) if self._decoder is None else self._decoder.decode(received):
                # Limits hold for the decoded body.
                if self._held_body.size + len(piece) > self._limits.max_body_bytes:
                    return self._error(*BODY_TOO_LARGE)
                if not self._held_body.take(len(piece)):
                    return self._error(*NO_ROOM_FOR_BODY)
                self._body.append(piece)
        except BodyTooDense:
            return self._error(*BODY_TOO_LARGE)
        except UndecodableBody:
            return self._error(*UNDECODABLE_BODY)
        return None

    def on_message_complete(self) -> None:
        if self._state is not _State.BODY or self._plain:
            return
        assert self._request is not None
        self._state, self.deadline = _State.BUSY, math.inf
        if self._surplus:
            self.server.limit.works(self)
        if self._decoder is not None and not self._decoder.complete and self._refusal is None:
            self._refusal = self._error(*UNDECODABLE_BODY)
        self._request.body, self._body = b"".join(self._body), []
        self._task = asyncio.get_running_loop().create_task(self._run(self._request, self._refusal))
        self._task.add_done_callback(self._never_began)

    # Answers.

    async def _run(self, request: Request, refusal: Response | None) -> None:
        try:
            response = refusal or await self.server.handler.answer(request)
        except asyncio.CancelledError:
            self._over(partial(self._cut_short, request))
        except Exception:
            log.exception("a fault in the gateway", path=request.path if refusal is None else "")
            self._over(self._transport.abort)
        else:
            self._over(partial(self._answered, request, response))

    def _never_began(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._over(self._transport.abort)

    def _over(self, end: Callable[[], None]) -> None:
        """Clean up after an answer that has ended or was cancelled, and call `end`."""
        # Called by the task itself, because a done callback may run after the connection's next request has arrived.
        self._task, self.source = None, None
        if self._writer is not None:
            self._writer.stop_pings()
        self.let_go()
        end()
        if not self._rest:
            self._answer_sent()
        if self.lost:
            self.server.forget(self)

    def _cut_short(self, request: Request) -> None:
        """Handle a cancelled answer: the client has disconnected, or the drain has ended. A waiting client receives a 503."""
        out = request.writer
        if self.lost or ((out.begun or out.opened) and not out.ended):
            self._transport.abort()
        elif out.ended:
            self._close()
        else:
            self._refuse(*SHUTTING_DOWN)

    def _answered(self, request: Request, response: Response | None) -> None:
        if self.lost:
            return
        if response is not None:
            last = not self.keep_alive or self.server.closing
            self._send(response, last=last, head_only=request.method == "HEAD")
        elif not request.writer.ended:
            self._transport.abort()
            return
        self._request = None
        if self._rest or self.full:
            # The next request waits, because answers to a client that reads none would fill the memory.
            self._state = _State.FLUSHING
            self._transport.pause_reading()
            self._watch(time.monotonic())
            self._flush()
        else:
            self._sent()

    def _flush(self) -> None:
        """Write the rest of the answer to the transport until its buffer is full."""
        while self._rest and not self.full and not self._transport.is_closing():
            piece, self._rest = self._rest[:HIGH_WATER], self._rest[HIGH_WATER:]
            self._transport.write(piece)
        if not self._rest and not self.full:
            self._rest = _NOTHING
            self._answer_sent()
            self._transport.resume_reading()
            self._sent()

    def _sent(self) -> None:
        """Wait for the next request or end the connection, after the transport has received the whole answer."""
        if not self.keep_alive or self.server.closing:
            self._close()
        elif self._more:
            self._state = _State.IDLE
            self._refuse(400, "A request arrived before the previous one was answered.", "pipelining_unsupported")
        else:
            now = time.monotonic()
            self._state, self.deadline = _State.IDLE, now + self._limits.idle_s
            self.server.limit.waits(self, now)

    def common_fields(self) -> dict[str, str]:
        """Return the header fields of every answer, also of answers to invalid requests."""
        request = self._request
        fields = {"X-Request-ID": secrets.token_hex(16)} if request is None else request.answer_fields
        return fields | self.server.date

    def _send(self, response: Response, *, last: bool, head_only: bool = False) -> None:
        framing = [] if response.status in (204, 304) else [f"Content-Length: {len(response.body)}"]
        if last:
            framing.append("Connection: close")
        head = head_bytes(response.status, response.headers | self.common_fields(), *framing)
        if head_only or not response.body:
            self._transport.write(head)
        elif len(response.body) <= HIGH_WATER:
            self._transport.writelines([head, response.body])
        else:
            # Written piece by piece: TLS would encrypt a whole answer at once and then report none of it as unsent.
            self._transport.write(head)
            self._rest = memoryview(response.body)

    def _error(self, status: int, message: str, code: str) -> Response:
        path = self._url.partition(b"?")[0].decode("latin-1")
        return self.server.handler.error(status, message, code, path)

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self._state is not _State.ENDING:
            self._end_with(self._error(status, message, code))

    def _too_large(self) -> None:
        self._refuse(431, "The request's head is too large.", "head_too_large")

    def _end_with(self, response: Response) -> None:
        """Send `response` now and close the connection, even if the client is still sending."""
        self._body = []
        self.let_go()
        self._answer_sent()
        self._send(response, last=True)
        self._more = True
        self._close()

    def _close(self) -> None:
        """Close the connection when all data is sent. If the client has sent more than was read, its data is read and dropped for
        LINGER_S."""
        self._state = _State.ENDING
        if self._more and self._transport.can_write_eof():  # a TLS connection cannot be closed on one side only
            self._transport.write_eof()
        else:
            self._transport.close()
        now = time.monotonic()
        self._watch(now)
        self.deadline = now + LINGER_S

    def let_go(self) -> None:
        """Release the memory budget of the request's body: its answer has begun, or there will be none."""
        self._held_body.let_go()

    def _answer_sent(self) -> None:
        """Release what the client holds until its answer is sent."""
        self._held_answer.let_go()
        self._held_place.let_go()

    def _unsent(self) -> int:
        """Return the bytes that the client has not read, without up to about 100 KB between TLS and the kernel."""
        return len(self._rest) + self._transport.get_write_buffer_size() + _kernel_holds(self._transport)

    def _watch(self, now: float) -> None:
        """Record the unsent bytes at `now`; after stall_s the client's read rate is checked against them."""
        self._watched, self._watched_at = self._unsent(), now
        self.deadline = now + self._limits.stall_s

    # From the server.

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def cancel(self) -> None:
        """Cancel an open request. A complete answer is still sent."""
        if self._task is not None:
            self._task.cancel()
        elif self._state not in (_State.FLUSHING, _State.ENDING):
            self._transport.abort()

    def close_idle(self) -> None:
        """Close the connection if no request is open; otherwise the connection closes after the answer."""
        if self._state is _State.IDLE:
            self._close()

    def overdue(self, now: float) -> None:
        """Act on a passed deadline: close an idle connection, refuse an incomplete request, or check the client's read rate."""
        match self._state:
            case _State.IDLE:
                self._close()
            case _State.HEAD | _State.BODY:
                self._refuse(*TOO_SLOW)
            case _State.BUSY | _State.FLUSHING | _State.ENDING:
                self._look_at_reader(now)

    def _look_at_reader(self, now: float) -> None:
        """Abort the connection of a client that reads its answer too slowly, or has read all of it and does not close."""
        unsent, waited = self._unsent(), now - self._watched_at
        if not unsent and self._watched:
            # Checked once more, because data may still be between TLS and the kernel.
            self._watch(now)
            self.deadline = now + LINGER_S
        # Compared with a sum, as the deadline is computed: the difference `waited` may be rounded down.
        elif unsent and now < self._watched_at + self._limits.stall_s:
            self.deadline = now + LINGER_S
        elif unsent and self._watched - unsent >= max(1, self._limits.min_read_bytes_per_s * waited):
            self._watch(now)
        else:
            self._transport.abort()
