"""Two pickers, an Envoy and two routers that share a Redis: no storm books an engine twice, and a dead picker leaves nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.fakes.gateway_peers import MODEL, FakeEngine
from tests.support.processes.envoy import EnvoySettings, envoy_beside
from tests.support.processes.gateway import gateway_running, logged_url, ready
from tests.support.processes.process import free_port
from tests.support.processes.replicas import Replicas, replicas
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually

ROUNDS = 100
ENGINES = 4


@dataclass
class Fleet:
    """Engines, routers, pickers and the Envoy before them."""

    engines: list[FakeEngine]
    routers: Replicas
    pickers: list[asyncio.subprocess.Process]
    picker_urls: list[str]
    url: str
    http: aiohttp.ClientSession

    async def storm(self, name: str, go: asyncio.Event) -> list[asyncio.Task[str]]:
        """Stream one long prompt for each engine; return when each is at an engine, whose answer waits for `go`."""
        for engine in self.engines:
            engine.hold = go
        asking = [asyncio.create_task(self.stream(f"{name} {at}")) for at in range(ENGINES)]
        await eventually(lambda: sum(engine.open for engine in self.engines) == ENGINES, "all are at engines")
        return asking

    async def stream(self, text: str) -> str:
        """Stream an answer; return the instance that gave it."""
        words = " ".join(f"{text} {at}" for at in range(300))
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "stream": True}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            whole = await answer.text()
            assert answer.status == 200, whole
            assert whole.endswith("data: [DONE]\n\n")
            return answer.headers["x-pointsman-instance"]

    async def idle(self) -> None:
        """Wait until no engine has a request, and every router counts none."""
        await eventually(lambda: not any(engine.open for engine in self.engines), "every answer has ended")
        await self.routers.idle()


@asynccontextmanager
async def fleet(folder: Path, pickers: int = 2) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as running:
        model = make_tokenizer(folder / "model")
        engines = [FakeEngine(load_tokenizer(model)) for _ in range(ENGINES)]
        for engine in engines:
            await running.enter_async_context(engine.serve())
        urls = [engine.url for engine in engines]
        behind = await running.enter_async_context(replicas(folder, models=(MODEL,), instances=ENGINES, urls=urls))
        addresses = [router.address for router in behind.routers.values()]
        ports, processes, picker_urls = [free_port() for _ in range(pickers)], [], []
        for at, port in enumerate(ports):
            settings = {
                "LISTEN": "127.0.0.1:0",
                "EXT_PROC_LISTEN": f"127.0.0.1:{port}",
                "ROUTERS": " ".join(addresses[at % 2 :] + addresses[: at % 2]),
                "TOKENIZERS": f"{MODEL}={model}",
            }
            process, log = await running.enter_async_context(gateway_running(settings))
            picker_urls.append(await logged_url(log))
            await ready(picker_urls[-1])
            processes.append(process)
        endpoints = [url.removeprefix("http://") for url in urls]
        url = await running.enter_async_context(envoy_beside(EnvoySettings(endpoints, ports), folder))
        http = await running.enter_async_context(aiohttp.ClientSession())
        yield Fleet(engines, behind, processes, picker_urls, url, http)


async def test_no_storm_through_two_pickers_books_an_engine_twice(tmp_path: Path) -> None:
    """Each long prompt has an idle engine. In every third storm the clients leave."""
    async with fleet(tmp_path) as up:
        used: Counter[str] = Counter()
        for number in range(ROUNDS):
            go = asyncio.Event()
            asking = await up.storm(str(number), go)
            assert [engine.open for engine in up.engines] == [1] * ENGINES, f"storm {number}"
            if number % 3 == 2:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            else:
                go.set()
                used.update(await asyncio.gather(*asking))
            await up.idle()
        assert len(used) == ENGINES
        for url in up.picker_urls:
            async with up.http.get(f"{url}/metrics") as page:
                counts = [
                    line
                    for line in (await page.text()).splitlines()
                    if line.startswith("pointsman_gateway_requests_total")
                ]
            assert counts, "both pickers had requests"


async def test_a_killed_picker_breaks_its_own_streams_and_its_reservations_end(tmp_path: Path) -> None:
    async with fleet(tmp_path) as up:
        go = asyncio.Event()
        asking = await up.storm("first", go)
        up.pickers[0].kill()
        await up.pickers[0].wait()
        go.set()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(end, str) for end in ends), "the other picker's streams go on"
        assert any(isinstance(end, BaseException) for end in ends), "nobody takes a broken stream for a whole one"
        # Requests whose picker is dead are counted until its lease has ended.
        await up.idle()
        await eventually(lambda: up.stream("after"), "the other picker places alone")
        for number in range(5):
            go = asyncio.Event()
            asking = await up.storm(f"then {number}", go)
            assert [engine.open for engine in up.engines] == [1] * ENGINES
            go.set()
            await asyncio.gather(*asking)
            await up.idle()
