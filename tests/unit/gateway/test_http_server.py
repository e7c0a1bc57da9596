"""The server's protocol, fed byte by byte over a transport that only remembers."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pointsman_common.core.addresses import Address
from pointsman_common.io.tls import server_context
from pointsman_gateway.core.http_message import Request, Response
from pointsman_gateway.io.http import client_connection, connection_limit
from pointsman_gateway.io.http.client_connection import HIGH_WATER, SMALL_BODY, ClientConnection
from pointsman_gateway.io.http.server import Server
from pointsman_gateway.io.http.server_types import ServerLimits
from tests.support.certificates import Authority
from tests.support.waiting import eventually

LIMITS = ServerLimits(max_body_bytes=100_000, max_buffered_body_bytes=150_000, max_head_bytes=2_000, max_headers=10)
HEAD = b"POST /echo?q=1 HTTP/1.1\r\nHost: h\r\n"
WHOLE = HEAD + b"Content-Length: 5\r\n\r\nhello"
# The gateway runs on uvloop, whose start_tls() differs from asyncio's.
# The first one in a process opens a pipe that stays open.
uvloop.new_event_loop().close()
EVENT_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that records what is written; the test sets how much is `unsent`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.closed = self.aborted = self.eof = False
        self.reading = True
        self.unsent = 0

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the end"
        self.out += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == HIGH_WATER


@dataclass
class Echo:
    """A site that answers with what it was sent; /stream in pieces, /hang never, /fault not at all, /refused without a body."""

    seen: list[Request] = field(default_factory=list)
    cancelled: int = 0
    source: Any = None

    def admit(self, request: Request) -> Response | None:
        request.holder = request.headers.get("x-key").encode()
        if request.surplus and request.path != "/probe":
            return Response(503, b"too many")
        return Response(404, b"no") if request.path == "/refused" else None

    async def answer(self, request: Request) -> Response | None:
        self.seen.append(request)
        if request.path == "/fault":
            raise ZeroDivisionError
        if request.path == "/stream":
            request.writer.begin(200, {"Content-Type": "text/event-stream"}, self.source)
            for piece in (b"one", b"two", request.body):
                request.writer.write(piece)
                await asyncio.sleep(0)
            request.writer.end()
            return None
        try:
            if request.path == "/hang":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Response(200, request.body, {"X-Path": request.path})

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        return Response(status, code.encode())


class Client:
    """One connection to a server that serves Echo."""

    def __init__(self, beside: Client | None = None, limits: ServerLimits = LIMITS) -> None:
        self.handler: Echo = Echo() if beside is None else beside.handler
        self.server: Server = Server(self.handler, limits) if beside is None else beside.server
        self.wire = Wire()
        self.connection = ClientConnection(self.server)
        self.connection.connection_made(self.wire)

    async def send(self, *pieces: bytes) -> bytes:
        """What comes back for all of `pieces`."""
        before = len(self.wire.out)
        for piece in pieces:
            self.connection.data_received(piece)
        for _ in range(10):
            await asyncio.sleep(0)
        return self.wire.out[before:]

    async def leave(self) -> None:
        """End the connection, and what it waits for."""
        self.connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("request_bytes", [WHOLE, CHUNKED], ids=["length", "chunked"])
async def test_a_request_is_the_same_however_it_is_cut(request_bytes: bytes) -> None:
    expected = await Client().send(request_bytes)
    assert expected.startswith(b"HTTP/1.1 200 OK\r\n")
    assert expected.endswith(b"\r\n\r\nhello")
    for at in range(1, len(request_bytes)):
        client = Client()
        assert await client.send(request_bytes[:at], request_bytes[at:]) == expected
        (seen,) = client.handler.seen
        assert (seen.method, seen.path, seen.query, seen.body) == ("POST", "/echo", "q=1", b"hello")
    one_by_one = Client()
    assert await one_by_one.send(*(request_bytes[at : at + 1] for at in range(len(request_bytes)))) == expected
    assert not one_by_one.wire.closed


async def test_a_connection_takes_request_after_request() -> None:
    client = Client()
    for _ in range(3):
        assert (await client.send(b"\r\n" + WHOLE)).endswith(b"hello")
    assert len(client.handler.seen) == 3
    assert (await client.send(b"GET http://h/abs?x HTTP/1.1\r\nHost: h\r\n\r\n")).endswith(b"\r\n\r\n")
    assert (client.handler.seen[-1].path, client.handler.seen[-1].query) == ("/abs", "x")


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b""])
async def test_a_connection_closes_when_the_client_wants_it_to(head: bytes) -> None:
    client = Client()
    version = b"1.1" if head else b"1.0"
    answer = await client.send(WHOLE.replace(b"1.1", version).replace(b"\r\n\r\n", b"\r\n" + head + b"\r\n"))
    assert b"\r\nConnection: close\r\n" in answer
    assert client.wire.closed


BAD = {
    "length and chunked": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": HEAD + b"Content-Length: -3\r\n\r\nabc",
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "obs-fold": HEAD + b"X: a\r\n b\r\n\r\n",
    "bare CR": HEAD + b"X: a\rb\r\n\r\n",
    "bare LF": b"POST / HTTP/1.1\nHost: a\n\n",
    "blank before the colon": HEAD + b"Content-Length : 3\r\n\r\nabc",
    "NUL": HEAD + b"X: a\0b\r\n\r\n",
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n",
    "gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk without size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than its size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": HEAD + b"Host: other\r\n\r\n",
    "an odd method": b"FOO / HTTP/1.1\r\nHost: h\r\n\r\n",
    "not ASCII": "GET /é HTTP/1.1\r\nHost: h\r\n\r\n".encode(),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    for pieces in ([BAD[name]], [BAD[name][at : at + 1] for at in range(len(BAD[name]))]):
        client = Client()
        answer = await client.send(*pieces, b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
        assert status_of(answer) == 400, answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert client.wire.eof
        assert client.handler.seen == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (HEAD + b"Expect: 200-maybe\r\n\r\n", 417),
        (b"GET /" + b"x" * 2_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
        (b"GET /" + b"x" * 3_000, 431),
        (HEAD + b"X: " + b"x" * 2_000 + b"\r\n\r\n", 431),
        (HEAD + b"X: " + b"x" * 3_000, 431),
        (HEAD + b"X: 1\r\n" * 20 + b"\r\n", 431),
        (HEAD + b"Content-Length: 100001\r\n\r\n", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"c350\r\n%b\r\n" % (b"x" * 50_000) * 3, 413),
    ],
)
async def test_what_is_too_much_is_refused(request_bytes: bytes, status: int) -> None:
    for pieces in ([request_bytes], [request_bytes[at : at + 997] for at in range(0, len(request_bytes), 997)]):
        client = Client()
        answer = await client.send(*pieces)
        assert status_of(answer) == status
        assert client.wire.eof
        assert client.handler.seen == []
        assert await client.send(b"x" * 100_000) == b""


async def test_what_the_site_refuses_by_its_head_costs_no_body() -> None:
    large = WHOLE.replace(b"/echo", b"/refused").replace(b"h: 5", b"h: %d" % (SMALL_BODY + 1))
    client = Client()
    assert status_of(await client.send(large)) == 404
    assert client.wire.eof
    small = Client()
    assert status_of(await small.send(WHOLE.replace(b"/echo", b"/refused"))) == 404
    assert (await small.send(WHOLE)).endswith(b"hello"), "a small body is read, and the connection stays"


async def test_a_client_that_expects_to_be_told_is_told() -> None:
    client = Client()
    head, body = WHOLE.replace(b"Host", b"Expect: 100-continue\r\nHost").split(b"\r\n\r\n")
    assert await client.send(head + b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await client.send(body)).endswith(b"hello")
    refused = Client()
    assert status_of(await refused.send(head.replace(b"/echo", b"/refused") + b"\r\n\r\n")) == 404
    assert refused.wire.eof


async def test_an_upgrade_is_answered_as_if_it_had_not_been_asked_for() -> None:
    upgrade = b"Host: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
    for asked in (WHOLE.replace(b"Host: h\r\n", upgrade), CHUNKED.replace(b"Host: h\r\n", upgrade)):
        for at in range(len(asked)):
            client = Client()
            assert (await client.send(asked[:at], asked[at:])).endswith(b"\r\n\r\nhello"), at
            assert (await client.send(WHOLE)).endswith(b"hello")
    client = Client()
    assert status_of(await client.send(b"GET /a HTTP/1.1\r\n" + upgrade + b"\r\n")) == 200


@pytest.mark.parametrize("together", [True, False])
async def test_a_request_that_does_not_wait_for_the_one_before_is_refused(together: bool) -> None:
    client = Client()
    pieces = [WHOLE + WHOLE] if together else [WHOLE, WHOLE]
    answer = await client.send(*pieces)
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert first.endswith(b"hello")
    assert second.startswith(b"400")
    assert second.endswith(b"pipelining_unsupported")
    assert client.wire.eof
    assert len(client.handler.seen) == 1


async def test_head_is_get_without_the_body() -> None:
    answer = await Client().send(b"HEAD /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc")
    assert b"\r\nContent-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_stream_is_chunked_and_the_connection_stays() -> None:
    client = Client()
    answer = await client.send(WHOLE.replace(b"/echo", b"/stream"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nhello\r\n0\r\n\r\n"
    assert (await client.send(WHOLE)).endswith(b"hello")


async def test_a_stream_to_http_1_0_ends_with_the_connection() -> None:
    client = Client()
    answer = await client.send(WHOLE.replace(b"/echo", b"/stream").replace(b"1.1", b"1.0"))
    assert answer.endswith(b"Connection: close\r\n\r\nonetwohello")
    assert client.wire.closed


@pytest.mark.parametrize("way", ["lost", "end"])
async def test_a_client_that_leaves_cancels_its_answer(way: str) -> None:
    client = Client()
    await client.send(WHOLE.replace(b"/echo", b"/hang"))
    if way == "end":
        client.connection.eof_received()
        assert client.wire.aborted
    client.connection.connection_lost(None)
    assert client.connection in client.server.connections, "its task still runs"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.handler.cancelled == 1
    assert client.server.connections == set()


@pytest.mark.parametrize("first", ["/echo", "/stream"])
async def test_a_client_that_asks_again_at_once_is_still_noticed_when_it_leaves(first: str) -> None:
    client = Client()
    loop, write_through = asyncio.get_running_loop(), client.wire.write

    def write(data: bytes) -> None:
        # The next request arrives before the event loop has run once more: a fast client, and a gateway that waits for the CPU.
        write_through(data)
        if client.wire.out.endswith((b"hello", b"0\r\n\r\n")):
            loop.call_soon(client.connection.data_received, WHOLE.replace(b"/echo", b"/hang"))

    wire: Any = client.wire
    wire.write = write
    await client.send(WHOLE.replace(b"/echo", first.encode()))
    assert [request.path for request in client.handler.seen] == [first, "/hang"]
    assert client.server.bodies.used == 5
    client.connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert client.handler.cancelled == 1
    assert client.server.bodies.used == 0
    assert client.server.connections == set()


async def test_a_fault_breaks_the_connection_off_and_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client()
    assert await client.send(WHOLE.replace(b"/echo", b"/fault")) == b""
    assert client.wire.aborted
    assert "ZeroDivisionError" in capsys.readouterr().out


async def test_a_slow_client_makes_its_source_wait_and_is_given_up_in_the_end() -> None:
    class Source:
        calls: list[str] = []  # noqa: RUF012

        def pause(self) -> None:
            self.calls.append("pause")

        def resume(self) -> None:
            self.calls.append("resume")

    client = Client()
    client.handler.source = Source()
    client.connection.data_received(WHOLE.replace(b"/echo", b"/stream"))
    await asyncio.sleep(0)
    client.connection.pause_writing()
    assert client.connection.deadline < math.inf
    client.connection.resume_writing()
    assert client.connection.deadline == math.inf
    client.connection.pause_writing()
    assert Source.calls[:3] == ["pause", "resume", "pause"]
    client.wire.unsent = HIGH_WATER
    client.connection.pause_writing()
    client.connection.overdue(client.connection.deadline + 1)
    assert client.wire.aborted
    client.connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)


# (724.1 + 300) - 724.1 is less than 300.
@pytest.mark.parametrize("now", [1000.0, 724.1])
async def test_a_client_that_reads_no_answer_is_not_read_either(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    """Otherwise unread responses would fill the memory, and each new request would extend the client's deadline."""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    client = Client()
    client.wire.unsent = 2_000_000
    client.connection.pause_writing()  # as a transport does while the answer is written
    assert status_of(await client.send(WHOLE)) == 200
    assert not client.wire.reading
    client.wire.unsent -= 400_000
    client.connection.overdue(client.connection.deadline)
    assert not client.wire.aborted, "it reads, if slowly"
    client.wire.unsent -= 200_000
    client.connection.overdue(client.connection.deadline)
    assert client.wire.aborted, "a client that reads too little is disconnected"


