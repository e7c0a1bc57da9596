"""A Redis that fails over: a real master and replica change places under traffic, with connections kept and closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.processes.process import free_port
from tests.support.processes.redis_failover import fleet_over, redis_pair
from tests.support.waiting import eventually

# Time within which routers use Redis again once it serves, s.
RETURN_S = 5.0


@pytest.mark.parametrize("closed", [False, True])
async def test_a_failover_is_followed_and_only_one_router_places(tmp_path: Path, closed: bool) -> None:
    """Old connections lead to a server that answers READONLY; new ones lead to the new master."""
    async with redis_pair(tmp_path) as pair, fleet_over(pair, tmp_path) as fleet:
        async with fleet.traffic():
            await asyncio.sleep(0.5)
            await pair.switch()
            for link in fleet.links.values():
                link.lead_to(pair.ports[pair.master])
            if closed:
                await pair.command(1 - pair.master, "CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(1.5)  # longer than a lease
            await eventually(lambda: not fleet.degraded(), "no router is degraded", RETURN_S - 1.5)
            owner = await fleet.owner()
            assert await pair.command(pair.master, "HGET", "pointsman:{default:m}:lease", "id") == owner
        fleet.check_epochs()


@pytest.mark.parametrize("silent", [False, True])
async def test_an_owner_that_stays_at_the_old_master_stops_as_another_router_places(
    tmp_path: Path, silent: bool
) -> None:
    """The owner reaches only the old master, a replica now: readable, or without stale answers (MASTERDOWN)."""
    async with redis_pair(tmp_path) as pair, fleet_over(pair, tmp_path) as fleet:
        owner = await fleet.owner()
        other = next(name for name in fleet.routers if name != owner)
        async with fleet.traffic():
            await asyncio.sleep(0.5)
            fleet.links[other].lead_to(pair.ports[1])
            if silent:
                await pair.command(0, "CONFIG", "SET", "replica-serve-stale-data", "no")
            await pair.switch()
            if silent:
                await pair.command(0, "REPLICAOF", "127.0.0.1", free_port())
            await eventually(lambda: fleet.owners() == [other], "the other router places, and no one else")
            await asyncio.sleep(1.0)
            assert fleet.owners() == [other]
            fleet.links[owner].lead_to(pair.ports[1])
            await eventually(lambda: not fleet.degraded(), "no router is degraded")
        fleet.check_epochs()


async def test_an_owner_without_gateways_reads_at_the_replica_that_another_router_owns_its_pool(tmp_path: Path) -> None:
    async with redis_pair(tmp_path) as pair, fleet_over(pair, tmp_path, gateways=0) as fleet:
        owner = await fleet.owner()
        other = next(name for name in fleet.routers if name != owner)
        fleet.links[other].lead_to(pair.ports[1])
        await pair.switch()
        await eventually(lambda: fleet.owners() == [other], "the other router places, and no one else")

        def knows_owner() -> bool:
            known = fleet.routers[owner].router.store.owner("m")
            return known is not None and (known.router_id, known.epoch) == (other, 2)

        await eventually(knows_owner, "the router names the owner")
