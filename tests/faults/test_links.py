"""The links between parts of a fleet are cut, broken and slow, one after the other, under load.

On a link that is cut nothing passes, as if all packets were lost, until it is repaired. A broken link resets connections, and
refuses new ones.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import ROUTERS, Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

# Durations of the faults, and the delay of a slow link in each direction, s.
CUT_S, BROKEN_S, SLOW_S, DELAY_S = 2.5, 1.5, 1.5, 0.2
# Duration of a long cut, s: longer than a session's keepalive, and than a gateway waits for a router.
LONG_S = 10.0


async def cut(fleet: Fleet, *pairs: tuple[str, str], for_s: float = CUT_S) -> None:
    for pair in pairs:
        fleet.links[pair].cut()
    await asyncio.sleep(for_s)
    for pair in pairs:
        fleet.links[pair].repair()


async def broken(fleet: Fleet, *pairs: tuple[str, str]) -> None:
    for pair in pairs:
        fleet.links[pair].break_()
    await asyncio.sleep(BROKEN_S)
    for pair in pairs:
        fleet.links[pair].repair()


async def slow(fleet: Fleet, *pairs: tuple[str, str]) -> None:
    for pair in pairs:
        fleet.links[pair].delay_s = DELAY_S
    await asyncio.sleep(SLOW_S)
    for pair in pairs:
        fleet.links[pair].repair()


async def test_no_way_from_gateways_to_the_router_that_owns_the_pool(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "gateway - router cut, the owner"):
        await cut(fleet, ("gateway", owner), for_s=LONG_S)


async def test_gateways_lose_all_routers(fleet: Fleet) -> None:
    """Gateways make degraded placements meanwhile."""
    async with fault_under_load(fleet, "gateway - all routers broken"):
        await broken(fleet, *(("gateway", name) for name in ROUTERS))


async def test_a_slow_way_from_gateways_to_routers(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "gateway - all routers slow"):
        await slow(fleet, *(("gateway", name) for name in ROUTERS))


async def test_no_way_from_agents_to_the_router_that_owns_the_pool(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "agents - router cut, the owner"):
        await cut(fleet, ("agents", owner))


async def test_a_slow_way_from_agents_to_routers(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "agents - all routers slow"):
        await slow(fleet, *(("agents", name) for name in ROUTERS))


async def test_no_way_from_the_router_that_owns_the_pool_to_redis(fleet: Fleet) -> None:
    owner = await fleet.owner()
    async with fault_under_load(fleet, "router - Redis cut, the owner"):
        await cut(fleet, (owner, "redis"))


async def test_a_slow_way_from_routers_to_redis(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "all routers - Redis slow"):
        await slow(fleet, *((name, "redis") for name in ROUTERS))


async def test_no_way_from_gateways_to_an_engine(fleet: Fleet) -> None:
    """Answers wait until the link is repaired."""
    async with fault_under_load(fleet, "gateway - engine cut"):
        await cut(fleet, ("gateway", "e0"))


async def test_connections_to_an_engine_break(fleet: Fleet) -> None:
    """Answers that had begun go on at other engines; the others are made there."""
    async with fault_under_load(fleet, "gateway - engine broken", may_repeat=True):
        await broken(fleet, ("gateway", "e0"))


async def test_a_slow_way_from_gateways_to_an_engine(fleet: Fleet) -> None:
    async with fault_under_load(fleet, "gateway - engine slow"):
        await slow(fleet, ("gateway", "e0"))
