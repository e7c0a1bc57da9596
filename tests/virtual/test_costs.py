"""Tests that computing takes virtual time: each former defect that outlasted a lease is put back, and must be found."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import pytest
import redis.exceptions

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import EngineLife
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.requests.place_or_hold import TRIES, HeldRequests
from pointsman_router.io.rpc import fleet_service
from pointsman_router.io.rpc.turn_budget import TurnBudget
from pointsman_router.io.store.redis_store import RedisStore
from tests.support.virtual import costs, faults
from tests.support.virtual.charging import PREBUILT, PREBUILT_SESSIONS, Charges
from tests.support.virtual.costs import LARGEST, Declared, draw
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.virtual.network import Network, Node, clock_offset_s, here, owner_of, track_tasks
from tests.support.virtual.run import run
from tests.support.virtual.store import Client, VirtualRedis
from tests.support.virtual.world import MODELS, World

Tell = Callable[[str], None]


async def owner_dies(world: World, tell: Tell) -> None:
    """Kill each pool's owner, and restart it when the other router has had time to take over."""
    for model in MODELS:
        await asyncio.sleep(1.0)
        for owner in [node for node in world.routers.values() if node.router and node.router.state.owned.owns(model)]:
            world.disturbances.note(owner.node.name, 0.0)
            owner.kill()
            tell(f"the owner of {model} dies")
            await asyncio.sleep(6.0)
            owner.start()
        await asyncio.sleep(5.0)


async def redis_forgets(world: World, tell: Tell) -> None:
    """Restart Redis empty, after all its data was read."""
    await asyncio.sleep(5.0)
    world.redis.wipe()
    tell("redis restarts empty")
    await asyncio.sleep(10.0)


async def engines_restart(world: World, tell: Tell) -> None:
    """Restart all engines often enough that the index is swept."""
    for _ in range(3):
        for engine in world.engines.values():
            engine.kill()
            await asyncio.sleep(0.5)
            engine.start()
            await asyncio.sleep(1.0)
    tell("all engines have restarted three times")
    await asyncio.sleep(5.0)


async def more_than_fits(world: World, tell: Tell) -> None:
    """Send requests faster than the engines answer, so they are held in the router."""
    asking = [asyncio.create_task(gateway.ask()) for gateway in world.gateways.values() for _ in range(40)]
    await asyncio.gather(*asking)
    tell("all are answered")


async def engines_hang(world: World, tell: Tell) -> None:
    """Stop one engine of each pool, and let clients leave: circuits open, and requests on trial end on other instances."""
    for name in ("e0:1", "e1:1"):
        world.network.stop(world.engines[name].node, 16.0)
    asking = [asyncio.create_task(gateway.ask()) for gateway in world.gateways.values() for _ in range(8)]
    for _ in range(40):
        await asyncio.sleep(0.3)
        asking.append(asyncio.create_task(world.gateways["g0"].ask(0.5)))
    await asyncio.gather(*asking)
    tell("all are answered")


async def operators_ask(world: World, tell: Tell) -> None:
    """Send WhatIf for all recorded decisions."""
    await asyncio.sleep(10.0)
    tell(faults.operators_ask(world, 0.0))
    await asyncio.sleep(5.0)


WHAT_BEFALLS = (owner_dies, redis_forgets, engines_restart, engines_hang, more_than_fits, operators_ask)


# ---- former defects ----


