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
from bench.hostile_clients import HOSTILE, KEY

INTERVAL_MS = 20.0
SECONDS = 8.0
KEYS = 10_000
# With this limit the gateway rejects a chat of 100,000 messages, which would block the mock engine while it parses the chat.
MAX_MODEL_LEN = 131_072
WHAT = {"ttft_ms": "TTFT", "gaps_ms": "gap between tokens"}


async def hostile() -> list[Figure]:
    """hostile_KIND_ttft_p99_ms, hostile_KIND_gap_p99_ms, hostile_KIND_peak_mb of each kind; goal of a p99: twice the p99
    without."""
    stack.allow_files(10_000)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"t{at}:{KEY if not at else f'sk-{at}-of-many'}\n" for at in range(KEYS)))
        async with fleet(INTERVAL_MS) as (engines, model):
            for kind in HOSTILE:
                # A new gateway for each kind, so that its peak of memory is due to this kind alone.
                flags = ("--api-keys-file", str(keys))
                async with stack.pointsman(engines, model, *flags, max_model_len=MAX_MODEL_LEN) as (gateway, _):
                    figures += await _beside(kind, gateway)
    return figures


async def _beside(kind: str, gateway: stack.ServerProcess) -> list[Figure]:
    await _ordinary(gateway.port, 2.0)
    without = await _ordinary(gateway.port, SECONDS)
    before = _peak_mb(gateway.pids[0])
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.hostile_clients", kind, "--port", str(gateway.port), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        await child.stdout.readline()
        beside = await _ordinary(gateway.port, SECONDS)
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
    after = _peak_mb(gateway.pids[0])
    figures.append(
        Figure(
            f"hostile_{kind}_peak_mb", after, "MB", before, "the gateway's peak of resident memory; baseline is without"
        )
    )
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