async def test_a_large_answer_leaves_in_pieces_and_counts_until_the_last() -> None:
    client = Client()
    body = bytes(range(256)) * 350
    whole = posting(len(body), "/echo").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body
    client.connection.pause_writing()
    client.connection.data_received(whole)
    for _ in range(5):
        await asyncio.sleep(0)
    client.handler.seen[-1].held_answer.take(len(body))
    assert client.wire.out.endswith(b"\r\n\r\n"), "the head alone"
    assert not client.wire.closed
    client.connection.data_received(b"GET / HTTP/1.1\r\n")
    client.connection.resume_writing()
    assert client.wire.out.endswith(b"\r\n\r\n" + body)
    assert client.wire.eof, "it closes when everything is sent"
    assert client.server.answers.used == 0


async def test_a_client_that_leaves_in_the_middle_of_a_large_answer_holds_none_of_it() -> None:
    client = Client()
    body = b"x" * 90_000
    client.connection.pause_writing()
    client.connection.data_received(posting(len(body), "/echo") + body)
    for _ in range(5):
        await asyncio.sleep(0)
    client.handler.seen[-1].held_answer.take(len(body))
    client.connection.connection_lost(None)
    assert client.server.answers.used == 0
    assert client.server.connections == set()


@pytest.mark.parametrize("closing", [False, True])
async def test_a_client_that_has_read_its_answer_may_go_on(closing: bool) -> None:
    client = Client()
    client.connection.pause_writing()
    await client.send(WHOLE)
    client.server.closing = closing
    client.connection.resume_writing()
    assert client.wire.reading
    assert client.wire.closed == closing
    if not closing:
        assert status_of(await client.send(WHOLE)) == 200
        assert client.wire.reading


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", 0), (b"P", 408), (HEAD, 408), (HEAD + b"Content-Length: 5\r\n\r\nhell", 408)]
)
async def test_what_does_not_come_in_time_is_not_waited_for(sent: bytes, status: int) -> None:
    client = Client()
    await client.send(sent)
    before = client.connection.deadline
    await client.send(b"\r\n" if not sent else b"")
    assert client.connection.deadline == before, "what trickles in does not move the deadline"
    client.connection.overdue(before)
    assert (status_of(client.wire.out) if client.wire.out else 0) == status
    assert client.wire.eof or client.wire.closed
    assert client.connection.deadline < math.inf
    client.connection.overdue(client.connection.deadline)
    assert client.wire.aborted


