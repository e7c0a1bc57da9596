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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

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

Describe: TypeAlias = Callable[[int], dict[str, Any]]


def _undescribed(_: int) -> dict[str, Any]:
    return {}


@dataclass
class ReportedEngine:
    """The stream of one instance. `computed`: keys that its engine has computed since the last report; `seq`: of that report."""

    report: Report
    computed: array[int] = field(default_factory=partial(array, "Q"))
    seq: int = 0
    has_joined: bool = False

    async def tell(self) -> None:
        """Send new keys and a load."""
        if self.computed:
            added, self.computed = self.computed, array("Q")
            self.seq += 1
            await self.report.send(delta=agent_pb2.Delta(seq=self.seq, tier=agent_pb2.TIER_DEVICE, added=added))
        await self.report.load()


class Agents:
    """The agents of all instances."""

    def __init__(self, address: str, channels: contextlib.AsyncExitStack, describe: Describe = _undescribed) -> None:
        """`describe`: further fields of an instance's description (agent_pb2.Instance), by the instance's number."""
        self._address = address
        self._describe = describe
        self._channels = channels
        self._nodes: list[Client] = []
        self._engines: dict[str, ReportedEngine] = {}

    async def join(self, instances: int, keys: int, incarnation: str) -> None:
        """Let all instances join at once; return when the router has all of them."""
        while len(self._nodes) * ON_A_NODE < instances:
            channel = open_channel(self._address, own_connection=True)
            self._nodes.append(Client(await self._channels.enter_async_context(channel)))
        before = list(self._engines.values())
        self._engines = {
            info(number).instance_id: ReportedEngine(Report(self._nodes[number // ON_A_NODE]))
            for number in range(instances)
        }
        at_once = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._join(at_once, number, keys, incarnation) for number in range(instances)))
        for engine in before:
            engine.report.call.cancel()
        while not await _known(self._nodes[0], instances, keys):  # noqa: ASYNC110
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _join(self, at_once: asyncio.Semaphore, number: int, count: int, incarnation: str) -> None:
        name = info(number).instance_id
        engine = self._engines[name]
        described: dict[str, Any] = {"kv_capacity_tokens": count * 16} | self._describe(number)
        await engine.report.hello(name, incarnation=incarnation, **described)
        assert (await engine.report.read()).welcome.snapshot
        rng = random.Random(f"{name} {incarnation}")
        async with at_once:
            await engine.report.snapshot(array("Q", rng.randbytes(8 * count)))  # type: ignore[arg-type]
        engine.has_joined = True

    def computed(self, name: str, keys: bytes) -> None:
        """Report these keys of an instance before its next load."""
        self._engines[name].computed.frombytes(keys)

    async def tell(self) -> None:
        """Send each instance's new keys and its load, once in LOAD_INTERVAL_S."""
        while True:
            for name, engine in list(self._engines.items()):
                if engine.has_joined:
                    try:
                        await engine.tell()
                    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        # The router ends the stream of an incarnation when the next one joins.
                        if self._engines.get(name) is engine:
                            raise
            await asyncio.sleep(LOAD_INTERVAL_S)


class AgentsProcess:
    """Agents in a process of their own, which are told by its standard input."""

    def __init__(self, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._stdin, self._stdout = stdin, stdout

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, address: str) -> AsyncIterator[AgentsProcess]:
        """Run the agents of a router inside the block."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "bench.many_agents", address)
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield cls(child.stdin, child.stdout)
        finally:
            child.kill()
            await child.wait()

    async def join(self, instances: int, keys: int, incarnation: int) -> None:
        """Let all instances send a hello at once; return when the router has all of them with all their keys. Raises RuntimeError
        if the agents end."""
        self._stdin.write(f"join {instances} {keys} {incarnation}\n".encode())
        if await self._stdout.readline() != b"done\n":
            raise RuntimeError("the agents have ended")

    def computed(self, instance_id: str, keys: array[int]) -> None:
        """Let an instance's agent report that its engine has computed a prompt with these keys: without such reports a router
        stops trusting the engine's events."""
        self._stdin.write(f"computed {instance_id} {keys.tobytes().hex()}\n".encode())


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
                tasks.create_task(_join(agents, int(instances), int(keys), incarnation))
            else:
                name, keys = values
                agents.computed(name, bytes.fromhex(keys))
        loads.cancel()


async def _join(agents: Agents, instances: int, keys: int, incarnation: str) -> None:
    await agents.join(instances, keys, incarnation)
    print("done", flush=True)


async def _known(client: Client, instances: int, keys: int) -> bool:
    known = (await client.instances()).values()
    return sum(status.state in IN_STEP and status.keys >= keys for status in known) == instances


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(sys.argv[1]))
