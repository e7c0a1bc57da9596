"""CPU time that pushing a prompt layer by layer costs the engine that computes it, beside vLLM's own connector.

Each round makes one offload through each pair of engines, in random order, with D's request sent first. Other load on the machine
disturbs some rounds, so the differences are trimmed. Two engines with the same connector also differ by a percent or two, and the
difference changes from run to run. A figure exact to the percent therefore takes several runs.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import aiohttp

from bench.figures import Figure
from bench.layerwise import TOKENS, engine_pairs, tail_of
from pointsman_lab.experiments.paired_statistics import trimmed_difference
from tests.support.engines.direct_offloads import session
from tests.support.engines.servers import Engine

# Time that an engine still works for an offload after both of its requests are answered, s.
SETTLES_S = 0.02


async def layerwise_cpu() -> list[Figure]:
    """Return P's CPU time for short prompts."""
    return await _figures({"block": 200, "2k": 80})


async def layerwise_cpu_long() -> list[Figure]:
    """Return P's CPU time for long prompts."""
    return await _figures({"4k": 30, "8k": 16})


async def _figures(pairs: Mapping[str, int]) -> list[Figure]:
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder, engine_pairs(Path(folder)) as (upstream, pushing, ids):
        async with session() as http:
            figures = []
            for name, count in pairs.items():
                # The first three rounds are not measured: each engine queries the other one, and learns the speed of the link.
                spent: tuple[list[float], list[float]] = ([], [])
                for number in range(-3, count):
                    both = [(upstream, spent[0]), (pushing, spent[1])]
                    rng.shuffle(both)
                    for pair, found in both:
                        prompt = [rng.choice(ids) for _ in range(TOKENS[name])]
                        cpu_s = await _p_cpu_s(http, pair, prompt)
                        if number >= 0:
                            found.append(cpu_s)
                figures.append(_figure(f"layerwise_p_cpu_s_{name}", *spent))
            return figures


def _figure(metric: str, after: list[float], layered: list[float]) -> Figure:
    base = median(after)
    more = trimmed_difference(layered, after)
    assert more.half_width is not None
    note = f"{more.trials} pairs, {more.mean / base:+.1%} +- {more.half_width / base:.1%} (95 %); baseline: vLLM's connector"
    return Figure(metric, base + more.mean, "s", base, note)


async def _p_cpu_s(http: aiohttp.ClientSession, pair: list[Engine], prompt: list[int]) -> float:
    before = _cpu_s(pair[0])
    await tail_of(http, pair, prompt)
    await asyncio.sleep(SETTLES_S)
    return _cpu_s(pair[0]) - before


def _cpu_s(engine: Engine) -> float:
    """Return the CPU time of all processes of an engine, in s, from their CPU-time clocks, which are finer than /proc's ticks."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == engine.process.pid:
                # The clock id that clock_getcpuclockid(3) computes from a process id.
                total += time.clock_gettime((~int(stat.parent.name) << 3) | 2)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
