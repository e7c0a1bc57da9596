"""Every part of a fleet is killed, stopped for a while, and restarted, one after the other, under load.

Each test names the outcomes that clients may get besides whole answers. If a dying gateway process resets a connection, the
client must retry, as with any server. The client of these tests retries with another request id.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

# How long a killed part is away, and how long a stopped one is stopped, s.
AWAY_S, STOPPED_S = 0.5, 2.5


async def killed(fleet: Fleet, name: str) -> None:
    fleet.kill(name)
    await asyncio.sleep(AWAY_S)
    fleet.parts[name].start()


async def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)


async def test_an_agent_that_is_killed(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "agent killed"):
        await killed(fleet, "a0")


async def test_an_agent_that_stops_for_a_while(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "agent stopped"):
        await stopped(fleet.parts["a0"].pid)


async def test_an_agent_that_is_restarted(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "agent restarted"):
        await fleet.restart("a0")


async def test_the_router_that_owns_the_pool_is_killed(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "router killed, the owner"):
        await killed(fleet, owner)


async def test_the_router_that_owns_the_pool_stops_for_a_while(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "router stopped, the owner"):
        await stopped(fleet.parts[owner].pid)


async def test_the_router_that_owns_the_pool_is_restarted(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "router restarted, the owner"):
        await fleet.restart(owner)


async def test_a_router_that_owns_nothing_is_killed(fleet: Fleet) -> None:
    other = await fleet.other()
    async with fault_under_load(fleet, "router killed, not the owner"):
        await killed(fleet, other)


async def test_a_router_that_owns_nothing_stops_for_a_while(fleet: Fleet) -> None:
    other = await fleet.other()
    async with fault_under_load(fleet, "router stopped, not the owner"):
        await stopped(fleet.parts[other].pid)


async def test_a_router_that_owns_nothing_is_restarted(fleet: Fleet) -> None:
    other = await fleet.other()
    async with fault_under_load(fleet, "router restarted, not the owner"):
        await fleet.restart(other)


async def test_redis_is_killed(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "Redis killed"):
        await killed(fleet, "redis")


async def test_redis_stops_for_a_while(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "Redis stopped"):
        await stopped(fleet.parts["redis"].pid)


async def test_redis_is_restarted(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "Redis restarted"):
        await fleet.restart("redis")


async def test_a_gateway_process_is_killed(fleet: Fleet) -> None:
    """The parent process starts another one."""
    pid = fleet.gateway_processes()[0]
    async with fault_under_load(fleet, "gateway process killed", may=("reset", "broken")) as fault:
        os.kill(pid, signal.SIGKILL)
        fault.ends_now()
        await fleet.wait_until_replaced(pid)


async def test_a_gateway_process_stops_for_a_while(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "gateway process stopped"):
        await stopped(fleet.gateway_processes()[0])


async def test_a_gateway_process_is_restarted(fleet: Fleet) -> None:
    pid = fleet.gateway_processes()[0]
    async with fault_under_load(fleet, "gateway process restarted", may=("reset",)) as fault:
        os.kill(pid, signal.SIGTERM)
        fault.ends_now()
        await fleet.wait_until_replaced(pid)


async def test_an_engine_is_killed(fleet: Fleet) -> None:
    """Answers that the engine had begun go on at other engines; the others are made there."""
    before = await fleet.incarnations("e0")
    async with fault_under_load(fleet, "engine killed") as fault:
        await killed(fleet, "e0")
        fault.ends_now()
        await fleet.wait_until_restarted("e0", before)


async def test_an_engine_stops_for_a_while(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "engine stopped"):
        await stopped(fleet.parts["e0"].pid)


async def test_an_engine_is_restarted(fleet: Fleet) -> None:
    """As when the engine is killed: an engine breaks its streams at SIGTERM, and others go on with them."""
    before = await fleet.incarnations("e0")
    async with fault_under_load(fleet, "engine restarted") as fault:
        await fleet.restart("e0")
        fault.ends_now()
        await fleet.wait_until_restarted("e0", before)
