"""An engine that its agent is set to follow and that has no instance: routers, commands and metrics count it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
import zmq.asyncio
from prometheus_client import generate_latest
from typer.testing import CliRunner

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2
from pointsman_agent.io import absent_engines
from pointsman_agent.io.engine_http import EngineProbe
from pointsman_cli.doctor import examine
from pointsman_cli.doctor_findings import Finding
from pointsman_cli.main import COMMANDS, app
from pointsman_common.io.settings import Tokens
from pointsman_router.core.instances.absent_engines import FORGOTTEN_AFTER_S
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent
from tests.support.processes.process import free_port
from tests.support.router import Client, running
from tests.support.waiting import eventually


async def listed(client: Client, model: str = "") -> fleet_pb2.ListInstancesResponse:
    return await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest(model=model), metadata=client.metadata)


async def test_an_engine_that_never_answered_is_counted_until_it_does(
    context: zmq.asyncio.Context, engine: FakeEngine, tmp_path: Path
) -> None:
    missing = FakeEngine(context)
    missing.port = free_port()
    absent = f"http://127.0.0.1:{missing.port}"
    async with running() as (server, client):
        router = f"127.0.0.1:{server.port}"
        agent = RunningAgent([engine.url, absent], [router], tmp_path)
        try:

            async def reported() -> bool:
                answer = await listed(client)
                return len(answer.instances) == 1 and [engine.url for engine in answer.absent_engines] == [absent]

            await eventually(reported, "one of two")
            [one] = (await listed(client)).absent_engines
            assert (one.instance_id, one.problem) == (f"127.0.0.1:{missing.port}", "connection refused")
            assert not (await listed(client, model=engine.model)).absent_engines
            page = generate_latest(server.router.telemetry.registry).decode()
            assert "pointsman_router_absent_engines 1.0" in page

            found = await asyncio.to_thread(examine, router, "http://127.0.0.1:1")
            failed = {finding.check: finding.found for finding in found if finding.level == Finding.FAIL}
            assert failed["engines"] == "1 of 2 engines have instances"
            assert "connection refused" in failed[absent]
            COMMANDS["instances"].register()
            shown = await asyncio.to_thread(CliRunner().invoke, app, ["instances", "--router", router])
            assert f"1 of 2 engines have instances\n{absent}: no instance: connection refused" in shown.output

            await missing.start()

            async def complete() -> bool:
                answer = await listed(client)
                return len(answer.instances) == 2 and not answer.absent_engines

            await eventually(complete, "both")
        finally:
            await agent.stop()
            await missing.stop()


async def test_a_router_without_the_method_gets_reports_all_the_same(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    """As one of 0.2.0. FakeRouter has no ReportAbsentEngines."""
    agent = RunningAgent([engine.url, f"http://127.0.0.1:{free_port()}"], [router.address], tmp_path)
    try:
        await eventually(lambda: len(router.streams) == 1 and bool(router.streams[0].loads), "reports")
        await eventually(lambda: router.absent_calls > 0, "a refused call")
        assert not agent.task.done()
    finally:
        await agent.stop()


async def test_an_agent_reports_absent_engines_of_its_own_only(tmp_path: Path) -> None:
    file = tmp_path / "agents"
    file.write_text("first vllm-0.*\n")
    async with (
        running(Tokens(agent_token="A", gateway_token="", operator_token="", token_dir=None), agents_file=file) as (
            server,
            _,
        ),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):

        async def report(token: str, *names: str, url: str = "") -> None:
            agent = Client(channel, token)
            engines = [agent_pb2.AbsentEngine(instance_id=name, url=url or f"http://{name}") for name in names]
            request = agent_pb2.ReportAbsentEnginesRequest(agent_id="a", engines=engines)
            await agent.agents.ReportAbsentEngines(request, metadata=agent.metadata)

        def known() -> list[str]:
            return [engine.instance_id for engine in server.router.absent()]

        await report("first", "vllm-0.x:8000", "vllm-1.x:8000")
        assert known() == ["vllm-0.x:8000"]
        # Another agent replaces nothing, whatever name it gives.
        await report("A")
        assert known() == ["vllm-0.x:8000"]
        for url, shown in (
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://vllm-0.y:1", "http://vllm-0.y:1"),
            ("https://log-in.example/now", "http://vllm-0.x:8000"),
            ("http://[", "http://vllm-0.x:8000"),
        ):
            await report("first", "vllm-0.x:8000", url=url)
            assert [engine.url for engine in server.router.absent()] == [shown]
        await report("A", "vllm-9.x:8000", url="http://engine:8000")
        assert next(engine.url for engine in server.router.absent()) == "http://engine:8000"
        await report("A")
        await report("first")
        assert known() == []


async def test_what_an_engine_sends_neither_ends_the_agent_nor_reaches_a_terminal(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        location = b"http://ex\xff\x1b]0;a:[/]bad/"
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % location)
        writer.close()

    odd = await asyncio.start_server(redirect, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
    async with odd, running() as (server, _):
        agent = RunningAgent([engine.url, url], [router := f"127.0.0.1:{server.port}"], tmp_path)
        try:
            await eventually(server.router.absent, "the odd engine is absent")
            [absent] = server.router.absent()
            assert "/metrics" in absent.problem
            assert absent.problem.isprintable()
            assert not agent.task.done()
            COMMANDS["doctor"].register()
            words = ["doctor", "--router", router, "--gateway", "http://127.0.0.1:1"]
            shown = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert shown.exit_code == 1, shown
            assert shown.exception is None or isinstance(shown.exception, SystemExit)
        finally:
            await agent.stop()


async def test_a_fault_whose_text_is_no_utf8_is_reported_as_text(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: EngineProbe) -> None:
        raise ValueError("half a pair: \ud83d")

    monkeypatch.setattr(EngineProbe, "scrape", fail)
    async with running() as (server, _):
        agent = RunningAgent([engine.url], [f"127.0.0.1:{server.port}"], tmp_path)
        try:
            await eventually(server.router.absent, "the engine is absent")
            [absent] = server.router.absent()
            assert absent.problem == "ValueError in its agent: half a pair: \ufffd"
            assert not agent.task.done()
        finally:
            await agent.stop()


def test_reports_are_repeated_before_a_router_forgets_them() -> None:
    assert 2 * (absent_engines.REPEAT_S + absent_engines.COMPARE_S) < FORGOTTEN_AFTER_S
