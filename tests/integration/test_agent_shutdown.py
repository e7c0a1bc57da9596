"""An agent ends soon and leaves nothing open, whatever it was doing when it was stopped."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing
import zmq
import zmq.asyncio

from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent, running
from tests.support.kv_events import store
from tests.support.waiting import eventually

# A ZeroMQ context that waits for a socket blocks the event loop, and with it every asyncio timeout.
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    with zmq.asyncio.Context() as context:
        engine = FakeEngine(context)
        await engine.start()
        yield engine
        await engine.stop()


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[zmq.asyncio.Context]:
    """The ZeroMQ contexts that agents create."""
    made: list[zmq.asyncio.Context] = []

    class Context(zmq.asyncio.Context):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("zmq.asyncio.Context", Context)
    return made


async def test_an_agent_ends_while_it_says_goodbye(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    """A goodbye that began before the agent was stopped is completed, and the agent's sockets are closed."""
    router.kept_open = asyncio.Event()
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 1, "the first process")
        engine.process_start = 2000.0
        await eventually(lambda: len(router.streams) == 2, "the second process")
        engine.process_start = 1000.0
        await eventually(lambda: router.streams[1].goodbye is not None, "goodbye")
        assert not router.streams[1].ended
    router.kept_open.set()
    await eventually(lambda: all(stream.ended for stream in router.streams), "the streams' ends")


@pytest.mark.parametrize("ends", [False, True])
async def test_an_engine_that_ends_with_its_agent_leaves_the_fleet(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, ends: bool
) -> None:
    """Otherwise a busy engine of a pod that is being stopped would stay in the fleet, since it answers."""
    async with running(engine.url, [router.address], tmp_path, ends_with_engines=ends):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "its load")
    assert router.streams[0].goodbye == ("its pod is being stopped" if ends else None)


async def test_a_process_that_left_before_its_welcome_is_said_goodbye_to(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    """Otherwise the router, which has read the hello, would regard the process as merely silent."""
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 1, "the first process")
        router.welcoming = asyncio.Event()
        engine.process_start = 2000.0
        await eventually(lambda: len(router.streams) == 2, "the second process")
        engine.process_start = 1000.0
        await eventually(lambda: router.streams[1].goodbye is not None, "goodbye")
        router.welcoming.set()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
async def test_an_agent_ends_while_it_catches_up(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, after_s: float
) -> None:
    """The agent is stopped during a replay: the publisher has received the request and does not answer."""
    assert engine._serving is not None
    engine._serving.cancel()
    agent = RunningAgent([engine.url], [router.address], tmp_path)
    await asyncio.sleep(after_s)
    await agent.stop()


async def test_an_agent_with_an_events_address_that_is_none_goes_on_and_stops(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, contexts: list[zmq.asyncio.Context]
) -> None:
    """The error's traceback keeps a reference to the socket that could not be connected."""
    with structlog.testing.capture_logs() as logs:
        too_long = "x" * 200
        agent = RunningAgent([f"{engine.url}?events=ipc:///{too_long}"], [router.address], tmp_path)
        await eventually(lambda: any(isinstance(log.get("exc_info"), zmq.ZMQError) for log in logs), "the logged error")
        assert not agent.task.done()
        await agent.stop()
    assert [context.closed for context in contexts] == [True]
    assert router.streams == []


async def test_an_agent_that_cannot_start_closes_what_it_opened(
    router: FakeRouter, tmp_path: Path, contexts: list[zmq.asyncio.Context]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        agent = RunningAgent(["http://127.0.0.1:9"], [router.address], tmp_path, metrics_listen=listen)
        with pytest.raises(OSError, match="another process listens there"):
            await agent.task
    assert [context.closed for context in contexts] == [True]


async def test_an_agent_that_is_cancelled_twice_closes_what_it_opened(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, contexts: list[zmq.asyncio.Context]
) -> None:
    router.kept_open = asyncio.Event()
    agent = RunningAgent([engine.url], [router.address], tmp_path)
    await eventually(lambda: len(router.streams) == 1, "hello")
    for _ in range(2):
        agent.task.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await agent.task
    assert [context.closed for context in contexts] == [True]
    router.kept_open.set()


async def test_an_agent_ends_though_a_router_reads_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    """Such a router still answers pings. Once its flow-control window is full, writes to it never complete."""
    router = FakeRouter(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    router.deaf = True
    await router.start()
    for first in range(0, 10_000, 200):
        await engine.publish(store(tuple(range(first, first + 200))))
    agent = RunningAgent([engine.url], [router.address], tmp_path)
    await eventually(lambda: len(router.streams) == 1, "hello")
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await agent.stop()
    assert time.monotonic() - began < 10
    await router.stop()
