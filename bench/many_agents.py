"""Agents of many instances in one process, which report to a router: `python -m bench.many_agents ADDRESS`.

It reads lines `INSTANCES KEYS INCARNATION`: all instances say hello at once in this incarnation, each sends a snapshot of KEYS
keys, and "done" is printed when the router knows all. Their loads follow once a second. Each node has a connection of its own,
which its engines share. The process runs at a low priority: agents are on other machines and take nothing from a router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from array import array

from bench.full_cache_fleet import info
from pointsman.agent.v1 import agent_pb2
from pointsman.common.io.channel import open_channel
from tests.support.instances import IN_STEP
from tests.support.router import Client, Report

LOAD_INTERVAL_S = 1.0
# Asked more often, a list of a thousand instances would be a load of its own.
POLL_INTERVAL_S = 0.5
ON_A_NODE = 8  # engines
NICENESS = 10
# Agents are processes of their own, so many of which have something to send at a time.
AT_ONCE = 64


async def main(address: str) -> None:
    """Until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    reports: dict[str, Report] = {}
    nodes: list[Client] = []
    async with contextlib.AsyncExitStack() as open_channels:
        loads = asyncio.create_task(_tell_loads(reports))
        while line := await reader.readline():
            instances, keys, incarnation = map(int, line.split())
            while len(nodes) * ON_A_NODE < instances:
                channel = open_channel(address, own_connection=True)
                nodes.append(Client(await open_channels.enter_async_context(channel)))
            fresh = {info(number).instance_id: Report(nodes[number // ON_A_NODE]) for number in range(instances)}
            turns = asyncio.Semaphore(AT_ONCE)
            before = list(reports.values())
            reports.clear()
            await asyncio.gather(*(_join(turns, one, name, keys, str(incarnation)) for name, one in fresh.items()))
            for one in before:
                one.call.cancel()
            reports.update(fresh)
            while not await _known(nodes[0], instances, keys):  # noqa: ASYNC110
                await asyncio.sleep(POLL_INTERVAL_S)
            print("done", flush=True)
        loads.cancel()


async def _join(turns: asyncio.Semaphore, report: Report, name: str, count: int, incarnation: str) -> None:
    await report.hello(name, incarnation=incarnation, kv_capacity_tokens=count * 16)
    assert (await report.read()).welcome.snapshot
    rng = random.Random(f"{name} {incarnation}")
    async with turns:
        await report.snapshot(array("Q", rng.randbytes(8 * count)))  # type: ignore[arg-type]


async def _known(client: Client, instances: int, keys: int) -> bool:
    known = (await client.instances()).values()
    return sum(one.state in IN_STEP and one.keys >= keys for one in known) == instances


async def _tell_loads(reports: dict[str, Report]) -> None:
    while True:
        for report in list(reports.values()):
            await report.send(load=agent_pb2.Load(healthy=True, running=1, kv_usage=0.25))
        await asyncio.sleep(LOAD_INTERVAL_S)


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(sys.argv[1]))
