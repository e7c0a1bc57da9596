"""A Redis that fails over: a real master and replica change places under traffic, with connections kept and closed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import redis

from pointsman_router.core.policy.registry import make_policy
from tests.support.processes.process import free_port
from tests.support.processes.redis import redis_cluster, redis_server, sentinel
from tests.support.processes.redis_failover import fleet_over, redis_pair
from tests.support.repository import REPOSITORY
from tests.support.router import Report, Session, running
from tests.support.tcp_proxies import Link
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
        before = fleet.routers[owner].router.store.epoch
        fleet.links[other].lead_to(pair.ports[1])
        await pair.switch()
        await eventually(lambda: fleet.owners() == [other], "the other router places, and no one else")

        def knows_owner() -> bool:
            known = fleet.routers[owner].router.store.owner("m")
            return known is not None and known.router_id == other and known.epoch > before

        await eventually(knows_owner, "the router names the owner")


async def test_sentinels_with_their_own_password_name_the_new_master(tmp_path: Path) -> None:
    async with redis_pair(tmp_path) as pair:
        for server in (0, 1):
            await pair.command(server, "CONFIG", "SET", "masterauth", "of-redis")
        for server in (0, 1):
            await pair.command(server, "CONFIG", "SET", "requirepass", "of-redis")
            pair.password = "of-redis"
        with sentinel(tmp_path, pair.ports[0], own_password="of-sentinel", password="of-redis") as port:
            settings: dict[str, Any] = {
                "redis_url": "redis://:of-redis@ignored/0",
                "redis_sentinels": f"redis://127.0.0.1:{free_port()},redis://:of-sentinel@127.0.0.1:{port}",
                "redis_master": "pointsman",
            }
            async with fleet_over(pair, tmp_path, **settings) as fleet:
                async with fleet.traffic():
                    await asyncio.sleep(0.5)
                    pair.processes[0].kill()
                    await eventually(fleet.degraded, "the routers go on without Redis")
                    pair.master = 1

                    async def promoted() -> bool:
                        return bool((await pair.command(1, "ROLE"))[0] == "master")

                    await eventually(promoted, "the Sentinel has named a new master")
                    await eventually(lambda: not fleet.degraded(), "no router is degraded", RETURN_S)
                fleet.check_epochs()
                assert await pair.command(1, "HGET", "pointsman:{default:m}:lease", "id") == await fleet.owner()


async def test_a_list_of_urls_is_searched_for_the_master(tmp_path: Path) -> None:
    async with redis_pair(tmp_path) as pair:
        urls = ",".join(f"redis://127.0.0.1:{port}/0" for port in reversed(pair.ports))
        async with fleet_over(pair, tmp_path, redis_url=urls) as fleet:
            async with fleet.traffic():
                await asyncio.sleep(0.5)
                await pair.switch()
                await asyncio.sleep(1.5)
                await eventually(lambda: not fleet.degraded(), "no router is degraded", RETURN_S - 1.5)
            fleet.check_epochs()
            assert await pair.command(1, "HGET", "pointsman:{default:m}:lease", "id") == await fleet.owner()


async def test_the_user_that_the_docs_name_may_do_all_that_a_router_does_and_no_more(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/operating.md").read_text()
    (rule,) = re.findall(r"^ACL SETUSER (pointsman .*)$", page, re.MULTILINE)
    with redis_server(tmp_path) as (url, _), redis.Redis.from_url(url, decode_responses=True) as admin:
        admin.execute_command("ACL", "SETUSER", *rule.replace("PASSWORD", "secret").split())
        own_url = url.replace("redis://", "redis://pointsman:secret@")
        async with running(redis_url=own_url, router_id="one", owner_lease_s=0.5) as (one, first):
            await Report(first).join("a")
            await eventually(lambda: one.router.store.may_place("m"), "the router owns the pool")
            session = Session(first)
            await session.hello()
            await session.place("r", session_id="s")
            await session.finish("r")
            await one.router.set_policy(make_policy("random"), "")
            async with running(redis_url=own_url, router_id="two", owner_lease_s=0.5) as (two, second):
                await Report(second).join("a")
                await one.stop()
                await eventually(lambda: two.router.store.may_place("m"), "the other router owns the pool")
                assert two.router.state.policy.ref().name == "random"
        refused = {entry["object"].partition("|")[0] for entry in admin.acl_log()}
        assert refused <= {"client"}, "Redis refused a command"
        with redis.Redis.from_url(own_url) as own:
            for command in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["ACL", "LIST"], ["GET", "other"]):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    own.execute_command(*command)


async def test_the_pools_of_a_fleet_are_spread_over_a_redis_cluster(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, 2) as (one, two):
        async with running(redis_url=f"redis://127.0.0.1:{one}/0", redis_cluster=True) as (server, client):
            models = [f"model-{number}" for number in range(6)]
            for model in models:
                await Report(client).join(f"of-{model}", model=model, served_names=[model])
            await eventually(lambda: all(map(server.router.store.may_place, models)), "all pools are owned")
            session = Session(client)
            await session.hello()
            for model in models:
                assert not (await session.place(f"for-{model}", model=model)).degraded
        nodes = [redis.Redis(port=port, decode_responses=True) for port in (one, two)]
        kept = [set(node.keys("pointsman:*:open")) for node in nodes]
        assert all(kept)
        assert set.union(*kept) == {f"pointsman:{{default:{model}}}:open" for model in models}
        for node in nodes:
            node.close()


async def test_a_router_goes_on_without_a_redis_cluster_that_is_away(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, 2) as ports:
        async with running(redis_url=f"redis://127.0.0.1:{ports[0]}/0", redis_cluster=True) as (server, client):
            await Report(client).join("a")
            await eventually(lambda: server.router.store.may_place("m"), "the pool is owned")
            session = Session(client)
            await session.hello()
            for port in ports:
                with redis.Redis(port=port) as node:
                    node.shutdown(nosave=True)
            await eventually(lambda: server.router.state.degraded, "the router is degraded")
            for number in range(3):
                await asyncio.sleep(0.5)
                assert (await session.place(f"r{number}")).degraded


async def test_the_epoch_after_redis_has_lost_its_data_is_higher_than_that_of_an_owner_cut_off(tmp_path: Path) -> None:
    """So the owner stops as a gateway tells it of the other."""
    with redis_server(tmp_path) as (url, _):
        link = Link(int(url.rsplit(":", 1)[1].partition("/")[0]))
        await link.start()
        async with running(router_id="one", redis_url=f"redis://{link.address}/0") as (one, first):
            await Report(first).join("a")
            await eventually(lambda: one.router.store.may_place("m"), "the first router places")
            link.break_()
            await eventually(lambda: one.router.state.degraded, "it is degraded")
            with redis.Redis.from_url(url) as server:
                server.flushall()
            async with running(router_id="two", redis_url=url) as (two, second):
                await Report(second).join("a")
                await eventually(lambda: two.router.store.may_place("m"), "the other router places")
                assert two.router.store.epoch > one.router.store.epoch > 0
            link.repair()
        await link.stop()


async def test_a_redis_that_answers_after_200_ms_costs_time_and_no_lease(tmp_path: Path) -> None:
    """Placements in many pools wait for their own write only."""
    models = [f"model-{number}" for number in range(12)]
    with redis_server(tmp_path) as (url, _):
        link = Link(int(url.rsplit(":", 1)[1].partition("/")[0]))
        await link.start()
        async with running(redis_url=f"redis://{link.address}/0") as (server, client):
            for model in models:
                await Report(client).join(f"of-{model}", model=model, served_names=[model])
            await eventually(lambda: all(map(server.router.store.may_place, models)), "all pools are owned")
            link.delay_s = 0.1
            sessions = [Session(client, f"g-{model}") for model in models]
            loop, slowest, lost = asyncio.get_running_loop(), 0.0, 0
            epoch = server.router.store.epoch

            async def ask(model: str, session: Session) -> None:
                nonlocal slowest, lost
                await session.hello()
                for number in range(8):
                    asked = loop.time()
                    placement = await session.place(f"{model}-{number}", model=model)
                    slowest, lost = max(slowest, loop.time() - asked), lost + placement.degraded
                    await session.finish(f"{model}-{number}")
                    lost += not server.router.store.may_place(model)

            await asyncio.gather(*map(ask, models, sessions))
            assert not lost, "a lease ended, or a placement was degraded"
            assert slowest < 2.0
            assert server.router.store.epoch == epoch
        await link.stop()
