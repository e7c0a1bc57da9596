"""Engines that are silent: one that closed its port and keeps its connections, and one that only takes long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core import dead_connections
from pointsman_gateway.io.engines import connection_pool
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, Placer, Stack, serve, stack
from tests.support.fakes.offloading_peers import STREAM, KvEngine, answered, offload_stack, reported_steps, slicing
from tests.support.gateway_requests import CHAT, LONG
from tests.support.processes.gateway import gateway_running, logged_url, ready
from tests.support.waiting import eventually

GONE = "went silent, and nobody listens there any more"


def by_session(up: Stack) -> Placer:
    """A placer that chooses the instance that the session id names, and i2 after a failure there."""
    refs = {ref.instance_id: ref for ref in up.router.pools[0].instances}
    return lambda request: serve(request, refs["i2" if request.exclude else request.session_id])


@asynccontextmanager
async def chat(
    url: str, at: str, path: str = "/v1/chat/completions", **fields: object
) -> AsyncIterator[aiohttp.ClientResponse]:
    headers = {"X-Session-ID": at}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, json=CHAT | {"max_tokens": 4} | fields, headers=headers) as answer,
    ):
        yield answer


async def whole(url: str, at: str, **fields: Any) -> tuple[str, bytes]:
    async with chat(url, at, **fields) as answer:
        return answer.headers["X-Pointsman-Instance"], await answer.read()


async def test_only_an_engine_that_does_not_listen_any_more_loses_its_answers(tmp_path: Path) -> None:
    """i1's answers are as silent as i0's, for as long as the gateway takes to end i0's."""
    async with stack(tmp_path, engines=3) as up:
        up.router.placer = by_session(up)
        leaves, takes_long, _ = up.engines
        leaves.hold, takes_long.hold = asyncio.Event(), asyncio.Event()
        async with gateway_running({"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}) as (process, log):
            url = await logged_url(log)
            await ready(url)
            async with (
                chat(url, "i0", stream=True) as broken,
                chat(url, "i0", path="/v1/messages", stream=True) as message,
                chat(url, "i1", stream=True) as patient,
            ):
                for answer in (broken, message, patient):
                    assert (await answer.content.readline()) != b""
                leaves.mode = "hang"
                before_a_byte = [asyncio.create_task(whole(url, "i0", stream=stream)) for stream in (True, False)]
                await eventually(lambda: leaves.open == 4)
                await leaves.stop_listening()
                for again in before_a_byte:
                    at, body = await again
                    assert at == "i2"
                    assert b"set." in body
                error = json.loads((await broken.read()).strip().splitlines()[-1].removeprefix(b"data: "))["error"]
                assert error["code"] == 502
                assert b"event: error\n" in await message.read()
                takes_long.hold.set()
                assert (await patient.read()).endswith(b"data: [DONE]\n\n")
            await up.router.until(lambda: len(up.router.finished) == 7)
            failed = [finish.error for finish in up.router.finished if finish.outcome == placement_pb2.OUTCOME_FAILED]
            assert sorted(failed) == [f"no answer: {GONE}"] * 2 + [GONE] * 2
            # The connections are closed, too.
            await eventually(lambda: leaves.open == 0)
            process.terminate()
            assert await process.wait() == 0
        assert len([line for line in log if GONE.encode() in line]) == 4
        assert not [line for line in log if b"Traceback" in line or b'"level": "error"' in line]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which silence is noticed."""
    monkeypatch.setattr(connection_pool, "SWEEP_S", 0.05)
    monkeypatch.setattr(connection_pool, "SILENT_S", 0.1)
    monkeypatch.setattr(dead_connections, "REPROBE_S", 0.1)
    monkeypatch.setattr(dead_connections, "PROBE_EVERY_S", 0.1)


@pytest.mark.usefixtures("soon")
async def test_a_prefill_for_another_instance_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    async with offload_stack(tmp_path) as up:
        p = up.engines[0]
        assert isinstance(p, KvEngine)
        p.sends = "hang"
        asking = asyncio.create_task(answered(up, STREAM))
        await eventually(lambda: p.halves)
        await p.stop_listening()
        assert await asking == ("i1", "The points are set.")
        assert reported_steps(up) == [(0, f"no answer: {GONE}")]
        assert [done.instance_failed for done in up.router.step_dones] == [True]
        await eventually(lambda: p.open == 0)


@pytest.mark.usefixtures("soon")
async def test_a_slice_on_an_instance_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        slicing(up, 128, 256)
        first = up.router.placer
        up.router.placer = lambda request: (up.router.first if request.exclude else first)(request)
        engine: FakeEngine = up.engines[0]
        engine.mode = "hang"
        asking = asyncio.create_task(whole(up.url, "i0", **LONG))
        await eventually(lambda: engine.open)
        await engine.stop_listening()
        at, body = await asking
        assert (at, json.loads(body)["model"]) == ("i1", MODEL)
        assert reported_steps(up)[0] == (0, f"no answer: {GONE}")
        await eventually(lambda: engine.open == 0)
