"""Agents of many instances in one process, which report to a router: `python -m bench.many_agents ADDRESS`.

It reads lines `INSTANCES KEYS INCARNATION`: all instances say hello at once in this incarnation, each sends a snapshot of KEYS
keys, and "done" is printed when all are sent. Their loads follow once a second.
"""

from __future__ import annotations

import asyncio
import random
import sys
from array import array

from bench.full_cache_fleet import info
from pointsman.agent.v1 import agent_pb2
from pointsman.common.io.channel import open_channel
from tests.support.router import Client, Report

LOAD_INTERVAL_S = 1.0
# Agents are processes of their own, so many of which have something to send at a time.
AT_ONCE = 64


async def main(address: str) -> None:
    """Until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    reports: dict[str, Report] = {}
    async with open_channel(address) as channel:
        client = Client(channel)
        loads = asyncio.create_task(_tell_loads(reports))
        while line := await reader.readline():
            instances, keys, incarnation = map(int, line.split())
            fresh = {info(number).instance_id: Report(client) for number in range(instances)}
            turns = asyncio.Semaphore(AT_ONCE)
            before = list(reports.values())
            reports.clear()
            await asyncio.gather(*(_join(turns, one, name, keys, str(incarnation)) for name, one in fresh.items()))
            for one in before:
                one.call.cancel()
            reports.update(fresh)
            print("done", flush=True)
        loads.cancel()


async def _join(turns: asyncio.Semaphore, report: Report, name: str, count: int, incarnation: str) -> None:
    await report.hello(name, incarnation=incarnation, kv_capacity_tokens=count * 16)
    assert (await report.read()).welcome.snapshot
    rng = random.Random(f"{name} {incarnation}")
    async with turns:
        await report.snapshot(array("Q", rng.randbytes(8 * count)))  # type: ignore[arg-type]


async def _tell_loads(reports: dict[str, Report]) -> None:
    while True:
        for report in list(reports.values()):
            await report.send(load=agent_pb2.Load(healthy=True, running=1, kv_usage=0.25))
        await asyncio.sleep(LOAD_INTERVAL_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
