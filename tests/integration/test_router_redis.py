"""Routers that share a real Redis: restart, takeover, fencing, loss."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis
import redis.asyncio
import redis.exceptions
import structlog.testing
from redis.asyncio.connection import AbstractConnection

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances import gone_pools
from pointsman_router.io.main import RouterServer
from pointsman_router.io.store import redis_store
from pointsman_router.io.store.redis_address import RedisAddress
from pointsman_router.io.store.redis_store import RedisStore
from pointsman_router.io.store.store import StoreEvent
from tests.support.processes.redis import redis_server
from tests.support.router import Report, Session, running
from tests.support.waiting import WITHIN_S, eventually

PLACE = placement_pb2.PlaceRequest(request=placement_pb2.PlacementRequest(request_id="p", model="m", input_tokens=10))


async def owns(server: RouterServer) -> None:
    async def check() -> bool:
        return server.router.store.may_place("m")

    await eventually(check, "the router owns the pool")


async def test_a_restarted_router_knows_the_open_requests_the_sessions_and_what_is_usual(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="r") as (server, client):
            await Report(client).join("a")
            await owns(server)
            session = Session(client)
            await session.hello()
            for name in ("done", "open"):
                await session.place(name, session_id="s")
            await session.finish("done")

            async def kept() -> bool:
                async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                    return set(await store.hkeys("pointsman:{default:m}:open")) == {"open"}

            await eventually(kept, "written")
            mean_work = server.router.state.prefill_observer.mean_work("m")
            assert mean_work.tokens
            facts = server.router.state.views.facts("m", time.monotonic())
            server.router.store.record([ev.PoolFactsSet(facts, "m")])
        async with running(redis_url=url, router_id="r", gateway_lease_s=30) as (server, client):
            await Report(client).join("a")
            await owns(server)
            assert server.router.state.prefill_observer.mean_work("m") == mean_work
            assert server.router.state.pool_choices.kept("m") is not None
            # Sessions are read after the pool is owned.
            await eventually(lambda: len(server.router.state.affinity) == 1, "the session is known")
            status = (await client.instances())["a"]
            assert (status.num_requests, status.ongoing_tokens, status.sessions) == (1, 100, 1)
            other = Session(client, "other")
            await other.hello()
            for name in ("new", "newest"):
                await other.place(name)
            session = Session(client)
            await session.hello()  # the same gateway, which no longer has open requests
            assert (await client.instances())["a"].num_requests == 2
            # A router whose id is fixed gives the same decision ids again.
            newest = server.router.decisions.get("r-2")
            assert newest is not None
            assert (newest.decision.request.request_id, newest.finished) == ("newest", None)


async def test_the_second_replica_stands_by_and_takes_over(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one", owner_lease_s=0.5) as (one, first):
            await Report(first).join("a")
            await owns(one)
            async with running(redis_url=url, router_id="two", owner_lease_s=0.5, gateway_lease_s=30) as (two, second):
                await Report(second).join("a")

                async def knows_owner() -> bool:
                    owner = two.router.store.owner("m")
                    return owner is not None and owner.router_id == "one"

                await eventually(knows_owner, "two knows one")
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await second.placement.Place(PLACE)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert f"its owner is one at 127.0.0.1:{one.port}" in (error.value.details() or "")
                await first.placement.Place(PLACE)

                async def written() -> bool:
                    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                        return bool(await store.hlen("pointsman:{default:m}:open"))

                await eventually(written, "written")
                await one.stop()
                await owns(two)
                assert (await second.instances())["a"].num_requests == 1


async def test_an_owner_that_slept_past_its_lease_is_fenced_off(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one") as (one, client):
            await Report(client).join("a")
            await owns(one)
            session = Session(client)
            await session.hello()
            await session.place("r")
            epoch = one.router.store.epoch
            async with redis.asyncio.Redis.from_url(url) as store:
                # What another replica would do while this one is paused.
                await store.hset("pointsman:{default:m}:lease", mapping={"id": "two", "address": "127.0.0.1:2"})
                await store.persist("pointsman:{default:m}:lease")
                await store.incr("pointsman:{default:m}:epoch")

            async def fenced() -> bool:
                return not one.router.store.may_place("m")

            await eventually(fenced, "fenced")
            assert len(one.router.state.reservations) == 0
            await session.send(place=PLACE.request)
            refusal = (await session.read("refusal")).refusal
            assert (refusal.not_serving, refusal.owner.router_id, refusal.owner.epoch) == (True, "two", epoch + 1)
            async with redis.asyncio.Redis.from_url(url) as store:
                assert await store.hget("pointsman:{default:m}:lease", "id") == b"two"


async def test_without_redis_the_owner_places_degraded_and_fills_an_empty_one_on_its_return(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, process):
        async with running(redis_url=url, owner_lease_s=0.5) as (server, client):
            await Report(client).join("a")
            await owns(server)
            session = Session(client)
            await session.hello()
            assert not (await session.place("before", session_id="s")).degraded
            process.kill()

            async def degraded() -> bool:
                return server.router.state.degraded

            await eventually(degraded, "degraded")
            assert (await session.place("during", session_id="s")).degraded
            process.start()

            async def healed() -> bool:
                try:
                    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                        kept = set(await store.hkeys("pointsman:{default:m}:open"))
                        owner = await store.hget("pointsman:{default:m}:affinity", "/s")
                except redis.ConnectionError:
                    return False
                return kept == {"before", "during"} and owner == "a"

            await eventually(healed, "the empty Redis holds what the owner knows")
            assert not (await session.place("after")).degraded
            assert server.router.store.may_place("m")


async def test_a_fleet_name_keeps_fleets_apart(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with (
            running(redis_url=url, fleet="x") as (one, first),
            running(redis_url=url, fleet="y") as (two, second),
        ):
            await Report(first).join("a")
            await Report(second).join("a")
            await owns(one)
            await owns(two)


async def test_what_another_version_has_written_is_taken_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    """A newer version's field is ignored, an older one's missing field has its default, and unreadable entries are left out, also
    those that no version writes."""
    older: dict[str, Any] = {"request_id": "older", "gateway_id": "g", "instance_id": "a", "decision_id": "d"}
    older |= {"input_tokens": 100, "new_tokens": 100, "pool": "m"}
    kept = {"older": older, "newer": {**older, "request_id": "newer", "colour": "red"}, "other": {"request_id": 7}}
    with redis_server(tmp_path) as (url, _):
        with redis.Redis.from_url(url) as client:
            client.hset(
                "pointsman:{default:m}:open", mapping={name: json.dumps(stored) for name, stored in kept.items()}
            )
            client.hset("pointsman:{default:m}:open", mapping={"deep": '{"a":' + "[" * 5_000, b"\xff": b'{"a":"\xff"}'})
            learned = {"work": json.dumps({"work": 7}), "idle": "[]", "idle_at": "now", "facts": "[" * 5_000}
            client.hset("pointsman:{default:m}:mean_work", mapping=learned)
            client.hset("pointsman:{default:m}:affinity", b"\xff", b"\xff")
        async with running(redis_url=url, owner_lease_s=0.5) as (server, agent):
            await Report(agent).join("a")

            async def taken() -> bool:
                found = server.router.state.reservations.of_pool("m")
                return {reservation.request_id for reservation in found} == {"older", "newer"}

            await eventually(taken, "what can be read is open")


async def test_a_new_owner_counts_the_idle_sessions_of_the_owner_that_ended(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="two", owner_lease_s=0.5, session_admission=True) as (two, second):
            async with running(redis_url=url, router_id="one", owner_lease_s=0.5, session_admission=True) as (
                one,
                first,
            ):
                await Report(first).join("a")
                await owns(one)
                ledger = one.router.state.admission._state("m").ledger
                ledger.opened("t/s", "t", 9_000, (), 0, time.monotonic())
                ledger.closed("t/s", 9_000, 1_000, "TOOL_CALLS", time.monotonic())
                async with redis.asyncio.Redis.from_url(url) as store:
                    await eventually(lambda: store.hexists(POOL + "mean_work", "idle"), "the idle session is stored")
            await Report(second).join("a")
            await owns(two)
            assert 8_000 < two.router.state.admission.pools["m"].ledger.weighted() < 10_000


def store_alone(url: str, on_event: Any = lambda event: None, snapshot: Any = lambda pool: iter(())) -> RedisStore:
    """The store of a router that is not there."""
    return RedisStore(
        RedisAddress((url,)), router_id="r", fleet="f", lease_s=0.4, settle_s=1.0, affinity_ttl_s=60.0, on_event=on_event,
        on_owners=lambda: None, snapshot=snapshot, merge_config=lambda before, own, stored: stored or own,
    )  # fmt: skip


async def test_a_store_that_is_told_to_end_as_a_command_is_written_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py writes by asyncio.wait_for(), which loses a cancellation that arrives at that moment."""
    ending: list[asyncio.Task[None]] = []
    write = AbstractConnection._send_packed_command

    async def write_and_cancel(connection: AbstractConnection, command: Iterable[bytes]) -> None:
        await write(connection, command)
        if ending:
            ending.pop().cancel()

    monkeypatch.setattr(AbstractConnection, "_send_packed_command", write_and_cancel)
    with redis_server(tmp_path) as (url, _):
        store = store_alone(url)
        running_store = asyncio.create_task(store.run())
        await eventually(lambda: store.answered_at is not None, "a first answer")
        ending.append(running_store)
        done, _ = await asyncio.wait({running_store}, timeout=WITHIN_S / 4)
        running_store.cancel()
        assert done
        with redis.Redis.from_url(url) as client:
            assert client.zcard("pointsman:{f}:replicas") == 0, "the router has removed itself from the replicas"


