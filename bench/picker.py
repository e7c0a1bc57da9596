"""CPU time and added TTFT of an Envoy that asks a gateway as its endpoint picker, beside the gateway itself and a bare Envoy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from statistics import median

from bench import stack
from bench.figures import Figure, percentile
from bench.gateway import INTERVAL_MS, SHORT, SPREAD, STREAMS, fleet
from bench.gateway import LONG as LONG_ANSWER
from bench.stack import ServerProcess
from tests.support.processes.process import free_port

ROUNDS, PROMPTS = 3, 500
PICKED, OWN, BARE = "envoy and picker", "gateway", "envoy alone"
# Parts of what is measured: Envoy, the gateway (picker) and the router.
Parts = Mapping[str, ServerProcess]


async def picker() -> list[Figure]:
    """picker_request_us, picker_chunk_us, picker_added_ttft_ms: medians over rounds, each of which measures all in turn; the
    baseline is the gateway in the place of the proxy."""
    requests: dict[str, list[dict[str, float]]] = {}
    chunks: dict[str, list[dict[str, float]]] = {}
    first_ms: dict[str, list[float]] = {}
    async with _proxies(0.0) as (direct, proxies):
        for port, _ in proxies.values():
            await stack.load(port, connections=16, requests=100, chunks=1, seed=99)
        for number in range(ROUNDS):
            base = await _first_ms(direct.port, number)
            for name, (port, parts) in proxies.items():
                before = _spent(parts)
                await stack.load(port, connections=16, requests=PROMPTS, seed=10 + number)
                requests.setdefault(name, []).append(_each_us(parts, before, PROMPTS))
                first_ms.setdefault(name, []).append(await _first_ms(port, number) - base)
    async with _proxies(INTERVAL_MS) as (_, proxies):
        for number in range(ROUNDS):
            for name, (port, parts) in proxies.items():
                short = await _answers_s(port, parts, SHORT, number)
                long = await _answers_s(port, parts, LONG_ANSWER, number)
                count = STREAMS * (LONG_ANSWER - SHORT)
                chunks.setdefault(name, []).append({part: (long[part] - short[part]) / count * 1e6 for part in parts})
    ttft = {name: median(values) for name, values in first_ms.items()}
    return [
        _figure("picker_request_us", requests, "CPU per new prompt of 1 KB"),
        _figure("picker_chunk_us", chunks, f"CPU per chunk, {STREAMS} streams"),
        Figure(
            "picker_added_ttft_ms", ttft[PICKED], "ms", ttft[OWN], f"over an engine asked directly; Envoy alone {ttft[BARE]:.2f}"
        ),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def _proxies(interval_ms: float) -> AsyncIterator[tuple[ServerProcess, dict[str, tuple[int, Parts]]]]:
    """Run engines and all proxies; yield an engine, and of each proxy its port and its parts."""
    async with contextlib.AsyncExitStack() as running:
        engines, model = await running.enter_async_context(fleet(interval_ms))
        asked = free_port()
        listen = ("--ext-proc-listen", f"127.0.0.1:{asked}")
        gateway, router = await running.enter_async_context(stack.pointsman(engines, model, *listen))
        envoy = await running.enter_async_context(stack.envoy(engines, asked))
        bare = await running.enter_async_context(stack.envoy(engines))
        yield (
            engines[0],
            {
                PICKED: (envoy.port, {"Envoy": envoy, "picker": gateway, "router": router}),
                OWN: (gateway.port, {"gateway": gateway, "router": router}),
                BARE: (bare.port, {"Envoy": bare}),
            },
        )


def _spent(parts: Parts) -> dict[str, float]:
    return {name: stack.cpu_s(*part.pids) for name, part in parts.items()}


def _each_us(parts: Parts, before: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: (spent - before[name]) / count * 1e6 for name, spent in _spent(parts).items()}


async def _answers_s(port: int, parts: Parts, chunks: int, number: int) -> dict[str, float]:
    """Return the CPU time of each part for STREAMS answers, s."""
    before = _spent(parts)
    await stack.load(port, connections=STREAMS, requests=STREAMS, chunks=chunks, seed=70 + number, **SPREAD)
    return {name: spent - before[name] for name, spent in _spent(parts).items()}


async def _first_ms(port: int, number: int) -> float:
    measured = await stack.load(port, connections=1, requests=100, chunks=1, seed=50 + number)
    return percentile(measured["first_ms"], 0.5)


def _figure(metric: str, found: Mapping[str, list[dict[str, float]]], what: str) -> Figure:
    """Return the sum of the parts of Envoy and picker; the baseline is the gateway's."""
    middle = {
        name: {part: median(figures[part] for figures in rounds) for part in rounds[0]}
        for name, rounds in found.items()
    }
    shown = ", ".join(f"{part} {us:,.3g}" for part, us in middle[PICKED].items())
    note = f"{what}: {shown}; Envoy alone {middle[BARE]['Envoy']:,.3g}; baseline is the gateway with its router"
    return Figure(metric, sum(middle[PICKED].values()), "us", sum(middle[OWN].values()), note)