def read_all_sessions_before_owning(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: a new owner reads all data of a pool from Redis in two calls, and handles it in one event."""

    async def own(store: Any, pool: Any, epoch: int, redis_ms: int, *, rewrite: bool) -> None:
        if epoch == pool.epoch:
            await original(store, pool, epoch, redis_ms, rewrite=rewrite)
            return
        sessions = await store._servers.client.hgetall(pool.state_keys[3])
        await original(store, pool, epoch, redis_ms, rewrite=rewrite)
        pool.reading.reservations_read, pool.reading.cursor = True, 0
        store._take_over(pool, pool.reading)
        store._on_event(ev.SessionsRead(pool.name, sessions))
        pool.reading = None

    original = RedisStore._own
    monkeypatch.setattr(RedisStore, "_own", own)


def rewrite_without_renewing(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: an emptied Redis is rewritten page by page, and leases are renewed only after the last page."""

    async def flush(store: Any, pool: Any, until: float = 0.0, *, page: bool = True) -> None:
        await original(store, pool)
        while pool.unwritten is not None:
            await original(store, pool)

    original = RedisStore._flush
    monkeypatch.setattr(RedisStore, "_flush", flush)


def sweep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3: the whole index is swept in one turn."""

    def sweep(index: Any) -> None:
        original(index)
        while index.sweeping:
            index._sweep_on()

    original = PrefixIndex.sweep
    monkeypatch.setattr(PrefixIndex, "sweep", sweep)


def retry_at_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: each load report tries held requests again, even if there is no room."""

    def reported(held: Any, pool: str, instance_id: str, now: float) -> list[ev.Effect]:
        held._views.has_room = lambda *_: True
        held._freed[pool] = True
        effects: list[ev.Effect] = held._serve(pool, now, TRIES)
        del held._views.has_room
        return effects

    monkeypatch.setattr(HeldRequests, "reported", reported)


def decide_again_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9: WhatIf has no pause."""

    async def at_once(items: Iterable[Any]) -> AsyncIterator[Any]:
        for item in items:
            yield item

    monkeypatch.setattr(fleet_service, "in_turns", at_once)


def keep_trials_that_end_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: if the end of a request on trial says nothing about its instance, the trial stays open."""
    monkeypatch.setattr(EngineLife, "gone", lambda life, request_id: life.served(request_id))


def wait_for_reports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like R6: neither freed room nor the passing of time makes the router try a held request again."""
    monkeypatch.setattr(HeldRequests, "_serve", lambda held, pool, now, tries: [])


@pytest.mark.parametrize(
    ("put_back", "trouble", "policy", "found"),
    [
        (read_all_sessions_before_owning, owner_dies, "unified", "had no owner that places"),
        (rewrite_without_renewing, redis_forgets, "unified", "let its lease of"),
        (sweep_at_once, engines_restart, "unified", "a turn of"),
        (retry_at_each_report, more_than_fits, "unified", "let its lease of"),
        (keep_trials_that_end_elsewhere, engines_hang, "unified", "trial="),
        (wait_for_reports_alone, more_than_fits, "unified", "which is idle"),
        (decide_again_in_one_turn, operators_ask, "elastic", "a turn of"),
    ],
)
def test_what_once_outlasted_a_lease_is_found(
    put_back: Callable[[pytest.MonkeyPatch], None],
    trouble: Any,
    policy: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a few seeds must find the defect. A seed draws, for instance, which requests are on trial."""
    put_back(monkeypatch)
    failures: list[str] = []
    for seed in range(1, 6):
        failures.append(run(seed, LARGEST, policy, trouble).failure)
        if found in failures[-1]:
            return
    pytest.fail(f"{found!r} is not among {failures}")


@pytest.mark.parametrize("trouble", WHAT_BEFALLS)
def test_the_largest_fleet_gets_over_it(trouble: Any) -> None:
    result = run(1, LARGEST, "unified", trouble)
    assert result.failure == ""
    assert result.answers[200] > 50


# ---- the time that work takes ----


def charged(*works: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run each of `works` as a separate node in virtual time, until the last has ended."""
    loop = VirtualLoop(owner_of)
    track_tasks(loop)

    async def all_of_them() -> None:
        await asyncio.gather(*(Node(str(at)).spawn(work(loop)) for at, work in enumerate(works)))

    with virtual_clocks(loop, clock_offset_s):
        try:
            loop.run_until_complete(all_of_them())
        finally:
            loop.end()


def test_a_node_that_computes_does_nothing_else_and_others_do() -> None:
    notes: list[tuple[str, float]] = []

    def note(what: str) -> None:
        notes.append((what, round(time.monotonic() - 1_000.0, 3)))

    async def busy(loop: VirtualLoop) -> None:
        loop.call_later(1.0, note, "due meanwhile")
        loop.charge(1.5)
        note("its clock goes on")
        await asyncio.sleep(0.0)
        note("its next turn")

    async def other(loop: VirtualLoop) -> None:
        await asyncio.sleep(1.0)
        note("another node")

    charged(busy, other)
    assert notes == [
        ("its clock goes on", 1.5),
        ("another node", 1.0),
        ("its next turn", 1.5),
        ("due meanwhile", 1.5),
    ]


def test_work_in_short_turns_lets_others_in() -> None:
    """A thousand turns of 1.5 ms in place of one turn of 1.5 s."""
    at: list[float] = []

    async def busy(loop: VirtualLoop) -> None:
        loop.call_later(1.0, lambda: at.append(time.monotonic() - 1_000.0))
        for _ in range(1_000):
            loop.charge(0.001_5)
            await asyncio.sleep(0.0)
        at.append(time.monotonic() - 1_000.0)

    charged(busy)
    assert at == [pytest.approx(1.0, abs=0.002), pytest.approx(1.5, abs=0.002)]


def test_short_turns_are_counted_though_each_of_them_holds_nothing_up() -> None:
    at: list[float] = []

    async def busy(loop: VirtualLoop) -> None:
        for _ in range(10_000):
            loop.charge(0.000_01)
            await asyncio.sleep(0.0)
        at.append(time.monotonic() - 1_000.0)

    charged(busy)
    assert at == [pytest.approx(0.1, abs=0.002)]


def test_budgets_of_a_turn_see_what_is_charged() -> None:
    """20 pieces of 1 ms under a budget of 2 ms let other callbacks run between them."""
    between: list[float] = []

    async def busy(loop: VirtualLoop) -> None:
        budget = TurnBudget(0.002)
        loop.call_later(0.01, lambda: between.append(time.monotonic() - 1_000.0))
        await asyncio.gather(*(budget.run(lambda: loop.charge(0.001)) for _ in range(20)))

    charged(busy)
    assert between == [pytest.approx(0.01, abs=0.006)]


def test_a_stop_outlasts_the_end_of_a_turn() -> None:
    ran: list[float] = []

    async def work(loop: VirtualLoop) -> None:
        network, node = Network(random.Random(1)), here()
        loop.call_later(0.5, lambda: ran.append(time.monotonic() - 1_000.0))
        network.stop(node, 3.0)
        loop.charge(1.0)
        await asyncio.sleep(5.0)

    charged(work)
    assert ran == [3.0]


def test_a_reply_of_redis_takes_as_long_as_its_size_asks_for() -> None:
    """Redis' next reply waits for it. A reply that takes longer than its client's timeout is lost."""
    took: list[float] = []

    async def read(loop: VirtualLoop) -> None:
        network, store = Network(random.Random(1)), VirtualRedis()
        charges = Charges(loop, Declared(sessions=200_000), pools=1, engines=1)
        store.prebuild("m", {f"{PREBUILT}{at}": "e" for at in range(PREBUILT_SESSIONS)})
        for timeout_s in (0.5, 0.1):
            began = loop.time()
            client = Client(network, store, timeout_s, charges)
            with contextlib.suppress(redis.exceptions.TimeoutError):
                await client.hgetall("pointsman:{default:m}:affinity")
            took.append(loop.time() - began)

    charged(read)
    served = 200_000 * costs.REDIS_FIELD_S
    assert took[0] == pytest.approx(served + 200_000 * costs.SESSION_PARSED_S, abs=0.02)
    assert took[1] == pytest.approx(0.1, abs=0.02)


def test_some_seeds_stand_for_large_fleets() -> None:
    drawn = [draw(random.Random(seed)) for seed in range(200)]
    assert 20 < sum(declared.large for declared in drawn) < 60
    assert max(declared.sessions for declared in drawn) == LARGEST.sessions
