"""Takeovers and hellos that are applied a part at a time end as those that are applied in one turn, whatever comes between."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Load, Phase
from pointsman_router.core.prefill_curve import MeanWork, PrefillWork
from pointsman_router.core.requests import unfinished_work
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.unfinished_work import PART
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.router import Router
from pointsman_router.io.settings import RouterSettings
from tests.support.router_values import finish, info, join, request, state

POOLS = {"m": ("a", "b"), "n": ("c",)}


def reservation(name: str, pool: str = "m", gateway: str = "g1", instance: str = "a") -> Reservation:
    return Reservation(name, gateway, instance, f"d-{name}", 100, 60, pool=pool, cached_tokens=40)


def stream(name: str, pool: str = "m", instance: str = "a", phase: Phase = Phase.DECODE) -> ev.OpenStream:
    return ev.OpenStream(request(name, tokens=100, model=pool), instance, phase, 40)


def fleet(limit: int = 0) -> RouterState:
    router = state(
        owns_all=False,
        limits=SaturationLimits(limit),
        queue=QueueSettings(size=50, timeout_s=1e6),
        gateway_lease_s=50.0,
    )
    for number, (name, pool) in enumerate((name, pool) for pool, names in POOLS.items() for name in names):
        join(router, name, number, model=pool, served_names=())
    return router


def known(router: RouterState) -> dict[str, Any]:
    """Return what the router knows of requests, without what depends on the order of events, such as the time of a decision that
    waited for a takeover."""
    return {
        "open": {reservation.request_id: reservation for reservation in router.reservations},
        "counters": {name: router.reservations.counters(name) for names in POOLS.values() for name in names},
        "held": sorted(held.request.request_id for held in router.held_requests.queue),
        "decided": {
            decision.request.request_id: (decision.pool, decision.decision_id)
            for decision in router.requests.decisions()
        },
        "owned": {pool: router.owned.owns(pool) for pool in POOLS},
        "mean": {pool: router.prefill_observer.mean_work(pool) for pool in POOLS},
        "owner": {pool: {name: router.affinity.owner(pool, f"/{name}", 0.0) for name in NAMES} for pool in POOLS},
    }


NAMES = [f"r{number}" for number in range(12)]
REQUESTS = st.sampled_from(NAMES)
GATEWAYS = st.sampled_from(["g1", "g2"])
PLACES = st.sampled_from([(pool, name) for pool, names in POOLS.items() for name in names])


def _reservations(drawn: list[tuple[str, str, tuple[str, str]]]) -> dict[str, list[Reservation]]:
    one_each = {name: reservation(name, pool, gateway, where) for name, gateway, (pool, where) in drawn}
    return {pool: [event for event in one_each.values() if event.pool == pool] for pool in POOLS}


def _taken(drawn: list[tuple[str, str, tuple[str, str]]], pool: str) -> ev.PoolTaken:
    return ev.PoolTaken(pool, tuple(_reservations(drawn)[pool]), MeanWork(PrefillWork(5.0, 9.0), 3))


TAKEN = st.builds(_taken, st.lists(st.tuples(REQUESTS, GATEWAYS, PLACES), max_size=10), st.sampled_from(sorted(POOLS)))
HELLO = st.builds(
    lambda gateway, streams, waiting: ev.GatewayHello(
        gateway,
        tuple({name: stream(name, pool, where, phase) for name, (pool, where), phase in streams}.values()),
        waiting,
    ),
    GATEWAYS,
    st.lists(st.tuples(REQUESTS, PLACES, st.sampled_from(Phase)), max_size=10),
    st.frozensets(REQUESTS, max_size=3),
)
EVENTS = st.one_of(
    TAKEN,
    HELLO,
    st.builds(ev.GatewayLost, GATEWAYS),
    st.builds(ev.Finished, REQUESTS, st.sampled_from(["OK", "CANCELLED"])),
    st.builds(ev.FirstToken, REQUESTS),
    st.builds(ev.StepDone, REQUESTS, st.just(0), st.booleans()),
    st.builds(lambda name, where, gateway: ev.StreamOpened(gateway, stream(name, *where)), REQUESTS, PLACES, GATEWAYS),
    st.builds(
        lambda name, pool, gateway: ev.PlaceRequested(request(name, tokens=100, model=pool, session_id=name), gateway),
        REQUESTS,
        st.sampled_from(sorted(POOLS)),
        GATEWAYS,
    ),
    st.builds(ev.SessionEnded, st.just(""), st.sampled_from(NAMES), GATEWAYS),
    st.builds(
        lambda pool, owners: ev.SessionsRead(pool, owners), st.sampled_from(sorted(POOLS)), st.just({"/r1": "a"})
    ),
)


@given(events=st.lists(EVENTS, min_size=3, max_size=25), turns=st.lists(st.integers(0, 4), min_size=25, max_size=25))
@settings(max_examples=300, deadline=None)
def test_any_interleaving_ends_as_whole_events_one_after_another(events: list[ev.Event], turns: list[int]) -> None:
    """Events of one pool stay in order. Events of two pools need not, so all requests of one id are of one pool here."""
    events = [_in_one_pool(event) for event in events]
    whole = fleet()
    answered_whole = [_answers(whole.handle(event, 0.0)) for event in events]
    parts = fleet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished_work, "PART", 2)
        answered: list[Any] = []
        for event, count in zip(events, turns, strict=False):
            answered.append(_answers(parts.handle(event, 0.0)))
            for _ in range(count):
                answered.append(_answers(parts.handle(ev.GoOn(), 0.0)))
                parts.check_invariants()
        answered.append(_answers(finish(parts)))
    parts.check_invariants()
    assert _sums(parts) == _sums(whole)
    assert sorted(chain.from_iterable(answered)) == sorted(chain.from_iterable(answered_whole))


LOST = st.builds(ev.PoolLost, st.sampled_from(sorted(POOLS)))


@given(
    events=st.lists(st.one_of(LOST, TAKEN, EVENTS), min_size=3, max_size=25),
    turns=st.lists(st.integers(0, 4), min_size=25, max_size=25),
)
@settings(max_examples=300, deadline=None)
def test_nothing_is_placed_in_a_pool_once_its_loss_is_known(events: list[ev.Event], turns: list[int]) -> None:
    """This holds at any point of the work in progress. A loss does not wait for it, so the order differs from that of whole
    events."""
    router = fleet()
    asked, answered = set[str](), set[str]()
    owned = dict.fromkeys(POOLS, False)

    def tell(event: ev.Event) -> None:
        for effect in router.handle(event, 0.0):
            if isinstance(effect, ev.Placed):
                assert router.owned.owns(effect.decision.pool)
            if isinstance(effect, ev.Placed | ev.Refused):
                answered.add(effect.request_id)
        router.check_invariants()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished_work, "PART", 2)
        for event, count in zip(map(_in_one_pool, events), turns, strict=False):
            if isinstance(event, ev.PoolLost | ev.PoolTaken):
                owned[event.pool] = isinstance(event, ev.PoolTaken)
            if isinstance(event, ev.PlaceRequested):
                asked.add(event.request.request_id)
            tell(event)
            assert not any(router.owned.owns(pool) for pool in POOLS if not owned[pool])
            for _ in range(count):
                tell(ev.GoOn())
        while router.unfinished:
            tell(ev.GoOn())
    assert {pool: router.owned.owns(pool) for pool in POOLS} == owned
    assert {reservation.pool for reservation in router.reservations} <= {pool for pool in POOLS if owned[pool]}
    assert asked <= answered


def _in_one_pool(event: ev.Event) -> ev.Event:
    """Requests with an even number are of pool m, on a; the others of pool n, on c."""

    def home(name: str) -> tuple[str, str]:
        return ("m", "a") if int(name[1:]) % 2 == 0 else ("n", "c")

    def at_home(one: ev.OpenStream) -> ev.OpenStream:
        return stream(one.request.request_id, *home(one.request.request_id), one.phase)

    match event:
        case ev.PoolTaken():
            kept = {reservation.request_id: reservation for reservation in event.reservations}
            return replace(
                event,
                reservations=tuple(
                    reservation(name, event.pool, reserved.gateway_id, home(name)[1])
                    for name, reserved in kept.items()
                    if home(name)[0] == event.pool
                ),
            )
        case ev.GatewayHello():
            return replace(event, open_streams=tuple(map(at_home, event.open_streams)))
        case ev.StreamOpened():
            return replace(event, stream=at_home(event.stream))
        case ev.PlaceRequested():
            return replace(event, request=replace(event.request, model=home(event.request.request_id)[0]))
        case _:
            return event


def _answers(effects: list[ev.Effect]) -> list[tuple[str, str, str]]:
    """Who is told what."""
    return [
        (effect.request_id, effect.gateway_id, "placed" if isinstance(effect, ev.Placed) else effect.code)
        for effect in effects
        if isinstance(effect, ev.Placed | ev.Refused)
    ]


def _sums(router: RouterState) -> dict[str, Any]:
    """Return what is known, without the ids of decisions, which depend on the order of decisions in different pools."""
    found = known(router)
    found["open"] = {
        name: replace(reservation, decision_id="", instance_id="") for name, reservation in found["open"].items()
    }
    found["decided"] = {name: pool for name, (pool, _) in found["decided"].items()}
    by_pool = {pool: [found["counters"][name] for name in names] for pool, names in POOLS.items()}
    found["counters"] = {
        pool: (sum(load.num_requests for load in sums), sum(load.ongoing_tokens for load in sums))
        for pool, sums in by_pool.items()
    }
    found["owner"] = {
        pool: {session: bool(name) for session, name in of.items()} for pool, of in found["owner"].items()
    }
    return found


def taking(count: int = 3 * PART, pool: str = "m") -> ev.PoolTaken:
    return ev.PoolTaken(pool, tuple(reservation(f"r{number}", pool) for number in range(count)))


def test_a_takeover_is_applied_in_parts_and_its_pools_placements_wait_for_all_of_them() -> None:
    router = fleet()
    router.handle(ev.PoolTaken("n"), 0.0)
    router.handle(taking(), 1.0)
    assert (router.unfinished, len(router.reservations)) == (True, PART - 1)
    assert router.handle(ev.PlaceRequested(request("new", tokens=10), "g2"), 1.0) == []
    other = router.handle(ev.PlaceRequested(request("other", tokens=10, model="n"), "g2"), 1.0)
    assert [type(effect) for effect in other if isinstance(effect, ev.Placed | ev.Refused)] == [ev.Placed]
    [placed] = [effect for effect in finish(router, 2.0) if isinstance(effect, ev.Placed)]
    # All of the takeover's are on a.
    assert (placed.request_id, placed.step.instance_id) == ("new", "b")
    assert len(router.reservations) == 3 * PART + 2


def test_an_end_that_comes_before_its_reservation_is_applied_ends_it() -> None:
    router = fleet()
    router.handle(taking(), 1.0)
    last = f"r{3 * PART - 1}"
    assert router.handle(ev.Finished(last, "OK"), 1.0) == []
    finish(router, 1.0)
    assert router.reservations.get(last) is None
    assert len(router.reservations) == 3 * PART - 1


def test_a_hello_in_the_middle_of_a_takeover_and_the_loss_of_its_stream_come_after_it() -> None:
    router = fleet()
    router.handle(taking(), 1.0)
    kept = tuple(stream(f"r{number}") for number in range(2 * PART))
    router.handle(ev.GatewayHello("g1", kept), 2.0)
    router.handle(ev.GatewayLost("g1"), 3.0)
    assert router.handle(ev.PlaceRequested(request("new", tokens=10), "g2"), 3.0) == []
    finish(router, 3.0)
    assert len(router.reservations) == 2 * PART + 1
    assert {reservation.lease_until for reservation in router.reservations if reservation.gateway_id == "g1"} == {53.0}


def test_a_pool_that_is_lost_in_the_middle_is_lost_at_once() -> None:
    router = fleet()
    router.handle(taking(), 1.0)
    router.handle(ev.PlaceRequested(request("new", tokens=10), "g2"), 1.0)
    router.handle(ev.PoolLost("m"), 1.0)
    assert (router.unfinished, len(router.reservations), router.owned.owns("m")) == (True, PART - 1, False)
    [refused] = [effect for effect in finish(router) if isinstance(effect, ev.Placed | ev.Refused)]
    assert isinstance(refused, ev.Refused)
    assert (refused.request_id, refused.not_serving, len(router.reservations)) == ("new", True, 0)
    router.check_invariants()


def test_the_requests_of_a_pool_that_is_lost_are_forgotten_in_parts() -> None:
    router = fleet()
    router.handle(ev.PoolTaken("n"), 0.0)
    router.handle(taking(), 1.0)
    finish(router)
    effects = router.handle(ev.PoolLost("m"), 2.0)
    assert ev.FleetChanged() in effects
    assert (router.unfinished, len(router.reservations), router.owned.owns("m")) == (True, 2 * PART + 1, False)
    # A step report of a lost pool's request comes too late. Requests of another pool do not wait.
    assert router.handle(ev.StepDone(f"r{3 * PART - 1}", 0, ok=False), 2.0) == []
    other = router.handle(ev.PlaceRequested(request("other", tokens=10, model="n"), "g2"), 2.0)
    assert any(isinstance(effect, ev.Placed) for effect in other)
    assert not any(isinstance(effect, ev.Placed) for effect in finish(router))
    assert [reservation.request_id for reservation in router.reservations] == ["other"]
    router.check_invariants()


def test_a_takeover_that_waits_is_void_once_its_pool_is_lost() -> None:
    router = fleet()
    router.handle(taking(), 1.0)
    router.handle(ev.PoolLost("m"), 1.0)
    router.handle(taking(), 1.0)
    router.handle(ev.PlaceRequested(request("new", tokens=10), "g2"), 1.0)
    router.handle(ev.PoolLost("m"), 1.0)
    effects = finish(router)
    assert not any(isinstance(effect, ev.Placed) for effect in effects)
    assert (len(router.reservations), router.owned.owns("m")) == (0, False)
    router.handle(taking(), 2.0)
    finish(router)
    assert (len(router.reservations), router.owned.owns("m")) == (3 * PART, True)
    router.check_invariants()


def test_agents_are_heard_in_the_middle() -> None:
    router = fleet()
    router.handle(taking(), 1.0)
    router.handle(ev.LoadReported(0, "a", Load(1.0, running=7)), 1.0)
    record = router.instances.get("a")
    assert record is not None
    assert record.load is not None
    assert (router.unfinished, record.load.running) == (True, 7)


async def test_the_process_has_other_turns_between_the_parts() -> None:
    router = Router(RouterSettings(router_id="t", startup_wait_s=0.0))
    router.submit(ev.AgentHello(0, info("a", exact_prefix=False), KEY_SCHEME, 1, 0))
    router.submit(ev.GatewayHello("g1", tuple(stream(f"r{number}") for number in range(4 * PART))))
    seen = [len(router.state.reservations)]
    while router.state.unfinished:
        await asyncio.sleep(0)
        seen.append(len(router.state.reservations))
    assert seen[:4] == [PART, 2 * PART, 3 * PART, 4 * PART]
    # A snapshot for the store contains all reservations.
    router.submit(ev.GatewayHello("g1", tuple(stream(f"s{number}") for number in range(4 * PART))))
    written = [event for event in router._snapshot("m") if isinstance(event, ev.Reserved)]
    assert {event.reservation.request_id for event in written} == {f"s{number}" for number in range(4 * PART)}
    router.decisions.close()
