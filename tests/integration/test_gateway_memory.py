"""What a gateway keeps in memory: for open streams, for a client that does not read, for bodies that are arriving."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.addresses import parse_address
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.fakes.engine_answers import Script
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, Stack, stack
from tests.support.processes.gateway import gateway_running, logged_url, ready
from tests.support.waiting import eventually

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "set the points"}], "stream": True}
EVENTS = 7_000
PADS = ("x" * 100, "x" * 12_000)  # one that passes unparsed, one that is parsed


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        yield running


def kept_by_the_gateway() -> int:
    """Bytes that the gateway's code allocated and that are still referenced."""
    filters = [
        tracemalloc.Filter(True, "*/pointsman_gateway/*", all_frames=True),
        # The engines of these tests read requests with the gateway's code, and keep them.
        tracemalloc.Filter(False, "*/tests/support/fakes/*", all_frames=True),
    ]
    return sum(
        statistic.size for statistic in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename")
    )


async def test_an_open_stream_does_not_keep_its_prompt(up: Stack) -> None:
    up.engines[0].hold = asyncio.Event()
    body = CHAT | {"padding": "x" * 600_000}
    tracemalloc.start(10)
    try:
        async with aiohttp.ClientSession() as http:
            answers = [await http.post(f"{up.url}/v1/chat/completions", json=body) for _ in range(3)]
            for answer in answers:
                assert (await answer.content.readline()).startswith(b"data: ")
            assert 0 < kept_by_the_gateway() < 300_000
            up.engines[0].hold.set()
            for answer in answers:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    finally:
        tracemalloc.stop()
    assert [len(body["padding"]) for _, body, _ in up.engines[0].requests] == [600_000] * 3
    await eventually(lambda: len(up.router.finished) == 3)


@pytest.mark.parametrize("count", [1_000, 4_000], ids=["light", "large"])
async def test_a_request_that_waits_for_its_answer_keeps_the_bytes_of_its_body_alone(up: Stack, count: int) -> None:
    """Not the body's values, which take ten times as much."""
    up.engines[0].hold = up.engines[1].hold = asyncio.Event()
    for engine in up.engines:
        engine.mode = "hang"
    body = CHAT | {"unknown": [{"a": "one", "bc": number} for number in range(count)]}
    size = len(json.dumps(body))
    tracemalloc.start(10)
    try:
        async with aiohttp.ClientSession() as http:
            waiting = [asyncio.create_task(http.post(f"{up.url}/v1/chat/completions", json=body)) for _ in range(3)]
            await eventually(lambda: sum(len(engine.requests) for engine in up.engines) == 3)
            assert 3 * size < kept_by_the_gateway() < 3 * (2 * size + 30_000)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        tracemalloc.stop()


class Torrent(FakeEngine):
    """Answers a request with `flood` with 42 MB, as fast as they are read; other requests as usual."""

    sent = 0

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        if "flood" not in script.body:
            return await super()._stream(request, script)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(EVENTS):
            event = f"data: {json.dumps({'number': number, 'pad': PADS[number % 2]})}\n\n".encode()
            await answer.write(event)
            self.sent += len(event)
        await answer.write(b"data: [DONE]\n\n")
        return answer


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


async def stalled(engine: Torrent) -> None:
    """Wait until the engine can send no more. If this returns too early, the test only measures less data."""
    before = 0
    while not before == engine.sent > 0:
        before = engine.sent
        await asyncio.sleep(0.5)


