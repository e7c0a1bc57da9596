"""What an agent reports of an engine's identity, and what a router does about two engines with one instance id."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_cli.doctor import uniformity
from pointsman_cli.doctor_findings import Finding
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, running
from tests.support.router import Report
from tests.support.router import running as running_router
from tests.support.waiting import eventually


async def test_an_agent_reports_the_identity_and_limits_that_its_engine_announces(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: bool(router.streams and router.streams[-1].loads), "a load")
        first = router.streams[-1].hello.instance
        assert first.identity == pb.EngineIdentity(weights="/models/tiny")
        assert first.max_num_seqs == 0
        engine.identity = {"weights": "maker/tiny", "dtype": "bfloat16", "kv_dtype": "bfloat16", "later": "1"}
        engine.engine = {"max_num_seqs": "64"}
        engine.tokenizer = {"tokenizer": "maker/tiny", "revision": "1"}
        await eventually(lambda: router.streams[-1].hello.instance.identity.dtype == "bfloat16", "the announcement")
        assert router.streams[-1].hello.instance.identity == pb.EngineIdentity(
            weights="maker/tiny", dtype="bfloat16", kv_dtype="bfloat16", tokenizer="maker/tiny"
        )


async def test_a_router_refuses_a_second_agent_s_engine_of_one_id_and_tells_of_it() -> None:
    async with running_router() as (_, client):
        first = Report(client)
        await first.join("a", agent_id="one", url="http://one:8000")
        second = Report(client)
        await second.hello("a", agent_id="two", url="http://two:8000", incarnation="2", node="n2")
        assert await second.call.code() is grpc.StatusCode.ABORTED
        assert "reported by agent one (http://one:8000" in await second.call.details()
        status = (await client.instances())["a"]
        assert (status.instance.url, status.rival) == ("http://one:8000", "agent two (http://two:8000 on n2)")
        [finding] = uniformity("m", [status])
        assert (finding.level, finding.check) == (Finding.FAIL, "a")
        # The agent of an engine may open another stream.
        again = Report(client)
        await again.hello("a", agent_id="one", url="http://one:8000")
        assert (await again.read()).HasField("welcome")


async def test_what_instances_of_a_pool_differ_in_is_listed() -> None:
    async with running_router() as (_, client):
        reports = {name: Report(client) for name in "abc"}
        for name, report in reports.items():
            dtype = "float16" if name == "c" else "bfloat16"
            context = 4_096 if name == "c" else 32_768
            await report.join(name, identity=pb.EngineIdentity(dtype=dtype), max_model_len=context, model_root="/m")
        listed = await client.instances()
        assert [list(listed[name].differences) for name in "abc"] == [
            [],
            [],
            ["dtype float16 and bfloat16", "context of 4096 tokens and 32768"],
        ]
        findings = list(uniformity("m", list(listed.values())))
        assert [(finding.level, finding.found) for finding in findings] == [
            (Finding.WARN, "c: context of 4096 tokens and 32768 (of the others)"),
            (Finding.WARN, "c: dtype float16 and bfloat16 (of the others)"),
        ]