async def test_a_rewrite_of_many_open_requests_goes_on_over_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "BATCH", 1)
    events: list[StoreEvent] = []
    with redis_server(tmp_path) as (url, process):
        # One write each, together longer than the interval of heartbeats.
        kept = [ev.Released(f"r{number}", "m") for number in range(2_000)]
        store = store_alone(url, events.append, lambda pool: iter([*kept, None]))
        store.compete_for(["m"])
        running_store = asyncio.create_task(store.run())
        await eventually(lambda: store.may_place("m"), "the router owns the pool")
        process.kill()
        await eventually(lambda: ev.StoreState(True) in events, "degraded")
        process.start()
        await eventually(lambda: ev.StoreState(False) in events, "the pool is rewritten", 30.0)
        running_store.cancel()
        await asyncio.wait({running_store})


SESSIONS, OPEN = 150_000, 2_000
POOL = "pointsman:{default:m}:"


async def test_a_pool_of_many_sessions_is_taken_over_under_one_lease(tmp_path: Path) -> None:
    """Its open requests are read before anything is placed, its sessions page by page after that."""
    with redis_server(tmp_path) as (url, _):
        kept = {
            "gateway_id": "g",
            "instance_id": "a",
            "decision_id": "d",
            "input_tokens": 9,
            "new_tokens": 9,
            "pool": "m",
        }
        with redis.Redis.from_url(url) as client, client.pipeline() as pipeline:
            for number in range(OPEN):
                pipeline.hset(POOL + "open", f"r{number}", json.dumps(kept | {"request_id": f"r{number}"}))
            for first in range(0, SESSIONS, 5_000):
                sessions = {f"t/session-{number}": "a" for number in range(first, first + 5_000)}
                pipeline.hset(POOL + "affinity", mapping=sessions)
            pipeline.execute()
        async with running(redis_url=url, owner_lease_s=0.4) as (server, agent):
            await Report(agent).join("a")
            await owns(server)
            state, epoch = server.router.state, server.router.store.epoch
            # Reservations are applied in parts; placements wait for all of them.
            await eventually(lambda: len(state.reservations) == OPEN, "all reservations are known")
            # A placement that is made while sessions are read takes precedence over the stored owner.
            session = Session(agent)
            await session.hello()
            await session.place("new", tenant="t", session_id="session-7")
            await eventually(lambda: len(state.affinity) == SESSIONS, "all sessions are known")
            assert server.router.store.may_place("m")
            assert server.router.store.epoch == epoch, "the lease was never lost"