async def test_a_client_that_does_not_read_costs_little_and_nobody_else(tmp_path: Path) -> None:
    async with stack(tmp_path, engines=1, engine=Torrent) as up:
        (engine,) = up.engines
        assert isinstance(engine, Torrent)
        async with gateway_running({"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}) as (process, log):
            url = f"{await logged_url(log)}/v1/chat/completions"
            await ready(url.partition("/v1")[0])
            async with aiohttp.ClientSession() as http, aiohttp.ClientSession() as others:
                for _ in range(5):
                    async with others.post(url, json=CHAT) as answer:
                        assert (await answer.read()).endswith(b"[DONE]\n\n")
                before = resident_mb(process.pid)
                slow = await http.post(url, json=CHAT | {"flood": True})
                await stalled(engine)
                held = engine.sent
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(others.post(url, json=CHAT)) for _ in range(20)]
                for request in asked:
                    assert (await request.result().read()).endswith(b"[DONE]\n\n")
                assert held == engine.sent < 30e6, "no more than the sockets' buffers take"
                assert resident_mb(process.pid) - before < 10
                events = (await slow.read()).split(b"\n\n")
            numbers = [json.loads(event[6:])["number"] for event in events[:-2]]
            assert numbers == list(range(EVENTS))
            assert events[-2:] == [b"data: [DONE]", b""]
            await up.router.until(lambda: len(up.router.finished) == 26)
            assert {finish.outcome for finish in up.router.finished} == {placement_pb2.OUTCOME_OK}
            assert up.router.reserved == set()
        assert not [line for line in log if b"Traceback" in line or b'"error"' in line]


async def test_bodies_beyond_what_may_be_held_are_refused_and_end_well(tmp_path: Path) -> None:
    async with stack(tmp_path, max_body_bytes=1_500_000, max_buffered_body_bytes=2_000_000) as up:
        url = f"{up.url}/v1/chat/completions"
        large = CHAT | {"padding": "x" * 900_000}
        for engine in up.engines:
            engine.mode = "hang"
        async with aiohttp.ClientSession() as http:
            waiting = [asyncio.create_task(http.post(url, json=large)) for _ in range(2)]
            await eventually(lambda: sum(len(engine.requests) for engine in up.engines) == 2)
            async with http.post(url, json=large) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                assert (await refused.json())["error"] == {
                    "message": "The gateway has no memory left for another request.",
                    "type": "server_error",
                    "param": None,
                    "code": "no_room",
                }
            for engine in up.engines:
                engine.mode = "ok"
            async with http.post(url, json=CHAT) as small:
                assert (await small.read()).endswith(b"[DONE]\n\n")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await eventually(lambda: not any(engine.open for engine in up.engines))
            async with http.post(url, json=large) as taken:
                assert (await taken.read()).endswith(b"[DONE]\n\n")


async def test_connections_beyond_what_may_be_open_are_refused_and_probes_answered() -> None:
    settings = GatewaySettings(listen="127.0.0.1:0", routers=["127.0.0.1:1"], max_connections=2)
    async with serving(settings) as (_, url):
        address = parse_address(url.removeprefix("http://"))
        held = [await asyncio.open_connection(*address) for _ in range(2)]
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/chat/completions", json={}) as answer:
                assert (answer.status, answer.headers["Retry-After"], answer.headers["Connection"]) == (
                    503,
                    "1",
                    "close",
                )
                assert (await answer.json())["error"]["code"] == "too_many_connections"
            for path, status in (("/livez", 200), ("/metrics", 200), ("/health", 503), ("/v1/models", 503)):
                async with http.get(url + path) as answer:
                    assert answer.status == status
            for _, writer in held:
                writer.close()
                await writer.wait_closed()

            async def listed() -> bool:
                async with http.get(f"{url}/v1/models") as answer:
                    return answer.status == 200

            await eventually(listed, "there is room again")


async def test_a_keys_requests_leave_connections_to_other_keys(tmp_path: Path) -> None:
    """One that sends without end may hold three quarters of them; they are free again when its requests have ended."""
    keys = tmp_path / "keys"
    keys.write_text("red:k1\nblue:k2\n")
    async with stack(tmp_path, api_keys_file=keys, max_connections=8) as up:
        url, keyed = f"{up.url}/v1/chat/completions", ({"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"})
        for engine in up.engines:
            engine.mode = "hang"
        async with aiohttp.ClientSession() as http, aiohttp.ClientSession() as other:
            waiting = [asyncio.create_task(http.post(url, json=CHAT, headers=keyed[0])) for _ in range(6)]
            await eventually(lambda: sum(len(engine.requests) for engine in up.engines) == 6)
            for engine in up.engines:
                engine.mode = "ok"
            async with http.post(url, json=CHAT, headers=keyed[0]) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"] == "1"
                assert (await refused.json())["error"]["code"] == "too_many_connections"
            async with other.post(url, json=CHAT, headers=keyed[1]) as taken:
                assert (await taken.read()).endswith(b"[DONE]\n\n")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await eventually(lambda: not any(engine.open for engine in up.engines))
            for _ in range(9):
                async with http.post(url, json=CHAT, headers=keyed[0]) as taken:
                    assert (await taken.read()).endswith(b"[DONE]\n\n")
            assert (await http.get(f"{up.url}/v1/models", headers=keyed[0])).status == 200
