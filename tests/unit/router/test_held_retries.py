"""When held requests are tried again: soon after something frees, and at a bounded rate however much happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import FleetView, Load, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, hold, serve
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.place_or_hold import (
    ENDS_AT_ONCE,
    MOST_DECISIONS,
    REPORT_RETRY_S,
    RETRY_S,
    TICK_RETRY_S,
    TRIALS_AT_ONCE,
    TRIES,
    TRIES_ON_TICK,
)
from pointsman_router.io.router import Router
from pointsman_router.io.settings import RouterSettings
from tests.support.router_values import info, join, request, set_policy, state

TICK_S = 0.5
INSTANCES = 6


@dataclass(frozen=True)
class Reluctant(Policy):
    """Holds every prompt of an odd number of tokens."""

    name: ClassVar[str] = "reluctant"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = min(view.eligible(), key=lambda one: one.num_requests)
        return hold("odd") if request.input_tokens % 2 else serve(first, "first")


class Driven:
    """A router with its timers, in virtual time. `decisions` counts decisions on held requests, `placed` those that place one."""

    def __init__(self, limit: int, queue: int = 30) -> None:
        self.router = state(limits=SaturationLimits(limit), queue=QueueSettings(size=queue, timeout_s=1e6))
        self.now, self.tick_at = 0.0, TICK_S
        self.decisions = self.placed = self.number = 0
        self.free_since: float | None = None
        self.longest_s = 0.0
        for number in range(INSTANCES):
            join(self.router, f"i{number}", number)
        queue_ = self.router.held_requests.queue
        held: Any = self.router.held_requests
        decide, commit = held._decider.decide, held._plans.commit

        def counted(asked: PlacementRequest, *given_: Any) -> Any:
            self.decisions += queue_.get(asked.request_id) is not None
            return decide(asked, *given_)

        def placed(decision: Any, *given_: Any) -> Any:
            self.placed += decision.held_s > 0
            return commit(decision, *given_)

        held._decider.decide = counted
        held._plans.commit = placed

    def tell(self, event: ev.Event) -> None:
        self.router.handle(event, self.now)
        waits = any(held.for_room for held in self.router.held_requests.queue)
        if not waits or not self.router.views.has_room("m", "m", self.now):
            self.free_since = None
        elif self.free_since is None:
            self.free_since = self.now

    def until(self, moment: float) -> None:
        """Let timers fire until `moment`."""
        while (due := min(self.router.retry_at or moment, self.tick_at)) <= moment and due > self.now:
            self.now = due
            if self.free_since is not None:
                self.longest_s = max(self.longest_s, self.now - self.free_since)
            self.tell(ev.RetryDue() if due != self.tick_at else ev.Tick())
            self.tick_at += TICK_S * (due == self.tick_at)
        self.now = moment
        if self.free_since is not None:
            self.longest_s = max(self.longest_s, self.now - self.free_since)

    def open(self) -> list[str]:
        return sorted(reservation.request_id for reservation in self.router.reservations)

    def act(self, kind: str, which: int) -> None:
        open_ = self.open()
        match kind:
            case "place":
                self.number += 1
                self.tell(ev.PlaceRequested(request(f"r{self.number:05}", tokens=100 + which), "g"))
            case "finish" if open_:
                self.tell(ev.Finished(open_[which % len(open_)], "OK"))
            case "first_token" if open_:
                self.tell(ev.FirstToken(open_[which % len(open_)]))
            case "load":
                who = which % INSTANCES
                self.tell(ev.LoadReported(who, f"i{who}", Load(self.now, running=1)))
            case "cordon":
                cordoned = [f"i{number}" for number in range(INSTANCES) if which >> number & 1]
                self.tell(ev.OrdersChanged({instance_id: InstanceOrder(cordoned=True) for instance_id in cordoned}))
            case "hello":
                self.tell(ev.AgentHello(which % INSTANCES, info(f"i{which % INSTANCES}"), KEY_SCHEME, 1, 0))


KINDS = st.sampled_from(["place", "place", "finish", "finish", "finish", "first_token", "load", "cordon", "hello"])
EVENTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.0001, 0.001, 0.003]), KINDS, st.integers(0, 63)), min_size=100, max_size=400
)


@given(reluctant=st.booleans(), events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_held_requests_cost_few_decisions_however_much_happens_and_wait_beside_free_room_for_moments_only(
    reluctant: bool, events: list[tuple[float, str, int]]
) -> None:
    driven = Driven(limit=0 if reluctant else 1)
    if reluctant:
        set_policy(driven.router, Reluctant())
    for number in range(INSTANCES + 20):
        driven.act("place", 2 * number + 1)
    for pause, kind, which in events:
        driven.until(driven.now + pause)
        driven.act(kind, which)
    driven.until(driven.now + RETRY_S)
    driven.router.check_invariants()
    trials = driven.now / RETRY_S + TRIALS_AT_ONCE + 1
    assert driven.decisions - driven.placed <= TRIES * trials + TRIES_ON_TICK * (driven.now / TICK_RETRY_S + 1)
    assert driven.decisions <= MOST_DECISIONS * trials + TRIES_ON_TICK * (driven.now / TICK_RETRY_S + 1)
    assert driven.longest_s <= RETRY_S + 1e-9


def test_what_ends_together_is_answered_by_one_trial_more() -> None:
    driven = Driven(limit=1, queue=30)
    for number in range(INSTANCES + 10):
        driven.act("place", number)
    driven.until(0.1)
    trials = 0
    queue: Any = driven.router.held_requests.queue
    order = queue.order

    def counted(*given_: Any) -> Any:
        nonlocal trials
        trials += 1
        return order(*given_)

    queue.order = counted
    for request_id in driven.open():
        driven.tell(ev.Finished(request_id, "OK"))
    assert (trials, len(driven.router.held_requests.queue)) == (TRIALS_AT_ONCE, 10 - TRIALS_AT_ONCE)
    driven.until(0.1 + RETRY_S)
    assert (trials, len(driven.router.held_requests.queue)) == (TRIALS_AT_ONCE + 1, 10 - INSTANCES)


def test_more_than_one_trial_may_place_is_placed_by_the_next_ones() -> None:
    driven = Driven(limit=1, queue=200)
    for number in range(INSTANCES + 100):
        driven.act("place", number)
    driven.until(0.1)
    driven.router.views.limits = SaturationLimits(100)
    driven.act("finish", 0)
    for left in (100 - MOST_DECISIONS, 100 - 2 * MOST_DECISIONS, 100 - 3 * MOST_DECISIONS, 0):
        assert len(driven.router.held_requests.queue) == left
        driven.until(driven.now + RETRY_S)
    assert driven.router.retry_at is None


@dataclass(frozen=True)
class Divided(Policy):
    """Holds every prompt, for an instance given by its number of tokens. The hold names the instance if the number is even."""

    name: ClassVar[str] = "divided"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        return hold("divided", waits_for="" if request.input_tokens % 2 else f"i{request.input_tokens % INSTANCES}")


@example(tokens=[*[0] * 90, 4], pauses=[0.004] * 5)
@example(tokens=[*[1] * 90, 4], pauses=[0.004] * 5)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=100),
    pauses=st.lists(st.sampled_from([0.0, 0.004, 0.021]), min_size=5, max_size=60),
)
@settings(max_examples=30, deadline=None)
def test_what_one_trial_leaves_the_next_ones_go_on_with_though_more_frees_meanwhile(
    tokens: list[int], pauses: list[float]
) -> None:
    """All lines are tried within RETRY_S for each line, in several trials, although one instance reports all the time."""
    driven = Driven(limit=0, queue=200)
    set_policy(driven.router, Divided())
    for which in tokens:
        driven.act("place", which)
    tried: set[tuple[str, str]] = set()
    decider: Any = driven.router.held_requests._decider
    queue, decide = driven.router.held_requests.queue, decider.decide

    def noted(asked: PlacementRequest, *given_: Any) -> Any:
        if (held := queue.get(asked.request_id)) is not None:
            tried.add(held.queue_key)
        return decide(asked, *given_)

    decider.decide = noted
    driven.until(TICK_S)
    for pause in pauses:
        driven.until(driven.now + pause)
        driven.tell(ev.LoadReported(0, "i0", Load(driven.now, running=1)))
    driven.until(driven.now + RETRY_S * len(queue.queue_keys("m")))
    assert tried == queue.queue_keys("m")


@given(alike=st.booleans(), adapters=st.integers(1, 80), freed=st.integers(0, 79))
@settings(max_examples=20, deadline=None)
def test_requests_for_many_adapters_cost_no_look_at_all_instances_for_each_of_them(
    alike: bool, adapters: int, freed: int
) -> None:
    """Adapters on the same instances are checked once. Of different ones a trial checks at most MOST_DECISIONS; the next trials
    continue."""
    freed %= adapters
    router = state(limits=SaturationLimits(1), queue=QueueSettings(size=adapters, timeout_s=1e6))
    names = [f"lora{number}" for number in range(adapters)]
    for number, name in enumerate(names):
        join(router, f"i{number}", number, lora_names=tuple(names) if alike else (name,))
    for name in names:
        router.handle(ev.PlaceRequested(request(f"x-{name}", tokens=10, model=name), "g"), 0.0)
    for name in names:
        assert not router.handle(ev.PlaceRequested(request(f"r-{name}", tokens=10, model=name), "g"), 0.0)
    views: Any = router.held_requests._views
    looks, has_room = 0, views.has_room

    def counted(*given_: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(has_room(*given_))

    views.has_room = counted
    router.handle(ev.LoadReported(0, "i0", Load(1.0)), 1.0)
    assert looks == (1 if alike else min(adapters, MOST_DECISIONS))
    now, answered = 2.0, router.handle(ev.Finished(f"x-lora{freed}", "OK"), 2.0)
    while router.retry_at is not None:
        looks, now = 0, max(router.retry_at, now)
        answered += router.handle(ev.RetryDue(), now)
        assert looks <= MOST_DECISIONS + 1
    assert sum(isinstance(effect, ev.Placed) for effect in answered) == 1
    assert now <= 2.0 + RETRY_S * (adapters // MOST_DECISIONS + 2)
    router.check_invariants()


@example(for_room=False, needed=[None], held=199)
@example(for_room=True, needed=[31.0], held=199)
@given(
    for_room=st.booleans(),
    needed=st.lists(st.sampled_from([None, 25.0, 31.0]), min_size=1, max_size=3),
    held=st.integers(1, 2 * ENDS_AT_ONCE + 100),
)
@settings(max_examples=15, deadline=None)
def test_those_that_end_together_are_answered_in_turns(for_room: bool, needed: list[float | None], held: int) -> None:
    """No decision is made for them if all instances are full and no deadline is near; otherwise few decisions in one turn."""
    held = held if for_room and needed == [None] else held % 200 + 1
    router = state(limits=SaturationLimits(1 if for_room else 0), queue=QueueSettings(size=held, timeout_s=30.0))
    join(router, "a", 0)
    router.handle(ev.PlaceRequested(request("x0", tokens=10), "g"), 0.0)
    if not for_room:
        set_policy(router, Reluctant())
    for number in range(held):
        asked = request(f"r{number}", tokens=11, ttft_deadline_s=needed[number % len(needed)])
        assert not router.handle(ev.PlaceRequested(asked, "g"), 1.0)
    decider: Any = router.held_requests._decider
    decisions, decide = 0, decider.decide

    def counted(*given_: Any) -> Any:
        nonlocal decisions
        decisions += 1
        return decide(*given_)

    decider.decide = counted
    waiting, now, answered = len(router.held_requests.queue), 40.0, Counter[str]()
    event: ev.Event = ev.Tick()
    for _ in range(waiting + 2):
        decisions = 0
        given_ = [effect for effect in router.handle(event, now) if isinstance(effect, ev.Placed | ev.Refused)]
        answered.update(effect.request_id for effect in given_)
        assert len(given_) <= ENDS_AT_ONCE + MOST_DECISIONS + TRIES_ON_TICK
        allowed = TRIES + (TRIES_ON_TICK if isinstance(event, ev.Tick) else TRIES)
        assert decisions <= (0 if for_room and needed == [None] else allowed)
        if router.retry_at is None:
            break
        event, now = ev.RetryDue(), router.retry_at
    assert set(answered.values()) <= {1}
    assert (answered.total(), len(router.held_requests.queue)) == (waiting, 0)
    router.check_invariants()


def test_a_report_that_comes_soon_after_another_is_not_forgotten() -> None:
    driven = Driven(limit=0)
    driven.router.views.limits = SaturationLimits(0, 0.9)
    for who in range(INSTANCES):
        driven.tell(ev.LoadReported(who, f"i{who}", Load(0.0, waiting=1, kv_usage=1.0)))
    driven.act("place", 0)
    driven.until(0.1)
    driven.tell(ev.LoadReported(0, "i0", Load(0.1, waiting=1, kv_usage=1.0)))
    driven.until(0.101)
    driven.tell(ev.LoadReported(1, "i1", Load(0.101, waiting=0, kv_usage=0.5)))
    assert len(driven.router.held_requests.queue) == 1
    driven.until(0.1 + REPORT_RETRY_S)
    assert len(driven.router.held_requests.queue) == 0


def test_a_trial_that_is_due_when_nothing_waits_any_more_is_due_once() -> None:
    driven = Driven(limit=1)
    for number in range(INSTANCES + 1):
        driven.act("place", number)
    driven.until(0.1)
    for _ in range(TRIALS_AT_ONCE):
        driven.tell(ev.OrdersChanged({"i0": InstanceOrder(cordoned=True)}))
        driven.tell(ev.OrdersChanged({}))
    [held] = driven.router.held_requests.queue
    driven.tell(ev.Finished(held.request.request_id, "CANCELLED"))
    assert driven.router.retry_at is not None
    driven.until(0.1 + RETRY_S)
    assert driven.router.retry_at is None


async def test_the_process_tries_again_by_a_timer_and_not_with_the_next_tick() -> None:
    """Its ticks are never begun here."""
    router: Any = Router(RouterSettings(router_id="t", max_requests_per_instance=1, startup_wait_s=0.0))
    tried = asyncio.Event()
    submit: Callable[[ev.Event], list[ev.Effect]] = router.submit

    def submitted(event: ev.Event) -> list[ev.Effect]:
        effects = submit(event)
        if isinstance(event, ev.RetryDue):
            tried.set()
        return effects

    router.submit = submitted
    for number in range(TRIALS_AT_ONCE + 1):
        name = f"i{number}"
        router.submit(ev.AgentHello(number, info(name, exact_prefix=False), KEY_SCHEME, 1, 0))
    names = [f"r{number}" for number in range(TRIALS_AT_ONCE + 1)]
    for name in (*names, *(f"held-{name}" for name in names)):
        router.submit(ev.PlaceRequested(request(name, tokens=10), "g"))
    assert len(router.state.held_requests.queue) == len(names)
    for name in names:
        router.submit(ev.Finished(name, "OK"))
    async with asyncio.timeout(30):
        # Nothing is held already if the machine stood still between two ends: the second one may try again itself then.
        while router.state.held_requests.queue:
            tried.clear()
            await tried.wait()
    router.decisions.close()
