"""What an engine announces of its KV connector and tokenizer reaches the routers, and never outlives the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.agent.v1 import agent_pb2 as pb
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, running
from tests.support.waiting import eventually

LAYERWISE = {"protocol": "mooncake", "role": "kv_both", "layerwise": "True", "bootstrap_port": "9001"}
OFF = LAYERWISE | {"layerwise": "False"}


@pytest.mark.parametrize("process_start", [1000.0, None])
@pytest.mark.parametrize("second", [OFF, {}])
async def test_an_engine_started_anew_is_what_it_announces_now(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, process_start: float | None, second: dict[str, str]
) -> None:
    """Also an engine that is one of several API server processes, which does not report its start."""
    engine.process_start = process_start
    engine.announced, engine.tokenizer = LAYERWISE, {"tokenizer": "maker/tiny", "revision": "abc123"}
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


async def test_an_engine_without_the_package_is_what_the_operator_says(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(f"{engine.url}?kv=mooncake", [router.address], tmp_path):
        await eventually(lambda: bool(router.streams and router.streams[-1].loads), "a load")
        kv = router.streams[-1].hello.instance.kv_transfer
        assert (kv.protocol, kv.bootstrap_url, kv.layerwise) == (
            pb.KV_PROTOCOL_MOONCAKE,
            "http://127.0.0.1:8998",
            False,
        )
        assert router.streams[-1].hello.instance.model_root == "/models/tiny"


@pytest.mark.parametrize("process_start", [1000.0, None])
async def test_engine_ids_are_those_of_the_running_process(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, process_start: float | None
) -> None:
    """Also when the bootstrap server did not answer at first, and of an engine that does not report its start."""
    engine.process_start = process_start
    engine.ranks = [0, 1]
    engine.announced = LAYERWISE | {"bootstrap_port": str(engine.port)}

    def engine_ids() -> dict[str, str]:
        return {
            stream.hello.instance.instance_id[-2:]: stream.hello.instance.kv_transfer.engine_id
            for stream in router.streams
        }

    async with running(engine.url, [router.address], tmp_path, engine_api_key="secret"):
        await eventually(lambda: set(engine_ids().values()) == {""}, "both ranks")
        engine.engine_ids = ["e_dp0", "e_dp1"]
        engine.announced |= {"layerwise": "False"}
        await eventually(lambda: sorted(engine_ids().values()) == ["e_dp0", "e_dp1"], "a bootstrap server that answers")
        await engine.stop()
        engine.engine_ids = ["f_dp0", "f_dp1"]
        engine.process_start = process_start and process_start + 1.0
        engine.generation_tokens = 0
        await engine.start()
        await eventually(lambda: sorted(engine_ids().values()) == ["f_dp0", "f_dp1"], "the second life")
        before = len(router.streams)
        engine.engine_ids = []
        engine.announced |= {"layerwise": "True"}
        await eventually(lambda: len(router.streams) >= before + 2, "another description")
        # Without a start time another process may answer by now.
        assert sorted(engine_ids().values()) == (["f_dp0", "f_dp1"] if process_start else ["", ""])