async def test_an_ended_connection_waits_for_a_client_that_still_reads() -> None:
    client = Client()
    client.wire.unsent = 1_000
    await client.send(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    given_up = time.monotonic() + LIMITS.stall_s
    while not client.wire.aborted:
        last = client.connection.deadline
        client.connection.overdue(last)
    assert given_up - 1 < last < given_up + 5, "a client that reads nothing is disconnected after stall_s"
    sent = Client()
    sent.wire.unsent = 1_000
    await sent.send(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    sent.wire.unsent = 0
    for aborted in (False, True):
        sent.connection.overdue(sent.connection.deadline)
        assert sent.wire.aborted == aborted, "everything is sent"


async def test_after_a_client_left_nothing_of_its_answer_is_written() -> None:
    for written in (False, True):
        client = Client()
        client.connection.data_received(WHOLE.replace(b"/echo", b"/hang"))
        await asyncio.sleep(0)
        out = client.handler.seen[-1].writer
        out.begin(200, {}, client.handler.source)
        if written:
            out.write(b"a piece")
        before, client.wire.closed = client.wire.out, True
        client.connection.connection_lost(None)
        out.write(b"another")
        out.send(b"1\r\nx\r\n")
        out.end()
        assert client.wire.out == before
        assert before.endswith(b"a piece\r\n" if written else b"")


async def test_a_closing_server_ends_idle_connections_and_lets_answers_end() -> None:
    idle, busy = Client(), Client()
    busy.server.connections.add(idle.connection)
    idle.connection.server = busy.server
    busy.connection.data_received(WHOLE.replace(b"/echo", b"/stream"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(busy.server.close(60.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert idle.wire.closed
    assert busy.wire.out.endswith(b"0\r\n\r\n")
    assert busy.wire.closed
    for client in (idle, busy):
        client.connection.connection_lost(None)
    await closing


def posting(size: int, path: str = "/hang") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n".encode()


def chunks_of(size: int) -> bytes:
    return b"POST /hang HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size


async def test_connections_are_bounded_and_probes_are_still_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "SURPLUS", 2)
    first = Client(limits=replace(LIMITS, max_connections=3))
    within = [first, Client(first), Client(first)]
    assert [status_of(await client.send(WHOLE)) for client in within] == [200] * 3
    assert not any(client.wire.closed for client in within)
    refused, probe = Client(first), Client(first)
    assert not refused.wire.closed
    answer = await refused.send(WHOLE)
    assert status_of(answer) == 503
    assert b"Connection: close" in answer
    assert refused.wire.closed
    answer = await probe.send(WHOLE.replace(b"/echo", b"/probe"))
    assert status_of(answer) == 200
    assert b"Connection: close" in answer
    assert probe.wire.closed
    # Both count until they are gone, and no more than SURPLUS of them are kept.
    too_many = Client(first)
    assert too_many.wire.closed
    assert not too_many.wire.out
    assert not within[0].wire.closed
    for client in (refused, probe, too_many, within[2]):
        client.connection.connection_lost(None)
    assert len(first.server.connections) == 2
    later = Client(first)
    assert status_of(await later.send(WHOLE)) == status_of(await later.send(WHOLE)) == 200
    assert not later.wire.closed


async def test_a_connection_beyond_the_bound_that_sends_nothing_is_soon_closed() -> None:
    first = Client(limits=replace(LIMITS, max_connections=1))
    surplus = Client(first)
    assert surplus.connection.deadline < first.connection.deadline
    surplus.connection.overdue(surplus.connection.deadline)
    assert surplus.wire.closed
    slow = Client(first)
    assert await slow.send(posting(60_000)) == b""
    assert slow.connection.deadline - time.monotonic() <= client_connection.LINGER_S


async def test_the_longest_idle_connection_gives_way_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "GIVES_WAY_AFTER_S", 0.0)
    first = Client(limits=replace(LIMITS, max_connections=3))
    streaming, silent = Client(first), Client(first)
    assert await streaming.send(WHOLE.replace(b"/echo", b"/hang")) == b""
    assert status_of(await first.send(WHOLE)) == 200
    # `silent` has waited since it came, `first` since its answer.
    newcomers = [Client(first), Client(first)]
    assert (silent.wire.aborted, first.wire.aborted, streaming.wire.closed) == (True, True, False)
    assert [status_of(await client.send(WHOLE)) for client in newcomers] == [200, 200]
    for client in (silent, first):
        client.connection.connection_lost(None)
    assert not any(client.wire.closed for client in (streaming, *newcomers))
    # A request that is on its way is not given up, and one more connection is beyond the bound.
    for client in newcomers:
        assert await client.send(WHOLE[:20]) == b""
    assert status_of(await Client(first).send(WHOLE)) == 503
    assert not any(client.wire.closed for client in (streaming, *newcomers))
    await streaming.leave()


async def test_a_connection_that_has_just_come_does_not_give_way() -> None:
    first = Client(limits=replace(LIMITS, max_connections=1))
    assert status_of(await Client(first).send(WHOLE)) == 503
    assert status_of(await first.send(WHOLE)) == 200


@pytest.mark.parametrize("begun", [b"", WHOLE[:20], posting(60_000)], ids=["nothing", "half a head", "no body"])
async def test_silent_connections_beyond_the_bound_do_not_keep_probes_out(begun: bytes) -> None:
    first = Client(limits=replace(LIMITS, max_connections=1))
    assert await first.send(WHOLE.replace(b"/echo", b"/hang")) == b""
    silent = [Client(first) for _ in range(connection_limit.SURPLUS)]
    for client in silent:
        assert await client.send(begun) == b""
    probe = Client(first)
    assert silent[0].wire.aborted
    assert not any(client.wire.closed for client in silent[1:])
    assert status_of(await probe.send(WHOLE.replace(b"/echo", b"/probe"))) == 200
    assert not first.wire.closed
    await first.leave()


async def test_all_bodies_together_are_bounded() -> None:
    """The received bytes count, not the announced ones: a client that announces a large body and sends nothing takes no room."""
    one = Client()
    assert await one.send(posting(90_000), b"x" * 80_000) == b""
    other = Client(one)
    refused = await other.send(posting(90_000))
    assert status_of(refused) == 503
    assert refused.endswith(b"no_room")
    small = Client(one)
    assert status_of(await small.send(WHOLE)) == 200
    unframed = Client(one)
    assert await unframed.send(chunks_of(90_000), b"x" * 69_000) == b""
    assert one.server.bodies.used == 149_000
    assert status_of(await unframed.send(b"x" * 2_000)) == 503
    assert one.server.bodies.used == 80_000
    await one.send(b"x" * 10_000)
    assert len(one.handler.seen[-1].body) == one.server.bodies.used == 90_000
    one.connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert one.server.bodies.used == 0
    assert status_of(await Client(one).send(posting(90_000, "/echo"), b"x" * 90_000)) == 200
    assert one.server.bodies.used == 0


async def test_one_clients_bodies_leave_room_for_the_others() -> None:
    def uploading(size: int, key: str) -> bytes:
        return posting(size).replace(b"Host: h", f"Host: h\r\nX-Key: {key}".encode())

    first = Client()
    answers = [await first.send(uploading(70_000, "a"), b"x" * 39_000)]
    answers += [await Client(first).send(uploading(70_000, "a"), b"x" * 39_000) for _ in range(5)]
    assert [status_of(answer) if answer else 0 for answer in answers] == [0, 0, 503, 503, 503, 503]
    assert first.server.bodies.used == 78_000
    other = Client(first)
    assert await other.send(uploading(60_000, "b"), b"x" * 59_999) == b"", "another client finds room"
    assert status_of(await Client(first).send(uploading(70_000, "c"), b"x" * 39_000)) == 503, "the limit of all clients"
    for connection in list(first.server.connections):
        connection.connection_lost(None)
    assert first.server.bodies.used == 0
    assert status_of(await Client(first).send(uploading(90_000, "a").replace(b"/hang", b"/echo"), b"x" * 90_000)) == 200


async def test_a_body_that_stops_coming_is_not_waited_for_as_long_as_one_that_comes() -> None:
    client = Client()
    await client.send(posting(90_000), b"x" * 1_000)
    stalled = client.connection.deadline
    assert stalled - time.monotonic() <= LIMITS.body_stall_s
    await client.send(b"x")
    assert stalled < client.connection.deadline
    client.connection.overdue(client.connection.deadline)
    assert status_of(client.wire.out) == 408


async def test_a_body_is_held_until_its_answer_begins() -> None:
    client = Client()
    client.connection.data_received(posting(90_000, "/stream"))
    client.connection.data_received(b"x" * 90_000)
    assert client.server.bodies.used == 90_000
    while not client.wire.out:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert client.server.bodies.used == 0
    assert (await client.send()).endswith(b"\r\n0\r\n\r\n")
    left = Client(client)
    left.connection.data_received(posting(90_000) + b"x" * 1000)
    left.connection.connection_lost(None)
    assert client.server.bodies.used == 0


async def test_a_tls_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    signed = Authority(tmp_path / "authority").sign("gateway")
    server = Server(Echo(), replace(LIMITS, head_s=0.1))
    tls = server_context(signed.cert, signed.key, None, ["http/1.1"])
    _, port = await server.start(Address("127.0.0.1", 0), tls=tls)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30.0):
        assert await reader.read() == b"", "it took the 60 s that a handshake has by default"
    writer.close()
    await server.close(0.0)


async def _tls_server(folder: Path, limits: ServerLimits) -> tuple[Server, int, ssl.SSLContext]:
    authority = Authority(folder / "authority")
    signed = authority.sign("gateway")
    server = Server(Echo(), limits)
    _, port = await server.start(
        Address("127.0.0.1", 0), tls=server_context(signed.cert, signed.key, None, ["http/1.1"])
    )
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    return server, port, trusting


@EVENT_LOOPS
def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(tmp_path: Path, run: Any) -> None:
    run(_requests_with_the_handshake(tmp_path))


async def _requests_with_the_handshake(folder: Path) -> None:
    server, port, trusting = await _tls_server(folder, LIMITS)
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        for _ in range(2):
            writer.write(WHOLE)
            assert b"200 OK" in await reader.readuntil(b"hello")
        writer.close()
    await server.close(0.0)


@EVENT_LOOPS
def test_tls_handshakes_count_as_connections_and_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    run(_silent_handshakes(tmp_path, monkeypatch))


async def _silent_handshakes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "SURPLUS", 1)
    server, port, trusting = await _tls_server(folder, replace(LIMITS, max_connections=2))
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    await eventually(lambda: server.limit.open == 3)
    # All three are younger than what gives way, but for the one beyond the bound.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    writer.write(WHOLE)
    assert b"503 " in await reader.readuntil(b"too many")
    assert await silent[2][0].read() == b""
    monkeypatch.setattr(connection_limit, "GIVES_WAY_AFTER_S", 0.0)
    reader, other = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    other.write(WHOLE)
    assert b"200 OK" in await reader.readuntil(b"hello")
    assert await silent[0][0].read() == b""
    await server.close(0.0)
    assert await silent[1][0].read() == b""
    for _, opened in (*silent, (reader, writer), (reader, other)):
        opened.close()
