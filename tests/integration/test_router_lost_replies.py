"""A router's write to Redis lands and its answer is lost, or it lands late: nothing is placed twice, forgotten or revived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha1
from pathlib import Path

import redis.asyncio

from pointsman_router.io.main import RouterServer
from pointsman_router.io.store import redis_scripts
from tests.support.processes.redis import redis_server
from tests.support.router import Client, Report, Session, running
from tests.support.tcp_proxies import LossyProxy
from tests.support.waiting import eventually

LEASE_S = 0.6
OPEN = "pointsman:{default:m}:open"
ACQUIRE, APPLY = (sha1(text.encode()).hexdigest().encode() for text in (redis_scripts.ACQUIRE, redis_scripts.APPLY))


@dataclass
class Scene:
    """A router behind a proxy to Redis, with one gateway's stream and two instances."""

    server: RouterServer
    client: Client
    session: Session
    proxy: LossyProxy
    store: redis.asyncio.Redis  # not through the proxy

    async def open_in_redis(self) -> set[str]:
        """Ids of the requests that Redis holds as open."""
        return {str(name) for name in await self.store.hkeys(OPEN)}

    async def count(self) -> int:
        """Number of requests that the router counts on its instances."""
        return sum(status.num_requests for status in (await self.client.instances()).values())

    async def normal(self) -> bool:
        """Whether the router owns the pool and works with Redis."""
        return self.server.router.store.may_place("m") and not self.server.router.state.degraded


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    with redis_server(folder) as (url, _):
        async with (
            LossyProxy(int(url.rsplit(":", 1)[1].split("/")[0])) as proxy,
            running(redis_url=f"redis://127.0.0.1:{proxy.port}/0", owner_lease_s=LEASE_S, gateway_lease_s=3) as (
                server,
                client,
            ),
            redis.asyncio.Redis.from_url(url, decode_responses=True) as store,
        ):
            reports = [Report(client), Report(client)]
            for name, report in zip("ab", reports, strict=True):
                await report.join(name)
            session = Session(client)
            await session.hello()
            one = Scene(server, client, session, proxy, store)
            await eventually(one.normal, "the router owns the pool")
            yield one


async def test_a_write_whose_reply_is_lost_is_answered_once_and_kept_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        await one.session.place(
            "first"
        )  # Redis loads the script now. Otherwise the lost answer would be its refusal of an unknown script.
        before = one.proxy.lost
        one.proxy.losing = APPLY
        placing = asyncio.create_task(one.session.place("r"))

        async def landed() -> bool:
            return await one.open_in_redis() == {"first", "r"} and one.proxy.lost > before

        await eventually(landed, "the write landed and its reply was lost")
        assert not placing.done(), "answered before the router could know that the placement is stored"
        one.proxy.losing = None
        placement = await placing
        await eventually(one.normal, "the router works with Redis again")
        assert (await one.session.place("r")).decision_id == placement.decision_id
        assert await one.count() == 2
        for name in ("first", "r"):
            await one.session.finish(name)

        async def empty() -> bool:
            return not await one.open_in_redis() and await one.count() == 0

        await eventually(empty, "nothing is left")
        one.server.router.state.check_invariants()


async def test_open_requests_outlive_renewals_whose_replies_are_lost(tmp_path: Path) -> None:
    """The lease expires, and each attempt to renew it succeeds in Redis while its reply is lost. So the router has owned the pool
    all the time, and its state, placements made meanwhile included, is newer than what Redis holds."""
    async with scene(tmp_path) as one:
        await one.session.place("before")
        for round_ in range(3):
            one.proxy.losing = ACQUIRE
            lost = one.proxy.lost

            async def degraded() -> bool:
                return one.server.router.state.degraded

            await eventually(degraded, "degraded")
            await one.session.place(f"during-{round_}")

            async def attempted(lost: int = lost) -> bool:
                return one.proxy.lost >= lost + 6

            await eventually(attempted, "attempts landed")
            await one.store.delete("pointsman:{default:m}:lease")
            await eventually(partial(attempted, one.proxy.lost), "more of them, on a lease that had run out")
            one.proxy.losing = None
            await eventually(one.normal, "normal")
        names = {"before", "during-0", "during-1", "during-2"}
        assert await one.count() == 4
        await eventually(lambda: _equal(one, names), "Redis holds what the router knows")
        for name in names:
            await one.session.finish(name)
        await eventually(lambda: _equal(one, set()), "nothing is left")
        assert await one.count() == 0
        outcomes = {logged.outcome for logged in one.server.router.decisions.newest(lambda _: True)}
        assert outcomes == {"OK"}


async def test_a_write_that_arrives_late_revives_nothing(tmp_path: Path) -> None:
    """A write is delayed until its request has ended and the end is written, too."""
    async with scene(tmp_path) as one:
        await one.session.place("first")
        await one.session.finish("first")
        await eventually(lambda: _equal(one, set()), "written")
        one.proxy.hold()
        placing = asyncio.create_task(one.session.place("late"))

        async def stuck() -> bool:
            return one.proxy.held > 0 and one.server.router.state.degraded

        await eventually(stuck, "on the way, and given up by the router")
        await placing
        await one.session.finish("late")

        async def ended() -> bool:
            return await one.count() == 0

        await eventually(ended, "ended")
        one.proxy.pass_on()
        await eventually(one.normal, "normal")
        await one.session.place("next")
        await eventually(lambda: _equal(one, {"next"}), "written")
        one.proxy.deliver()

        async def arrived() -> bool:
            return one.proxy.answered_late > 0

        await eventually(arrived, "the late write is carried out")
        assert await one.open_in_redis() == {"next"}


async def test_an_emptied_redis_whose_first_answer_is_lost_is_filled_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        for name in ("one", "two"):
            await one.session.place(name, session_id="s")
        one.proxy.losing = ACQUIRE
        lost = one.proxy.lost
        await one.store.flushall()

        async def taken_again() -> bool:
            return bool(await one.store.exists("pointsman:{default:m}:lease")) and one.proxy.lost > lost

        await eventually(taken_again, "an attempt landed")
        one.proxy.losing = None
        await eventually(lambda: _equal(one, {"one", "two"}), "filled again")

        async def sessions() -> bool:
            return set(await one.store.hkeys("pointsman:{default:m}:affinity")) == {"/s"}

        await eventually(sessions, "sessions follow")
        assert await one.count() == 2


async def _equal(one: Scene, names: set[str]) -> bool:
    return await one.open_in_redis() == names
