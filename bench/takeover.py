"""How long requests wait when the owner of their pool dies: real routers, a real Redis, `kill -9`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.replica_fixtures import replicas

GOAL_S = 2.0


async def _takeovers(rounds: int, folder: Path) -> list[float]:
    waits: list[float] = []
    async with replicas(folder) as fleet:
        for number in range(rounds):
            router = fleet.routers[await fleet.owner()]
            router.process.kill()
            died = time.perf_counter()
            await fleet.gateways[number % 2].place(f"r{number}")
            waits.append(time.perf_counter() - died)
            fleet.gateways[number % 2].finish(f"r{number}")
            router.process.start()
            await fleet.ready()
    return sorted(waits)


def run(rounds: int = 20) -> list[dict[str, object]]:
    """From an owner's death to the next placement, in s: p50 and p99 of `rounds` kills. Prints and returns rows."""
    with tempfile.TemporaryDirectory() as folder:
        waits = asyncio.run(_takeovers(rounds, Path(folder)))
    rows: list[dict[str, object]] = []
    for name, share in (("takeover_p50_s", 0.5), ("takeover_p99_s", 0.99)):
        value = waits[min(int(share * len(waits)), len(waits) - 1)]
        note = f"{rounds} owners killed, lease 1 s"
        row = {"metric": name, "value": round(value, 3), "unit": "s", "baseline": GOAL_S, "ratio": value / GOAL_S}
        rows.append({**row, "note": note})
        print(f"{name:20} {value:8.3f} s   goal {GOAL_S:g} s   {note}")
    return rows


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
