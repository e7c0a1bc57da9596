"""Connections that are silent fail if their peer refuses new connections, and only then."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.dead_connections import (
    PROBE_EVERY_S,
    REFUSALS,
    REPROBE_S,
    SILENT_S,
    DeadConnectionDetector,
    Peer,
    Probe,
)
from pointsman_gateway.io.engines import connection_pool
from pointsman_gateway.io.engines.connection_pool import ConnectionPool, probe
from pointsman_gateway.io.engines.engine_connection import UpstreamError, UpstreamResponse
from tests.support.fakes.scripted_instance import WHOLE, Instance, ask, instance, whole

A, B = ("10.0.0.1", 8000), ("10.0.0.2", 8000)


def test_two_refusals_a_second_apart_and_nothing_less() -> None:
    silence = DeadConnectionDetector()
    assert silence.due([A], 0.0) == [A]
    assert silence.due([A], 100.0) == [], "one question at a time"
    silence.probed(A, Probe.REFUSED, 100.0)
    assert not silence.is_dead(A)
    assert silence.due([A], 100.0 + REPROBE_S - 0.1) == []
    assert silence.due([A], 100.0 + REPROBE_S) == [A]
    silence.probed(A, Probe.REFUSED, 102.0)
    assert silence.is_dead(A)
    assert not silence.is_dead(B)


def test_a_refusal_does_not_count_once_somebody_accepted_or_spoke() -> None:
    silence = DeadConnectionDetector()
    for at, result in enumerate((Probe.REFUSED, Probe.ACCEPTED, Probe.REFUSED)):
        assert silence.due([A, B], at * 10.0) == [A, B]
        silence.probed(A, result, at * 10.0)
        silence.probed(B, Probe.REFUSED, at * 10.0)
    assert (silence.is_dead(A), silence.is_dead(B)) == (False, True)
    assert silence.due([A], 30.0) == [A]
    silence.probed(A, Probe.ACCEPTED, 30.0)
    assert silence.due([A], 30.0 + PROBE_EVERY_S - 0.1) == []
    assert not silence.is_dead(B)
    silence.due([], 60.0)
    assert silence._known == {}


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from([A, B])),
            st.sampled_from([0.25, 0.5, 1.0, 2.5]),
            st.lists(st.sampled_from(Probe), max_size=2),
            st.sets(st.sampled_from([A, B])),
        ),
        max_size=40,
    )
)
def test_in_any_order_of_events(looks: list[tuple[set[Peer], float, list[Probe], set[Peer]]]) -> None:
    """A peer is dead only after REFUSALS refused probes in a row, at least REPROBE_S apart, and if a connection to the peer was
    silent at every check in between. If its agent was lost meanwhile, unanswered probes count, too."""
    silence, now = DeadConnectionDetector(), 0.0
    open_: list[Peer] = []
    asked: dict[Peer, float] = {}
    refused: dict[Peer, int] = {A: 0, B: 0}
    failed: dict[Peer, int] = {A: 0, B: 0}
    lost: set[Peer] = set()
    for silent, after, answers, gone in looks:
        now += after
        refused = {peer: count if peer in silent else 0 for peer, count in refused.items()}
        failed = {peer: count if peer in silent else 0 for peer, count in failed.items()}
        lost &= silent
        for peer in silence.due(sorted(silent), now):
            assert peer in silent
            assert peer not in open_
            assert now - asked.get(peer, -100.0) >= REPROBE_S
            asked[peer] = now
            open_.append(peer)
        for answer in answers:
            if open_:
                peer = open_.pop(0)
                refused[peer] = refused[peer] + 1 if answer is Probe.REFUSED else 0
                failed[peer] = failed[peer] + 1 if answer is not Probe.ACCEPTED else 0
                silence.probed(peer, answer, now)
                lost -= {peer} if answer is Probe.ACCEPTED else set()
        for peer in gone:
            silence.lost(peer)
        lost |= gone & silent
        for peer in (A, B):
            assert silence.is_dead(peer) is ((failed if peer in lost else refused)[peer] >= REFUSALS)


@asynccontextmanager
async def pool() -> AsyncIterator[ConnectionPool]:
    """A connection pool that checks its connections only when the test calls `sweep`."""
    one = ConnectionPool(60.0, 1e12)
    try:
        yield one
    finally:
        one.close()
        while one.connections or one._probing:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def look(here: ConnectionPool, at: float) -> int:
    """Check the connections at time `at`, far in the future, and wait for all probes; return the number of probes."""
    here.sweep(at)
    asked = len(here._probing)
    while here._probing:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return asked


async def begun(there: Instance, here: ConnectionPool, *answers: list[bytes]) -> list[asyncio.Task[UpstreamResponse]]:
    """Send one request for each of `answers`, which the instance does not continue."""
    there.answers = list(answers)
    asking = [asyncio.create_task(ask(there, here)) for _ in answers]
    while len(there.requests) < len(answers):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return asking


async def test_what_is_due_is_given_up_where_nobody_listens_any_more() -> None:
    """A stream that had begun, and a request without a byte of its answer."""
    async with instance() as there, pool() as here:
        stream, before = await begun(there, here, [WHOLE[:-1]], [])
        answer = await stream
        assert await answer.read() == b"hell"
        there.server.close()
        asked = max(connection.heard_at for connection in here.connections)
        assert await look(here, asked + SILENT_S - 0.5) == 0
        assert await look(here, 2e9) == 1
        assert not before.done()
        assert await look(here, 3e9) == 1
        here.sweep(4e9)
        with pytest.raises(UpstreamError, match=r"^went silent, and nobody listens there any more$") as broken:
            await answer.read()
        assert broken.value.status == 200
        with pytest.raises(UpstreamError, match=r"^no answer: went silent, and nobody") as failed:
            await before
        assert (failed.value.status, failed.value.sent) == (0, True)
        while here.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await look(here, 5e9) == 0


async def test_what_listens_may_be_silent_and_is_asked_once_for_all_streams() -> None:
    async with instance() as there, pool() as here:
        there.hold = asyncio.Event()
        asking = await begun(there, here, *([[WHOLE]] * 20))
        for at in range(2, 7):
            assert await look(here, at * 1e9) == 1
        while there.connections < 25:  # noqa: ASYNC110 - the questions are connections, too
            await asyncio.sleep(0)
        there.hold.set()
        for request in asking:
            assert await whole(await request) == b"hello"


async def test_a_stream_that_goes_on_outlives_its_port() -> None:
    """An engine that shuts down closes its port first, and then ends its responses."""
    async with instance() as there, pool() as here:
        there.hold = asyncio.Event()
        (stream,) = await begun(there, here, [WHOLE[:-1], WHOLE[-1:]])
        answer = await stream
        there.server.close()
        assert [await look(here, at * 1e9) for at in (2, 3)] == [1, 1]
        there.hold.set()
        assert await whole(answer) == b"hello"
        here.sweep(4e9)


async def test_we_who_do_not_read_ask_nobody() -> None:
    async with instance() as there, pool() as here:
        (stream,) = await begun(there, here, [WHOLE[:-1]])
        answer = await stream
        answer.pause()
        there.server.close()
        assert [await look(here, at * 1e9) for at in range(1, 5)] == [0] * 4
        answer.resume()
        assert await answer.read() == b"hell"
        assert [await look(here, at * 1e9) for at in (6, 7, 8)] == [1, 1, 0]


async def test_a_question_without_an_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with instance() as there, pool() as here:
        loop = asyncio.get_running_loop()

        async def slow(sock: socket.socket, address: Peer) -> None:
            await asyncio.sleep(60)

        async def unreachable(sock: socket.socket, address: Peer) -> None:
            raise OSError(113, "No route to host")

        peer = there.server.sockets[0].getsockname()
        assert await probe(peer) is Probe.ACCEPTED
        (waiting,) = await begun(there, here, [])
        with monkeypatch.context() as patch:
            patch.setattr(connection_pool, "PROBE_TIMEOUT_S", 0.01)
            for connect in (slow, unreachable):
                patch.setattr(loop, "sock_connect", connect)
                assert await probe(peer) is Probe.UNANSWERED
            # A pool that is closed meanwhile waits for nobody.
            patch.setattr(connection_pool, "PROBE_TIMEOUT_S", 60.0)
            patch.setattr(loop, "sock_connect", slow)
            here.sweep(1e9)
            here.sweep(2e9)
            assert len(here._probing) == 1
            here.close()
            with pytest.raises(UpstreamError):
                await waiting
        there.server.close()
        assert await probe(peer) is Probe.REFUSED


async def test_a_machine_that_is_gone_fails_its_streams_once_the_router_has_lost_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with instance() as there, pool() as here:

        async def unreachable(sock: socket.socket, address: Peer) -> None:
            raise OSError(113, "No route to host")

        (stream,) = await begun(there, here, [WHOLE[:-1]])
        answer = await stream
        assert await answer.read() == b"hell"
        here.lost(there.url)  # It is not silent: this says nothing.
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "sock_connect", unreachable)
            here.sweep(1e9)
            for at in range(2, 6):
                await look(here, at * 1e9)
            assert here.connections
            here.lost(there.url)
            here.sweep(6e9)
        with pytest.raises(UpstreamError, match=r"^went silent, and nobody listens there any more$"):
            await answer.read()


async def test_an_instance_is_asked_by_ipv6_too() -> None:
    try:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    peer = server.sockets[0].getsockname()
    assert await probe(peer) is Probe.ACCEPTED
    server.close()
    assert await probe(peer) is Probe.REFUSED
