"""How long an offloaded prompt waits for its KV transfer, layer by layer and after the prefill, on real engines over Mooncake and
TCP.

The tail is the time between P's answer and D's first token. Each figure is a median over runs that alternate with those of its
baseline: the same with vLLM's own connector, and D's request also sent first. Two engines run on two cores, so D's first token
also waits for D's own step and for the other engine's threads. `layerwise_cpu` measures the CPU cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench.figures import Figure
from tests.support.engines.direct_offloads import Offload, post, session
from tests.support.engines.servers import (
    ENGINE_PYTHON,
    KV_BYTES_PER_TOKEN,
    LAYERWISE,
    MOONCAKE,
    Engine,
    EngineSpec,
    make_model,
    running_engines,
)
from tests.support.waiting import until

# Prompt lengths. A block has few bytes: its tail is the time of the requests, the answers and D's own step.
TOKENS = {"block": 32, "2k": 2_000, "4k": 4_000, "8k": 8_000}
ROUNDS = {"block": 20, "2k": 16, "4k": 12, "8k": 9}
STREAMS = 16


async def layerwise() -> list[Figure]:
    """Return the handshake's time, and tails: of several lengths with D's request sent first, of one length with D's request sent
    after P's answer, and of one length beside decoding streams."""
    with tempfile.TemporaryDirectory() as folder, engine_pairs(Path(folder)) as (upstream, pushing, ids):
        rng = random.Random(3)

        async def turns(
            http: aiohttp.ClientSession, tokens: int, lead_s: float, rounds: int
        ) -> tuple[list[float], list[float]]:
            """Measure both pairs of engines in turn, so that other load on the machine affects both; return their tails."""
            runs: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for pair, found in ((upstream, runs[0]), (pushing, runs[1])):
                    prompt = [rng.choice(ids) for _ in range(tokens)]
                    found.append(await tail_of(http, pair, prompt, lead_s))
            return runs

        async def beside_streams(http: aiohttp.ClientSession, pair: list[Engine]) -> list[float]:
            """Measure one pair at a time, because the other pair's streams would use its cores; return the tails."""
            async with decoding(http, pair[1], rng, ids):
                prompts = [[rng.choice(ids) for _ in range(TOKENS["4k"])] for _ in range(ROUNDS["4k"])]
                return [await tail_of(http, pair, prompt) for prompt in prompts]

        figures: list[Figure] = []
        async with session() as http:
            # At the first offload an engine queries the other one and opens its connections.
            first, again = await turns(http, 300, 0.0, rounds=1), await turns(http, 300, 0.0, rounds=1)
            after_s, layered_s = (one[0] - two[0] for one, two in zip(first, again, strict=True))
            figures.append(
                Figure(
                    "layerwise_handshake_s",
                    layered_s,
                    "s",
                    after_s,
                    "tail of the first offload less that of the second",
                )
            )
            for name, tokens in TOKENS.items():
                after, layered = await turns(http, tokens, 0.0, ROUNDS[name])
                figures.append(
                    _tail(f"layerwise_tail_s_{name}", after, layered, "D asked first; baseline: vLLM's connector")
                )
            after, layered = await turns(http, TOKENS["4k"], -1.0, ROUNDS["4k"])
            figures.append(
                _tail("layerwise_tail_s_4k_sequential", after, layered, "D asked after P; baseline: the same")
            )
            after, layered = [await beside_streams(http, pair) for pair in (upstream, pushing)]
            figures.append(
                _tail("layerwise_tail_s_4k_streams", after, layered, f"{STREAMS} streams decode on D meanwhile")
            )
        megabytes = TOKENS["8k"] * KV_BYTES_PER_TOKEN / 2**20
        layered_s, after_s = [megabytes * _write_s_per_mb(pair[0]) for pair in (pushing, upstream)]
        figures.append(
            Figure(
                "layerwise_write_s_8k",
                layered_s,
                "s",
                after_s,
                "time of the writes of 8k tokens, from the engines' logs",
            )
        )
        return figures


