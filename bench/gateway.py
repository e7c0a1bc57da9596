"""CPU time of the gateway per streamed chunk (beside nginx and vllm-router) and per request, added TTFT, and leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench import stack
from bench.figures import Figure, percentile
from bench.stack import ServerProcess
from pointsman_common.io.direct_http import open_directly
from tests.support.tiny_tokenizer import CHATML, make_tokenizer

STREAMS = 64
SHORT, LONG = 20, 140  # chunks
# Interval between two chunks of a stream, ms.
INTERVAL_MS = 20.0
# Time over which the streams start. Streams that start together have their chunks together as long as they run. One wake-up then
# serves all of them, which favours the proxy that answers requests fastest. The streams of a real fleet are not in step.
SPREAD = {"spread-ms": INTERVAL_MS}
ROUNDS = 5
PROMPTS = 1_000
KILLS = 5
# Timeout for open requests to end, s.
SETTLE_S = 20.0


async def chunks() -> list[Figure]:
    """chunk_us, chunk_vs_nginx, chunk_vs_vllm_router: medians over rounds, each of which measures all proxies in turn."""
    spent: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as running:
        engines, model = await running.enter_async_context(fleet(INTERVAL_MS))
        gateway, _ = await running.enter_async_context(stack.pointsman(engines, model))
        served = {"gateway": gateway, "nginx": await running.enter_async_context(stack.nginx(engines))}
        served["vllm_router"] = await running.enter_async_context(stack.vllm_router(engines))
        for server in served.values():
            await stack.load(server.port, connections=STREAMS, requests=STREAMS, chunks=SHORT)
        for _ in range(ROUNDS):
            for name, server in served.items():
                spent.setdefault(name, []).append(await chunk_us(server))
    us = {name: percentile(values, 0.5) for name, values in spent.items()}
    note = f"CPU per chunk, {STREAMS} streams out of step, a chunk of 230 bytes each {INTERVAL_MS:.0f} ms; median of {ROUNDS}"
    return [
        Figure("chunk_us", us["gateway"], "us", 15.0, f"{note}; baseline is the goal"),
        Figure(
            "chunk_vs_nginx", us["gateway"], "us", us["nginx"], "baseline is nginx in the same run; ratio: goal 1.3"
        ),
        Figure(
            "chunk_vs_vllm_router",
            us["gateway"],
            "us",
            us["vllm_router"],
            "baseline is the Rust vllm-router, round robin, in the same run; ratio: goal 0.7",
        ),
    ]


async def requests() -> list[Figure]:
    """request_1k_us, request_1k_one_process_us, added_ttft_ms."""
    async with (
        fleet(0.0) as (engines, model),
        stack.pointsman(engines, model) as (gateway, router),
        stack.one_process(engines, model) as both,
    ):
        for number, served in enumerate((gateway, both)):
            await stack.load(served.port, connections=16, requests=200, seed=10 + number)
        processes = (gateway, router, both)
        before = [stack.cpu_s(*process.pids) for process in processes]
        for number, served in enumerate((gateway, both) * 2):
            await stack.load(served.port, connections=16, requests=PROMPTS // 2, seed=20 + number)
        us = [
            (stack.cpu_s(*process.pids) - was) / PROMPTS * 1e6 for process, was in zip(processes, before, strict=True)
        ]
        share = f"gateway {us[0]:.0f}, router {us[1]:.0f}"
        direct = await stack.load(engines[0].port, connections=1, requests=200, chunks=1, seed=3)
        through = await stack.load(gateway.port, connections=1, requests=200, chunks=1, seed=4)
    added = percentile(through["first_ms"], 0.5) - percentile(direct["first_ms"], 0.5)
    return [
        Figure(
            "request_1k_us",
            us[0] + us[1],
            "us",
            600.0,
            f"CPU of gateway and router ({share}), new 1 KB chats, C=16, tokenised, placed by prefix; baseline is the goal",
        ),
        Figure(
            "request_1k_one_process_us",
            us[2],
            "us",
            us[0] + us[1],
            "the same through `pointsman serve`; baseline is gateway and router as two processes in the same run",
        ),
        Figure(
            "added_ttft_ms",
            added,
            "ms",
            1.0,
            "C=1, 1 KB, p50 through the gateway less p50 direct; baseline is the goal",
        ),
    ]


@contextlib.asynccontextmanager
async def fleet(
    interval_ms: float, *flags: str, template: str = CHATML
) -> AsyncIterator[tuple[list[ServerProcess], str]]:
    """Run two mock engines; yield them and the folder of their model, which has this chat template."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(await asyncio.to_thread(make_tokenizer, Path(folder) / "model", template))
        async with stack.engine(interval_ms, model, *flags) as one, stack.engine(interval_ms, model, *flags) as other:
            yield [one, other], model


async def chunk_us(served: ServerProcess) -> float:
    """Return CPU time per chunk in us: the slope between short and long streams, which excludes the cost of a request."""
    spent = []
    for count in (SHORT, LONG):
        before = stack.cpu_s(*served.pids)
        counts = await stack.load(served.port, connections=STREAMS, requests=STREAMS, chunks=count, **SPREAD)
        if counts["chunks"] != STREAMS * count:
            raise RuntimeError(f"{counts['chunks']} chunks came of {STREAMS * count}")
        spent.append(stack.cpu_s(*served.pids) - before)
    return (spent[1] - spent[0]) / (STREAMS * (LONG - SHORT)) * 1e6


async def leaks() -> list[Figure]:
    """leaks: requests still open at the gateway and at an engine after clients and an engine were killed."""
    async with fleet(INTERVAL_MS) as (engines, model), stack.pointsman(engines, model) as (gateway, _):
        for number in range(KILLS):
            async with stack.open_streams(gateway.port, STREAMS):
                await stack.load(gateway.port, connections=16, requests=100, seed=number)
                if number == KILLS - 1:
                    os.kill(engines[1].pids[0], signal.SIGKILL)
        left = await asyncio.to_thread(_left, gateway.port, engines[0].port)
    note = f"{KILLS} clients killed with {STREAMS} streams each beside {KILLS * 100} requests, then an engine; goal 0"
    return [Figure("leaks", left, "", None, note)]


def _left(gateway: int, engine: int) -> float:
    """Wait until no request is open, at most SETTLE_S; return the number still open."""
    ends = time.monotonic() + SETTLE_S
    while (left := open_requests(gateway) + _under_way(engine)) and time.monotonic() < ends:
        time.sleep(0.1)
    return left


def open_requests(port: int) -> float:
    """Return the number of open requests by the gateway's metric."""
    with open_directly(f"http://127.0.0.1:{port}/metrics", 10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pointsman_gateway_open_requests "))


def _under_way(port: int) -> float:
    """Return the number of answers that a mock engine has in flight."""
    with open_directly(f"http://127.0.0.1:{port}/open", 10) as answer:
        return float(json.loads(answer.read())["open"])
