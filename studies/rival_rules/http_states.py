"""Draws states for routers that match prompts by their text, and records what their own programs choose.

Each router serves engines that keep an answer open until they are told to end it, so that the state of a decision is known: how
many requests each engine has, and how much of the prompt each was sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import string
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from bench.stack import ServerProcess

MODEL = "m"
ENGINES = 4
# Every second stretch of so many requests nearly all continue one prompt, and few end: until its engine has far more than others.
STRETCH = 300
# Timeout of one step of a request, s.
STEP_S = 20.0
Program = Callable[[list[ServerProcess]], contextlib.AbstractAsyncContextManager[ServerProcess]]


@dataclass
class HeldEngine:
    """An engine that holds each answer. `texts`: prompts that it was sent. `ends`: by the requests' texts, what ends them."""

    name: str  # as in the states: w0, w1, ...
    arrivals: asyncio.Queue[tuple[str, str]]  # (engine's name, prompt) of each request at any of the engines
    texts: list[str] = field(default_factory=list)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    port: int = 0  # 0 until it serves

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ServerProcess]:
        """Serve on a free port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/server_info", "/get_server_info", "/get_model_info", "/model_info", "/version"):
            app.router.add_get(path, self._info)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            self.port = runner.addresses[0][1]
            yield ServerProcess(self.port, ())
        finally:
            await runner.cleanup()

    def matched(self, text: str) -> int:
        """Return how many leading characters of a prompt the engine was sent before."""
        return max((_common(text, earlier) for earlier in self.texts), default=0)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": MODEL, "served_model_name": MODEL, "version": "0", "is_generation": True}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        text = (await request.json())["prompt"]
        end = self.ends[text] = asyncio.Event()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        chunk = {"id": "x", "object": "text_completion", "model": MODEL, "choices": [{"index": 0, "text": "a"}]}
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.arrivals.put_nowait((self.name, text))
        await end.wait()
        del self.ends[text]
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def http_states(rival: str, program: Program, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` states with what the router chose."""
    rng = random.Random(seed)
    arrivals: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    engines = [HeldEngine(f"w{at}", arrivals) for at in range(ENGINES)]
    async with contextlib.AsyncExitStack() as running:
        served = [await running.enter_async_context(engine.serve()) for engine in engines]
        router = await running.enter_async_context(program(served))
        connector = aiohttp.TCPConnector(limit=0)
        client = await running.enter_async_context(aiohttp.ClientSession(connector=connector))
        open_: dict[str, tuple[HeldEngine, asyncio.Task[None]]] = {}
        try:
            states = []
            for number in range(count):
                if number % STRETCH == 0:
                    for text in list(open_):
                        await _end(open_, text)
                hot = number // STRETCH % 2 == 1
                states.append(await _one(rival, client, router, engines, arrivals, open_, rng, hot=hot))
            return states
        finally:
            for engine in engines:
                for end in engine.ends.values():
                    end.set()
            await asyncio.gather(*(task for _, task in open_.values()), return_exceptions=True)


async def _one(
    rival: str,
    client: aiohttp.ClientSession,
    router: ServerProcess,
    engines: Sequence[HeldEngine],
    arrivals: asyncio.Queue[tuple[str, str]],
    open_: dict[str, tuple[HeldEngine, asyncio.Task[None]]],
    rng: random.Random,
    *,
    hot: bool,
) -> dict[str, Any]:
    texts = [text for engine in engines for text in engine.texts]
    text = max(texts, key=len) + _letters(rng, 10, 40) if hot and rng.random() < 0.9 else _prompt(texts, rng)
    state = {
        "rival": rival,
        "input": len(text),
        "instances": {
            engine.name: {"cached": engine.matched(text), "requests": sum(at is engine for at, _ in open_.values())}
            for engine in engines
        },
    }
    task = asyncio.create_task(_send(client, router.port, text))
    name = await _chosen(arrivals, task, text)
    chosen = next(engine for engine in engines if engine.name == name)
    chosen.texts.append(text)
    open_[text] = chosen, task
    # Many and few open requests, and engines that are emptied at once, for states that are out of balance.
    most = 400 if hot else rng.choice((4, 40, 160))
    while len(open_) > most:
        await _end(open_, rng.choice(list(open_)))
    if not hot and rng.random() < 0.03:
        emptied = rng.choice(engines)
        for prompt in [prompt for prompt, (at, _) in open_.items() if at is emptied]:
            await _end(open_, prompt)
    return state | {"chosen": name}


async def _chosen(arrivals: asyncio.Queue[tuple[str, str]], task: asyncio.Task[None], text: str) -> str:
    """Return which engine gets the request. Raises what `task` raises if the router refuses it."""
    arrival = asyncio.create_task(arrivals.get())
    done, _ = await asyncio.wait((arrival, task), timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
    if arrival not in done:
        arrival.cancel()
        await task
        raise RuntimeError("the router answered, and asked no engine")
    name, sent = arrival.result()
    assert sent == text
    return name


async def _end(open_: dict[str, tuple[HeldEngine, asyncio.Task[None]]], text: str) -> None:
    engine, task = open_.pop(text)
    engine.ends[text].set()
    async with asyncio.timeout(STEP_S):
        await task


async def _send(client: aiohttp.ClientSession, port: int, text: str) -> None:
    body = {"model": MODEL, "prompt": text, "stream": True, "max_tokens": 4}
    async with client.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the router answers {answer.status}: {(await answer.text())[:300]}")
        async for _ in answer.content:
            pass


def _prompt(sent: Sequence[str], rng: random.Random) -> str:
    """Return a new prompt, or one that continues a part of one that was sent."""
    begun = rng.choice(sent) if sent and rng.random() < 0.6 else ""
    kept = begun[: round(len(begun) * rng.choice((0.2, 0.5, 0.8, 1.0)))][:4_000]
    return kept + _letters(rng, 10, 600)


def _letters(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choices(string.ascii_letters, k=rng.randrange(low, high)))


def _common(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
