"""Routers that gateways tell of ended sessions: in memory, in Redis, and through a change of the owner."""

from __future__ import annotations

from pathlib import Path

import redis.asyncio

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_router.io.main import RouterServer
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, running
from tests.support.waiting import eventually

AFFINITY = "pointsman:{default:m}:affinity"


async def listed(client: Client) -> tuple[list[str], int]:
    answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(), metadata=client.metadata)
    return [f"{session.tenant}/{session.session_id}" for session in answer.sessions], answer.ended


async def owns(server: RouterServer) -> None:
    async def check() -> bool:
        return server.router.store.may_place("m")

    await eventually(check, "the router owns the pool")


async def end(session: Session, tenant: str, session_id: str) -> placement_pb2.SessionEnded:
    await session.send(end_session=placement_pb2.EndSession(tenant=tenant, session_id=session_id))
    return (await session.read("session_ended")).session_ended


async def turns(session: Session, count: int, session_id: str = "s") -> None:
    for number in range(count):
        await session.place(f"{session_id}-{number}", tenant="t", session_id=session_id)
        await session.finish(f"{session_id}-{number}")


async def test_an_ended_session_is_listed_no_longer_and_is_counted() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await turns(session, 2)
        await turns(session, 1, "other")
        assert await listed(client) == (["t/other", "t/s"], 0)
        ended = await end(session, "t", "s")
        assert (ended.tenant, ended.session_id, list(ended.models)) == ("t", "s", ["m"])
        assert await listed(client) == (["t/other"], 1)
        assert list((await end(session, "t", "s")).models) == ["m"], "told twice"
        assert list((await end(session, "red", "other")).models) == ["m"], "another tenant's id"
        await session.send(end_session=placement_pb2.EndSession(tenant="t"))
        assert list((await end(session, "t", "unknown")).models) == ["m"]
        assert await listed(client) == (["t/other"], 1)
        await session.place("again", tenant="t", session_id="s")
        assert await listed(client) == (["t/s", "t/other"], 1)


async def test_an_end_is_confirmed_once_redis_has_it_and_holds_for_the_next_owner(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one") as (one, client), redis.asyncio.Redis.from_url(url) as store:
            await Report(client).join("a")
            await owns(one)
            session = Session(client)
            await session.hello()
            await turns(session, 2)
            await turns(session, 2, "kept")

            async def stored() -> bool:
                return set(await store.hkeys(AFFINITY)) == {b"t/s", b"t/kept"}

            await eventually(stored, "both sessions are stored")
            assert list((await end(session, "t", "s")).models) == ["m"]
            assert await store.hkeys(AFFINITY) == [b"t/kept"]
            assert await store.zrange(f"{AFFINITY}_expiry", 0, -1) == [b"t/kept"]
        async with running(redis_url=url, router_id="two") as (two, client):
            await Report(client).join("a")
            await owns(two)

            async def read() -> bool:
                return (await listed(client))[0] == ["t/kept"]

            await eventually(read, "the new owner has read the sessions")


async def test_an_end_is_not_confirmed_while_redis_does_not_answer(tmp_path: Path) -> None:
    """The owner's end would be the end of it: the gateway tells the next owner of what nobody has confirmed."""
    with redis_server(tmp_path) as (url, process):
        async with running(redis_url=url, router_id="one") as (one, client):
            await Report(client).join("a")
            await owns(one)
            session = Session(client)
            await session.hello()
            await turns(session, 2)
            process.kill()

            async def degraded() -> bool:
                return one.router.state.degraded

            await eventually(degraded, "the router goes on without Redis")
            await session.send(end_session=placement_pb2.EndSession(tenant="t", session_id="s"))
            place = placement_pb2.PlacementRequest(request_id="later", model="m", input_tokens=10)
            await session.send(place=place)
            answer = await session.read("session_ended", "placement", "refusal")
            assert answer.WhichOneof("kind") == "placement"
            assert await listed(client) == ([], 1)


async def test_a_router_that_does_not_own_the_pool_confirms_nothing(tmp_path: Path) -> None:
    """The gateway then waits for the answer of the owner."""
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url, router_id="one") as (one, first):
            await Report(first).join("a")
            await owns(one)
            async with running(redis_url=url, router_id="two") as (two, second):
                await Report(second).join("a")
                stranger = Session(second)
                await stranger.hello()
                await stranger.send(end_session=placement_pb2.EndSession(tenant="t", session_id="s"))
                request = placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=10)
                await stranger.send(place=request)
                answer = await stranger.read("session_ended", "refusal")
                assert answer.refusal.not_serving
                assert two.router.state.affinity.ended_at("t/s") > 0, "it has come before the request"
                owner = Session(first)
                await owner.hello()
                assert list((await end(owner, "t", "s")).models) == ["m"]


async def test_a_tenant_whose_name_has_a_slash_shares_no_session_with_another(tmp_path: Path) -> None:
    """Clients choose session ids, so a tenant "a" could take, end and see the sessions of a tenant "a/b"."""
    with redis_server(tmp_path) as (url, _):
        async with running(redis_url=url) as (server, client), redis.asyncio.Redis.from_url(url) as store:
            await Report(client).join("a")
            session = Session(client)
            await session.hello()
            await owns(server)
            # A session is stored with its second turn.
            for number, (tenant, session_id) in enumerate([("a", "b/c"), ("a/b", "c")] * 2):
                await session.place(f"r-{number}", tenant=tenant, session_id=session_id)
                await session.finish(f"r-{number}")

            async def kept() -> bool:
                return set(await store.hkeys(AFFINITY)) == {b"a/b/c", b"a%2Fb/c"}

            await eventually(kept, "the store has both sessions")
            answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest(text="a/b/c"))
            assert {(found.tenant, found.session_id) for found in answer.sessions} == {("a", "b/c"), ("a/b", "c")}
            await end(session, "a", "b/c")
            answer = await client.fleet.ListSessions(fleet_pb2.ListSessionsRequest())
            assert [(found.tenant, found.session_id) for found in answer.sessions] == [("a/b", "c")]
