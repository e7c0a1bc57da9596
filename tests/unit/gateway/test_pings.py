"""Pings of a silent stream, in virtual time, over a transport that only remembers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman_gateway.core.api import ApiRequestError, Endpoint, ErrorFormat, redact_error
from pointsman_gateway.core.http_message import Request, Response
from pointsman_gateway.core.streaming.pings import as_event, ping_in_silence
from pointsman_gateway.io.http.client_connection import ClientConnection
from pointsman_gateway.io.http.server import Server
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.unit.gateway.test_http_server import LIMITS, WHOLE, Wire

PING = b": keep-alive\n\n"
INTERVAL_S = 5.0
# More than the loop's clock is rounded by.
ROUNDED_S = 1e-6


class Handler:
    """Shows each request to the test, which says how it ends."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.requests: list[Request] = []
        self.result: asyncio.Future[Response | None] | None = None

    def admit(self, request: Request) -> Response | None:
        request.answer_fields = {"X-Request-ID": "r"}
        return None

    async def answer(self, request: Request) -> Response | None:
        self.requests.append(request)
        ping_in_silence(request, ErrorFormat.OPENAI, self.interval_s, time.monotonic())
        self.result = asyncio.get_running_loop().create_future()
        return await self.result

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        return Response(status, code.encode())


class TimedWire(Wire):
    """Notes when something was written, monotonic s."""

    def __init__(self) -> None:
        super().__init__()
        self.written_at = time.monotonic()

    def write(self, data: Any) -> None:
        super().write(data)
        self.written_at = time.monotonic()


class Source:
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Exchange:
    """One request on a connection in virtual time."""

    def __init__(self, interval_s: float = INTERVAL_S, request: bytes = WHOLE) -> None:
        self.loop = VirtualLoop()
        self._clocks = virtual_clocks(self.loop)
        self._clocks.__enter__()
        self.handler = Handler(interval_s)
        self.loop.run_until_complete(self._open(request))

    async def _open(self, request: bytes) -> None:
        self.server = Server(self.handler, LIMITS)
        self.wire = TimedWire()
        self.connection = ClientConnection(self.server)
        self.connection.connection_made(self.wire)
        self.connection.data_received(request)
        await asyncio.sleep(0)
        self.out = self.handler.requests[-1].writer

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def end(self, response: Response | None) -> None:
        assert self.handler.result is not None
        if not self.handler.result.done():
            self.handler.result.set_result(response)
        self.wait(0)

    def leave(self) -> None:
        self.wire.closed = True
        self.connection.connection_lost(None)
        self.wait(0)

    def close(self) -> None:
        if not self.wire.closed:
            self.leave()
        self.loop.end()
        self._clocks.__exit__(None, None, None)

    @property
    def head(self) -> bytes:
        return self.wire.out.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        """The body so far, without its framing."""
        rest, body = self.wire.out.partition(b"\r\n\r\n")[2], b""
        while rest:
            line, _, rest = rest.partition(b"\r\n")
            size = int(line, 16)
            body, rest = body + rest[:size], rest[size:].removeprefix(b"\r\n")
        return body


@contextmanager
def exchange(interval_s: float = INTERVAL_S, request: bytes = WHOLE) -> Iterator[Exchange]:
    made = Exchange(interval_s, request)
    try:
        yield made
    finally:
        made.close()


def test_a_silent_client_gets_a_head_and_a_ping_each_time_and_then_the_answer() -> None:
    with exchange() as up:
        up.wait(4.9)
        assert not up.wire.out
        up.wait(0.2)
        assert up.head.startswith(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Request-ID: r\r\n"
        )
        assert (up.body, up.out.opened, up.out.begun) == (PING, True, False)
        up.wait(10)
        assert up.body == PING * 3
        up.out.begin(200, {"Content-Type": "text/event-stream", "X-Late": "1"}, Source())
        assert (up.out.opened, up.out.begun) == (False, True)
        up.out.write(b"data: 1\n\n")
        assert up.body == PING * 3 + b"data: 1\n\n"
        assert b"X-Late" not in up.wire.out
        up.wait(5.1)
        up.out.write(b"data: 2\n\n")
        up.out.end()
        up.end(None)
        up.wait(60)
        assert up.body == PING * 3 + b"data: 1\n\n" + PING + b"data: 2\n\n"
        assert up.wire.out.count(b"HTTP/1.1") == 1


