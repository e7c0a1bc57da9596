"""CPU time, added TTFT and memory of Pointsman, vllm-router, SMG, Dynamo and nginx in front of the same mock engines, in one run.

Pointsman is its gateway and its router, as two processes and as one (`pointsman serve`). vllm-router and SMG run their
cache_aware policies, nginx its round robin. Dynamo gets requests only; its front end counts, not the adapters behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from bench import stack
from bench.figures import Figure, percentile
from bench.gateway import chunk_us
from bench.stack import ServerProcess
from bench.turns import SIZES, TURNS, Conversation, make_model, run_turns, text_of_code

ROUNDS = 5
NEW_PROMPTS = 600
# Answers of 300 chunks, one each INTERVAL_MS.
ANSWERS, CHUNKS, INTERVAL_MS = 64, 300, 20.0
STREAMS = 1_000
OURS, ONE_PROCESS = "pointsman", "pointsman serve"
VLLM_ROUTER, SMG, NGINX = "vllm-router", "smg", "nginx"
DYNAMO = "dynamo"
PROXIES = (OURS, ONE_PROCESS, VLLM_ROUTER, SMG, NGINX, DYNAMO)
# Metric -> unit, the proxy of the baseline, and the ratio to it that is the goal (0: none).
GOALS: Mapping[str, tuple[str, str, float]] = {
    "side_new_1k_us": ("us", VLLM_ROUTER, 2.2),
    "side_new_1k_of_dynamo_us": ("us", DYNAMO, 0.4),
    "side_new_32k_us": ("us", DYNAMO, 0.25),
    "side_new_400k_us": ("us", DYNAMO, 0.15),
    "side_turn_32k_us": ("us", VLLM_ROUTER, 0.6),
    "side_turn_400k_us": ("us", VLLM_ROUTER, 0.2),
    "side_chunk_us": ("us", NGINX, 1.1),
    "side_answer_300_us": ("us", VLLM_ROUTER, 0.75),
    "side_added_ttft_ms": ("ms", NGINX, 0.0),
    "side_rss_mb_1000_streams": ("MB", VLLM_ROUTER, 0.0),
}
Found = dict[str, dict[str, list[float]]]


async def side_by_side() -> list[Figure]:
    """side_*, and side_serve_* for one process: medians over rounds, each of which measures all proxies in turn; the baseline is
    another proxy's figure."""
    stack.allow_files(4 * STREAMS)
    found: Found = defaultdict(lambda: defaultdict(list))
    text = text_of_code()
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder))
        await asyncio.to_thread(make_model, Path(folder), text)
        async with _proxies(0.0, model) as (engines, proxies), stack.dynamo(engines, model) as dynamo:
            everyone = proxies | {DYNAMO: dynamo}
            await _warm_up(everyone)
            for number in range(ROUNDS):
                for name, proxy in everyone.items():
                    await _requests(found, name, proxy, number)
                    await _turns(found, name, proxy, text, number)
                    _say(number, name)
                await _added_ttft(found, engines[0], proxies, number)
        found["side_new_1k_of_dynamo_us"] = found["side_new_1k_us"]
        async with _proxies(INTERVAL_MS, model) as (_, proxies):
            await _warm_up(proxies)
            for number in range(ROUNDS):
                for name, proxy in proxies.items():
                    found["side_chunk_us"][name].append(await chunk_us(proxy))
                    await _answers(found, name, proxy, number)
                    _say(number, name)
        async with _proxies(1_000.0, model) as (_, proxies):
            for name, proxy in proxies.items():
                async with stack.open_streams(proxy.port, STREAMS):
                    resident = sum(stack.rss_mb(pid) for pid in proxy.pids)
                found["side_rss_mb_1000_streams"][name].append(resident)
    return [_figure(metric, name, found[metric]) for metric in GOALS for name in (OURS, ONE_PROCESS)]


