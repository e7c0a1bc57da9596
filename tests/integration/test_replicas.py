"""Several routers over one Redis: every request is placed once, whoever dies, sleeps or forgets."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from google.rpc import error_details_pb2

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Decision
from tests.support.processes.replicas import BIG, Gateway, double_bookings, replicas
from tests.support.router import Client, Session, details_of
from tests.support.router_values import join, request, state
from tests.support.waiting import eventually

ROUNDS = 100
OPEN = "pointsman:{default:m}:open"
LEASE = "pointsman:{default:m}:lease"


async def test_a_storm_through_all_replicas_never_books_an_instance_twice(tmp_path: Path) -> None:
    async with replicas(tmp_path, count=3) as fleet:
        doubles = 0
        for _ in range(ROUNDS):
            doubles += double_bookings(await fleet.burst())
            await fleet.idle()
        assert doubles == 0
        assert all(set(gateway.answers.values()) == {1} for gateway in fleet.gateways)


async def test_the_naive_order_fails_the_same_storm() -> None:
    """Here each replica decides on its own view, and only then writes the decision where the other replicas see it."""
    views = [state() for _ in range(3)]
    for view in views:
        for at in range(4):
            join(view, f"i{at}", at)
    log: list[Reservation] = []

    async def place(at: int, name: str) -> str:
        view = views[at % len(views)]
        for reservation in log:
            view.reservations.put(reservation)
        decision = view.explain(request(name, tokens=BIG), 0.0)
        await asyncio.sleep(0)  # the write is on its way
        assert isinstance(decision, Decision)
        log.append(Reservation(name, "g", decision.instance_id, "", BIG, BIG))
        return decision.instance_id

    doubles = 0
    for number in range(ROUNDS):
        names = [f"{number}-{at}" for at in range(4)]
        doubles += double_bookings(list(await asyncio.gather(*(place(at, name) for at, name in enumerate(names)))))
        log.clear()
        for view in views:
            for name in names:
                view.handle(ev.Finished(name, "OK"), 0.0)
    assert doubles > 0


async def test_pools_spread_and_each_gateway_reaches_every_owner(tmp_path: Path) -> None:
    models = tuple(f"model-{at}" for at in range(6))
    async with replicas(tmp_path, models=models, instances=1) as fleet:
        owners = {model: await fleet.owner(model) for model in models}
        assert set(owners.values()) == {"one", "two"}
        for gateway in fleet.gateways:
            for model in models:
                name = f"{gateway.client._gateway_id}-{model}"
                assert (await gateway.place(name, model)).decision_id.startswith(owners[model])
                gateway.finish(name)
        await fleet.idle()


async def test_a_replica_that_does_not_own_the_pool_names_the_one_that_does(tmp_path: Path) -> None:
    async with replicas(tmp_path) as fleet:
        owner = await fleet.owner()
        other = next(name for name in fleet.routers if name != owner)
        wanted = placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=10)
        async with fleet.client(other) as client:
            session = Session(client, "shell")
            await session.hello()
            while [pool.owner.router_id for pool in (await session.fleet()).pools.values()] != [owner]:
                pass
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.placement.Place(placement_pb2.PlaceRequest(request=wanted))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            details = details_of(error.value)
            assert details[0].Unpack(info)
            assert details[1].Unpack(retry)
            assert (info.reason, info.domain) == ("NOT_OWNER", "pointsman")
            assert dict(info.metadata) == {"router_id": owner, "address": fleet.routers[owner].address}
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.fleet.Explain(fleet_pb2.ExplainRequest(request=wanted))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"its owner is {owner} at {fleet.routers[owner].address}" in (error.value.details() or "")
            end = placement_pb2.Finished(request_id="r", outcome=placement_pb2.OUTCOME_OK)
            finish = placement_pb2.FinishRequest(finished=end, model="m")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.placement.Finish(finish)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            await session.send(place=wanted)
            refusal = (await session.read("refusal")).refusal
            assert (refusal.not_serving, refusal.owner.router_id) == (True, owner)
            assert refusal.owner.address == fleet.routers[owner].address
        await fleet.idle()


async def test_the_owner_is_killed_in_the_middle_of_storms(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with replicas(tmp_path) as fleet:
        for _ in range(5):
            owner = await fleet.owner()
            burst = asyncio.create_task(fleet.burst())
            await asyncio.sleep(rng.uniform(0.0, 0.01))
            fleet.routers[owner].process.kill()
            placed = await burst
            # If its Redis does not answer, as on a busy machine, an owner places on its own knowledge alone; the logs say so.
            assert double_bookings(placed) == 0, "\n".join([str(placed), *fleet.logs()])
            await fleet.idle()
            fleet.routers[owner].process.start()
            await fleet.ready()
            # The router may own the pool again, by its old lease, before a gateway has reported which requests ended.
            await fleet.idle()
        assert all(set(gateway.answers.values()) == {1} for gateway in fleet.gateways)


async def test_open_streams_and_sessions_outlive_their_owner(tmp_path: Path) -> None:
    async with replicas(tmp_path) as fleet:
        owner = await fleet.owner()
        other = next(name for name in fleet.routers if name != owner)
        first = await fleet.gateways[0].place("open")
        async with fleet.client(owner) as client:
            session = Session(client, "h")
            await session.hello()
            lost = (await session.place("lost", BIG)).step.instance.instance_id
            fleet.routers[owner].process.kill()
            session.call.cancel()
        assert await fleet.owner(other_than=owner) == other
        async with fleet.client(other) as client:
            at = first.step.instance.instance_id
            assert at != lost
            counts = {name: instance.num_requests for name, instance in (await client.instances()).items()}
            assert (counts[at], counts[lost]) == (1, 1)
            # A request that a gateway repeats because the answer did not reach it goes to the same instance.
            again = Session(client, "h")
            await again.hello()
            assert (await again.place("lost", BIG)).step.instance.instance_id == lost
            await again.finish("lost")
            again.call.cancel()
        second = await fleet.gateways[1].place("beside")
        assert second.step.instance.instance_id != at
        fleet.gateways[0].finish("open")
        fleet.gateways[1].finish("beside")
        await fleet.idle()


async def test_an_owner_that_slept_past_its_lease_writes_nothing_and_loses_its_gateways(tmp_path: Path) -> None:
    async with replicas(tmp_path) as fleet:
        owner = await fleet.owner()
        process = fleet.routers[owner].process
        url = f"redis://127.0.0.1:{fleet.redis.argv[fleet.redis.argv.index('--port') + 1]}/0"
        async with fleet.client(owner) as client, redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
            session = Session(client, "early")
            await session.hello()
            os.kill(process.pid, signal.SIGSTOP)
            try:
                # Written to a paused router, which reads this when it resumes.
                await session.send(place=placement_pb2.PlacementRequest(request_id="late", model="m", input_tokens=BIG))
                other = await fleet.owner(other_than=owner)
                placed = await fleet.gateways[0].place("r")
                kept = await _kept(store, {"r"})
            finally:
                os.kill(process.pid, signal.SIGCONT)
            refusal = (await session.read("refusal")).refusal
            assert refusal.not_serving

            async def knows_owner() -> bool:
                await session.send(place=placement_pb2.PlacementRequest(request_id="late", model="m", input_tokens=BIG))
                return (await session.read("refusal")).refusal.owner.router_id == other

            await eventually(knows_owner, "the sleeper knows the new owner")
            assert await store.hgetall(OPEN) == kept
            assert await store.hget(LEASE, "id") == other
            session.call.cancel()
        assert double_bookings([placed.step.instance.instance_id, *(await _three_more(fleet.gateways))]) == 0
        fleet.gateways[0].finish("r")
        await fleet.idle()


async def _kept(store: redis.asyncio.Redis, wanted: set[str]) -> dict[str, str]:
    async def written() -> bool:
        return set(await store.hkeys(OPEN)) == wanted

    await eventually(written, f"Redis holds {wanted}")
    kept: Any = await store.hgetall(OPEN)
    return dict(kept)


async def _three_more(gateways: list[Gateway]) -> list[str]:
    pairs = [(gateways[at % len(gateways)], f"more-{at}") for at in range(3)]
    placed = await asyncio.gather(*(gateway.place(name) for gateway, name in pairs))
    for gateway, name in pairs:
        gateway.finish(name)
    return [placement.step.instance.instance_id for placement in placed]


async def test_an_empty_redis_replaces_the_one_that_died(tmp_path: Path) -> None:
    async with replicas(tmp_path) as fleet:
        before = await fleet.owner()
        held = (await fleet.gateways[0].place("held")).step.instance.instance_id
        fleet.redis.kill()
        instances = [held, *(await _three_more(fleet.gateways))]
        assert double_bookings(instances) == 0
        fleet.redis.start()
        url = f"redis://127.0.0.1:{fleet.redis.argv[fleet.redis.argv.index('--port') + 1]}/0"
        async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:

            async def filled() -> bool:
                try:
                    return set(await store.hkeys(OPEN)) == {"held"}
                except redis.ConnectionError:
                    return False

            await eventually(filled, "the owner filled the empty Redis")
            assert await fleet.owner() == before
            fleet.gateways[0].finish("held")
            await _kept(store, set())
        await fleet.idle()
        assert double_bookings(await fleet.burst()) == 0
        await fleet.idle()


async def test_an_idle_client_of_each_replica_sees_only_what_it_owns(tmp_path: Path) -> None:
    async with replicas(tmp_path) as fleet:
        owner = await fleet.owner()
        await fleet.gateways[0].place("r")
        for name in fleet.routers:
            async with fleet.client(name) as client:
                assert isinstance(client, Client)
                total = sum(instance.num_requests for instance in (await client.instances()).values())
                assert total == (1 if name == owner else 0)
        fleet.gateways[0].finish("r")
        await fleet.idle()
