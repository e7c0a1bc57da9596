"""Steady traffic of well and badly behaved clients, of which no engine and no gateway is to blame: streams, answers in one piece,
tool calls, sessions of several turns, clients that leave, and requests that are refused."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

MODEL = "pointsman-emulated"
TOOL = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Sets the points.",
        "parameters": {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]},
    },
}
# Mean pause of a client between two requests, s.
PAUSE_S = 0.5


class MixedTraffic:
    """Clients of one gateway. `counts`: number of requests of each kind with the status of the answer, 0 for a client that
    left."""

    def __init__(self, url: str, seed: int = 1) -> None:
        self._url = url
        self._random = random.Random(seed)
        self.counts: Counter[tuple[str, int]] = Counter()

    async def run(self, seconds: float, clients: int) -> None:
        """Let `clients` send requests one after the other for `seconds`."""
        ends = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(self._client(http, number, ends) for number in range(clients)))

    async def _client(self, http: aiohttp.ClientSession, number: int, ends: float) -> None:
        kinds: list[tuple[str, Callable[..., Awaitable[int]]]] = [
            ("stream", self._stream),
            ("whole", self._whole),
            ("session", self._session),
            ("tools", self._tools),
            ("left", self._left),
            ("no json", self._no_json),
            ("no model", self._no_model),
            ("too long", self._too_long),
            ("no path", self._no_path),
        ]
        for turn in range(10_000):
            if time.monotonic() > ends:
                return
            name, send = kinds[(number + turn) % len(kinds)]
            try:
                self.counts[name, await send(http, f"client-{number}-{turn // len(kinds)}")] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.counts[f"{name}: {type(error).__name__}", -1] += 1
            await asyncio.sleep(self._random.expovariate(1 / PAUSE_S))

    def _chat(self, name: str, **more: Any) -> dict[str, Any]:
        text = f"{name} sets the points. " * self._random.randint(1, 200)
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}

    async def _post(self, http: aiohttp.ClientSession, body: dict[str, Any], path: str = "/v1/chat/completions") -> int:
        async with http.post(self._url + path, json=body) as answer:
            await answer.read()
            return answer.status

    async def _stream(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, self._chat(name, stream=True))

    async def _whole(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, self._chat(name))

    async def _session(self, http: aiohttp.ClientSession, name: str) -> int:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} begins. " * 100}]
        status = 0
        for turn in range(3):
            body = {"model": MODEL, "messages": messages, "max_tokens": 20, "session_id": name}
            async with http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                status, text = answer.status, await answer.text()
            if status == 200:
                messages.append(json.loads(text)["choices"][0]["message"])
                messages.append({"role": "user", "content": f"go on with {turn}"})
        return status

    async def _tools(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, self._chat(name, tools=[TOOL], stream=True, max_tokens=200))

    async def _left(self, http: aiohttp.ClientSession, name: str) -> int:
        body = self._chat(name, stream=True, max_tokens=2_000, ignore_eos=True)
        async with http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            answer.close()
        return 0

    async def _no_json(self, http: aiohttp.ClientSession, name: str) -> int:
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{self._url}/v1/chat/completions", data=b"{" + name.encode(), headers=headers) as answer:
            return answer.status

    async def _no_model(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, self._chat(name) | {"model": "none"})

    async def _too_long(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, {"model": MODEL, "prompt": [7] * 200_000, "max_tokens": 1}, "/v1/completions")

    async def _no_path(self, http: aiohttp.ClientSession, name: str) -> int:
        return await self._post(http, self._chat(name), "/v1/nowhere")
