"""What an engine announces of its KV connector and tokenizer reaches the routers, and never outlives the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq.asyncio

from pointsman.agent.v1 import agent_pb2 as pb
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, running
from tests.support.waiting import eventually

LAYERWISE = {"protocol": "mooncake", "role": "kv_both", "layerwise": "True", "bootstrap_port": "9001"}
OFF = LAYERWISE | {"layerwise": "False"}


@pytest.mark.parametrize("process_start", [1000.0, None])
@pytest.mark.parametrize("second", [OFF, {}])
async def test_an_engine_started_anew_is_what_it_announces_now(
    tmp_path: Path, process_start: float | None, second: dict[str, str]
) -> None:
    """Also an engine that is one of several API server processes, which does not report its start."""
    context = zmq.asyncio.Context()
    engine, router = FakeEngine(context, process_start=process_start), FakeRouter()
    engine.announced, engine.tokenizer = LAYERWISE, {"tokenizer": "maker/tiny", "revision": "abc123"}
    await engine.start()
    await router.start()
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: bool(router.streams and router.streams[-1].loads), "the first life")
        kv = router.streams[-1].hello.instance.kv_transfer
        assert (kv.protocol, kv.bootstrap_url, kv.layerwise) == (
            pb.KV_PROTOCOL_MOONCAKE,
            "http://127.0.0.1:9001",
            True,
        )
        assert router.streams[-1].hello.instance.model_root == "maker/tiny@abc123"
        await engine.stop()
        engine.announced = second
        engine.process_start = process_start and process_start + 1.0
        await engine.start()
        await eventually(lambda: not router.streams[-1].hello.instance.kv_transfer.layerwise, "the second life")
        assert router.streams[-1].hello.instance.HasField("kv_transfer") == bool(second)
    await engine.stop()
    await router.stop()
    context.destroy(linger=0)


async def test_an_engine_without_the_package_is_what_the_operator_says(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    engine, router = FakeEngine(context), FakeRouter()
    await engine.start()
    await router.start()
    async with running(f"{engine.url}?kv=mooncake", [router.address], tmp_path):
        await eventually(lambda: bool(router.streams and router.streams[-1].loads), "a load")
        kv = router.streams[-1].hello.instance.kv_transfer
        assert (kv.protocol, kv.bootstrap_url, kv.layerwise) == (
            pb.KV_PROTOCOL_MOONCAKE,
            "http://127.0.0.1:8998",
            False,
        )
        assert router.streams[-1].hello.instance.model_root == "/models/tiny"
    await engine.stop()
    await router.stop()
    context.destroy(linger=0)