def _tail(metric: str, after: list[float], layered: list[float], note: str) -> Figure:
    return Figure(metric, median(layered), "s", median(after), note)


def _write_s_per_mb(engine: Engine) -> float:
    """Return the time of the engine's KV writes so far, in s per MB, from its log."""
    log = engine.process.log.read_text()
    found = re.findall(r"transfers=(\d+), Avg xfer time \(ms\)=([\d.]+), .*?Avg MB per transfer=([\d.]+)", log)
    rows = [tuple(map(float, row)) for row in found]
    return sum(count * ms for count, ms, _ in rows) / 1e3 / sum(count * mb for count, _, mb in rows)


@dataclass(frozen=True)
class Halves:
    """An offloaded prompt: the time of its prefill on P, and from P's answer to D's first token (negative: before it), in s."""

    prefill_s: float
    tail_s: float


async def offload_times(
    http: aiohttp.ClientSession, pair: list[Engine], prompt: list[int], lead_s: float = 0.0
) -> Halves:
    """Offload a prompt; return its times. `lead_s`: negative if D's request is to be sent after P's answer."""
    p, d = pair
    offload = Offload(http, p, d, prompt, lead_s, output=1)

    async def end_of(half: Awaitable[object]) -> float:
        await half
        return time.perf_counter()

    if lead_s < 0:
        began = time.perf_counter()
        prefilled = await end_of(offload.prefill())
        answered = await end_of(offload.decode())
    else:
        answer = asyncio.create_task(end_of(offload.decode()))
        await asyncio.sleep(0.01)
        began = time.perf_counter()
        prefilled, answered = await end_of(offload.prefill()), await answer
    return Halves(prefilled - began, answered - prefilled)


async def tail_of(http: aiohttp.ClientSession, pair: list[Engine], prompt: list[int], lead_s: float = 0.0) -> float:
    """Offload a prompt; return the time from P's answer to D's first token in s, negative if D's token was first."""
    return (await offload_times(http, pair, prompt, lead_s)).tail_s


@contextlib.asynccontextmanager
async def decoding(
    http: aiohttp.ClientSession, engine: Engine, rng: random.Random, ids: list[int], tokens: int = 8_000
) -> AsyncIterator[None]:
    """Keep STREAMS streams of up to `tokens` tokens decoding on `engine` inside the block."""

    async def stream() -> None:
        while True:
            await post(http, engine, {"prompt": [rng.choice(ids) for _ in range(32)], "max_tokens": tokens})

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]

    def running() -> bool:
        for task in streams:
            if task.done():
                # A refused request raises here.
                task.result()
        return engine.running() >= STREAMS

    try:
        await asyncio.to_thread(until, running, within_s=60.0, what="all background streams running")
        yield
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def _cpu_spec(name: str, kv_transfer: Mapping[str, Any]) -> EngineSpec:
    return EngineSpec(
        name,
        kv_transfer=kv_transfer,
        max_model_len=8_192,
        kv_capacity_tokens=160_000,
        extra_args=("--max-num-batched-tokens", "2048"),
    )


@contextlib.contextmanager
def engine_pairs(
    folder: Path, spec: Callable[[str, Mapping[str, Any]], EngineSpec] = _cpu_spec, model: Path | None = None
) -> Iterator[tuple[list[Engine], list[Engine], list[int]]]:
    """Run a pair of engines with vLLM's connector and one with the layerwise connector; yield both and token ids for prompts.

    `spec` makes an engine's start from its name and its connector; without a `model` they have the tests' small one."""
    if not ENGINE_PYTHON.exists():
        raise SystemExit(f"{ENGINE_PYTHON} is missing: `make env-engine` makes it")
    model = model or make_model(folder / "model")
    known = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    specs = [spec(f"{role}-{name}", kind) for name, kind in (("after", MOONCAKE), ("push", LAYERWISE)) for role in "pd"]
    with running_engines(specs, model, folder) as engines:
        yield engines[:2], engines[2:], [number for word, number in known.items() if word.startswith("Ġ")]
