"""Cores of gateway and router for long prompts that share most of their tokens, and the time that they add to a first token.

The shape for which llm-d publishes figures (35 to 46 cores for 99 requests/s): prompts of 100,000 tokens, of which 95,000 are
shared with others, on 100 instances. Requests arrive at RATE_PER_S, so that the load client and the engine, one process for all
instances, fit the machine beside them; CPU time is counted for RATE_PER_S and scaled to PUBLISHED_PER_S. So it includes that of
100 instances that report loads and keys, PUBLISHED_PER_S / RATE_PER_S times: the result is an upper bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from bench import stack
from bench.figures import Figure, percentile
from bench.many_agents import Agents
from bench.stack import ServerProcess
from bench.turns import make_model, text_of_code
from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.tokenizer_files import load_tokenizer

INSTANCES, KEYS = 100, 20_000
PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 100_000, 95_000, 50
# Number of different shared parts.
GROUPS = 20
RATE_PER_S, PUBLISHED_PER_S, GOAL_CORES = 10.0, 100.0, 6.0
REQUESTS, DIRECT = 300, 50
INTERVAL_MS = 10.0
CONTEXT = 131_072


class Prompts:
    """Prompts of about PROMPT_TOKENS tokens, made of `text`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, text: str) -> None:
        self._text = text
        self._model = load_tokenizer(folder, TokenCache(64 << 20))
        some = text[:1_000_000]
        self._chars_a_token = len(some) / len(tokenizer.encode(some).ids)
        self._random = random.Random(1)
        self._shared = [self._words(SHARED_TOKENS) for _ in range(GROUPS)]

    def next(self, group: int) -> dict[str, Any]:
        """Return a request whose prompt begins with the shared part of a group."""
        own = self._words(PROMPT_TOKENS - SHARED_TOKENS)
        messages = [{"role": "system", "content": self._shared[group]}, {"role": "user", "content": own}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": stack.MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, **options}

    def keys(self, body: dict[str, Any]) -> array[int]:
        """Return the keys of a request's prompt."""
        return array("Q", prompt_keys(self._model.chat(body), stack.MODEL))

    def _words(self, tokens: int) -> str:
        length = int(tokens * self._chars_a_token)
        begin = self._random.randrange(len(self._text))
        return (self._text[begin:] + self._text)[:length]


async def shared_prompts() -> list[Figure]:
    """shared_prompts_cores, and shared_prompts_added_ttft_p50_ms and _p99_ms."""
    text = text_of_code()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = await asyncio.to_thread(make_model, Path(folder), text)
        prompts = await asyncio.to_thread(Prompts, Path(folder), tokenizer, text)
        usage = ("--prompt-tokens", str(PROMPT_TOKENS), "--cached-tokens", str(SHARED_TOKENS))
        async with (
            stack.engine(INTERVAL_MS, folder, "--host", "0.0.0.0", *usage) as engine,
            stack.router() as (router_at, router),
            contextlib.AsyncExitStack() as channels,
            aiohttp.ClientSession() as http,
        ):
            agents = Agents(router_at, channels, partial(_described, engine, folder))
            await agents.join(INSTANCES, KEYS, "1")
            telling = asyncio.create_task(agents.tell())
            try:
                async with stack.gateway(router_at) as gateway:
                    # Each instance is sent some, which confirm its events.
                    await _run(http, gateway, agents, prompts, 3 * INSTANCES)
                    before = [stack.cpu_s(*process.pids) for process in (gateway, router)]
                    began = time.perf_counter()
                    times = await _run(http, gateway, agents, prompts, REQUESTS)
                    spent_s = time.perf_counter() - began
                    now = [stack.cpu_s(*process.pids) for process in (gateway, router)]
            finally:
                telling.cancel()
            direct = [await _ask(http, engine.port, prompts.next(0)) for _ in range(DIRECT)]
    each_ms = [(end - start) / REQUESTS * 1e3 for start, end in zip(before, now, strict=True)]
    cores = sum(each_ms) * PUBLISHED_PER_S / 1e3
    note = f"for {PUBLISHED_PER_S:.0f} requests/s of {PROMPT_TOKENS:,} tokens, {SHARED_TOKENS:,} shared, {INSTANCES} instances; "
    note += f"ms a request: gateway {each_ms[0]:.2f}, router {each_ms[1]:.2f} at {REQUESTS / spent_s:.1f}/s; baseline is the goal"
    middle = percentile([first for first, _ in direct], 0.5)
    figures = [Figure("shared_prompts_cores", cores, "cores", GOAL_CORES, note)]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        added_ms = (percentile(times, share) - middle) * 1e3
        note = f"above the middle of {DIRECT} asked of the engine directly ({middle * 1e3:.1f} ms)"
        figures.append(Figure(f"shared_prompts_added_ttft_{name}_ms", added_ms, "ms", None, note))
    return figures


def _described(engine: ServerProcess, model: str, number: int) -> dict[str, Any]:
    url = f"http://127.0.0.{number + 1}:{engine.port}"
    return {"url": url, "model_root": model, "max_model_len": CONTEXT, "kv_capacity_tokens": 1_000_000}


async def _run(
    http: aiohttp.ClientSession, gateway: ServerProcess, agents: Agents, prompts: Prompts, count: int
) -> list[float]:
    """Send `count` requests at RATE_PER_S; return their times to the first token, s."""
    times: list[float] = []

    async def ask(body: dict[str, Any], keys: array[int]) -> None:
        first_s, instance_id = await _ask(http, gateway.port, body)
        times.append(first_s)
        agents.computed(instance_id, keys.tobytes())

    due = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            body = prompts.next(number % GROUPS)
            keys = prompts.keys(body)
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            tasks.create_task(ask(body, keys))
            due += 1 / RATE_PER_S
    return times


async def _ask(http: aiohttp.ClientSession, port: int, body: dict[str, Any]) -> tuple[float, str]:
    """Return the time to the first token, and the instance if a gateway answers."""
    raw, began = json.dumps(body).encode(), time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with http.post(f"http://127.0.0.1:{port}{Endpoint.CHAT.value}", data=raw, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        await answer.content.readany()
        first_s = time.perf_counter() - began
        await answer.read()
        return first_s, answer.headers.get("X-Pointsman-Instance", "")