def test_a_head_alone_releases_no_memory_of_the_body() -> None:
    with exchange() as up:
        up.wait(6)
        assert not up.server.bodies.has_room(b"", LIMITS.max_buffered_body_bytes)
        up.out.begin(200, {}, Source())
        assert up.server.bodies.has_room(b"", LIMITS.max_buffered_body_bytes)


def test_no_ping_comes_inside_an_event_nor_to_a_client_that_does_not_read() -> None:
    with exchange() as up:
        up.out.begin(200, {}, Source())
        up.out.write(b"data: ")
        up.wait(20)
        up.out.write(b"1\n\n")
        assert up.body == b"data: 1\n\n"
        up.connection.pause_writing()
        up.wait(20)
        assert up.body == b"data: 1\n\n"
        up.connection.resume_writing()
        up.wait(5.1)
        assert up.body == b"data: 1\n\n" + PING


def test_chunks_that_pass_unparsed_count_as_bytes() -> None:
    with exchange() as up:
        up.out.begin(200, {}, Source())
        up.out.write(b"data: 1\n\n")
        for _ in range(10):
            up.wait(4)
            up.out.send(b"9\r\ndata: 2\n\n\r\n")
        assert PING not in up.wire.out


@pytest.mark.parametrize("waited", [0.0, 4.9])
def test_a_whole_answer_before_the_first_ping_is_as_ever_and_nothing_follows_it(waited: float) -> None:
    with exchange() as up:
        up.wait(waited)
        up.end(Response(503, b"no"))
        up.wait(60)
        assert up.wire.out.startswith(b"HTTP/1.1 503 ")
        assert up.wire.out.endswith(b"\r\n\r\nno")


def test_a_client_that_leaves_gets_nothing_more() -> None:
    with exchange() as up:
        up.wait(6)
        up.leave()
        up.wait(60)
        assert up.body == PING


def test_an_opened_stream_that_is_cancelled_gets_no_second_head() -> None:
    with exchange() as up:
        up.wait(6)
        up.connection.cancel()
        up.wait(0)
        assert up.wire.aborted
        assert up.body == PING


def test_without_an_interval_there_are_no_pings() -> None:
    with exchange(0.0) as up:
        up.wait(3_600)
        assert not up.wire.out


def test_a_client_of_http_1_0_gets_them_without_framing() -> None:
    with exchange(request=WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0")) as up:
        up.wait(6)
        assert b"\r\nConnection: close" in up.head
        assert b"Transfer-Encoding" not in up.head
        up.out.write(b"data: error\n\n")
        up.out.end()
        up.end(None)
        assert up.wire.out.endswith(b"\r\n\r\n" + PING + b"data: error\n\n")
        assert up.wire.closed


@pytest.mark.parametrize(
    ("endpoint", "event"),
    [
        (
            Endpoint.CHAT,
            b'data: {"error":{"message":"Too long.","type":"invalid_request_error","param":"messages","code":"long"}}\n\n',
        ),
        (
            Endpoint.MESSAGES,
            b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"Too long."}}\n\n',
        ),
        (
            Endpoint.RESPONSES,
            b'event: error\ndata: {"type":"error","code":"long","message":"Too long.","param":"messages",'
            b'"sequence_number":0}\n\n',
        ),
    ],
)
def test_an_error_becomes_the_event_of_its_api(endpoint: Endpoint, event: bytes) -> None:
    error = ApiRequestError(400, "Too long.", param="messages", code="long")
    assert as_event(Response(400, error.body(endpoint.error_format)), endpoint.error_format) == event


def test_a_code_of_an_engine_that_is_a_number_is_told_by_its_type() -> None:
    body = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
    error_event = redact_error(ErrorFormat.RESPONSES, 400, body)
    assert b'"code":"BadRequestError"' in as_event(Response(400, error_event), ErrorFormat.RESPONSES)
    assert b'"code":400}' in as_event(Response(400, error_event), ErrorFormat.OPENAI)


