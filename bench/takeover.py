"""Takeovers and bursts with several router replicas, a real Redis and `kill -9`: waiting times and double bookings."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, percentile
from tests.support.processes.replicas import double_bookings, replicas

GOAL_S = 2.0
ROUNDS = 20
BURSTS, KILLED_EACH = 100, 10


async def takeover() -> list[Figure]:
    """Return the time from an owner's death to the next placement, in s: p50 and p99 of ROUNDS kills."""
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


async def bursts() -> list[Figure]:
    """Return the number of large prompts that share an instance although each could have an idle one, over BURSTS bursts."""
    rng, doubles = random.Random(7), 0
    with tempfile.TemporaryDirectory() as folder:
        async with replicas(Path(folder)) as fleet:
            for number in range(BURSTS):
                owner = fleet.routers[await fleet.owner()]
                burst = asyncio.create_task(fleet.burst())
                if number % KILLED_EACH == 0:
                    await asyncio.sleep(rng.uniform(0.0, 0.01))
                    owner.process.kill()
                doubles += double_bookings(await burst)
                await fleet.idle()
                if number % KILLED_EACH == 0:
                    owner.process.start()
                    await fleet.ready()
                    await fleet.idle()
    note = f"{BURSTS} bursts of simultaneous 100k-token prompts on idle instances, the owner killed in {BURSTS // KILLED_EACH}"
    return [Figure("double_bookings", doubles, "", 0, note)]
