"""Agents of busy engines in one process, which report to a router: `python -m bench.busy_engines ADDRESS INSTANCES each|paced`.

The keys of each engine change STEPS_PER_S times a second, as those of an engine that decodes many requests and prefills one. With
`each` an agent sends every change as a message, with `paced` it merges them at the router's pace. "ready" is printed when all
engines have a pace or need none, and a line with the number of messages about keys when standard input ends. The process has a
low priority, because real agents do not use the router's machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import deque
from collections.abc import Collection
from typing import Any

from bench.full_cache_fleet import info
from bench.many_agents import LOAD_INTERVAL_S, NICENESS, ON_A_NODE
from pointsman.agent.v1 import agent_pb2
from pointsman_agent.core.report_protocol import ReportProtocol
from pointsman_common.core.block_keys import digest_of
from pointsman_common.core.key_report_types import Delta, Tier
from pointsman_common.io.channel import open_channel
from tests.support.router import Client

# Steps of an engine per second that change its keys, and the keys that one adds; as many leave, once there are CACHED.
STEPS_PER_S, ADDED, CACHED = 30, 8, 4_000
# Time after the start in which all engines receive their pace, s.
SETTLE_S = 3.0


class ChangingKeys:
    """The keys of one engine on its device, and the last changes (`agent.core.key_report_sequence.ReportedKeys`)."""

    def __init__(self, seed: int) -> None:
        self.latest_seq = 0
        self.digest = 0
        self._random = random.Random(seed)
        self._keys: deque[int] = deque()
        self._ring: deque[Delta] = deque(maxlen=4_096)

    @property
    def oldest_seq(self) -> int:
        """As ReportedKeys has it."""
        return self._ring[0].seq if self._ring else self.latest_seq + 1

    @property
    def key_count(self) -> int:
        """As ReportedKeys has it."""
        return len(self._keys)

    def keys(self, tier: Tier) -> Collection[int]:
        """As ReportedKeys has it."""
        return self._keys if tier is Tier.DEVICE else ()

    def delta(self, seq: int) -> Delta:
        """As ReportedKeys has it."""
        return self._ring[seq - self._ring[0].seq]

    def step(self) -> None:
        """Change the keys as a step does. Mutates."""
        added = tuple(self._random.getrandbits(64) for _ in range(ADDED))
        self._keys.extend(added)
        removed = tuple(self._keys.popleft() for _ in range(len(self._keys) - CACHED))
        self.latest_seq += 1
        self.digest ^= digest_of(Tier.DEVICE, added) ^ digest_of(Tier.DEVICE, removed)
        self._ring.append(Delta(self.latest_seq, Tier.DEVICE, added, removed))


class BusyEngine:
    """One engine and its agent's stream. `sent`: number of messages about keys."""

    def __init__(self, client: Client, number: int, paced: bool) -> None:
        self.sent = 0
        self.keys = ChangingKeys(number)
        described = info(number)
        instance = agent_pb2.Instance(
            instance_id=described.instance_id, incarnation="1", url=described.url, model=described.model, block_size=16,
            prefix_mode=agent_pb2.PREFIX_MODE_EXACT, kv_capacity_tokens=CACHED * 16,
        )  # fmt: skip
        self._protocol = ReportProtocol(
            self.keys, instance, "busy", consistency_check_interval_s=5.0, report_interval_s=LOAD_INTERVAL_S
        )
        self._paced = paced
        # grpc-stubs types the synchronous calls only.
        stub: Any = client.agents
        self._call = stub.Report(metadata=client.metadata)

    async def open(self) -> None:
        """Say hello, and read the welcome."""
        hello = self._protocol.next_message(time.monotonic())
        assert hello is not None
        hello.hello.accepts_pace = self._paced
        await self._call.write(hello)
        self._protocol.received(await self._call.read(), time.monotonic())

    async def read(self) -> None:
        """Read what the router says, until the call ends."""
        while isinstance(response := await self._call.read(), agent_pb2.ReportResponse):
            assert not response.HasField("resync"), response
            self._protocol.received(response, time.monotonic())

    async def tell(self) -> None:
        """Send what is to be sent now."""
        while (message := self._protocol.next_message(time.monotonic())) is not None:
            self.sent += not message.HasField("load")
            await self._call.write(message)

    def load(self) -> None:
        """Have a load to send."""
        self._protocol.load(agent_pb2.Load(healthy=True, running=8, kv_usage=0.5), time.monotonic())


async def main(address: str, instances: int, paced: bool) -> None:
    """Run until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with contextlib.AsyncExitStack() as open_channels:
        nodes = [
            Client(await open_channels.enter_async_context(open_channel(address, own_connection=True)))
            for _ in range(-(-instances // ON_A_NODE))
        ]
        await _run(nodes, instances, paced, reader)


async def _run(nodes: list[Client], instances: int, paced: bool, reader: asyncio.StreamReader) -> None:
    engines = [BusyEngine(nodes[number // ON_A_NODE], number, paced) for number in range(instances)]
    await asyncio.gather(*(engine.open() for engine in engines))
    tasks = [asyncio.create_task(engine.read()) for engine in engines]
    work = asyncio.create_task(_steps(engines))
    await asyncio.sleep(SETTLE_S)
    before = sum(engine.sent for engine in engines)
    print("ready", flush=True)
    await reader.read()
    print(sum(engine.sent for engine in engines) - before, flush=True)
    for task in (work, *tasks):
        task.cancel()


async def _steps(engines: list[BusyEngine]) -> None:
    """Step all engines STEPS_PER_S times a second, at times of their own."""
    due = time.monotonic()
    for step in range(sys.maxsize):
        for at, engine in enumerate(engines):
            engine.keys.step()
            if (step + at) % int(STEPS_PER_S * LOAD_INTERVAL_S) == 0:
                engine.load()
            await engine.tell()
        due += 1 / STEPS_PER_S
        await asyncio.sleep(max(due - time.monotonic(), 0.0))


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "paced"))
