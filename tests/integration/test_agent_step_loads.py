"""Loads that an engine pushes after each step reach the routers, and keep a busy engine healthy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from pointsman.agent.core.step_load import StepLoad
from pointsman_connector import step_load
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent, running
from tests.support.waiting import eventually


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@asynccontextmanager
async def pushing(context: zmq.asyncio.Context, address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    yield socket
    socket.close(linger=0)


def load(**changes: Any) -> bytes:
    counters = step_load.Counters(generation_tokens=5_000, prefix_cache_hits=64, connector={"bytes_transferred": 1.0})
    fields: dict[str, Any] = {"process": 1000.0, "ports": [], "rank": 0, "running": 7, "waiting": 2, "kv_usage": 0.5}
    return msgspec.msgpack.encode(step_load.StepLoad(counters=counters, **fields | changes))


def test_engine_and_agent_mean_the_same() -> None:
    """The connector package and the agent share no code, only these field names."""
    seen = msgspec.msgpack.decode(load(ports=[8000]), type=StepLoad)
    assert (seen.process, seen.ports, seen.rank, seen.running, seen.waiting, seen.kv_usage) == (
        1000.0,
        [8000],
        0,
        7,
        2,
        0.5,
    )
    assert (seen.counters.generation_tokens, seen.counters.prefix_cache_hits) == (5_000, 64)


async def test_pushed_loads_reach_the_router(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    engine, router = FakeEngine(context), FakeRouter()
    await engine.start()
    await router.start()
    address = f"ipc://{tmp_path}/loads"
    # The only scrape is at the start; later loads were pushed.
    async with (
        running(engine.url, [router.address], tmp_path, step_loads_listen=address, scrape_interval_s=60.0),
        pushing(context, address) as push,
    ):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "the scraped load")
        assert router.streams[0].loads[-1].running == 0
        for message in (b"\xc1", load(process=999.0, running=1), load(rank=3, running=1), load()):
            await push.send(message)
        await eventually(lambda: router.streams[0].loads[-1].running == 7, "the pushed load")
        seen = router.streams[0].loads[-1]
        assert (seen.waiting, seen.kv_usage, seen.generation_tokens, seen.prefix_cache_hits) == (2, 0.5, 5_000, 64)
        assert all(one.running in (0, 7) for one in router.streams[0].loads), "no load of other processes or ranks"
    await engine.stop()
    await router.stop()
    assert router.problems == []


async def test_engines_that_started_at_the_same_moment_are_told_apart_by_their_ports(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """Process starts are known to a hundredth of a second. Engines that cannot be told apart are only scraped."""
    engines, router = [FakeEngine(context), FakeEngine(context)], FakeRouter()
    for engine in engines:
        await engine.start()
    await router.start()
    address = f"ipc://{tmp_path}/loads"
    settings = {"step_loads_listen": address, "scrape_interval_s": 60.0}
    agent = RunningAgent([engine.url for engine in engines], [router.address], tmp_path, **settings)

    def running_of(engine: FakeEngine) -> list[int]:
        (stream,) = (one for one in router.streams if one.hello.instance.url == engine.url)
        return [one.running for one in stream.loads]

    async with pushing(context, address) as push:
        await eventually(
            lambda: len(router.streams) == 2 and all(one.loads for one in router.streams), "both scraped loads"
        )
        for running, ports in ((1, []), (2, [1]), (3, [one.port for one in engines]), (4, [1, engines[1].port])):
            await push.send(load(running=running, ports=ports))
        await push.send(load(running=5, ports=[engines[0].port]))
        await eventually(lambda: running_of(engines[0])[-1] == 5, "the pushed load")
        assert running_of(engines[1])[-1] == 4
        assert {1, 2, 3}.isdisjoint(running_of(engines[0]) + running_of(engines[1]))
    await agent.stop()
    for engine in engines:
        await engine.stop()
    await router.stop()


async def test_an_engine_that_steps_is_healthy_though_its_metrics_fail(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    engine, router = FakeEngine(context), FakeRouter()
    await engine.start()
    await router.start()
    address = f"ipc://{tmp_path}/loads"

    async def step(push: zmq.asyncio.Socket) -> None:
        while True:
            await push.send(load())
            await asyncio.sleep(0.02)

    async with running(engine.url, [router.address], tmp_path, step_loads_listen=address) as agent:
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "a load")
        async with pushing(context, address) as push:
            steps = asyncio.create_task(step(push))
            await eventually(lambda: router.streams[0].loads[-1].running == 7, "a pushed load")
            engine.metrics_broken = True
            count = len(router.streams[0].loads)
            await eventually(lambda: len(router.streams[0].loads) > count + 20, "many more loads")
            assert all(one.healthy for one in router.streams[0].loads)
            steps.cancel()
        await eventually(lambda: not router.streams[0].loads[-1].healthy, "that it is not, without steps")
        assert not agent.task.done()
    await engine.stop()
    await router.stop()
