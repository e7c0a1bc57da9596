"""Routers that share a real Redis: restart, takeover, fencing, loss."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest
import redis.asyncio

from pointsman.router.v1 import placement_pb2
from services.router.io.main import RouterServer
from tests.integration.router_fixtures import Client, Report, Session, eventually, redis_server, running

PLACE = placement_pb2.PlaceRequest(request=placement_pb2.PlacementRequest(request_id="p", model="m", input_tokens=10))


async def owns(server: RouterServer) -> None:
    async def check() -> bool:
        return server.router.owns

    await eventually(check, "the router owns the log")


async def test_a_restarted_router_knows_the_open_requests_and_the_sessions(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url) as (server, client):
            await owns(server)
            await Report(client).join("a")
            session = Session(client)
            await session.hello()
            for name in ("done", "open"):
                await session.place(name, session_id="s")
            await session.finish("done")

            async def kept() -> bool:
                async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                    return set(await store.hkeys("pointsman:{default}:open")) == {"open"}

            await eventually(kept, "written")
        async with running(redis_url=url, gateway_lease_s=30) as (server, client):
            await owns(server)
            assert server.router.store.epoch == 2
            await Report(client).join("a")
            status = (await client.instances())["a"]
            assert (status.num_requests, status.ongoing_tokens, status.sessions) == (1, 100, 1)
            session = Session(client)
            await session.hello()  # The same gateway, which has nothing open any more.
            assert (await client.instances())["a"].num_requests == 0


async def test_the_second_replica_stands_by_and_takes_over(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one", owner_lease_s=0.5) as (one, first):
            await owns(one)
            await Report(first).join("a")
            async with running(redis_url=url, router_id="two", owner_lease_s=0.5, gateway_lease_s=30) as (two, second):
                await Report(second).join("a")

                async def knows_owner() -> bool:
                    return two.router.store.owner == "one"

                await eventually(knows_owner, "two knows one")
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await second.placement.Place(PLACE)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "the owner is one" in (error.value.details() or "")
                await first.placement.Place(PLACE)

                async def written() -> bool:
                    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                        return bool(await store.hlen("pointsman:{default}:open"))

                await eventually(written, "written")
                await one.stop()
                await owns(two)
                assert (await second.instances())["a"].num_requests == 1


async def test_an_owner_that_slept_past_its_lease_is_fenced_off(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one") as (one, client):
            await owns(one)
            await Report(client).join("a")
            session = Session(client)
            await session.hello()
            await session.place("r")
            async with redis.asyncio.Redis.from_url(url) as store:
                # What another replica does while this one sleeps.
                await store.set("pointsman:{default}:owner", "two", px=60_000)
                await store.incr("pointsman:{default}:epoch")

            async def fenced() -> bool:
                return not one.router.owns

            await eventually(fenced, "fenced")
            assert len(one.router.state.reservations) == 0
            assert await session.call.code() is grpc.StatusCode.UNAVAILABLE
            async with redis.asyncio.Redis.from_url(url) as store:
                assert await store.get("pointsman:{default}:owner") == b"two"


async def test_without_redis_the_owner_places_degraded_and_fills_an_empty_one_on_its_return(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, process):
        async with running(redis_url=url, owner_lease_s=0.5) as (server, client):
            await owns(server)
            await Report(client).join("a")
            session = Session(client)
            await session.hello()
            assert not (await session.place("before")).degraded
            process.kill()

            async def degraded() -> bool:
                return server.router.state.degraded

            await eventually(degraded, "degraded")
            assert (await session.place("during", session_id="s")).degraded
            process.start()

            async def healed() -> bool:
                try:
                    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as store:
                        kept = set(await store.hkeys("pointsman:{default}:open"))
                        owner = await store.hget("pointsman:{default}:affinity", "/s")
                except redis.ConnectionError:
                    return False
                return kept == {"before", "during"} and owner == "a"

            await eventually(healed, "the empty Redis holds what the owner knows")
            assert not (await session.place("after")).degraded
            assert server.router.owns


async def test_a_fleet_name_keeps_fleets_apart(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, fleet="x") as (one, _), running(redis_url=url, fleet="y") as (two, client):
            await owns(one)
            await owns(two)
            assert isinstance(client, Client)
