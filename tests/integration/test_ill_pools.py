"""A pool whose only engine dies and comes back, with router, gateway and agent as they run."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from tests.support.processes.pointsman import control_plane
from tests.support.processes.process import free_port
from tests.support.waiting import eventually

CHAT = {
    "model": "pointsman-emulated",
    "messages": [{"role": "user", "content": "Set the points."}],
    "max_tokens": 4,
}
REQUESTS = 60


async def engine(port: int) -> EmulatedEngine:
    return await start(EmulateSettings(port=port, speedup=20.0))


async def test_where_the_only_engine_is_dead_few_requests_try_it_and_the_others_may_come_again(tmp_path: Path) -> None:
    listen, port = f"127.0.0.1:{free_port()}", free_port()
    async with AsyncExitStack() as stack:
        only = await engine(port)
        await stack.enter_async_context(control_plane(tmp_path, listen, f"127.0.0.1:{free_port()}", [port]))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        seen: Counter[int] = Counter()

        async def ask() -> int:
            async with http.post(f"http://{listen}/v1/chat/completions", json=CHAT) as answer:
                seen[answer.status] += 1
                if answer.status == 503:
                    assert int(answer.headers["Retry-After"]) >= 1
                return answer.status

        async def answers() -> bool:
            return await ask() == 200

        await eventually(answers, "the engine answers", 60)
        await only.stop()
        seen.clear()
        # Requests that come in a moment of the router's: at most three before it knows, then one in each second.
        before = asyncio.get_running_loop().time()
        for _ in range(REQUESTS):
            await ask()
        tried = 3 + 1 + asyncio.get_running_loop().time() - before
        assert set(seen) == {502, 503}
        assert seen[502] <= tried
        only = await engine(port)
        stack.push_async_callback(only.stop)

        async def all_go_on() -> bool:
            return {await ask() for _ in range(8)} == {200}

        await eventually(all_go_on, "it answers all again", 60)
