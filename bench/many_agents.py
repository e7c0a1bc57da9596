"""Agents of many instances in one process, which report to a router: `python -m bench.many_agents ADDRESS`.

The process reads lines. `join INSTANCES KEYS INCARNATION`: all instances send a hello with this incarnation at once, and each
sends a snapshot of KEYS keys. "done" is printed when the router has all of them. Load reports follow once a second. `computed
INSTANCE_ID KEYS`: the instance's engine has computed a prompt with these keys (64-bit, hexadecimal, without separators); they
are reported before the instance's next load. Each node has its own connection, which its engines share. The process has a low
priority, because real agents do not use the router's machine.
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


class Agents:
    """The agents of all instances."""

    def __init__(self, address: str, channels: contextlib.AsyncExitStack) -> None:
        self._address = address
        self._channels = channels
        self._nodes: list[Client] = []
        self._reports: dict[str, Report] = {}
        # What the engines have computed since their last report, and the number of reports with keys, of each instance.
        self._computed: dict[str, array[int]] = {}
        self._seqs: dict[str, int] = {}

    async def join(self, instances: int, keys: int, incarnation: str) -> None:
        """Let all instances join at once; return when the router has all of them."""
        while len(self._nodes) * ON_A_NODE < instances:
            channel = open_channel(self._address, own_connection=True)
            self._nodes.append(Client(await self._channels.enter_async_context(channel)))
        before = list(self._reports.values())
        self._reports.clear()
        at_once = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._join(at_once, number, keys, incarnation) for number in range(instances)))
        for report in before:
            report.call.cancel()
        while not await _known(self._nodes[0], instances, keys):  # noqa: ASYNC110
            await asyncio.sleep(POLL_INTERVAL_S)
        print("done", flush=True)

    async def _join(self, at_once: asyncio.Semaphore, number: int, count: int, incarnation: str) -> None:
        name, report = info(number).instance_id, Report(self._nodes[number // ON_A_NODE])
        await report.hello(name, incarnation=incarnation, kv_capacity_tokens=count * 16)
        assert (await report.read()).welcome.snapshot
        self._computed[name] = array("Q")
        rng = random.Random(f"{name} {incarnation}")
        async with at_once:
            await report.snapshot(array("Q", rng.randbytes(8 * count)))  # type: ignore[arg-type]
        self._seqs[name] = 0
        self._reports[name] = report

    def computed(self, name: str, keys: bytes) -> None:
        """Report these keys of an instance with its next load."""
        self._computed[name].frombytes(keys)

    async def tell(self) -> None:
        """Send each instance's new keys and its load, once in LOAD_INTERVAL_S."""
        while True:
            for name, report in list(self._reports.items()):
                if keys := self._computed[name]:
                    self._computed[name] = array("Q")
                    self._seqs[name] += 1
                    added = agent_pb2.Delta(seq=self._seqs[name], tier=agent_pb2.TIER_DEVICE, added=keys)
                    await report.send(delta=added)
                await report.load()
            await asyncio.sleep(LOAD_INTERVAL_S)


async def main(address: str) -> None:
    """Run until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with contextlib.AsyncExitStack() as channels, asyncio.TaskGroup() as tasks:
        agents = Agents(address, channels)
        loads = tasks.create_task(agents.tell())
        while line := await reader.readline():
            kind, *values = line.decode().split()
            if kind == "join":
                instances, keys, incarnation = values
                tasks.create_task(agents.join(int(instances), int(keys), incarnation))
            else:
                name, keys = values
                agents.computed(name, bytes.fromhex(keys))
        loads.cancel()


async def _known(client: Client, instances: int, keys: int) -> bool:
    known = (await client.instances()).values()
    return sum(status.state in IN_STEP and status.keys >= keys for status in known) == instances


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(sys.argv[1]))
