"""Longest blocks of a router's event loop, and placement times meanwhile, on large fleets: `python -m bench stalls`.

Takes two minutes. The router (timed_service.py) and the agents are separate processes. This process requests placements, with a
pause of PROBE_INTERVAL_S after each. A turn is one iteration of the event loop, measured in ms of the router's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import grpc.aio
import redis.asyncio

from bench import stack
from bench.figures import Figure, percentile
from bench.many_agents import AgentsProcess
from bench.waiting import waiting
from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.io.channel import open_channel
from tests.support.http_request import serves
from tests.support.processes.process import free_port
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Session
from tests.support.waiting import eventually

GOAL_TURN_MS, GOAL_PLACE_MS, GOAL_TAKEOVER_S = 20.0, 10.0, 2.0
PROBE_INTERVAL_S = 0.01
PROBE_TOKENS = 1_024
SESSIONS, OPEN = 1_000_000, 10_000
WHAT_IFS, DECISIONS = 20, 1_000
# Number of stored sessions that may be missing: a router keeps a million, and the sessions of the probes displace as many.
SOME = 1_000
# Timeout of each wait, s.
WITHIN_S = 300.0
# Prefix of the pool's keys in Redis.
POOL = "pointsman:{default:m}:"
# Requests of a console page: those of every view, and of the view of the last 15 minutes.
ASKED: tuple[tuple[str, dict[str, str]], ...] = (
    ("ListInstances", {}),
    ("ListReplicas", {}),
    ("ListPolicies", {}),
    ("ListPoolHistories", {}),
    ("ListInstanceHistories", {"measure": "INSTANCE_MEASURE_OPEN_REQUESTS"}),
)
Stored: TypeAlias = dict[Any, Any]


async def stalls() -> list[Figure]:
    """Return the cost of requests that wait (bench/waiting.py), the longest turn and the placements' p99 of each case, and the
    time of a takeover."""
    return [*waiting(), *await _restarts(), *await _thousand(), *await _shared_store()]


async def _restarts() -> list[Figure]:
    async with TimedRouter.running() as router:
        await router.join(64, 62_500, 1)
        async with router.measured("restart_64", "64 engines with 62,500 keys each restart at once") as measured:
            await router.join(64, 62_500, 2)
        return measured


async def _thousand() -> list[Figure]:
    figures: list[Figure] = []
    async with TimedRouter.running("--max-keys", "16000000") as router:
        await router.join(1_000, 4_500, 1)
        async with router.measured("resync_1000", "1,000 instances with 4,500 keys each restart at once") as measured:
            await router.join(1_000, 4_500, 2)
        figures += measured
        async with router.probed(0.0) as placed:
            await eventually(lambda: len(placed) > DECISIONS, "there are decisions", WITHIN_S)
        note = f"WhatIf over the newest {DECISIONS:,} decisions on 1,000 instances, {WHAT_IFS} times"
        async with router.measured("what_if", note) as measured:
            asked = fleet_pb2.WhatIfRequest(last=DECISIONS, policy=fleet_pb2.Policy(name="foresight"))
            for _ in range(WHAT_IFS):
                answer = await router.client.fleet.WhatIf(asked, timeout=WITHIN_S)
                assert answer.decided == DECISIONS
        figures += measured
        async with router.measured("console", "three consoles on 1,000 instances for 10 s") as measured:
            await asyncio.gather(*(_console(router.console_url) for _ in range(3)))
        figures += measured
    return figures


async def _console(url: str) -> None:
    """Send a console page's requests for 10 s, once a second; a page requests histories less often."""
    ends = time.monotonic() + 10.0
    async with aiohttp.ClientSession(url) as http, http.get("/api/decisions") as decisions:

        async def read() -> None:
            async for _ in decisions.content.iter_any():
                pass

        reading = asyncio.create_task(read())
        while time.monotonic() < ends:
            for method, asked in ASKED:
                async with http.post(f"/api/{method}", json=asked) as answer:
                    assert answer.status == 200
                    await answer.read()
            await asyncio.sleep(1.0)
        reading.cancel()


async def _shared_store() -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, _):
        async with redis.asyncio.Redis.from_url(url, socket_timeout=WITHIN_S) as store:
            await _fill(store)
            async with TimedRouter.running("--redis-url", url) as router:
                session = Session(router.client, "takes over")
                await session.hello()
                begun = time.perf_counter()
                async with router.measured(
                    "takeover", "a million sessions, 10,000 open requests", probed=False
                ) as measured:
                    await router.join(64, 1_000, 1)
                    # The takeover is timed to the first placement. It includes the agents' hellos and small snapshots.
                    await session.place("first")
                    taken_s = time.perf_counter() - begun
                    async with router.probed() as placed:
                        while await _sessions_read(router.client) < SESSIONS - SOME:  # noqa: ASYNC110
                            await asyncio.sleep(1.0)
                figures += [
                    *measured,
                    Figure(
                        "stall_takeover_place_p99_ms", percentile(placed, 0.99) * 1e3, "ms", GOAL_PLACE_MS, "as above"
                    ),
                    Figure("stall_takeover_s", taken_s, "s", GOAL_TAKEOVER_S, "from the first hello to a placement"),
                ]
                async with router.measured("refill", "an emptied Redis is filled again with all of this") as measured:
                    await store.flushall()

                    async def whole() -> bool:
                        kept = await store.hlen(POOL + "affinity")
                        return kept >= SESSIONS - SOME and not await store.hexists(POOL + "mean_work", "incomplete")

                    await eventually(whole, "all of it is there again", WITHIN_S)
                figures += measured
    return figures


