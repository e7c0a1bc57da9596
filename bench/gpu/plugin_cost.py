"""Part d: what the connector package costs an engine in its steps, the loads that it tells of them, and sleep.

First without vLLM: the plug-in on a scheduler that does nothing, the events of a step and the checksums of a prompt on this
device. Then two engines in turn, one with layer-wise push and step loads, one with neither; and an engine that sleeps and
wakes up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from statistics import median
from typing import Any

import aiohttp
import msgspec
import zmq

from bench.engine_steps import engine_steps
from bench.figures import Figure
from bench.gpu.device import CPU, CUDA, STREAMS, make_shape, memory_used_bytes, site
from bench.gpu.part import PartRun, run_part
from bench.gpu.shapes import QWEN3, TINY
from pointsman_common.io.direct_http import open_directly
from tests.support.engines.direct_offloads import post, session
from tests.support.engines.servers import LAYERWISE, Engine, running_engines
from tests.support.engines.vllm_questions import asking_vllm

DEVICE_COSTS = "import step_cost; answer = getattr(step_cost, asked.pop('what'))(**asked)"
# Output tokens of a measured decode.
DECODED = 200
# Requests that decode, and prompts that are computed beside them, in a step of the scheduler that does nothing.
BATCHES = ((16, 0), (256, 2))
# Of the step whose events, and the prompt whose checksums, are measured on the device without vLLM; and repetitions.
LAYERS, ROUNDS = 48, 30
SLEEP_WITHIN_S = 90.0


async def plugin_cost(run: PartRun) -> bool:
    """Measure; all is done in one go."""
    await asyncio.to_thread(_without_vllm, run)
    if run.vllm:
        with run.device.ready(run.folder):
            await _engines(run)
            await _sleep(run)
    return True


def _without_vllm(run: PartRun) -> None:
    run.add(*engine_steps(1 if run.device.kind == CPU else 3, BATCHES))
    shape = QWEN3[0] if run.device.kind == CUDA else TINY
    block = 16 * shape.kv_bytes_per_token // shape.layers
    with asking_vllm(run.folder / "costs.log") as python:

        def ask(what: str, **more: Any) -> float:
            asked = {"what": what, "device": run.device.kind, "layers": LAYERS, "rounds": ROUNDS, **more}
            return float(python.ask(DEVICE_COSTS, asked))

        note = f"of the engine's thread, for {LAYERS} layers"
        run.add(Figure("events of a step", ask("events_us"), "us", None, note))
        run.add(Figure("checksums of a prompt", ask("sums_us", block_bytes=block), "us", None, f"{note}, four blocks"))


async def _engines(run: PartRun) -> None:
    length = run.device.sizes.lengths[0]
    plan = run.device.plan((2,), (length + STREAMS * (64 + DECODED) + 1_024,))
    model = make_shape(run.folder / "model", plan.shape)
    loads = f"ipc://{run.folder}/loads"
    specs = [
        run.device.spec(
            "with", plan, length + 64, kv_transfer=run.device.kv_transfer(LAYERWISE),
            env={**site(run.folder), "POINTSMAN_AGENT_LOADS": loads},
        ),
        # With this variable empty vLLM loads no plug-in.
        run.device.spec("without", plan, length + 64, env={"VLLM_PLUGINS": ""}),
    ]  # fmt: skip
    with _received(loads) as received, running_engines(specs, model, run.folder) as engines:
        words = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        ids = [number for word, number in words.items() if word.startswith("Ġ")]
        async with session() as http:
            await _compare(run, http, engines, ids, length, plan.shape.name)
            before = len(received)
            began = time.perf_counter()
            tokens = await _decode(http, engines[0], ids, STREAMS)
            took_s = time.perf_counter() - began
            await asyncio.to_thread(_until_idle, received, before)
        first, last = received[before - 1]["totals"], received[-1]["totals"]
        note = f"while {STREAMS} streams decode, {tokens:,} tokens"
        run.add(
            Figure("step loads", (len(received) - before) / took_s, "1/s", None, note),
            # Of each answer the prompt's last step has the first token.
            Figure("step loads: decode tokens", last["decode_tokens"] - first["decode_tokens"], "tokens", tokens - STREAMS,
                   "by the engine's messages; baseline: of the answers"),
        )  # fmt: skip


async def _compare(
    run: PartRun, http: aiohttp.ClientSession, engines: list[Engine], ids: list[int], length: int, name: str
) -> None:
    """Measure both engines in turn: a decode step of one and of many sequences, and a prefill. The first round is not counted."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(run.device.sizes.rounds + 1):
        for at, engine in enumerate(engines):
            found = {}
            for batch in (1, STREAMS):
                began = time.perf_counter()
                await _decode(http, engine, ids, batch)
                found[f"step of {batch} decodes"] = (time.perf_counter() - began) / DECODED
            began = time.perf_counter()
            await post(http, engine, {"prompt": random.choices(ids, k=length), "max_tokens": 1})
            found[f"prefill of {length:,} tokens"] = time.perf_counter() - began
            for what, seconds in found.items():
                if number:
                    times.setdefault(what, ([], []))[at].append(seconds)
    note = f"{name}, with layer-wise push and step loads; baseline: with neither; medians of {run.device.sizes.rounds}"
    for what, (with_it, without) in times.items():
        run.add(Figure(what, 1e3 * median(with_it), "ms", 1e3 * median(without), note))


