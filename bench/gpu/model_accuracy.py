"""Part b: the costs of an engine's steps on this device, and how well the lab's model of it predicts a replay.

One engine alone, since the model does not know engines that share a device. `pointsman calibrate` measures it, replays a
generated trace through `pointsman up` and simulates the same requests. Before that: what a long prefill does to streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import aiohttp

from bench.figures import Figure
from bench.gpu.device import CPU, CUDA, STREAMS, make_shape
from bench.gpu.part import PartRun, run_part
from bench.gpu.shapes import QWEN3
from pointsman_lab.workload.synthetic_trace import SMALL, SessionShape, generate, shape_with
from pointsman_lab.workload.trace_files import save_trace
from pointsman_lab.workload.traces import TraceRequest, by_session
from tests.support.engines.direct_offloads import post, session
from tests.support.engines.servers import SERVED_NAME, Engine, running_engines
from tests.support.processes.pointsman import plane_process, pointsman_command, wait_until_it_serves
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

SHAPES = {
    CUDA: shape_with(SMALL, {"system_tokens": 1_024, "context_tokens": 3_000, "growth_tokens": 600, "output_tokens": 100,
                             "max_tokens": 15_000}),
    CPU: shape_with(SMALL, {"system_tokens": 512, "context_tokens": 600, "growth_tokens": 120, "output_tokens": 24,
                            "max_tokens": 3_500, "block_size": 64}),
}  # fmt: skip
# Tokens of a prompt with its answer.
CONTEXT = {CUDA: 16_384, CPU: 4_096}
KV_TOKENS = {CUDA: (131_072, 65_536, 32_768), CPU: (32_768,)}
# Share of the engine's time that prefills take in the replay at its first load.
LOAD = 0.4
# Factors on the replay's time, and seconds of each measurement of the engine.
SCALES = {CUDA: (1.0, 0.5), CPU: (1.0,)}
PROFILE_S = {CUDA: 25.0, CPU: 8.0}
PROFILE_LONGEST = {CUDA: 12_288, CPU: 1_024}
# Answers of the streams that a prefill disturbs, tokens.
STREAM_TOKENS = 400


async def model_accuracy(run: PartRun) -> bool:
    """Measure; all is done in one go. Without vLLM there is nothing to do."""
    if not run.vllm:
        raise SystemExit("this part needs vLLM")
    kind = run.device.kind
    plan = run.device.plan((1,), KV_TOKENS[kind], QWEN3[:-1])
    model = make_shape(run.folder / "model", plan.shape)
    spec = run.device.spec("a", plan, CONTEXT[kind])
    with run.device.ready(run.folder), running_engines([spec], model, run.folder) as (engine,):
        run.add(Figure("KV cache", plan.kv_tokens, "tokens", None, plan.shape.name))
        async with session() as http:
            words = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
            probe = Probe(run, http, engine, [number for word, number in words.items() if word.startswith("Ġ")])
            token_s = await probe.prefill_token_s(min(8_192, CONTEXT[kind] // 2))
            await probe.interference(run.device.sizes.lengths[-1] // 4 * 3 if kind == CPU else 8_192)
        trace = _trace(SHAPES[kind], run.device.sizes.requests)
        factor = _span_s(trace, token_s) / _length_s(trace)
        async with _plane(run.folder, engine) as url:
            await asyncio.to_thread(_calibrate, run, engine, url, model, trace, factor)
    return True


class Probe:
    """One engine that nobody else uses."""

    def __init__(self, run: PartRun, http: aiohttp.ClientSession, engine: Engine, ids: list[int]) -> None:
        self._run, self._http, self._engine, self._ids = run, http, engine, ids
        self._rng = random.Random(46)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.choice(self._ids) for _ in range(tokens)]

    async def _prefill_s(self, tokens: int) -> float:
        began = time.perf_counter()
        await post(self._http, self._engine, {"prompt": self._prompt(tokens), "max_tokens": 1})
        return time.perf_counter() - began

    async def prefill_token_s(self, tokens: int) -> float:
        """Return the time of a prefill of so many tokens, for each, s. The first request is not counted."""
        return median([await self._prefill_s(tokens) for _ in range(4)][1:]) / tokens

    async def interference(self, tokens: int) -> None:
        """Tell what a prefill of so many tokens does to STREAMS decodes, and they to it."""
        alone_s = median([await self._prefill_s(tokens) for _ in range(3)])
        quiet: list[float] = []
        gaps: list[float] = []
        beside: list[float] = []
        for _ in range(self._run.device.sizes.rounds):
            times: list[list[float]] = [[] for _ in range(STREAMS)]
            streams = [asyncio.create_task(self._stream(found)) for found in times]
            await asyncio.to_thread(
                until,
                lambda found=times: min(map(len, found)) >= STREAM_TOKENS // 4,
                within_s=60.0,
                what="streams that decode",
            )
            began = time.perf_counter()
            beside.append(await self._prefill_s(tokens))
            ended = time.perf_counter()
            await asyncio.gather(*streams)
            for found in times:
                steps = [(second, second - first) for first, second in pairwise(found)]
                quiet += [step for at, step in steps if at < began][8:]
                gaps.append(max((step for at, step in steps if began <= at <= ended + 1.0), default=0.0))
        what = f"{tokens:,} tokens beside {STREAMS} decodes"
        self._run.add(
            Figure(f"longest gap of a stream, prefill of {what}", 1e3 * median(gaps), "ms", 1e3 * median(quiet),
                   "baseline: its usual step"),
            Figure(f"prefill of {what}", 1e3 * median(beside), "ms", 1e3 * alone_s, "baseline: alone"),
        )  # fmt: skip

    async def _stream(self, times: list[float]) -> None:
        """Stream an answer; note when each of its chunks arrives."""
        body = {"model": SERVED_NAME, "prompt": self._prompt(64), "max_tokens": STREAM_TOKENS, "temperature": 0}
        async with self._http.post(
            f"{self._engine.url}/v1/completions", json=body | {"ignore_eos": True, "stream": True}
        ) as response:
            async for line in response.content:
                times += [time.perf_counter()] * line.startswith(b"data: {")


def _trace(shape: SessionShape, requests: int) -> list[TraceRequest]:
    """Return so many requests, of sessions that start within a minute."""
    drawn = generate(max(requests // 4, 1), 60.0, seed=46, shape=shape)
    kept = [request for turns in by_session(drawn).values() for request in turns][:requests]
    return sorted(kept, key=lambda request: request.timestamp_ms)


def _length_s(trace: list[TraceRequest]) -> float:
    return max(request.timestamp_ms for request in trace) / 1e3


def _span_s(trace: list[TraceRequest], token_s: float) -> float:
    """Return how long the trace should take, so that its new tokens are LOAD of that time."""
    seen: set[int] = set()
    new = 0
    for request in trace:
        new += request.input_length - request.block_size * len(seen.intersection(request.hash_ids))
        seen |= set(request.hash_ids)
    return max(new * token_s / LOAD, 10.0)


@contextlib.asynccontextmanager
async def _plane(folder: Path, engine: Engine) -> AsyncIterator[str]:
    """Run `pointsman up` in front of the engine; yield its base URL."""
    address = f"127.0.0.1:{free_port()}"
    plane = plane_process(folder, address, f"127.0.0.1:{free_port()}", [engine.url], cwd=REPOSITORY)
    plane.start()
    try:
        await asyncio.to_thread(wait_until_it_serves, plane)
        yield f"http://{address}"
    finally:
        plane.stop(within_s=40)


def _calibrate(run: PartRun, engine: Engine, url: str, model: Path, trace: list[TraceRequest], factor: float) -> None:
    kind, out = run.device.kind, run.folder / "calibration"
    save_trace(run.folder / "trace.jsonl", trace)
    flags = [
        "--url",
        url,
        "--engines",
        engine.url,
        "--tokenizer",
        str(model),
        "--trace",
        str(run.folder / "trace.jsonl"),
    ]
    flags += [
        "--token-scale",
        "1",
        "--profile-seconds",
        str(PROFILE_S[kind]),
        "--profile-longest",
        str(PROFILE_LONGEST[kind]),
    ]
    flags += [word for scale in SCALES[kind] for word in ("--time-scales", f"{scale * factor:.4f}")]
    command = pointsman_command("calibrate", *flags, "--out", str(out))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=run.left_s(), check=False)
    if done.returncode:
        raise RuntimeError(f"pointsman calibrate ended with {done.returncode}: {done.stderr[-2_000:]}")
    found = json.loads((out / "calibration.json").read_text())
    for row in found["measured"]:
        run.add(
            Figure(row["what"], 1e3 * row["seconds"], "ms", 1e3 * row["fitted"], "tokens; baseline: the fitted profile")
        )
    for name, value in found["profile"].items():
        if value and not name.startswith(("transfer", "layerwise", "host", "storage")):
            run.add(Figure(f"profile {name}", 1e6 * value, "us", None, f"residual of the fit {found['residual']:.1%}"))
    for load, compared in found["loads"].items():
        for metric, figures in compared.items():
            times = metric != "cached tokens"
            run.add(
                Figure(
                    f"{metric}, {load}", figures["simulated"] * (1e3 if times else 1), "ms" if times else "tokens",
                    figures["live"] * (1e3 if times else 1), f"simulated, of {len(trace)} requests; baseline: live",
                )
            )  # fmt: skip


if __name__ == "__main__":
    run_part(model_accuracy)
