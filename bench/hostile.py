"""The effect of each kind of hostile client on ordinary ones: TTFT and gaps between tokens with and without them, and memory."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench import stack
from bench.figures import Figure, percentile
from bench.gateway import fleet
from bench.hostile_clients import BODIES, HOSTILE, KEY, MULTIPLIED, MULTIPLYING
from tests.support.tiny_tokenizer import CHATML

INTERVAL_MS = 20.0
SECONDS = 8.0
KEYS = 10_000
# With this limit the gateway rejects a chat of 100,000 messages, which would block the mock engine while it parses the chat.
MAX_MODEL_LEN = 131_072
WHAT = {"ttft_ms": "TTFT", "gaps_ms": "gap between tokens"}


async def hostile() -> list[Figure]:
    """Of each kind: hostile_KIND_ttft_p99_ms and hostile_KIND_gap_p99_ms (goal: twice the p99 without), hostile_KIND_turn_ms and
    hostile_KIND_peak_mb; of kinds that send a body over and over: hostile_KIND_memory_ratio."""
    stack.allow_files(10_000)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"t{at}:{KEY if not at else f'sk-{at}-of-many'}\n" for at in range(KEYS)))
        for template in (CHATML, MULTIPLYING):
            kinds = [kind for kind in HOSTILE if (kind in MULTIPLIED) is (template is MULTIPLYING)]
            async with fleet(INTERVAL_MS, template=template) as (engines, model):
                for kind in kinds:
                    # A new gateway for each kind, so that its peak of memory is due to this kind alone.
                    flags, turns_file = ("--api-keys-file", str(keys)), Path(folder) / kind
                    async with stack.pointsman(
                        engines, model, *flags, max_model_len=MAX_MODEL_LEN, turns_file=turns_file
                    ) as (gateway, _):
                        figures += await _beside(kind, gateway, turns_file)
    return figures


async def _beside(kind: str, gateway: stack.ServerProcess, turns_file: Path) -> list[Figure]:
    [pid] = gateway.pids
    await _ordinary(gateway.port, 2.0)
    await stack.longest_turn(pid, turns_file)
    without = await _ordinary(gateway.port, SECONDS)
    turn_without = await stack.longest_turn(pid, turns_file)
    before = _peak_mb(pid)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.hostile_clients", kind, "--port", str(gateway.port), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        await child.stdout.readline()
        alone = _peak_mb(pid)
        beside = await _ordinary(gateway.port, SECONDS)
        turn = await stack.longest_turn(pid, turns_file)
    finally:
        child.kill()
        await child.wait()
    figures = []
    for what, name in WHAT.items():
        p50, p99 = ([percentile(seen[what], share) for seen in (without, beside)] for share in (0.5, 0.99))
        note = f"{HOSTILE[kind][1]} {kind.replace('_', ' ')}: {name} of 32 streams, p50 {p50[1]:.1f} (without {p50[0]:.1f})"
        failures = dict(Counter(beside["failures"])) or "none"
        note += f", {len(beside[what]):,} values, failures: {failures}; baseline is p99 without; ratio: goal 2"
        short = what.removesuffix("_ms").removesuffix("s")
        figures.append(Figure(f"hostile_{kind}_{short}_p99_ms", p99[1], "ms", p99[0], note))
    clocks = f"{turn['clock_ms']:.0f} ms by the clock (without {turn_without['clock_ms']:.0f})"
    note = f"the longest turn of the event loop, CPU; {clocks}; baseline is without"
    figures.append(Figure(f"hostile_{kind}_turn_ms", turn["cpu_ms"], "ms", turn_without["cpu_ms"], note))
    after = _peak_mb(pid)
    note = "the gateway's peak of resident memory; baseline is without"
    figures.append(Figure(f"hostile_{kind}_peak_mb", after, "MB", before, note))
    if kind in BODIES:
        sent_mb = len(BODIES[kind]) * HOSTILE[kind][1] / 1e6
        # Before ordinary clients go on: the tokens and sessions of their new prompts are kept, 5 MB in 10 s.
        note = f"memory for each byte of {HOSTILE[kind][1]} bodies of {len(BODIES[kind]) / 1e3:,.0f} kB: what the peak rose by"
        note += " while only these clients ran"
        figures.append(Figure(f"hostile_{kind}_memory_ratio", (alone - before) / sent_mb, "x", None, note))
    return figures


async def _ordinary(port: int, seconds: float) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.hostile_clients", "ordinary", "--port", str(port), "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    result: dict[str, Any] = json.loads(out)
    return result


def _peak_mb(pid: int) -> float:
    """Return the process's peak of resident memory, in MB (10^6 bytes)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6
