"""A Redis that fails over: a real master and replica change places under traffic, with connections kept and closed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog.testing
from redis.asyncio.cluster import RedisCluster

from pointsman_cli.doctor_findings import Finding
from pointsman_cli.doctor_redis import RedisUrls, redis_findings
from pointsman_router.core.events_and_effects import PoolLost
from pointsman_router.core.ownership import Owner
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.io.store.redis_address import RedisAddress
from pointsman_router.io.store.redis_servers import RedisServers
from pointsman_router.io.store.redis_store import RedisStore
from tests.support.certificates import Authority
from tests.support.processes.process import free_port
from tests.support.processes.redis import RedisTls, redis_cluster, redis_server, sentinel
from tests.support.processes.redis_failover import RETURN_S, fleet_over, redis_pair
from tests.support.repository import REPOSITORY
from tests.support.router import Report, Session, running
from tests.support.tcp_proxies import Link
from tests.support.waiting import eventually

# The user by which a Sentinel watches servers, as Redis' documentation has it.
WATCHER = (
    "watcher on >of-watching allchannels -@all +multi +slaveof +ping +exec +subscribe +config|rewrite +role +publish +info "
    "+client|setname +client|kill +script|kill"
)


def documented(command: str) -> str:
    """Return the rule after `command` in the documentation of the routers' users, with the password `secret`."""
    page = (REPOSITORY / "docs/operating.md").read_text()
    (rule,) = re.findall(rf"^{command} (pointsman on >PASSWORD .*)$", page, re.MULTILINE)
    return str(rule).replace("PASSWORD", "secret")


@pytest.mark.parametrize("closed", [False, True])
async def test_a_failover_is_followed_and_only_one_router_places(tmp_path: Path, closed: bool) -> None:
    """Old connections lead to a server that answers READONLY; new ones lead to the new master."""
    async with redis_pair(tmp_path) as pair, fleet_over(pair, tmp_path) as fleet:
        async with fleet.traffic():
            await asyncio.sleep(0.5)
            with structlog.testing.capture_logs() as logs:
                await pair.switch()
                for link in fleet.links.values():
                    link.lead_to(pair.ports[pair.master])
                if closed:
                    await pair.command(1 - pair.master, "CLIENT", "KILL", "TYPE", "normal")
                await asyncio.sleep(1.5)  # longer than a lease
                await eventually(lambda: not fleet.degraded(), "no router is degraded", RETURN_S - 1.5)
                named = {line["server"] for line in logs if "server" in line}
            assert named == {link.address for link in fleet.links.values()}, "each router tells of its new server"
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
        await pair.protect()
        auth = "sentinel auth-pass pointsman of-redis"
        with sentinel(tmp_path, pair.ports[0], "of-sentinel", auth) as (port, sentinel_admin):
            settings: dict[str, Any] = {
                "redis_url": "redis://:of-redis@ignored/0",
                "redis_sentinels": f"redis://127.0.0.1:{free_port()},redis://:of-sentinel@127.0.0.1:{port}",
                "redis_master": "pointsman",
            }
            async with fleet_over(pair, tmp_path, **settings) as fleet:
                async with fleet.traffic():
                    await asyncio.sleep(0.5)
                    await fleet.lose_master(sentinel_admin)
                fleet.check_epochs()
                assert await pair.command(1, "HGET", "pointsman:{default:m}:lease", "id") == await fleet.owner()


@pytest.mark.parametrize(("host", "planned"), [("localhost", False), ("localhost", True), ("127.0.0.1", False)])
async def test_a_failover_by_sentinel_is_followed_over_tls_by_users_with_few_permissions(
    tmp_path: Path, host: str, planned: bool
) -> None:
    """Servers and Sentinel announce a host name, for which alone their certificate is valid, or their address. After a planned
    failover the old master takes writes for a while; here for ever, since the Sentinel may not make it a replica."""
    authority = Authority(tmp_path / "authority")
    tls = RedisTls(authority.ca, authority.sign("redis", ["localhost"] if host == "localhost" else []), host)
    async with redis_pair(tmp_path, tls) as pair:
        await pair.protect(documented("ACL SETUSER"), WATCHER)
        await pair.command(0, "ACL", "SETUSER", "watcher", "-slaveof")
        lines = [
            "sentinel auth-user pointsman watcher",
            "sentinel auth-pass pointsman of-watching",
            "user " + documented("user").replace("secret", "of-sentinel"),
        ]
        with sentinel(tmp_path, pair.ports[0], "of-admin", *lines, tls=tls) as (port, sentinel_admin):
            options = "&".join(f"{name}={value}" for name, value in tls.of_client().items())
            settings: dict[str, Any] = {
                "redis_url": f"rediss://pointsman:secret@ignored/0?{options}",
                "redis_sentinels": f"rediss://pointsman:of-sentinel@{host}:{port}?{options}",
                "redis_master": "pointsman",
            }
            with structlog.testing.capture_logs() as logs:
                async with fleet_over(pair, tmp_path, **settings) as fleet:
                    async with fleet.traffic():
                        await asyncio.sleep(0.5)
                        if planned:
                            sentinel_admin.sentinel_failover("pointsman")
                            pair.master = 1
                        else:
                            await fleet.lose_master(sentinel_admin)

                        stores: list[Any] = [server.router.store for server in fleet.routers.values()]

                        def named() -> bool:
                            return all(store._server.startswith(f"{host}:{pair.ports[1]}") for store in stores)

                        await eventually(named, "each router tells of its new server")
                    fleet.check_epochs()
                    owner = await fleet.owner()
                    assert await pair.command(1, "HGET", "pointsman:{default:m}:lease", "id") == owner
            if planned:
                assert await pair.is_master(0)
                assert not [line for line in logs if "does not answer" in line["event"]], "no router was degraded"