@pytest.mark.parametrize("code", ["\u00b2", "9" * 5_000])
def test_a_code_of_an_engine_that_is_no_status_stays_a_text(code: str) -> None:
    error = redact_error(ErrorFormat.OPENAI, 500, json.dumps({"error": {"message": "no", "code": code}}).encode())
    event = as_event(Response(500, error), ErrorFormat.OPENAI)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == code


class Streams(RuleBasedStateMachine):
    """A handler, a client and a clock act in any order.

    The client gets one head, all bytes of the answer in order, pings only between events, and none of them late; nothing after
    the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = Exchange()
        self.written = b""
        self.opened_before = False
        self.over = False
        self.quiet_since = time.monotonic()  # since when nothing forbids a ping

    @initialize(passed=st.sampled_from([0.0, 6.0]))
    def begin(self, passed: float) -> None:
        self.up.wait(passed)

    @property
    def mid_event(self) -> bool:
        return bool(self.written) and not self.written.endswith(b"\n\n")

    @rule(passed=st.sampled_from([0.0, 0.1, 4.9, 5.0, 7.5, 30.0]))
    def time_passes(self, passed: float) -> None:
        self.up.wait(passed)

    @precondition(lambda self: not self.over and not self.up.out.begun)
    @rule()
    def answer_begins(self) -> None:
        self.up.out.begin(200, {"Content-Type": "text/event-stream"}, Source())

    @precondition(lambda self: not self.over and self.up.out.begun)
    @rule()
    def another_instance_goes_on(self) -> None:
        self.up.out.go_on(Source())

    @precondition(lambda self: not self.over and self.up.out.begun)
    @rule(piece=st.sampled_from([b"data: x\n\n", b"data: x\n\ndata: y\n\n", b"data: ", b"y\n\n", b"\n\n"]))
    def piece(self, piece: bytes) -> None:
        self.up.out.write(piece)
        self.written += piece
        self.quiet_since = time.monotonic()

    @precondition(lambda self: not self.over and self.written and not self.mid_event)
    @rule()
    def unparsed(self) -> None:
        self.up.out.send(b"9\r\ndata: z\n\n\r\n")
        self.written += b"data: z\n\n"

    @precondition(lambda self: not self.over)
    @rule(full=st.booleans())
    def client_reads(self, full: bool) -> None:
        if full != self.up.connection.full:
            (self.up.connection.pause_writing if full else self.up.connection.resume_writing)()
            self.quiet_since = time.monotonic()

    @precondition(lambda self: not self.over and (self.up.out.begun or self.up.out.opened))
    @rule()
    def stream_ends(self) -> None:
        event = b"data: error\n\n" if self.up.out.opened else b"data: [DONE]\n\n"
        event = b"\n\n" + event if self.mid_event else event
        self.up.out.write(event)
        self.written += event
        self.up.out.end()
        self.up.end(None)
        self.over = True

    @precondition(lambda self: not self.over and not self.up.out.begun and not self.up.out.opened)
    @rule()
    def fails(self) -> None:
        self.up.end(Response(503, b"no"))
        assert self.up.wire.out.startswith(b"HTTP/1.1 503 ")
        self.over = True

    @precondition(lambda self: not self.over)
    @rule()
    def client_leaves(self) -> None:
        self.up.leave()
        self.over = True

    @invariant()
    def whole(self) -> None:
        out = self.up.wire.out
        assert out.count(b"HTTP/1.1 ") <= 1
        if out.startswith(b"HTTP/1.1 503 "):
            assert out.endswith(b"\r\n\r\nno")
            return
        body = self.up.body
        assert body.replace(PING, b"") == (self.written if out else b"")
        for before in body.split(PING)[:-1]:
            assert not before or before.endswith(b"\n\n")
        if not self.over and not self.mid_event and not self.up.connection.full:
            silent_since = max(self.up.wire.written_at, self.quiet_since)
            # A time at which no ping was possible counts as one, so the next one may come an interval later.
            assert time.monotonic() - silent_since <= INTERVAL_S + ROUNDED_S

    def teardown(self) -> None:
        before = self.up.wire.out
        if self.over:
            self.up.wait(60)
            assert self.up.wire.out == before
        self.up.close()


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=200, stateful_step_count=30)
