"""API key limits across two gateways and a router that may die, each a process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from tests.support.processes.gateway import gateway_running, logged_url
from tests.support.processes.replicas import RouterProcess, keep_reporting
from tests.support.waiting import eventually

# A model that no instance serves: requests are admitted or limited before that is checked.
BODY = {"model": "nobody", "prompt": "x"}
HELD = {"model": "m", "prompt": "x"}


class Gateways:
    """Two gateways, by their addresses."""

    def __init__(self, http: aiohttp.ClientSession, urls: list[str]) -> None:
        self._http = http
        self.urls = urls

    async def admitted(self, url: str, key: str, times: int) -> int:
        """Return how many of `times` requests are admitted."""
        statuses = []
        for _ in range(times):
            async with self._http.post(f"{url}/v1/completions", json=BODY, headers={"x-api-key": key}) as answer:
                statuses.append(answer.status)
        assert set(statuses) <= {404, 429, 503}
        return sum(status != 429 for status in statuses)

    async def held(self, url: str, key: str) -> None:
        """Keep one request in flight until it is cancelled: the model's instance never answers. A refused request is sent again:
        the other gateway may hold an unused slot, which it gives back with its next report."""
        while True:
            async with self._http.post(f"{url}/v1/completions", json=HELD, headers={"x-api-key": key}) as answer:
                assert answer.status == 429
            await asyncio.sleep(0.1)

    async def figure(self, name: str) -> list[float]:
        """Return a metric's value from both gateways' metrics pages."""
        found = []
        for url in self.urls:
            async with self._http.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            found += [float(line.split()[1]) for line in lines if line.startswith(f"{name} ")]
        return found

    async def until(self, name: str, value: float) -> None:
        async def reached() -> bool:
            return await self.figure(name) == [value] * 2

        await eventually(reached, f"{name} is {value} at both gateways")


@asynccontextmanager
async def two_gateways(
    folder: Path, keys: str, processes: int, **instance: str
) -> AsyncIterator[tuple[RouterProcess, Gateways]]:
    (folder / "keys").write_text(keys)
    router = RouterProcess("r0", "", folder)
    router.process.start()
    async with AsyncExitStack() as stack:
        stack.callback(router.process.stop)
        reporting = asyncio.create_task(keep_reporting(router.address, "i0", "m", **instance))
        stack.callback(reporting.cancel)
        urls = []
        for name in ("one", "two"):
            environment = {
                "LISTEN": "127.0.0.1:0",
                "ROUTERS": router.address,
                "API_KEYS_FILE": str(folder / "keys"),
                "GATEWAY_ID": name,
                "PROCESSES": str(processes),
            }
            _, log = await stack.enter_async_context(gateway_running(environment))
            urls.append(await logged_url(log))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)))
        gateways = Gateways(http, urls)
        await gateways.until("pointsman_gateway_limits_accounted", 1)
        await gateways.until("pointsman_gateway_limit_gateways", 2)
        yield router, gateways
    with contextlib.suppress(asyncio.CancelledError):
        await reporting


async def test_two_gateways_admit_what_one_would_and_halves_of_it_without_a_router(tmp_path: Path) -> None:
    # On a busy machine a router's answer may come too late, and a gateway admits its share: then it is another key's turn.
    both, alone = [f"both-{number}" for number in range(5)], [f"alone-{number}" for number in range(5)]
    keys = "".join(f"tenant:{name} requests_per_minute=40\n" for name in (*both, *alone, "k3"))
    async with two_gateways(tmp_path, keys, 1) as (router, gateways):
        one, two = gateways.urls
        whole = False
        while both and not whole:
            began, key = time.monotonic(), both.pop()
            counts = [await gateways.admitted(url, key, 3) for _ in range(10) for url in (one, two)]
            assert sum(counts) <= 40 * (1 + (time.monotonic() - began) / 60)
            whole = sum(counts) >= 40
        assert whole
        # One gateway alone may use the whole limit.
        while (admitted := await gateways.admitted(one, alone.pop(), 40)) < 40 and alone:
            await gateways.until("pointsman_gateway_limits_accounted", 1)
        assert admitted == 40
        router.process.kill()
        await gateways.until("pointsman_gateway_limits_accounted", 0)
        began = time.monotonic()
        counts = [await gateways.admitted(url, "k3", 30) for url in (one, two)]
        assert min(counts) >= 20
        assert sum(counts) <= 40 * (1 + (time.monotonic() - began) / 60)
        # A used-up limit stays used up, with or without a router.
        router.process.start()
        await gateways.until("pointsman_gateway_limits_accounted", 1)
        again = [await gateways.admitted(url, "k3", 30) for url in (one, two)]
        # The router refills the whole limit once the first gateway is back. Until the second is back, that one refills its half.
        assert sum(counts) + sum(again) <= 40 * (1 + 1.5 * (time.monotonic() - began) / 60)


async def test_processes_of_a_gateway_share_its_lease(tmp_path: Path) -> None:
    async with two_gateways(tmp_path, "tenant:k1 requests_per_minute=40\n", 2) as (_, gateways):
        began = time.monotonic()
        counts = [await gateways.admitted(url, "k1", 3) for _ in range(10) for url in gateways.urls]
        assert 40 <= sum(counts) <= 40 * (1 + (time.monotonic() - began) / 60)


async def test_requests_in_flight_count_over_both_gateways(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))  # nobody accepts
        instance = f"http://127.0.0.1:{silent.getsockname()[1]}"
        plane = two_gateways(tmp_path, "tenant:k1 in_flight=4\n", 1, url=instance)
        router, gateways = await stack.enter_async_context(plane)
        one, two = gateways.urls

        async def open_at(*counts: float) -> None:
            async def reached() -> bool:
                return await gateways.figure("pointsman_gateway_open_requests") == [*counts]

            await eventually(reached, f"{counts} open requests")

        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(gateways.held(url, "k1")) for url in (one, one, one, two)]
            await open_at(3, 1)
            assert [await gateways.admitted(url, "k1", 1) for url in (one, two)] == [0, 0]
            # A slot that one gateway gives back may be used by the other.
            held[0].cancel()
            await eventually(lambda: gateways.admitted(two, "k1", 1), "a slot at the other gateway")
            await open_at(2, 1)
            router.process.kill()
            await gateways.until("pointsman_gateway_limits_accounted", 0)
            # Without a router each gateway has half of the limit; `one` uses all of its half.
            assert [await gateways.admitted(url, "k1", 1) for url in (one, two)] == [0, 1]
            for request in held:
                request.cancel()