async def _sessions_read(client: Client) -> int:
    answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(page_size=1))
    return int(answer.total)


async def _fill(store: redis.asyncio.Redis) -> None:
    """Write the state of an owner that died: open requests and sessions."""
    kept = {"gateway_id": "g", "decision_id": "d", "input_tokens": 9_000, "new_tokens": 900, "pool": "m"}
    for first in range(0, OPEN, 1_000):
        names: dict[str, str] = {f"o{number}": f"i{number % 64:04d}" for number in range(first, first + 1_000)}
        lines: Stored = {
            name: json.dumps({"request_id": name, "instance_id": at, **kept}) for name, at in names.items()
        }
        await store.hset(POOL + "open", mapping=lines)
    for first in range(0, SESSIONS, 10_000):
        sessions: Stored = {f"t/session-{number}": f"i{number % 64:04d}" for number in range(first, first + 10_000)}
        await store.hset(POOL + "affinity", mapping=sessions)


class TimedRouter:
    """A router process that times the turns of its event loop, with the process of its agents."""

    def __init__(
        self, pid: int, turns_file: Path, channel: grpc.aio.Channel, console_url: str, agents: AgentsProcess
    ) -> None:
        self._pid = pid
        self._turns_file = turns_file
        self._numbers = itertools.count()
        self._agents = agents
        self.client = Client(channel)
        self.console_url = console_url

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, *flags: str) -> AsyncIterator[TimedRouter]:
        """Run a router and its agents; yield the router when it answers."""
        address, console = (f"127.0.0.1:{free_port()}" for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            turns_file = Path(folder) / "turns"
            turns_file.touch()
            command = [sys.executable, "-m", "bench.timed_service", str(turns_file), "router", "--listen", address]
            command += ["--metrics-listen", "", "--console-listen", console, "--log-level", "error", *flags]
            with stack.process(command) as child:
                async with open_channel(address) as channel, AgentsProcess.running(address) as agents:
                    router = cls(child.pid, turns_file, channel, f"http://{console}", agents)
                    await eventually(lambda: asyncio.to_thread(serves, router.console_url, "/"), "the router answers")
                    yield router

    async def join(self, instances: int, keys: int, incarnation: int) -> None:
        """As AgentsProcess.join(), within WITHIN_S."""
        async with asyncio.timeout(WITHIN_S):
            await self._agents.join(instances, keys, incarnation)

    @contextlib.asynccontextmanager
    async def measured(self, name: str, note: str, *, probed: bool = True) -> AsyncIterator[list[Figure]]:
        """Measure the block; yield a list of figures that is filled at its end."""
        figures: list[Figure] = []
        await self._tell()
        async with contextlib.AsyncExitStack() as probing:
            waits = await probing.enter_async_context(self.probed()) if probed else []
            yield figures
        turn = await self._tell()
        note = f"{note}; {turn['clock_ms']:.0f} ms by the clock, {turn['rss_mb']:.0f} MB; baseline is the goal"
        figures.append(Figure(f"stall_{name}_ms", turn["cpu_ms"], "ms", GOAL_TURN_MS, note))
        if waits:
            p99 = percentile(waits, 0.99) * 1e3
            note = f"{len(waits)} placements of 1k tokens meanwhile, the longest {max(waits) * 1e3:.0f} ms"
            figures.append(Figure(f"stall_{name}_place_p99_ms", p99, "ms", GOAL_PLACE_MS, note))

    @contextlib.asynccontextmanager
    async def probed(self, pause_s: float = PROBE_INTERVAL_S) -> AsyncIterator[list[float]]:
        """Request placements until the block ends, with a pause after each; yield the list of their times, in s."""
        waits: list[float] = []
        session = Session(self.client, f"probe {next(self._numbers)}")
        await session.hello()
        probing = asyncio.create_task(self._probe(session, waits, pause_s))
        try:
            yield waits
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            session.call.cancel()

    async def _probe(self, session: Session, waits: list[float], pause_s: float) -> None:
        rng = random.Random(session.gateway_id)
        for number in itertools.count():
            name = f"{session.gateway_id} {number}"
            keys = array("Q", rng.randbytes(8 * PROBE_TOKENS // KEY_TOKENS))
            begun = time.perf_counter()
            placement = await session.place(name, PROBE_TOKENS, keys=keys, session_id=f"probe-{number % 50}")
            waits.append(time.perf_counter() - begun)
            self._agents.computed(placement.step.instance.instance_id, keys)
            await session.finish(name)
            await asyncio.sleep(pause_s)

    async def _tell(self) -> dict[str, float]:
        return await stack.longest_turn(self._pid, self._turns_file)
