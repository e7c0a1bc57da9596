"""Whatever one engine answers, the agent goes on with the others, and with this one as soon as it answers as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent, Stream
from tests.support.waiting import eventually

ODD_LINES = (
    'vllm:num_requests_waiting{engine="0"} +Inf',
    'vllm:num_requests_waiting{engine="0"} -1',
    'vllm:generation_tokens_total{engine="0"} NaN',
    'vllm:generation_tokens_total{engine="0"} 1e300',
    'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} +Inf',
    'pointsman_kv_wrong_requests_total{sender="http://a:8998"} +Inf',
    'pointsman_kv_wrong_requests_total{sender="http://a:8998"} -1',
)


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    context = zmq.asyncio.Context()
    odd, other = FakeEngine(context), FakeEngine(context)
    odd.announced = {"connector": "LayerwiseMooncakeConnector", "protocol": "mooncake", "role": "kv_both"}
    await odd.start()
    await other.start()
    yield odd, other
    await odd.stop()
    await other.stop()
    context.destroy(linger=0)


@asynccontextmanager
async def agent_of(engines: tuple[FakeEngine, FakeEngine], router: FakeRouter, state_dir: Path) -> AsyncIterator[None]:
    """Run an agent of both engines inside the block, which must not end before it is stopped."""
    agent = RunningAgent([engine.url for engine in engines], [router.address], state_dir)
    try:
        yield
        assert not agent.task.done(), agent.task.exception()
    finally:
        await agent.stop()


def stream_of(router: FakeRouter, engine: FakeEngine) -> Stream | None:
    """The newest stream that reports the engine."""
    return next((stream for stream in reversed(router.streams) if stream.hello.instance.url == engine.url), None)


async def loads(router: FakeRouter, engine: FakeEngine, *, healthy: bool) -> None:
    """Wait until an engine is reported with this health, by a load that is sent from now on."""
    count = sum(len(stream.loads) for stream in router.streams if stream.hello.instance.url == engine.url)

    def reported() -> bool:
        seen = [load for stream in router.streams if stream.hello.instance.url == engine.url for load in stream.loads]
        return len(seen) > count and seen[-1].healthy == healthy

    await eventually(reported, f"a load of {engine.url} that says healthy={healthy}")


@pytest.mark.parametrize("line", ODD_LINES)
async def test_one_odd_number_leaves_its_engine_healthy(
    engines: tuple[FakeEngine, FakeEngine], router: FakeRouter, tmp_path: Path, line: str
) -> None:
    odd, other = engines
    async with agent_of(engines, router, tmp_path):
        await asyncio.gather(loads(router, odd, healthy=True), loads(router, other, healthy=True))
        odd.more_metrics = line
        for _ in range(3):
            await asyncio.gather(loads(router, odd, healthy=True), loads(router, other, healthy=True))
        assert all(load.healthy for stream in router.streams for load in stream.loads)
        assert not any(stream.goodbye for stream in router.streams)


@pytest.mark.parametrize("max_model_len", [-1, 2**40, [4_096]])
async def test_an_engine_with_an_odd_context_length_is_not_reported(
    engines: tuple[FakeEngine, FakeEngine], router: FakeRouter, tmp_path: Path, max_model_len: object
) -> None:
    odd, other = engines
    odd.max_model_len = max_model_len
    async with agent_of(engines, router, tmp_path):
        await loads(router, other, healthy=True)
        assert stream_of(router, odd) is None
        odd.max_model_len = 4_096
        await loads(router, odd, healthy=True)


@pytest.mark.parametrize("address", [7, "nonsense"])
async def test_an_engine_that_cannot_be_followed_is_tried_again(
    engines: tuple[FakeEngine, FakeEngine], router: FakeRouter, tmp_path: Path, address: object
) -> None:
    odd, other = engines
    odd.events_address = address
    async with agent_of(engines, router, tmp_path):
        await loads(router, other, healthy=True)
        assert stream_of(router, odd) is None
        odd.events_address = ""
        await loads(router, odd, healthy=True)


async def test_an_engine_that_does_not_tell_where_its_events_are_says_so(
    engines: tuple[FakeEngine, FakeEngine], router: FakeRouter, tmp_path: Path
) -> None:
    """As vLLM up to 0.29 at least: its events need addresses in the agent's settings."""
    older, _ = engines
    older.tells_sources = False
    async with agent_of(engines, router, tmp_path):
        stream = await eventually(lambda: stream_of(router, older), "the engine's stream")
        assert "no GET /kv_event_sources" in stream.hello.instance.prefix_reason
        assert "events=tcp://HOST:5557" in stream.hello.instance.prefix_reason
