"""How long requests wait when the owner of their pool dies: real routers, a real Redis, `kill -9`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.figures import Figure, percentile
from tests.integration.replica_fixtures import replicas

GOAL_S = 2.0
ROUNDS = 20


async def takeover() -> list[Figure]:
    """From an owner's death to the next placement, in s: p50 and p99 of ROUNDS kills."""
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with replicas(Path(folder)) as fleet:
            for number in range(ROUNDS):
                router = fleet.routers[await fleet.owner()]
                router.process.kill()
                died = time.perf_counter()
                await fleet.gateways[number % 2].place(f"r{number}")
                waits.append(time.perf_counter() - died)
                fleet.gateways[number % 2].finish(f"r{number}")
                router.process.start()
                await fleet.ready()
    note = f"{ROUNDS} owners killed, lease 1 s; baseline is the goal for p99"
    return [
        Figure(f"takeover_{name}_s", percentile(waits, share), "s", GOAL_S, note)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