async def test_the_doctor_checks_the_master_that_sentinels_name(tmp_path: Path) -> None:
    async with redis_pair(tmp_path) as pair:
        await pair.protect()
        for server in (0, 1):
            await pair.command(server, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        with sentinel(tmp_path, pair.ports[0], "of-sentinel", "sentinel auth-pass pointsman of-redis") as (port, _):
            nobody = f"127.0.0.1:{free_port()}"
            servers = "redis://:of-redis@ignored/0"
            sentinels = f"redis://{nobody},redis://127.0.0.1:{port},redis://:of-sentinel@127.0.0.1:{port}"
            urls = RedisUrls.of(servers, sentinels, "pointsman")
            assert urls is not None
            away, refused, names, master = redis_findings(urls)
            assert (away.level, away.check) == (Finding.WARN, f"Sentinel {nobody}")
            assert (refused.level, refused.found.partition(":")[0]) == (Finding.WARN, "AuthenticationError")
            assert names.found == f"names the master 127.0.0.1:{pair.ports[0]}"
            assert (master.level, master.check) == (Finding.OK, f"Redis 127.0.0.1:{pair.ports[0]}")
            unknown = list(redis_findings(replace(urls, master="mymaster")))[-1]
            assert (unknown.level, unknown.found) == (Finding.FAIL, "no Sentinel names the master mymaster")


async def test_sentinels_that_fail_one_after_the_other_are_all_asked(tmp_path: Path) -> None:
    """Many connections that are made at the same time must not lose the Sentinels that do not answer then."""
    async with redis_pair(tmp_path) as pair:
        with sentinel(tmp_path, pair.ports[0], "of-sentinel") as (port, _):
            async with Link(port) as first, Link(port) as second:
                urls = tuple(f"redis://:of-sentinel@{link.address}" for link in (first, second))
                servers = RedisServers(RedisAddress(("redis://ignored/0",), urls, "pointsman"), 2.0)
                first.break_()
                assert all(await asyncio.gather(*(servers.client.ping() for _ in range(8))))
                first.repair()
                second.break_()
                await servers.connect_anew()
                assert await servers.client.ping()
                await servers.aclose()


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
    with redis_server(tmp_path) as (url, _), redis.Redis.from_url(url, decode_responses=True) as admin:
        admin.execute_command("ACL", "SETUSER", *documented("ACL SETUSER").split())
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
        nodes = [redis.Redis(port=port, decode_responses=True) for port in (one, two)]
        for node in nodes:
            execute: Any = node.execute_command
            execute("ACL", "SETUSER", *documented("ACL SETUSER").split())
        async with running(redis_url=f"redis://pointsman:secret@127.0.0.1:{one}/0", redis_cluster=True) as (
            server,
            client,
        ):
            models = [f"model-{number}" for number in range(6)]
            for model in models:
                await Report(client).join(f"of-{model}", model=model, served_names=[model])
            await eventually(lambda: all(map(server.router.store.may_place, models)), "all pools are owned")
            session = Session(client)
            await session.hello()
            for model in models:
                assert not (await session.place(f"for-{model}", model=model)).degraded
        kept = [set(node.keys("pointsman:*:open")) for node in nodes]
        assert all(kept)
        assert set.union(*kept) == {f"pointsman:{{default:{model}}}:open" for model in models}
        for node in nodes:
            node.close()


async def test_the_owners_of_pools_are_asked_for_at_all_nodes_of_a_redis_cluster(tmp_path: Path) -> None:
    """After READONLY a router asks who owns its pools, by now."""
    with redis_cluster(tmp_path, 2) as ports:
        owners: list[str] = []
        url = f"redis://127.0.0.1:{ports[0]}/0"
        store: Any = RedisStore(
            RedisAddress((url,), cluster=True), router_id="one", fleet="f", lease_s=1.0, settle_s=5.0, affinity_ttl_s=60.0,
            on_event=lambda event: owners.append(event.pool) if isinstance(event, PoolLost) else None,
            on_owners=lambda: None, snapshot=lambda pool: iter(()), merge_config=lambda before, own, stored: stored or own,
        )  # fmt: skip
        models = [f"model-{number}" for number in range(6)]
        store.compete_for(models)
        async with RedisCluster.from_url(url) as admin:
            for pool in store._pools.values():
                pool.epoch = 1
                await admin.set(pool.state_keys[0], 2)
                await admin.hset(pool.lease_key, mapping={"id": "two", "address": "127.0.0.1:2"})
        await store._failed(redis.exceptions.ReadOnlyError("READONLY"))
        assert owners == models
        assert [store.owner(model) for model in models] == [Owner("two", "127.0.0.1:2", 2)] * 6
        await store._servers.aclose()


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


async def test_a_router_stops_though_the_client_of_sentinels_loses_the_cancellation() -> None:
    """As asyncio.wait_for() does before Python 3.12 if it arrives as a write ends."""
    address = RedisAddress(("redis://ignored/0",), (f"redis://127.0.0.1:{free_port()}",), "pointsman")
    store: Any = RedisStore(
        address, router_id="one", fleet="f", lease_s=1.0, settle_s=5.0, affinity_ttl_s=60.0,
        on_event=lambda event: None, on_owners=lambda: None, snapshot=lambda pool: iter(()),
        merge_config=lambda before, own, stored: stored or own,
    )  # fmt: skip
    ended: list[str] = []
    asked, close = asyncio.Event(), store._servers.aclose

    async def moved() -> bool:
        asked.set()
        with contextlib.suppress(*[asyncio.CancelledError] * (not ended)):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("asking")
        return False

    async def aclose() -> None:
        ended.append("connections")
        await close()

    store._servers.moved, store._servers.aclose = moved, aclose
    run = asyncio.create_task(store.run())
    await asked.wait()
    asked.clear()
    run.cancel()
    await eventually(lambda: run.done() or asked.is_set(), "the store has stopped")
    assert run.done(), "the Sentinels are asked again"
    assert ended == ["asking", "connections"], "a connection that is opened later is left open"


async def test_the_epoch_after_redis_has_lost_its_data_is_higher_than_that_of_an_owner_cut_off(tmp_path: Path) -> None:
    """So the owner stops as a gateway tells it of the other."""
    with redis_server(tmp_path) as (url, _):
        async with (
            Link(int(url.rsplit(":", 1)[1].partition("/")[0])) as link,
            running(router_id="one", redis_url=f"redis://{link.address}/0") as (one, first),
        ):
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


async def test_a_redis_whose_background_save_failed_is_done_without_until_one_succeeds(tmp_path: Path) -> None:
    """Redis answers writes with MISCONF after a save that failed: here because a folder has the name of its file."""
    async with redis_pair(tmp_path, flags=("--save", "3600 1")) as pair, fleet_over(pair, tmp_path) as fleet:

        async def saved(status: str) -> None:
            async def ended() -> bool:
                info: Any = await pair.command(0, "INFO", "persistence")
                return bool(not info["rdb_bgsave_in_progress"] and info["rdb_last_bgsave_status"] == status)

            await pair.command(0, "BGSAVE")
            await eventually(ended, "the save has ended")

        file = tmp_path / "redis-0/dump.rdb"
        async with fleet.traffic():
            await asyncio.sleep(0.5)
            file.unlink(missing_ok=True)
            file.mkdir()
            await saved("err")
            await eventually(lambda: len(fleet.degraded()) == 2, "both routers do without Redis")
            owner = await fleet.owner()
            count = len(fleet.placed)
            await eventually(lambda: len(fleet.placed) > count + 100, "requests are placed meanwhile")
            assert fleet.owners() == [owner]
            file.rmdir()
            await saved("ok")
            await eventually(lambda: not fleet.degraded(), "no router is degraded", RETURN_S)
            assert await fleet.owner() == owner
        fleet.check_epochs()
        assert await pair.command(0, "HGET", "pointsman:{default:m}:lease", "id") == owner


async def test_a_redis_that_answers_after_200_ms_costs_time_and_no_lease(tmp_path: Path) -> None:
    """Placements in many pools wait for their own write only.

    The lease is long, because a busy machine may stop this process for longer than a lease of 1 s has left after such an answer.
    """
    models = [f"model-{number}" for number in range(12)]
    with redis_server(tmp_path) as (url, _):
        async with (
            Link(int(url.rsplit(":", 1)[1].partition("/")[0])) as link,
            running(redis_url=f"redis://{link.address}/0", owner_lease_s=5.0) as (server, client),
        ):
            for model in models:
                await Report(client).join(f"of-{model}", model=model, served_names=[model])
            await eventually(lambda: all(map(server.router.store.may_place, models)), "all pools are owned")
            link.delay_s = 0.1
            sessions = [Session(client, f"g-{model}") for model in models]
            loop, took, lost = asyncio.get_running_loop(), list[float](), 0
            epoch = server.router.store.epoch

            async def ask(model: str, session: Session) -> None:
                nonlocal lost
                await session.hello()
                for number in range(8):
                    asked = loop.time()
                    placement = await session.place(f"{model}-{number}", model=model)
                    took.append(loop.time() - asked)
                    lost += placement.degraded
                    await session.finish(f"{model}-{number}")
                    lost += not server.router.store.may_place(model)

            await asyncio.gather(*map(ask, models, sessions))
            assert not lost, "a lease ended, or a placement was degraded"
            # One write after the other they would take 12 x 0.2 s.
            assert statistics.median(took) < 2.0
            assert server.router.store.epoch == epoch