async def test_a_pool_is_taken_over_whole_though_redis_restarts_while_its_sessions_are_read(tmp_path: Path) -> None:
    """A Redis that has restarted has the fields of a hash in another order."""
    with redis_server(tmp_path) as (url, process):
        with redis.Redis.from_url(url) as client:
            for first in range(0, SESSIONS, 5_000):
                sessions = {f"t/session-{number}": "a" for number in range(first, first + 5_000)}
                client.hset(POOL + "affinity", mapping=sessions)
            client.save()
        async with running(redis_url=url, owner_lease_s=0.4) as (server, agent):
            await Report(agent).join("a")
            affinity = server.router.state.affinity
            await eventually(lambda: len(affinity) > SESSIONS // 10, "a part of the sessions is known")
            process.kill()
            read = len(affinity)
            process.start()
            await eventually(lambda: len(affinity) == SESSIONS, "all sessions are known")
            assert read < SESSIONS * 9 // 10


async def test_an_emptied_redis_is_filled_again_under_one_lease(tmp_path: Path) -> None:
    # The rewrite takes longer than a lease, and on a busy machine one page must not.
    lease_s = 2.0
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one", owner_lease_s=lease_s) as (one, first):
            await Report(first).join("a")
            await owns(one)
            epoch = one.router.store.epoch
            for number in range(SESSIONS):
                one.router.state.affinity.recall("m", f"t/session-{number}", "a", time.monotonic())
            session = Session(first)
            await session.hello()
            await session.place("open")
            async with running(redis_url=url, router_id="two", owner_lease_s=lease_s) as (two, second):
                await Report(second).join("a")
                async with redis.asyncio.Redis.from_url(url) as store:
                    await eventually(lambda: len(two.router.store.replicas()) == 2, "the standby is there")
                    await store.flushall()

                    async def whole() -> bool:
                        found = await store.hlen(POOL + "affinity"), await store.hlen(POOL + "open")
                        return found == (SESSIONS, 1) and not await store.hexists(POOL + "mean_work", "incomplete")

                    await eventually(whole, "all of it is there again")
                    assert await store.hget(POOL + "lease", "id") == b"one"
                assert one.router.store.epoch == epoch
                assert one.router.store.may_place("m")


async def test_a_new_kind_of_error_of_redis_is_logged_while_the_router_is_degraded(tmp_path: Path) -> None:
    """After a failover the new master may refuse writes, which the first error, of the old one, does not tell."""
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url) as (server, client):
            await Report(client).join("a")
            await owns(server)
            store: Any = server.router.store
            store._failures = 100
            with structlog.testing.capture_logs() as logs:
                for error in ("refused", "refused"):
                    await store._failed(redis.exceptions.ConnectionError(error))
                for error in ("NOREPLICAS", "NOREPLICAS"):
                    await store._failed(redis.exceptions.ResponseError(error))
            reasons = [log["error"] for log in logs if "takes no writes" in log["event"]]
            assert reasons == ["ConnectionError: refused", "ResponseError: NOREPLICAS"]


