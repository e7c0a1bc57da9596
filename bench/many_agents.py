"""Agents of many instances in one process, which report to a router: `python -m bench.many_agents ADDRESS`.

The process reads lines `INSTANCES KEYS INCARNATION`. For each line all instances send a hello with this incarnation at once, and
each sends a snapshot of KEYS keys. "done" is printed when the router has all of them. Load reports follow once a second. Each
node has its own connection, which its engines share. The process has a low priority, because real agents do not use the router's
machine.
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
from pointsman_common.io.channel import open_channel
from tests.support.instances import IN_STEP
from tests.support.router import Client, Report

# Interval between two load reports of an instance, s.
LOAD_INTERVAL_S = 1.0
# Interval between two listings of the instances, s. More frequent listings of a thousand instances would load the router.
POLL_INTERVAL_S = 0.5
ON_A_NODE = 8  # engines
NICENESS = 10
# Maximum number of instances that send a snapshot at the same time.
AT_ONCE = 64


async def main(address: str) -> None:
    """Run until standard input ends."""
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
            await asyncio.gather(
                *(_join(turns, engine, name, keys, str(incarnation)) for name, engine in fresh.items())
            )
            for report in before:
                report.call.cancel()
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
    return sum(status.state in IN_STEP and status.keys >= keys for status in known) == instances


async def _tell_loads(reports: dict[str, Report]) -> None:
    while True:
        for report in list(reports.values()):
            await report.send(load=agent_pb2.Load(healthy=True, running=1, kv_usage=0.25))
        await asyncio.sleep(LOAD_INTERVAL_S)


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(sys.argv[1]))