@contextlib.asynccontextmanager
async def _proxies(
    interval_ms: float, model: str
) -> AsyncIterator[tuple[list[ServerProcess], dict[str, ServerProcess]]]:
    """Run two mock engines and all proxies in front of them; yield the engines, and the proxies by name."""
    async with contextlib.AsyncExitStack() as running:
        engines = [await running.enter_async_context(stack.engine(interval_ms, model)) for _ in range(2)]
        gateway, router = await running.enter_async_context(stack.pointsman(engines, model))
        proxies = {
            OURS: ServerProcess(gateway.port, (*gateway.pids, *router.pids)),
            ONE_PROCESS: await running.enter_async_context(stack.one_process(engines, model)),
            VLLM_ROUTER: await running.enter_async_context(stack.vllm_router(engines, "cache_aware")),
            SMG: await running.enter_async_context(stack.smg(engines, "cache_aware")),
            NGINX: await running.enter_async_context(stack.nginx(engines)),
        }
        yield engines, proxies


def _say(number: int, name: str) -> None:
    """Tell the progress: a run takes minutes."""
    print(f"side_by_side: round {number + 1} of {ROUNDS}, {name}", file=sys.stderr, flush=True)


async def _warm_up(proxies: Mapping[str, ServerProcess]) -> None:
    for proxy in proxies.values():
        await stack.load(proxy.port, connections=16, requests=200, chunks=1, seed=99)


async def _requests(found: Found, name: str, proxy: ServerProcess, number: int) -> None:
    before = stack.cpu_s(*proxy.pids)
    await stack.load(proxy.port, connections=16, requests=NEW_PROMPTS, seed=10 + number)
    found["side_new_1k_us"][name].append((stack.cpu_s(*proxy.pids) - before) / NEW_PROMPTS * 1e6)


async def _turns(found: Found, name: str, proxy: ServerProcess, text: str, number: int) -> None:
    """Measure conversations' first turns, which are new prompts, and the turns after them. Each proxy and round has conversations
    of its own."""
    for size, (_, _, conversations, _) in SIZES.items():
        first = (number * len(PROXIES) + PROXIES.index(name)) * 10
        talks = [Conversation(size, text, first + at) for at in range(conversations)]
        for kind, turns in (("new", 1), ("turn", TURNS)):
            before = stack.cpu_s(*proxy.pids)
            await run_turns(proxy.port, talks, turns)
            each_us = (stack.cpu_s(*proxy.pids) - before) / (turns * conversations) * 1e6
            found[f"side_{kind}_{size}_us"][name].append(each_us)


async def _added_ttft(found: Found, engine: ServerProcess, proxies: Mapping[str, ServerProcess], number: int) -> None:
    async def first_ms(port: int) -> float:
        measured = await stack.load(port, connections=1, requests=100, chunks=1, seed=50 + number)
        return percentile(measured["first_ms"], 0.5)

    direct = await first_ms(engine.port)
    for name, proxy in proxies.items():
        found["side_added_ttft_ms"][name].append(await first_ms(proxy.port) - direct)


async def _answers(found: Found, name: str, proxy: ServerProcess, number: int) -> None:
    before = stack.cpu_s(*proxy.pids)
    spread = {"spread-ms": INTERVAL_MS}
    await stack.load(proxy.port, connections=ANSWERS, requests=ANSWERS, chunks=CHUNKS, seed=70 + number, **spread)
    found["side_answer_300_us"][name].append((stack.cpu_s(*proxy.pids) - before) / ANSWERS * 1e6)


def _figure(metric: str, ours: str, by_name: Mapping[str, Sequence[float]]) -> Figure:
    unit, against, goal = GOALS[metric]
    middle = {name: percentile(values, 0.5) for name, values in by_name.items()}
    others = ", ".join(f"{name} {value:,.3g}" for name, value in middle.items() if name != ours)
    aim = f"; goal of the ratio {goal:g}" if goal else ""
    name = metric if ours == OURS else metric.replace("side_", "side_serve_", 1)
    return Figure(name, middle[ours], unit, middle[against], f"{others}; baseline is {against}{aim}")