async def _decode(http: aiohttp.ClientSession, engine: Engine, ids: list[int], batch: int) -> int:
    """Have the engine answer so many requests at once; return the tokens of the answers."""
    bodies = [{"prompt": random.choices(ids, k=64), "max_tokens": DECODED} for _ in range(batch)]
    answers = await asyncio.gather(*(post(http, engine, body) for body in bodies))
    return sum(int(answer["usage"]["completion_tokens"]) for answer in answers)


@contextlib.contextmanager
def _received(address: str) -> Iterator[list[dict[str, Any]]]:
    """Be the agent's end of the socket inside the block; yields the messages, which grow."""
    messages: list[dict[str, Any]] = []
    ended = threading.Event()
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)

        def receive() -> None:
            while not ended.is_set():
                if socket.poll(100):
                    messages.append(msgspec.msgpack.decode(socket.recv()))

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            yield messages
        finally:
            ended.set()
            thread.join()


def _until_idle(received: list[dict[str, Any]], after: int) -> None:
    """Wait until a message after so many says that nothing is left to do."""
    deadline = time.monotonic() + 10.0
    while len(received) <= after or received[-1]["running"]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                "the engine tells no end of its work: its plug-in is not loaded, or has switched itself off"
            )
        time.sleep(0.05)


async def _sleep(run: PartRun) -> None:
    """An engine sleeps at level 1: its weights go to host memory, its KV cache is dropped."""
    length = run.device.sizes.lengths[0]
    plan = run.device.plan((1,), (65_536, length + 1_024))
    model = make_shape(run.folder / "sleeper", plan.shape)
    flags = ("--enable-sleep-mode",) if run.device.kind == CUDA else ()
    spec = run.device.spec("sleeper", plan, length + 64, env={"VLLM_SERVER_DEV_MODE": "1"}, extra_args=flags)
    with running_engines([spec], model, run.folder) as (engine,):
        async with session() as http:
            prompt = list(range(300, 300 + length // 2))
            answer = await post(http, engine, {"prompt": prompt, "max_tokens": 8})
            used = [_used_gb(run)]
            slept_s = await asyncio.to_thread(_tell, engine, "/sleep?level=1")
            used.append(_used_gb(run))
            woke_s = await asyncio.to_thread(_tell, engine, "/wake_up")
            used.append(_used_gb(run))
            began = time.perf_counter()
            again = await post(http, engine, {"prompt": prompt, "max_tokens": 8})
            first_s = time.perf_counter() - began
    run.add(
        Figure("asleep after", slept_s, "s", None, f"level 1, {plan.shape.name}"),
        Figure("awake after", woke_s, "s", None, ""),
        Figure("first answer after that", first_s, "s", None, f"{length // 2:,} tokens, nothing cached"),
        Figure("answer as before", float(again["choices"][0]["text"] == answer["choices"][0]["text"]), "", 1.0, ""),
    )
    if run.device.kind == CUDA:
        run.add(
            Figure("memory asleep", used[1], "GB", used[0], "of the card; baseline: awake, before"),
            Figure("memory awake again", used[2], "GB", used[0], "of the card; baseline: awake, before"),
        )


def _used_gb(run: PartRun) -> float:
    return memory_used_bytes() / 1e9 if run.device.kind == CUDA else 0.0


def _tell(engine: Engine, path: str) -> float:
    """POST to the engine; return how long it took, s. Raises urllib.error.HTTPError."""
    began = time.perf_counter()
    request = urllib.request.Request(engine.url + path, b"", method="POST")
    with open_directly(request, SLEEP_WITHIN_S) as answer:
        answer.read()
    return time.perf_counter() - began


if __name__ == "__main__":
    run_part(plugin_cost)
