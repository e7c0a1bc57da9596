"""Loads that an engine pushes at its steps reach the routers, and keep a busy engine healthy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from pointsman_agent.core.step_load import StepLoad
from pointsman_agent.io import engine_monitor
from pointsman_connector import step_load
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent, running
from tests.support.waiting import eventually


@asynccontextmanager
async def pushing(context: zmq.asyncio.Context, address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    yield socket
    socket.close(linger=0)


def load(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"run": "7f", "rank": 0, "running": 7, "waiting": 2, "kv_usage": 0.5}
    fields["prefill_tokens_left"] = 400
    totals = step_load.StepTotals(steps=3, seconds=0.75, prefill_tokens=5_000, prefill_pairs=25_000_000)
    return msgspec.msgpack.encode(step_load.StepLoad(totals=totals, **fields | changes))


def test_engine_and_agent_mean_the_same() -> None:
    """The connector package and the agent share no code, only these field names."""
    seen = msgspec.msgpack.decode(load(), type=StepLoad)
    assert msgspec.to_builtins(seen) == msgspec.msgpack.decode(load())
    wire = seen.to_wire(None)
    assert (wire.running, wire.waiting, wire.kv_usage, wire.prefill_tokens_left) == (7, 2, 0.5, 400)
    assert (wire.steps.steps, wire.steps.seconds, wire.steps.prefill_tokens) == (3, 0.75, 5_000)


NESTED = b"\x81\xa1x" + b"\x91" * 3_000 + b"\xc0"
LARGE = msgspec.msgpack.encode(msgspec.msgpack.decode(load(running=8)) | {"more": b"\0" * 1_000_000})


@pytest.mark.parametrize(
    "message",
    [load(running=-1), load(waiting=1 << 40), load(prefill_tokens_left=-5), load(kv_usage=float("inf")), NESTED, LARGE],
    ids=["negative", "beyond 32 bits", "negative tokens", "infinite", "nested", "large"],
)
async def test_one_message_does_not_end_the_agent(
    context: zmq.asyncio.Context, engine: FakeEngine, router: FakeRouter, tmp_path: Path, message: bytes
) -> None:
    engine.engine = {"run": "7f"}
    address = f"ipc://{tmp_path}/loads"
    async with (
        running(engine.url, [router.address], tmp_path, step_loads_listen=address, scrape_interval_s=60.0) as agent,
        pushing(context, address) as push,
    ):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "the scraped load")
        await push.send(message)

        async def step() -> bool:
            # A connection that was closed after a large message takes the messages that were under way with it.
            await push.send(load(running=9))
            return agent.task.done() or router.streams[0].loads[-1].running == 9

        await eventually(step, "a later load")
        assert not agent.task.done()
        assert {load.running for load in router.streams[0].loads} == {0, 9}


@pytest.mark.parametrize("process_start", [1000.0, None], ids=["one API server", "several API servers"])
async def test_pushed_loads_reach_the_router(
    context: zmq.asyncio.Context, engine: FakeEngine, router: FakeRouter, tmp_path: Path, process_start: float | None
) -> None:
    engine.process_start = process_start
    engine.engine = {"run": "7f"}
    address = f"ipc://{tmp_path}/loads"
    # The only scrape is at the start; later loads were pushed.
    async with (
        running(engine.url, [router.address], tmp_path, step_loads_listen=address, scrape_interval_s=60.0),
        pushing(context, address) as push,
    ):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "the scraped load")
        assert router.streams[0].loads[-1].running == 0
        for message in (b"\xc1", load(run="80", running=1), load(run="", running=1), load(rank=3, running=1), load()):
            await push.send(message)
        await eventually(lambda: router.streams[0].loads[-1].running == 7, "the pushed load")
        seen = router.streams[0].loads[-1]
        assert (seen.waiting, seen.kv_usage, seen.prefill_tokens_left, seen.steps.steps) == (2, 0.5, 400, 3)
        assert seen.generation_tokens == 100, "what /metrics has said"
        assert all(load.running in (0, 7) for load in router.streams[0].loads), "no load of other engines or ranks"
    assert router.problems == []


async def test_loads_of_engines_that_cannot_be_told_apart_are_dropped(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """Two addresses of one engine, and one of another engine."""
    engines, router = [FakeEngine(context) for _ in range(3)], FakeRouter()
    for engine, run in zip(engines, ("7f", "7f", "80"), strict=True):
        engine.engine = {"run": run}
        await engine.start()
    await router.start()
    address = f"ipc://{tmp_path}/loads"
    settings = {"step_loads_listen": address, "scrape_interval_s": 60.0}
    agent = RunningAgent([engine.url for engine in engines], [router.address], tmp_path, **settings)

    def running_of(engine: FakeEngine) -> list[int]:
        (stream,) = (stream for stream in router.streams if stream.hello.instance.url == engine.url)
        return [load.running for load in stream.loads]

    async with pushing(context, address) as push:
        await eventually(
            lambda: len(router.streams) == 3 and all(stream.loads for stream in router.streams), "all scraped loads"
        )
        await push.send(load(running=1))
        await push.send(load(run="80", running=2))
        await eventually(lambda: running_of(engines[2])[-1] == 2, "the pushed load")
        assert {1, 2}.isdisjoint(running_of(engines[0]) + running_of(engines[1]))
    await agent.stop()
    for engine in engines:
        await engine.stop()
    await router.stop()


async def test_a_scrape_does_not_replace_a_newer_step(
    context: zmq.asyncio.Context, engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    engine.engine = {"run": "7f"}
    address = f"ipc://{tmp_path}/loads"
    async with (
        running(engine.url, [router.address], tmp_path, step_loads_listen=address) as agent,
        pushing(context, address) as push,
    ):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "a load")
        await push.send(load())
        await eventually(lambda: router.streams[0].loads[-1].running == 7, "the pushed load")
        engine.generation_tokens = 200
        await eventually(lambda: router.streams[0].loads[-1].generation_tokens == 200, "a scrape after it")
        assert (router.streams[0].loads[-1].running, router.streams[0].loads[-1].steps.steps) == (7, 3)
        await eventually(lambda: router.streams[0].loads[-1].running == 0, "that the steps have ended")
        assert not router.streams[0].loads[-1].HasField("steps")
        assert not agent.task.done()


async def test_limits_and_hardware_need_no_setting(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    """What the engine announces is reported, except for what a setting says."""
    engine.engine = {
        "device": "NVIDIA H200",
        "tensor_parallel_size": "2",
        "max_num_batched_tokens": "8192",
        "long_prefill_token_threshold": "4096",
    }
    async with running(engine.url, [router.address], tmp_path / "a"):
        await eventually(lambda: bool(router.streams), "a stream")
        seen = router.streams[0].hello.instance
        assert (seen.hardware, seen.long_prefill_token_threshold) == ("2x-nvidia-h200", 4_096)
    options = "?hardware=fast&long-prefill-token-threshold=512"
    async with running(engine.url + options, [router.address], tmp_path / "b"):
        await eventually(lambda: len(router.streams) == 2, "another stream")
        seen = router.streams[1].hello.instance
        assert (seen.hardware, seen.long_prefill_token_threshold) == ("fast", 512)


async def test_step_loads_that_end_while_the_engine_generates_are_told(
    context: zmq.asyncio.Context,
    engine: FakeEngine,
    router: FakeRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when vLLM's front end loads no stat loggers."""
    monkeypatch.setattr(engine_monitor, "STEP_LOADS_ENDED_S", 0.3)
    monkeypatch.setattr(engine_monitor, "STEP_LOAD_COUNTS_S", 0.1)
    engine.engine = {"run": "7f"}
    address = f"ipc://{tmp_path}/loads"
    async with running(engine.url, [router.address], tmp_path, step_loads_listen=address):
        await eventually(lambda: bool(router.streams and router.streams[0].loads), "a load")
        loads = router.streams[0].loads
        async with pushing(context, address) as push:
            await push.send(load())
            await eventually(lambda: loads[-1].running == 7, "a pushed load")
            assert "kv_usage" not in loads[-1].unknown
        await eventually(lambda: loads[-1].running == 0, "a load from /metrics")
        assert not any(sent.problem for sent in loads), "an idle engine has no steps"

        def router_knows() -> bool:
            engine.generation_tokens += 1
            return bool(loads[-1].problem)

        await eventually(router_knows, "that the step loads have ended")
        assert loads[-1].problem == "the engine's step loads have ended: its load is read from /metrics"
        assert loads[-1].healthy


async def test_an_engine_that_steps_is_healthy_though_its_metrics_fail(
    context: zmq.asyncio.Context, engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    engine.engine = {"run": "7f"}
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
            assert all(load.healthy for load in router.streams[0].loads)
            steps.cancel()
        await engine.stop()
        await eventually(lambda: not router.streams[0].loads[-1].healthy, "that it is not, when nothing answers")
        assert not agent.task.done()
