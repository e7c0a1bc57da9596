"""Part a: KV transfers between two engines on one device, layer by layer and after the prefill.

First without vLLM: the connector's event waiter and Mooncake on tensors, whose bytes the receiver checks. Then two pairs of
engines, one with vLLM's own connector, one with layer-wise push, measured in turn. The overhead is what a transfer leaves on the
critical path: the time from P's answer to D's first token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import aiohttp

from bench.figures import Figure
from bench.gpu.device import CUDA, STREAM_TOKENS, STREAMS, make_shape, site
from bench.gpu.part import PartRun, run_part
from bench.gpu.shapes import QWEN3, TINY, Shape
from bench.layerwise import Halves, decoding, engine_pairs, offload_times
from tests.support.engines.direct_offloads import Offload, Refused, alone, post, session
from tests.support.engines.servers import ENGINE_PYTHON, Engine, EngineSpec
from tests.support.repository import REPOSITORY

# KV of the background streams, tokens.
STREAM_KV = STREAMS * (32 + STREAM_TOKENS)
AT_ONCE = 3
# How long engines may keep KV of requests that were aborted: until their timeout, and some.
FREE_WITHIN_S = 100.0
# Milliseconds of a layer's computation without vLLM, on a card: as of 8,192 tokens of a larger model.
LAYER_MS = 8.0


async def transfers(run: PartRun) -> bool:
    """Measure; all is done in one go."""
    lengths = run.device.sizes.lengths
    shape = QWEN3[0] if run.device.kind == CUDA else TINY
    for length in lengths:
        await asyncio.to_thread(_tensors, run, shape, length)
    if run.vllm:
        await _engines(run)
    return True


def _tensors(run: PartRun, shape: Shape, length: int) -> None:
    layer_ms = LAYER_MS if run.device.kind == CUDA else 1.0
    command = [str(ENGINE_PYTHON), str(REPOSITORY / "connector" / "push_tensors.py"), "--device", run.device.kind]
    command += ["--protocol", run.device.protocol, "--layers", str(shape.layers), "--tokens", str(length)]
    command += ["--bytes-per-token", str(shape.kv_bytes_per_token // shape.layers), "--layer-ms", str(layer_ms)]
    command += ["--rounds", str(run.device.sizes.rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=run.left_s(), check=False)
    if done.returncode:
        raise RuntimeError(f"push_tensors.py ended with {done.returncode}: {done.stderr[-2_000:]}")
    after, each = map(float, re.findall(r"^tail .*?([\d.]+) ms$", done.stdout, re.MULTILINE))
    note = f"without vLLM: {shape.layers} layers of {layer_ms:g} ms, all bytes right; baseline: after the last layer"
    run.add(Figure(f"tensors, {length:,} tokens", each, "ms", after, note))


async def _engines(run: PartRun) -> None:
    lengths = run.device.sizes.lengths
    # By estimate the largest shape takes longer than a part has.
    plan = run.device.plan((4,), [length + STREAM_KV for length in reversed(lengths)], QWEN3[:-1])
    lengths = tuple(length for length in lengths if length + STREAM_KV <= plan.kv_tokens)
    model = make_shape(run.folder / "model", plan.shape)
    env = site(run.folder)

    def spec(name: str, connector: Mapping[str, Any]) -> EngineSpec:
        context = max(lengths[-1], 32 + STREAM_TOKENS) + 64
        return run.device.spec(name, plan, context, kv_transfer=run.device.kv_transfer(connector), env=env)

    began = time.monotonic()
    with run.device.ready(run.folder), engine_pairs(run.folder, spec, model) as (after, push, ids):
        run.add(Figure("engines started", time.monotonic() - began, "s", None, f"4 engines of {plan.shape.name}"))
        async with session() as http:
            await _Pairs(run, http, after, push, ids, plan.shape).measure(lengths)


class _Pairs:
    """The two pairs of engines, P and D each."""

    def __init__(
        self,
        run: PartRun,
        http: aiohttp.ClientSession,
        after: list[Engine],
        push: list[Engine],
        ids: list[int],
        shape: Shape,
    ) -> None:
        self._run, self._http, self._ids, self._shape = run, http, ids, shape
        self._pairs = {"after": after, "push": push}
        self._rng = random.Random(46)
        self._rounds = run.device.sizes.rounds
        self._loaded = 0  # tokens of all prompts that the D of layer-wise push was to load

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.choice(self._ids) for _ in range(tokens)]

    async def measure(self, lengths: Sequence[int]) -> None:
        """Measure everything, the most important first."""
        await self._handshake()
        for length in lengths:
            size = length * self._shape.kv_bytes_per_token / 1e6
            self._run.add(Figure(f"{self._shape.name} / {length:,} tokens / KV", size, "MB"))
        for length in lengths:
            await self._table(length, "idle")
        for length in lengths:
            async with contextlib.AsyncExitStack() as streams:
                for _, d in self._pairs.values():
                    await streams.enter_async_context(decoding(self._http, d, self._rng, self._ids, STREAM_TOKENS))
                await self._table(length, f"{STREAMS} decodes")
        await self._at_once(lengths[0])
        await self._answers(lengths)
        await self._fetch(lengths)
        await self._checks("before aborts")
        await self._aborts(lengths[-1])

    async def _handshake(self) -> None:
        """The first transfer of a pair opens connections; the second is not measured, either."""
        times = {}
        for name, pair in self._pairs.items():
            first, again = [await self._offload(name, pair, 300) for _ in range(2)]
            times[name] = 1e3 * (first.tail_s - again.tail_s)
        note = "first tail less the second; baseline: vLLM's connector"
        self._run.add(Figure("handshake", times["push"], "ms", times["after"], note))

    async def _offload(self, name: str, pair: list[Engine], tokens: int) -> Halves:
        self._loaded += tokens if name == "push" else 0
        return await offload_times(self._http, pair, self._prompt(tokens))

    async def _table(self, length: int, load: str) -> None:
        halves: dict[str, list[Halves]] = {name: [] for name in self._pairs}
        alone_s: dict[str, list[float]] = {name: [] for name in self._pairs}
        for _ in range(self._rounds):
            for name, pair in self._pairs.items():
                began = time.perf_counter()
                await post(self._http, pair[0], {"prompt": self._prompt(length), "max_tokens": 1})
                alone_s[name].append(time.perf_counter() - began)
                halves[name].append(await self._offload(name, pair, length))
        tails = {name: 1e3 * median(found.tail_s for found in all_) for name, all_ in halves.items()}
        row = f"{self._shape.name} / {length:,} tokens"
        self._run.add(
            Figure(f"{row} / overhead after the prefill, {load}", tails["after"], "ms"),
            Figure(f"{row} / overhead layer by layer, {load}", tails["push"], "ms", tails["after"]),
        )
        for name, told in (("after", "after it"), ("push", "layer by layer")):
            prefill_ms = 1e3 * median(found.prefill_s for found in halves[name])
            without_ms = 1e3 * median(alone_s[name])
            self._run.add(Figure(f"{row} / prefill with a transfer {told}, {load}", prefill_ms, "ms", without_ms))

    async def _at_once(self, length: int) -> None:
        times: dict[str, list[float]] = {name: [] for name in self._pairs}
        for _ in range(self._rounds):
            for name, pair in self._pairs.items():
                found = await asyncio.gather(*(self._offload(name, pair, length) for _ in range(AT_ONCE)))
                # All are sent at once: the last first token after the last answer of P.
                prefilled = max(half.prefill_s for half in found)
                times[name].append(1e3 * (max(half.prefill_s + half.tail_s for half in found) - prefilled))
        after, push = (median(times[name]) for name in ("after", "push"))
        note = "last first token after P's last answer, layer by layer; baseline: after the prefill"
        self._run.add(Figure(f"{AT_ONCE} transfers at once, {length:,} tokens", push, "ms", after, note))

    async def _answers(self, lengths: Sequence[int]) -> None:
        p, d = self._pairs["push"]
        same = 0
        for length in lengths:
            prompt = self._prompt(length)
            self._loaded += length
            same += await Offload(self._http, p, d, prompt).answer() == await alone(self._http, p, prompt)
        note = "greedy answers of D after a transfer that are P's own; baseline: of so many; made-up weights have near ties"
        self._run.add(Figure("answers equal", same, "", len(lengths), note))

    async def _fetch(self, lengths: Sequence[int]) -> None:
        """D gets a prefix that P has cached by a prompt of the prefix and one token, and then computes the rest."""
        p, d = self._pairs["push"]
        block = p.spec.block_size
        prefix, rest = lengths[-1] // 2 // block * block, lengths[0] // 8
        fetched, computed, cached = [], [], 0.0
        for _ in range(self._rounds):
            prompt = self._prompt(prefix + rest)
            await post(self._http, p, {"prompt": prompt[: prefix + 1], "max_tokens": 1})
            began = time.perf_counter()
            self._loaded += prefix + 1
            await Offload(self._http, p, d, prompt[: prefix + 1], 0.0, output=1).answer()
            answer = await post(self._http, d, {"prompt": prompt, "max_tokens": 1})
            fetched.append(time.perf_counter() - began)
            cached += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            began = time.perf_counter()
            await post(self._http, d, {"prompt": self._prompt(prefix + rest), "max_tokens": 1})
            computed.append(time.perf_counter() - began)
        note = f"prefix from P, then D's own request of {rest:,} more tokens; baseline: D computes everything"
        self._run.add(
            Figure(f"prefix of {prefix:,} tokens fetched", 1e3 * median(fetched), "ms", 1e3 * median(computed), note)
        )
        note = "cached tokens that D found of fetched prefixes; baseline: their tokens"
        self._run.add(Figure("fetched prefixes found", cached, "tokens", prefix * self._rounds, note))

    async def _checks(self, when: str) -> None:
        """What D counted of all transfers layer by layer: loaded tokens, and checksums that P computed on its device."""
        d = self._pairs["push"][1]
        # Engines count with steps.
        await post(self._http, d, {"prompt": self._prompt(3), "max_tokens": 1})
        counted = partial(_counted, d)
        loaded = counted("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        self._run.add(Figure("tokens loaded", loaded, "tokens", self._loaded, f"by D, {when}; baseline: sent to it"))
        checked, wrong = (counted(f"pointsman_kv_{kind}_requests_total") for kind in ("checked", "wrong"))
        self._run.add(
            Figure("requests checked by checksums", checked, "", None, f"KV of some blocks, {when}"),
            Figure(
                "requests with wrong checksums",
                wrong,
                "",
                None,
                "of those: KV read before it was computed, or changed",
            ),
        )

    async def _aborts(self, length: int) -> None:
        """P's and D's clients leave in turn, a third into the prefill; then nothing may be left."""
        p, d = self._pairs["push"]
        began = time.perf_counter()
        await post(self._http, p, {"prompt": self._prompt(length), "max_tokens": 1})
        third_s = (time.perf_counter() - began) / 3
        ended: list[float] = []
        for _ in range(self._rounds):
            for left in ("p", "d"):
                offload = Offload(self._http, p, d, self._prompt(length), output=1)
                answer = asyncio.create_task(offload.decode())
                await asyncio.sleep(0.02)
                prefill = asyncio.create_task(offload.prefill())
                await asyncio.sleep(third_s)
                (prefill if left == "p" else answer).cancel()
                began = time.perf_counter()
                results = await asyncio.gather(prefill, answer, return_exceptions=True)
                if left == "p":
                    ended.append(time.perf_counter() - began)
                if unexpected := [it for it in results if isinstance(it, Exception) and not isinstance(it, Refused)]:
                    raise unexpected[0]
        note = f"from P's client's leaving to D's error, {len(ended)} aborted prefills of {length:,} tokens"
        self._run.add(Figure("D's error after an abort on P", 1e3 * median(ended), "ms", None, note))
        began = time.perf_counter()
        while not all([await self._free(engine) for engine in (p, d)]):
            if time.perf_counter() - began > FREE_WITHIN_S:
                raise RuntimeError(f"engines keep KV {FREE_WITHIN_S:.0f} s after the last abort")
            await asyncio.sleep(0.2)
        note = "from the last of the aborts until neither engine has a request or KV in use"
        self._run.add(Figure("KV free after aborts", time.perf_counter() - began, "s", None, note))
        prompt = self._prompt(length)
        same = await Offload(self._http, p, d, prompt).answer() == await alone(self._http, p, prompt)
        self._run.add(Figure("answer equal after aborts", float(same), "", 1.0, "one more transfer"))

    async def _free(self, engine: Engine) -> bool:
        # Gauges move with steps.
        await post(self._http, engine, {"prompt": self._prompt(3), "max_tokens": 1})
        return engine.running() == 0 and engine.metric("vllm:kv_cache_usage_perc") == 0


def _counted(engine: Engine, name: str, **labels: str) -> float:
    """Return the sum of a counter's series; 0 without any."""
    try:
        return engine.metric(name, **labels)
    except KeyError:
        return 0.0


if __name__ == "__main__":
    run_part(transfers)