async def test_a_redis_that_takes_no_writes_is_done_without_until_it_does(tmp_path: Path) -> None:
    """Meanwhile Redis answers heartbeats and accepts the writes of another pool."""
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, owner_lease_s=0.4) as (server, client):
            await Report(client).join("b", model="n", served_names=["n"])
            await Report(client).join("a")
            await owns(server)
            await eventually(lambda: server.router.store.may_place("n"), "the router owns the other pool")
            session = Session(client)
            await session.hello()
            assert not (await session.place("before")).degraded
            degraded: list[bool] = []
            handle = server.router.submit

            def noted(event: ev.Event) -> list[ev.Effect]:
                if isinstance(event, ev.StoreState):
                    degraded.append(event.degraded)
                return handle(event)

            store: Any = server.router.store
            store._on_event = noted
            state = server.router.state
            async with redis.asyncio.Redis.from_url(url) as admin:
                lease = (
                    "~pointsman:{default}:*",
                    f"~{POOL}lease",
                    f"~{POOL}epoch",
                    f"~{POOL}number",
                    "~pointsman:{default:n}:*",
                )
                execute: Any = admin.execute_command
                await execute("ACL", "SETUSER", "default", "resetkeys", *lease)
                await session.place("tells", model="n")
                await session.place("waits")
                await eventually(lambda: state.degraded, "degraded")
                for number in range(5):
                    assert (await session.place(f"r{number}")).degraded
                beats = store.answered_at
                assert beats is not None
                await eventually(lambda: (store.answered_at or 0.0) > beats + 1.0, "heartbeats")
                assert degraded == [True], "the state does not alternate"
                assert store.may_place("m")
                await execute("ACL", "SETUSER", "default", "allkeys")

                async def written() -> bool:
                    return len(await admin.hkeys(POOL + "open")) == 7

                await eventually(written, "written")
            assert not (await session.place("after")).degraded
            assert degraded == [True, False]


