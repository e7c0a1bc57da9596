"""The client of the instances: answers cut at every position, connections kept, lost and used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.io.engines.connection_pool import KEEPALIVE_S, ConnectionPool
from pointsman_gateway.io.engines.engine_connection import (
    HIGH_WATER,
    Origin,
    Passthrough,
    UpstreamConnection,
    UpstreamError,
)
from tests.support.fakes.scripted_instance import WHOLE, ask, instance, whole

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
UNFRAMED = b"HTTP/1.1 200 OK\r\n\r\nhello"


@asynccontextmanager
async def pool(idle_s: float = 60.0) -> AsyncIterator[ConnectionPool]:
    one = ConnectionPool(60.0, idle_s)
    one.start()
    try:
        yield one
    finally:
        one.close()
        while one.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("framed", [WHOLE, CHUNKED, UNFRAMED], ids=["length", "chunked", "until it closes"])
async def test_an_answer_is_the_same_however_it_is_cut(framed: bytes) -> None:
    async with instance() as there, pool() as here:
        there.after = "close" if framed is UNFRAMED else "keep"
        for at in range(1, len(framed)):
            there.answers = [[b"HTTP/1.1 100 Continue\r\n\r\n", framed[:at], framed[at:]]]
            answer = await ask(there, here)
            assert (answer.status, await whole(answer)) == (200, b"hello"), at
        assert there.connections == (at if framed is UNFRAMED else 1)
        assert answer.headers.media_type == ("text/plain" if framed is WHOLE else "")
        assert there.requests[0].startswith(b"POST /path HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nX-A: b  c: d\r\nContent-Length: 4\r\n\r\nbody" in there.requests[0]


async def test_pieces_are_handed_over_as_they_come() -> None:
    async with instance() as there, pool() as here:
        there.answers = [[CHUNKED[:-11], CHUNKED[-11:]]]
        pieces: list[bytes] = []
        await (await ask(there, here)).pipe(pieces.append)
        assert b"".join(pieces) == b"hello"


async def test_a_kept_connection_that_was_closed_is_tried_again_on_a_new_one() -> None:
    async with instance() as there, pool() as here:
        there.after = "reset"
        there.answers = [[WHOLE], [], [WHOLE]]
        assert await whole(await ask(there, here)) == b"hello"
        assert await whole(await ask(there, here)) == b"hello"
        assert (there.connections, len(there.requests)) == (2, 3)
        there.answers = [[], []]
        with pytest.raises(UpstreamError, match="no answer: closed"):
            await ask(there, here)
        assert len(there.requests) == 5, "once more, not for ever"


async def test_an_instance_that_dies_with_a_request_on_a_kept_connection_broke_it() -> None:
    async with instance() as there, pool() as here:
        there.after = "die"
        there.answers = [[WHOLE], []]
        assert await whole(await ask(there, here)) == b"hello"
        with pytest.raises(UpstreamError, match="no answer: closed, then no answer: ConnectionRefusedError") as broken:
            await ask(there, here)
        assert (broken.value.broke, broken.value.sent) == (True, True)
        with pytest.raises(UpstreamError) as refused:
            await ask(there, here)
        assert (refused.value.broke, refused.value.sent) == (False, False), "this request never reached it"


async def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    async with instance() as there, pool() as here:
        there.answers = [[WHOLE]]
        await whole(await ask(there, here))
        there.after = "close"
        there.answers = [[b"HTTP/1.1 2"]]
        with pytest.raises(UpstreamError, match="broke off"):
            await ask(there, here)
        there.answers = [[WHOLE[:-1]]]
        answer = await ask(there, here)
        with pytest.raises(UpstreamError, match="broke off") as broken:
            await whole(answer)
        assert broken.value.status == 200
        there.answers = [[CHUNKED[:-2]]]
        answer = await ask(there, here)
        with pytest.raises(UpstreamError, match="broke off"):
            await answer.pipe(lambda piece: None)


@pytest.mark.parametrize(
    "odd",
    [b"\x16\x03\x01", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"200\r\n\r\n"],
)
async def test_an_answer_that_is_not_http_is_an_error(odd: bytes) -> None:
    async with instance() as there, pool() as here:
        there.answers = [[odd]]
        with pytest.raises(UpstreamError, match=r"not valid HTTP/1\.1"):
            await ask(there, here)


async def test_an_answer_too_many_costs_the_connection_and_answers_nobody() -> None:
    async with instance() as there, pool() as here:
        for more in ([WHOLE + WHOLE], [WHOLE, WHOLE]):
            there.answers = [more, [WHOLE]]
            for _ in range(2):
                answer = await ask(there, here)
                assert (answer.headers["content-length"], await whole(answer)) == ("5", b"hello")


async def test_what_is_not_read_to_its_end_is_closed() -> None:
    async with instance() as there, pool() as here:
        there.answers = [[CHUNKED[:-5]]]
        answer = await ask(there, here)
        assert await answer.begun()
        answer.close()
        while here.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        there.answers = [[]]
        waiting = asyncio.create_task(ask(there, here))
        while len(there.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while here.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_nobody_who_reads_means_nothing_is_read() -> None:
    async with instance() as there, pool() as here:
        large = 20 * HIGH_WATER
        there.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % large, b"x" * large]]
        answer = await ask(there, here)
        while not answer.paused:  # noqa: ASYNC110
            await asyncio.sleep(0)
        held = len(answer.arrived)
        assert HIGH_WATER < held < 3 * HIGH_WATER
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(answer.arrived) == held
        assert len(await whole(answer)) == large


async def test_a_preamble_is_waited_out_however_long_it_is() -> None:
    async with instance() as there, pool() as here:
        size = 5 * HIGH_WATER
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
        there.answers = [
            [head % (size + 1), b"x" * size + b"y"],
            [head % size, b"x" * size],
            [head % (size + 1), b"x" * size],
        ]
        answer = await ask(there, here)
        assert await answer.begun(lambda arrived: b"y" not in arrived)
        assert len(answer.arrived) == size + 1
        assert not await (await ask(there, here)).begun(lambda arrived: True)
        there.after = "close"
        with pytest.raises(UpstreamError, match="broke off"):
            await (await ask(there, here)).begun(lambda arrived: True)


async def test_silence_within_an_answer_ends_it_unless_we_do_not_listen() -> None:
    async with instance() as there, pool(idle_s=60.0) as here:
        there.answers = [[WHOLE[:-1]]]
        answer = await ask(there, here)
        answer.pause()
        for now in (0.0, 1e9, 2e9):
            here.sweep(now)
        answer.resume()
        (connection,) = here.connections
        here.sweep(connection.heard_at + 59)
        assert connection.answers
        assert await answer.read() == b"hell"
        here.sweep(connection.heard_at + 61)
        with pytest.raises(UpstreamError, match="went silent"):
            await answer.read()


async def test_idle_connections_are_closed_before_the_instance_would() -> None:
    async with instance() as there, pool() as here:
        there.answers = [[WHOLE], [WHOLE]]
        await whole(await ask(there, here))
        (connection,) = here.connections
        connection.since -= KEEPALIVE_S
        await whole(await ask(there, here))
        assert there.connections == 2
        connection = next(iter(here._idle.values()))[0]
        connection.since -= KEEPALIVE_S
        while here.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert here._idle == {}


async def test_looking_after_an_idle_connection_does_not_keep_it() -> None:
    async with instance() as there, pool() as here:
        there.answers = [[WHOLE]]
        await whole(await ask(there, here))
        (connection,) = here.connections
        kept = connection.since
        for after in (0.5, 1.0, KEEPALIVE_S):
            here.sweep(kept + after)
            assert any(here._idle.values())
        here.sweep(kept + KEEPALIVE_S + 0.5)
        assert not any(here._idle.values())


async def test_addresses_that_lead_nowhere_are_errors_without_an_address() -> None:
    async with pool() as here:
        for url in ("http://127.0.0.1:1", "ftp://x", "http://127.0.0.1:99999", "nonsense", "http://[::1"):
            with pytest.raises(UpstreamError, match="no answer") as error:
                await here.send("GET", url, "/", {})
            assert "127.0.0.1" not in error.value.text


class Wire(asyncio.Transport):
    """A transport for a connection that is fed by hand."""

    closed = False

    def writelines(self, list_of_data: object) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


BODIES = st.lists(
    st.binary(min_size=1, max_size=40) | st.sampled_from([b"f0", b"1\r\n", b"\r\n", b"x" * 5000]), max_size=8
)


@given(BODIES, st.lists(st.integers(1, 60), max_size=30), st.booleans(), st.booleans())
def test_chunks_offered_whole_are_those_that_were_sent(
    bodies: list[bytes], cuts: list[int], odd: bool, alone: bool
) -> None:
    """For any cuts of a chunked response, each chunk is delivered once: whole with its framing, or by the parser."""
    sizes = [b"%X;x=y" if odd else b"%x"] * len(bodies)
    chunks = [size % len(body) + b"\r\n" + body + b"\r\n" for size, body in zip(sizes, bodies, strict=True)]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [head, *chunks, b"0\r\n\r\n"]
    if not alone:
        whole, pieces = b"".join(pieces), []
        for cut in [*cuts, len(whole)]:
            pieces.append(whole[:cut])
            whole = whole[cut:]
    got = asyncio.run(_piped([piece for piece in pieces if piece], refuse=b"r"))
    assert b"".join(got) == b"".join(bodies)


async def _piped(pieces: list[bytes], refuse: bytes) -> list[bytes]:
    got: list[bytes] = []

    class Taker:
        def send(self, chunk: bytes) -> None:
            size, _, rest = chunk.partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2
            got.append(rest[:-2])

    connection = UpstreamConnection(ConnectionPool(1.0, 1.0), Origin("h", 1, tls=False))
    connection.connection_made(Wire())
    asking = asyncio.create_task(connection.exchange([b""]))
    await asyncio.sleep(0)
    while not asking.done():
        connection.data_received(pieces.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    answer = await asking
    taker: Any = Taker()
    piping = asyncio.create_task(
        answer.pipe(
            got.append, Passthrough(lambda chunk: chunk if refuse not in chunk.partition(b"\r\n")[2] else b"", taker)
        )
    )
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    await piping
    return got


async def test_ordinary_chunks_need_no_parser() -> None:
    """The low cost of a streamed token depends on this."""
    chunk = b"10\r\n" + b"x" * 16 + b"\r\n"
    connection = UpstreamConnection(ConnectionPool(1.0, 1.0), Origin("h", 1, tls=False))
    connection.connection_made(Wire())
    asking = asyncio.create_task(connection.exchange([b""]))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    taken: list[bytes] = []
    parsed: list[bytes] = []

    class Taker:
        send = taken.append

    taker: Any = Taker()
    piping = asyncio.create_task((await asking).pipe(parsed.append, Passthrough(lambda chunk: chunk, taker)))
    await asyncio.sleep(0)
    for _ in range(5):
        connection.data_received(chunk)
    connection.data_received(chunk[:3])
    connection.data_received(chunk[3:] + chunk)
    for _ in range(5):
        connection.data_received(chunk)
    connection.data_received(b"0\r\n\r\n")
    await piping
    assert (taken, parsed) == ([chunk] * 9, [b"x" * 16, b"x" * 32])


async def test_what_only_looks_like_a_chunk_is_left_to_the_parser() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    like = b"10\r\n" + b"x" * 16 + b"\r\n"
    rest = b"y" * (0x110 - 18)
    # First a chunk whose size, 0x110, is cut in two; then bytes like a chunk within another chunk.
    got = await _piped([head, b"1\r\na\r\n1", like, rest + b"\r\n", b"0\r\n\r\n"], refuse=b"r")
    assert b"".join(got) == b"a" + like[4:] + rest
    got = await _piped([head, b"1\r\na\r\n18\r\n\n", like, b"z\r\n", b"0\r\n\r\n"], refuse=b"r")
    assert b"".join(got) == b"a\n" + like + b"z"


async def test_a_broken_chunk_is_an_error_behind_chunks_that_were_passed_on() -> None:
    for broken in (b"0x1\r\nx\r\n", b"+1\r\nx\r\n", b"2\r\nx\r\n\r\n", b"1\r\nxx\r", b"zz\r\n"):
        with pytest.raises(UpstreamError, match=r"not valid HTTP/1\.1"):
            await _piped([CHUNKED[:-12], b"1\r\nx\r\n", b"1\r\nx\r\n", broken], refuse=b"r")
