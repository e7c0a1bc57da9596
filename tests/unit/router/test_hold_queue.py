"""Held requests by example, in virtual time: order, bounds, deadlines, and every way in which a hold ends."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, redecide
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import (
    Decision,
    FleetView,
    InstanceState,
    Load,
    PlacementRequest,
    PolicyResult,
)
from pointsman_router.core.policy.base import Policy, hold, serve
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.priority import PRIORITIES, Priority
from pointsman_router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman_router.core.requests.place_or_hold import REPORT_RETRY_S, TRIES
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, set_policy, state


def held(name: str, new: int = 100, *, since: float = 0.0, tenant: str = "", **changes: Any) -> HeldRequest:
    values: dict[str, Any] = {
        "gateway_id": "g",
        "pool": "m",
        "answer_by": 30.0,
        "reason": "saturated",
        "for_room": True,
    }
    return HeldRequest(request(name, tokens=new, tenant=tenant), since=since, new_tokens=new, **{**values, **changes})


def order(queue: HoldQueue) -> str:
    return " ".join(held.request.request_id for held in queue.order("m"))


def test_the_shortest_new_prefill_goes_first_and_waiting_counts() -> None:
    queue = HoldQueue(QueueSettings(ageing_tokens_per_s=100.0))
    queue.add(held("long", 1_000))
    queue.add(held("short", 10, since=5.0))
    queue.add(held("middle", 500))
    assert order(queue) == "middle short long"  # 500 - 500 = 0, 10, 1,000 - 500 = 500
    queue.add(held("late", 10, since=20.0))
    assert order(queue) == "middle short long late"  # -1,500, -1,490, -1,000, 10
    queue.check_invariants()


def test_without_ageing_long_prompts_wait_for_all_short_ones() -> None:
    queue = HoldQueue(QueueSettings(ageing_tokens_per_s=0.0))
    for name, new in (("long", 1_000), ("short", 10)):
        queue.add(held(name, new))
    assert order(queue) == "short long"


def test_tenants_are_served_in_turn_by_what_they_cost() -> None:
    queue = HoldQueue(QueueSettings())
    for number in range(3):
        queue.add(held(f"a{number}", 1 + number, tenant="a"))
    for name, tenant in (("b0", "b"), ("b1", "b"), ("c0", "c")):
        queue.add(held(name, 100, tenant=tenant))
    assert order(queue) == "a0 b0 c0 a1 b1 a2"
    queue.answered("a0", 1)
    assert order(queue) == "b0 c0 a1 b1 a2"
    queue.answered("c0", 100)
    queue.add(held("c1", 1, tenant="c"))
    assert order(queue) == "b0 a1 b1 c1 a2"
    queue.check_invariants()


def test_without_fairness_tenants_do_not_count() -> None:
    queue = HoldQueue(QueueSettings(fair="off"))
    for name, new, tenant in (("a0", 1, "a"), ("a1", 2, "a"), ("b0", 3, "b")):
        queue.add(held(name, new, tenant=tenant))
    assert order(queue) == "a0 a1 b0"


@pytest.mark.parametrize(
    ("requests", "load", "full"),
    [
        (1, None, False),
        (2, None, True),
        (0, Load(10.0, waiting=1, kv_usage=0.9), True),
        (0, Load(10.0, waiting=0, kv_usage=1.0), False),  # full of reusable blocks: nobody waits
        (0, Load(10.0, waiting=9, kv_usage=0.89), False),
        (0, None, False),  # nothing fresh
        (0, Load(10.0, waiting=9, kv_usage=None), False),  # the engine does not report it
        (0, Load(10.0, waiting=None, kv_usage=1.0), False),
        (2, Load(10.0, waiting=None, kv_usage=None), True),
    ],
)
def test_saturation(requests: int, load: Load | None, full: bool) -> None:
    assert SaturationLimits(2, 0.9).saturated(requests, load) is full
    assert not SaturationLimits().saturated(1_000, Load(10.0, waiting=9, kv_usage=1.0))


def busy(
    names: str = "a", *, limit: int = 1, policy: Policy | None = None, **queue: Any
) -> tuple[RouterState, list[ev.Effect]]:
    """A router with an instance for each letter, and one request (`x` + letter) on each of them, all at its limit."""
    router = state(limits=SaturationLimits(limit), queue=QueueSettings(**queue))
    effects: list[ev.Effect] = []
    for number, name in enumerate(names):
        join(router, name, number)
    for name in names:
        effects += ask(router, f"x{name}")
    if policy is not None:
        set_policy(router, policy)
    return router, effects


def ask(router: RouterState, name: str, now: float = 0.0, tokens: int = 10, gateway: str = "g", **changes: Any) -> Any:
    effects = router.handle(ev.PlaceRequested(request(name, tokens=tokens, **changes), gateway), now)
    router.check_invariants()
    return answers(effects)


def answers(effects: list[ev.Effect]) -> list[ev.Placed | ev.Refused]:
    return [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]


def tell(router: RouterState, event: ev.Event, now: float) -> list[tuple[str, str]]:
    """(request id, instance or refusal code) of the answers to an event."""
    given = answers(router.handle(event, now))
    router.check_invariants()
    return [
        (effect.request_id, effect.step.instance_id if isinstance(effect, ev.Placed) else effect.code)
        for effect in given
    ]


def test_without_a_queue_a_saturated_fleet_refuses_at_once_with_a_time_to_come_back() -> None:
    router, first = busy("ab", size=0)
    assert [type(effect) for effect in first] == [ev.Placed, ev.Placed]
    [refused] = ask(router, "r")
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.retry_after_s, refused.gateway_id) == ("RESOURCE_EXHAUSTED", 1.0, "g")
    assert refused.message == "every instance of 'm' is at its limit (no queue)"
    assert len(router.reservations) == 2


def test_saturated_instances_are_passed_over_while_another_is_not() -> None:
    router, _ = busy("ab", limit=2)
    ask(router, "r0")
    [placed] = ask(router, "r1")
    assert router.reservations.counters("a").num_requests == router.reservations.counters("b").num_requests == 2
    assert {candidate.excluded for candidate in placed.decision.view.candidates} == {"", "saturated"}


def test_a_held_request_is_answered_when_another_ends_and_tells_how_long_it_was_held() -> None:
    router, _ = busy("ab")
    assert ask(router, "r", 1.0, keys=tuple(range(3))) == []
    assert (len(router.reservations), len(router.held_requests.queue)) == (2, 1)
    assert tell(router, ev.FirstToken("xa"), 2.0) == []
    effects = router.handle(ev.Finished("xb", "OK"), 3.5)
    [placed] = answers(effects)
    assert isinstance(placed, ev.Placed)
    assert (placed.request_id, placed.step.instance_id, placed.gateway_id) == ("r", "b", "g")
    assert (placed.decision.held_s, placed.decision.key_count, placed.decision.notes) == (2.5, 3, ())
    assert differences(placed.decision, redecide(placed.decision)) == []
    assert router.reservations.get("r") is not None
    assert tell(router, ev.Tick(), 100.0) == []


def test_freed_room_goes_to_the_first_in_order_not_to_the_newest() -> None:
    router, _ = busy()
    ask(router, "long", 0.0, tokens=50_000)
    ask(router, "short", 1.0, tokens=100)
    router.handle(ev.DrainsChanged({"a": "1"}), 1.0)
    router.handle(ev.Finished("xa", "OK"), 1.5)
    assert len(router.held_requests.queue) == 2
    router.views.limits = SaturationLimits(2)
    assert tell(router, ev.DrainsChanged({}), 2.0) == [("short", "a"), ("long", "a")]


def test_a_new_request_does_not_overtake_those_that_wait_for_room() -> None:
    router, _ = busy(ageing_tokens_per_s=1_000.0)
    ask(router, "old", 0.0, tokens=5_000)
    # The limit is raised without an event that would have told the queue.
    router.views.limits = SaturationLimits(2)
    given = ask(router, "new", 10.0, tokens=100)
    assert [effect.request_id for effect in given] == ["old"]
    assert router.held_requests.queue.get("new") is not None


def test_a_report_that_the_cache_has_room_answers_the_held() -> None:
    router = state(limits=SaturationLimits(0, 0.9))
    join(router, "a", 1)
    router.handle(ev.LoadReported(1, "a", Load(0.0, waiting=3, kv_usage=0.95)), 0.0)
    assert ask(router, "r") == []
    assert tell(router, ev.LoadReported(1, "a", Load(1.0, waiting=0, kv_usage=0.95)), 1.0) == [("r", "a")]
    router.handle(ev.LoadReported(1, "a", Load(2.0, waiting=3, kv_usage=0.95)), 2.0)
    assert ask(router, "r2", 3.0) == []
    assert tell(router, ev.Tick(), 7.1) == [("r2", "a")]  # a report of 5.1 s ago says nothing


def test_what_is_held_too_long_is_refused_within_the_gateways_deadline() -> None:
    router, _ = busy(timeout_s=20.0)
    ask(router, "patient", 0.0)
    ask(router, "hurried", 0.0, deadline_s=5.0)
    ask(router, "aged", 0.0, age_s=18.0)
    assert tell(router, ev.Tick(), 1.9) == []
    assert tell(router, ev.Tick(), 2.0) == [("aged", "RESOURCE_EXHAUSTED")]
    assert tell(router, ev.Tick(), 4.0) == [("hurried", "RESOURCE_EXHAUSTED")]
    assert tell(router, ev.Tick(), 20.0) == [("patient", "RESOURCE_EXHAUSTED")]
    assert len(router.reservations) == 1


def test_a_hold_ends_with_its_request_and_with_its_gateways_stream() -> None:
    router, _ = busy()
    for name, gateway in (("r0", "g"), ("r1", "g"), ("r2", "h"), ("r3", "i")):
        ask(router, name, gateway=gateway)
    assert tell(router, ev.Finished("r0", "CANCELLED"), 1.0) == []
    router.handle(ev.GatewayLost("h"), 1.0)
    router.handle(ev.GatewayHello("i"), 1.0)
    assert [held.request.request_id for held in router.held_requests.queue] == ["r1"]
    assert ask(router, "r2", 5.0, gateway="h", age_s=5.0) == []
    waiting = router.held_requests.queue.get("r2")
    assert waiting is not None
    assert waiting.since == 0.0


def test_asked_again_while_held_the_gateway_that_asks_gets_the_one_answer() -> None:
    router, _ = busy()
    assert ask(router, "r", gateway="") == []
    assert ask(router, "r", gateway="h") == []
    [refused] = ask(router, "r", gateway="g")
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.gateway_id) == ("ALREADY_EXISTS", "g")
    [placed] = answers(router.handle(ev.Finished("xa", "OK"), 1.0))
    assert placed.gateway_id == "h"


def test_a_placement_lost_on_the_way_is_made_again() -> None:
    router, _ = busy()
    ask(router, "r", gateway="g")
    tell(router, ev.Finished("xa", "OK"), 1.0)
    router.handle(ev.GatewayLost("g"), 1.0)
    router.handle(ev.GatewayHello("g"), 2.0)
    assert len(router.reservations) == 0
    [placed] = ask(router, "r", 2.0, age_s=2.0)
    assert isinstance(placed, ev.Placed)
    assert router.reservations.get("r") is not None


def test_held_requests_wait_for_an_instance_to_come_back_or_are_told_that_none_is_there() -> None:
    router, _ = busy(timeout_s=10.0)
    ask(router, "r0")
    ask(router, "r1", age_s=5.0)
    router.handle(ev.AgentGoodbye(0, "a"), 1.0)
    assert tell(router, ev.Tick(), 5.0) == [("r1", "UNAVAILABLE")]
    join(router, "b", 7, now=6.0)
    assert router.reservations.get("r0") is not None
    router.check_invariants()


def test_pools_wait_apart() -> None:
    router, _ = busy()
    join(router, "n", 9, model="n", served_names=())
    ask(router, "xn", model="n")
    ask(router, "rm")
    ask(router, "rn", model="n")
    assert tell(router, ev.Finished("xn", "OK"), 1.0) == [("rn", "n")]
    assert router.held_requests.queue.pools() == ["m"]


@given(adapters=st.integers(1, 80), order=st.sampled_from(["base first", "base last"]), room=st.booleans())
def test_requests_wait_only_behind_those_that_could_go_where_they_would(adapters: int, order: str, room: bool) -> None:
    """Three instances, of which one has the adapter; many wait for that one."""
    router = state(limits=SaturationLimits(1), queue=QueueSettings(size=100))
    for number, name in enumerate("abc"):
        join(router, name, number, lora_names=("lora",) if name == "a" else ())
    for name in ("xa", *(() if room else ("xb", "xc"))):
        ask(router, name)
    where = {reservation.instance_id: reservation.request_id for reservation in router.reservations}
    base_first = order == "base first"
    if base_first:
        ask(router, "base", 1.0)
    for number in range(adapters):
        assert ask(router, f"lora{number}", 1.0 + number / 100, model="lora", tokens=100) == []
    given_ = [] if base_first else ask(router, "base", 2.0, tokens=50_000)
    if room:
        assert "base" in [effect.request_id for effect in given_] or base_first
        assert router.held_requests.queue.get("base") is None
        return
    freed = "b" if "b" in where else "c"
    assert tell(router, ev.Finished(where[freed], "OK"), 3.0) == [("base", freed)]
    assert [answer for answer, _ in tell(router, ev.Finished(where["a"], "OK"), 4.0)] == ["lora0"]


@dataclass(frozen=True)
class Wants(Policy):
    """Waits for the instance that has the prompt until nothing is open there."""

    name: ClassVar[str] = "wants"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        best = max(view.eligible(), key=lambda one: one.cached_tokens)
        return hold("busy", waits_for=best.instance_id) if best.num_requests else serve(best, "idle")


# A batch request, which would be owed its turn if the ten standard ones before it could be placed: but they wait elsewhere.
OWED_ELSEWHERE = [(0, Priority.BATCH), *[(1, Priority.STANDARD)] * 10, (0, Priority.STANDARD)]


@given(
    waiting=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(PRIORITIES)), min_size=1, max_size=200),
    ticks=st.integers(0, 2),
    which=st.integers(0, 199),
)
@example(waiting=OWED_ELSEWHERE, ticks=0, which=0)
@example(waiting=OWED_ELSEWHERE, ticks=2, which=0)
@settings(max_examples=40)
def test_requests_wait_only_behind_those_that_wait_for_the_same_instance(
    waiting: list[tuple[int, Priority]], ticks: int, which: int
) -> None:
    """A policy holds each request for one of eight instances. When one becomes free, the first request of the highest class that
    waits for it is placed there at once: nothing was served meanwhile of which a lower class would be owed a share."""
    router = state(queue=QueueSettings(size=len(waiting)))
    set_policy(router, Wants())
    prompts = [tuple(range(100 * number, 100 * number + 20)) for number in range(8)]
    for number, keys in enumerate(prompts):
        join(router, f"i{number}", number, list(keys))
        [placed] = ask(router, f"x{number}", keys=keys, tokens=320)
        assert placed.step.instance_id == f"i{number}"
    for place, (number, priority) in enumerate(waiting):
        name = f"r{place:03}-{number}"
        assert ask(router, name, 1.0 + place / 1000, keys=prompts[number], tokens=320, priority=priority) == []
    for tick in range(ticks):
        assert tell(router, ev.Tick(), 2.0 + tick / 2) == []
    freed, _ = waiting[which % len(waiting)]
    here = [(-priority.level, place) for place, (number, priority) in enumerate(waiting) if number == freed]
    _, first = min(here)
    assert tell(router, ev.Finished(f"x{freed}", "OK"), 4.0) == [(f"r{first:03}-{freed}", f"i{freed}")]


@given(
    policy_holds=st.booleans(),
    reports=st.lists(st.tuples(st.floats(0, 0.02), st.integers(0, 63), st.integers(0, 5)), min_size=50, max_size=400),
)
@settings(max_examples=20)
def test_load_reports_that_free_nothing_cost_few_decisions(
    policy_holds: bool, reports: list[tuple[float, int, int]]
) -> None:
    """Requests are held while one of 64 engines reports every 0 to 20 ms."""
    router, _ = busy(limit=0 if policy_holds else 1, policy=Picky() if policy_holds else None, names="a")
    decider: Any = router.held_requests._decider
    decisions, decide = 0, decider.decide

    def counted(*given: Any) -> Any:
        nonlocal decisions
        decisions += 1
        return decide(*given)

    decider.decide = counted
    for number in range(1, 64):
        join(router, f"i{number}", number, now=0.0)
        ask(router, f"x{number}", tokens=10)
    for number in range(12):
        assert ask(router, f"r{number}", 0.0, tokens=5_000) == []
    decisions, now = 0, 0.0
    for seconds, who, running in reports:
        now += seconds
        router.handle(ev.LoadReported(who, f"i{who}" if who else "a", Load(now, running=running)), now)
    assert decisions <= (TRIES * (now / REPORT_RETRY_S + 1) if policy_holds else 0)


def test_a_held_request_whose_name_goes_to_another_pool_is_to_be_asked_for_there() -> None:
    """Another router may own that one."""
    router = state(owns_all=False, limits=SaturationLimits(1))
    router.handle(ev.PoolTaken("m"), 0.0)
    join(router, "b", 1, served_names=("x",))
    ask(router, "first", 0.0)
    assert ask(router, "waits", 1.0, model="x") == []
    join(router, "a", 2, model="a-first", served_names=("x",))
    [refused] = answers(router.handle(ev.Finished("first", "OK"), 2.0)) or answers(router.handle(ev.Tick(), 2.0))
    assert isinstance(refused, ev.Refused)
    assert (refused.request_id, refused.not_serving, refused.gateway_id) == ("waits", True, "g")
    router.check_invariants()
    assert not len(router.held_requests.queue)


@dataclass(frozen=True)
class Picky(Policy):
    """Holds heavy prompts while every instance is busy."""

    name: ClassVar[str] = "picky"
    at_most_s: float = 0.0

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        idle = [candidate for candidate in view.eligible() if not candidate.num_requests]
        if request.input_tokens > 1_000 and not idle:
            return hold("all_busy", self.at_most_s)
        return serve((idle or view.eligible())[0], "idle" if idle else "light")


def test_a_policy_may_hold_a_request_and_light_ones_pass_it() -> None:
    router, _ = busy(limit=0, policy=Picky())
    assert ask(router, "heavy", 0.0, tokens=5_000) == []
    assert [effect.request_id for effect in ask(router, "light", 1.0)] == ["light"]
    assert tell(router, ev.Finished("light", "OK"), 2.0) == []
    [placed] = answers(router.handle(ev.Finished("xa", "OK"), 3.0))
    assert isinstance(placed, ev.Placed)
    assert (placed.request_id, placed.decision.result.reason, placed.decision.held_s) == ("heavy", "idle", 3.0)


@pytest.mark.parametrize(("at_most_s", "timeout_s", "ends"), [(4.0, 30.0, 4.0), (0.0, 6.0, 6.0), (9.0, 6.0, 6.0)])
def test_what_a_policy_holds_to_the_end_is_placed_by_the_default_policy(
    at_most_s: float, timeout_s: float, ends: float
) -> None:
    router, _ = busy(limit=0, policy=Picky(at_most_s), timeout_s=timeout_s)
    ask(router, "heavy", 0.0, tokens=5_000)
    assert tell(router, ev.Tick(), ends - 0.1) == []
    [placed] = answers(router.handle(ev.Tick(), ends))
    assert isinstance(placed, ev.Placed)
    decision = placed.decision
    assert (decision.policy.name, decision.notes, decision.held_s) == ("unified", ("hold_expired",), ends)
    assert differences(decision, redecide(decision)) == []


def test_or_refused_as_the_setting_says() -> None:
    router, _ = busy(limit=0, policy=Picky(4.0), expiry="refuse")
    ask(router, "heavy", 0.0, tokens=5_000)
    assert tell(router, ev.Tick(), 4.0) == [("heavy", "RESOURCE_EXHAUSTED")]


def test_without_room_in_the_queue_the_default_policy_places_what_a_policy_would_hold() -> None:
    router, _ = busy(limit=0, policy=Picky(), size=0)
    [placed] = ask(router, "heavy", 0.0, tokens=5_000)
    assert isinstance(placed, ev.Placed)
    assert (placed.decision.policy.name, placed.decision.notes) == ("unified", ("queue_full",))


def test_explain_and_what_if_tell_of_holds_and_change_nothing() -> None:
    router, [first] = busy(limit=0, policy=Picky())
    dry = router.explain(request("x", tokens=5_000), 0.0)
    assert isinstance(dry, Decision)
    assert (dry.mode, dry.instance_id, dry.result.reason) == ("HELD", "", "all_busy")
    assert isinstance(first, ev.Placed)
    view = first.decision.view
    seen = replace(view, candidates=tuple(replace(candidate, num_requests=1) for candidate in view.candidates))
    recorded = replace(first.decision, view=seen, request=replace(first.decision.request, input_tokens=2_000))
    assert router.what_if(recorded, Picky()).mode == "HELD"
    assert len(router.held_requests.queue) == 0
    full, _ = busy()
    refused = full.explain(request("x", tokens=1), 0.0)
    assert isinstance(refused, ev.Refused)
    assert refused.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(("policy", "reason"), [("unified", "least_load_x_work"), ("sticky", "least_requests")])
def test_a_session_leaves_a_draining_owner_and_its_decision_says_so(policy: str, reason: str) -> None:
    router, _ = busy("ab", limit=0)
    set_policy(router, make_policy(policy))
    keys = tuple(range(4))
    join(router, "c", 3, keys=list(keys))
    [first] = ask(router, "r1", tokens=64, keys=keys, session_id="s")
    assert (first.step.instance_id, first.decision.notes) == ("c", ())
    router.handle(ev.DrainsChanged({"c": "1"}), 1.0)
    record = router.instances.get("c")
    assert record is not None
    assert (record.state, router.reservations.counters("c").num_requests) == (InstanceState.DRAINING, 1)
    [moved] = ask(router, "r2", 2.0, tokens=64, keys=keys, session_id="s")
    assert moved.step.instance_id != "c"
    assert (moved.decision.result.reason, moved.decision.notes) == (reason, ("owner_draining",))
    assert differences(moved.decision, redecide(moved.decision)) == []
    [stays] = ask(router, "r3", 3.0, tokens=64, keys=keys, session_id="s")
    assert stays.decision.notes == ()


def test_a_session_says_which_way_its_owner_was_lost() -> None:
    router, _ = busy("ab", limit=2)
    ask(router, "r1", session_id="s")
    owner = router.affinity.owner("m", "/s", 0.0)
    [moved] = ask(router, "r2", session_id="s")
    assert (moved.step.instance_id != owner, moved.decision.notes) == (True, ("owner_saturated",))
    owner = router.affinity.owner("m", "/s", 0.0)
    router.handle(ev.AgentGoodbye("ab".index(owner), owner), 1.0)
    router.handle(ev.Finished("r1", "OK"), 1.0)
    [gone] = ask(router, "r3", 1.0, session_id="s")
    assert gone.decision.notes == ("owner_gone",)


def test_draining_leaves_held_requests_where_they_are() -> None:
    router, _ = busy("ab")
    ask(router, "r")
    assert tell(router, ev.DrainsChanged({"a": "1"}), 1.0) == []
    assert tell(router, ev.Finished("xa", "OK"), 2.0) == []
    assert tell(router, ev.Finished("xb", "OK"), 3.0) == [("r", "b")]