async def test_a_pool_without_instances_is_left_and_what_redis_has_of_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are requested only for models that are present, however many come and go. A model that returns is owned again."""
    monkeypatch.setattr(gone_pools, "KEPT_S", 0.3)
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, owner_lease_s=0.4) as (server, client):
            await Report(client).join("stays", model="n", served_names=["n"])
            report = Report(client)
            await report.join("a")
            await owns(server)
            session = Session(client)
            await session.hello()
            await session.place("open")
            await session.finish("open")
            async with redis.asyncio.Redis.from_url(url) as store:

                async def ending() -> bool:
                    left = [await store.pttl(key) for key in await store.keys(POOL + "*")]
                    return bool(left) and all(0 < ms <= 3_600_000 for ms in left)

                await report.send(goodbye=agent_pb2.Goodbye())
                await eventually(ending, "all that is kept of the pool has a time to live")
                assert not await store.exists(POOL + "lease")
                assert isinstance(server.router.store, RedisStore)
                assert set(server.router.store._pools) == {"n"}
                await Report(client).join("a", incarnation="2")
                await owns(server)
                assert (await session.place("again")).step.instance.instance_id == "a"
                kept = {key: await store.pttl(key) for key in await store.keys(POOL + "*")}
                assert {key for key, ms in kept.items() if ms >= 0} == {POOL.encode() + b"lease"}


async def _filled(url: str, *, expired: bool, foreign: bool) -> None:
    """Fill a Redis until it refuses writes: by the pool's sessions, or by another program's keys."""
    score = 1_000 if expired else int((time.time() + 3_600.0) * 1e3)
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as admin:
        for first in range(0, 30_000, 5_000):
            sessions: dict[Any, Any] = {f"t/filling-{number:06}": "a" for number in range(first, first + 5_000)}
            await admin.hset(POOL + "affinity", mapping=sessions)
            await admin.zadd(POOL + "affinity_expiry", dict.fromkeys(sessions, score))
        if foreign:
            await admin.set("another program's", "x" * 30_000_000)
        memory: Any = await admin.info("memory")
        await admin.config_set("maxmemory-policy", "noeviction")
        await admin.config_set("maxmemory", 20_000_000 if foreign else memory["used_memory"] - 2_000_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            await admin.set("any", "x")


async def test_a_redis_full_of_expired_sessions_frees_itself(tmp_path: Path) -> None:
    """Without traffic, and also if it was full before the router started."""
    with redis_server(tmp_path) as (url, _):
        await _filled(url, expired=True, foreign=False)
        async with running(redis_url=url, owner_lease_s=0.4) as (server, client):
            await Report(client).join("a")
            await owns(server)
            async with redis.asyncio.Redis.from_url(url) as store:

                async def freed() -> bool:
                    return not await store.zcard(POOL + "affinity_expiry") and not await store.hlen(POOL + "affinity")

                await eventually(freed, "the expired sessions are removed", 30.0)
                assert await store.set("any", "x")
            assert not server.router.state.degraded


@pytest.mark.parametrize("foreign", [False, True])
async def test_a_full_redis_keeps_leases_and_requests_and_the_newest_sessions(tmp_path: Path, foreign: bool) -> None:
    with redis_server(tmp_path) as (url, _):
        await _filled(url, expired=False, foreign=foreign)
        async with running(redis_url=url, router_id="one", owner_lease_s=0.5) as (one, first):
            await Report(first).join("a")
            await owns(one)
            session = Session(first)
            await session.hello()
            for number in range(3):
                await session.place(f"first-{number}", session_id=f"s{number}")
                await session.finish(f"first-{number}")
            assert not (await session.place("open", session_id="s0")).degraded
            await session.place("another", session_id="s1")
            async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:

                async def kept() -> bool:
                    return set(await store.hkeys(POOL + "open")) == {"open", "another"} and bool(
                        await store.hexists(POOL + "affinity", "/s1")
                    )

                await eventually(kept, "written")
                assert await store.hlen(POOL + "affinity") == 30_000, "each new session has replaced the oldest"
                assert await store.zcard(POOL + "affinity_expiry") == 30_000
                with pytest.raises(redis.exceptions.OutOfMemoryError):
                    await store.set("any", "x")
                async with running(redis_url=url, router_id="two", owner_lease_s=0.5) as (two, second):
                    await Report(second).join("a")
                    before = one.router.store.epoch
                    await one.stop()
                    await owns(two)
                    assert two.router.store.epoch > before
