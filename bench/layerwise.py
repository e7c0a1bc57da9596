"""What an offloaded prompt pays for its transfer, layer by layer and after the prefill, on real engines over Mooncake and TCP.

The tail is the time between P's answer and D's first token. Each figure is the median of pairs of runs that took turns; the
baseline is the same with vLLM's own connector (its receiver, too, asked first). Two engines on two cores: D's first token
also waits for D's own step and for the other engine's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp

from bench.figures import Figure
from lab.paired import paired_difference
from tests.engine.direct_offloads import Offload, post, session
from tests.engine.processes import until
from tests.engine.servers import (
    ENGINE_PYTHON,
    KV_BYTES_PER_TOKEN,
    LAYERWISE,
    MOONCAKE,
    Engine,
    EngineSpec,
    make_model,
    running_engines,
)

# A block has hardly any bytes: its tail is what asking, answering and D's own step take.
TOKENS = {"block": 32, "2k": 2_000, "4k": 4_000, "8k": 8_000}
ROUNDS = {"block": 20, "2k": 16, "4k": 12, "8k": 9}
STREAMS = 16
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """One offload: the tail (negative when D's first token was there before P's answer) and P's CPU time, in seconds."""

    tail_s: float
    p_cpu_s: float


async def layerwise() -> list[Figure]:
    """The handshake; tails of several lengths with the receiver asked first, idle and beside decoding streams, and with it asked
    last; P's CPU time."""
    if not ENGINE_PYTHON.exists():
        raise SystemExit(f"{ENGINE_PYTHON} is missing: `make env-engine` makes it")
    with tempfile.TemporaryDirectory() as folder, _pairs(Path(folder)) as (upstream, pushing, ids):
        rng = random.Random(3)

        async def turns(
            http: aiohttp.ClientSession, tokens: int, lead_s: float, rounds: int
        ) -> tuple[list[Run], list[Run]]:
            """Both pairs of engines in turn, so that what the machine does meanwhile meets both."""
            runs: tuple[list[Run], list[Run]] = ([], [])
            for _ in range(rounds):
                for pair, found in ((upstream, runs[0]), (pushing, runs[1])):
                    prompt = [rng.choice(ids) for _ in range(tokens)]
                    found.append(await _offload(http, pair, prompt, lead_s))
            return runs

        async def beside_streams(http: aiohttp.ClientSession, pair: list[Engine]) -> list[Run]:
            """One pair at a time: the other's streams would take its cores."""
            async with _decoding(http, pair[1], rng, ids):
                prompts = [[rng.choice(ids) for _ in range(TOKENS["4k"])] for _ in range(ROUNDS["4k"])]
                return [await _offload(http, pair, prompt, 0.0) for prompt in prompts]

        figures: list[Figure] = []
        async with session() as http:
            # An engine learns of the other once, and opens its connections.
            first, again = await turns(http, 300, 0.0, rounds=1), await turns(http, 300, 0.0, rounds=1)
            after_s, layered_s = (one[0].tail_s - two[0].tail_s for one, two in zip(first, again, strict=True))
            figures.append(
                Figure("layerwise_handshake_s", layered_s, "s", after_s, "by which the first offload's tail is longer")
            )
            for name, tokens in TOKENS.items():
                after, layered = await turns(http, tokens, 0.0, ROUNDS[name])
                figures += [
                    _tail(f"layerwise_tail_s_{name}", after, layered, "D asked first; baseline: vLLM's connector"),
                    _cpu(f"layerwise_p_cpu_s_{name}", after, layered),
                ]
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
                "layerwise_write_s_8k", layered_s, "s", after_s, "writes of so many bytes, by the engines' own count"
            )
        )
        return figures


def _tail(metric: str, after: list[Run], layered: list[Run], note: str) -> Figure:
    return Figure(metric, median(run.tail_s for run in layered), "s", median(run.tail_s for run in after), note)


def _cpu(metric: str, after: list[Run], layered: list[Run]) -> Figure:
    base = fmean(run.p_cpu_s for run in after)
    more = paired_difference([run.p_cpu_s for run in layered], [run.p_cpu_s for run in after])
    assert more.half_width is not None
    note = f"P's CPU time, mean of {more.trials}: {more.mean / base:+.1%} +- {more.half_width / base:.1%} (95 %)"
    return Figure(metric, base + more.mean, "s", base, note)


def _write_s_per_mb(engine: Engine) -> float:
    """How long writes to the other took, from what the engine has logged so far."""
    log = engine.process.log.read_text()
    found = re.findall(r"transfers=(\d+), Avg xfer time \(ms\)=([\d.]+), .*?Avg MB per transfer=([\d.]+)", log)
    rows = [tuple(map(float, row)) for row in found]
    return sum(count * ms for count, ms, _ in rows) / 1e3 / sum(count * mb for count, _, mb in rows)


async def _offload(http: aiohttp.ClientSession, pair: list[Engine], prompt: list[int], lead_s: float) -> Run:
    p, d = pair
    offload = Offload(http, p, d, prompt, lead_s, output=1)
    before = _cpu_s(p)

    async def end_of(half: Awaitable[object]) -> float:
        await half
        return time.perf_counter()

    if lead_s < 0:
        prefilled = await end_of(offload.prefill())
        answered = await end_of(offload.decode())
    else:
        answer = asyncio.create_task(end_of(offload.decode()))
        await asyncio.sleep(0.01)
        prefilled, answered = await end_of(offload.prefill()), await answer
    return Run(answered - prefilled, _cpu_s(p) - before)


def _cpu_s(engine: Engine) -> float:
    """CPU time of all of an engine's processes, in seconds."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == engine.process.pid:
                total += int(fields[11]) + int(fields[12])
    return total / TICKS


@contextlib.asynccontextmanager
async def _decoding(
    http: aiohttp.ClientSession, engine: Engine, rng: random.Random, ids: list[int]
) -> AsyncIterator[None]:
    """Streams that generate on `engine` all the while."""
    streams = [
        asyncio.create_task(post(http, engine, {"prompt": [rng.choice(ids) for _ in range(32)], "max_tokens": 8_000}))
        for _ in range(STREAMS)
    ]
    await asyncio.to_thread(
        until, lambda: engine.running() >= STREAMS, within_s=60.0, what="all background streams running"
    )
    yield
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


@contextlib.contextmanager
def _pairs(folder: Path) -> Iterator[tuple[list[Engine], list[Engine], list[int]]]:
    """A pair of engines with vLLM's connector, one with ours, and the ids of tokens to make prompts of."""
    model = make_model(folder / "model")
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]

    def spec(name: str, kv_transfer: Mapping[str, Any]) -> EngineSpec:
        return EngineSpec(
            name,
            kv_transfer=kv_transfer,
            max_model_len=8_192,
            kv_capacity_tokens=160_000,
            extra_args=("--max-num-batched-tokens", "2048"),
        )

    specs = [spec(f"{role}-{name}", kind) for name, kind in (("after", MOONCAKE), ("push", LAYERWISE)) for role in "pd"]
    with running_engines(specs, model, folder) as engines:
        yield engines[:2], engines[2:], [number for word, number in vocabulary.items() if word.startswith("Ġ")]
