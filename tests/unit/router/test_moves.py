"""`drain --move`: requests leave an instance as fast as others take them, and only if they can go on there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import FleetView, Phase, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, hold
from pointsman_router.core.requests.moves import LEAVES_WITHIN_S, LOOK_EVERY_S, MOST_DECISIONS, TELL_AGAIN_S
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import finish, hello, join, place, request, set_policy, state

DRAIN = ev.DrainsChanged({"a": "1"}, frozenset("a"))


def fleet(others: str = "bc", *, streams: int = 3, waits: int = 0, **settings: Any) -> RouterState:
    """A router with an instance `a` that gives so many answers: r0, r1, ... with longer and longer prompts, and has not begun one
    to a prompt of `waits` tokens."""
    router = state(**settings)
    join(router, "a", 1)
    for number in range(streams):
        assert isinstance(place(router, request(f"r{number}", tokens=100 + number, movable=True)), ev.Placed)
        router.handle(ev.FirstToken(f"r{number}"), 0.0)
    if waits:
        place(router, request("waits", tokens=waits, movable=True))
    for number, name in enumerate(others, 2):
        join(router, name, number)
    return router


def moved(effects: list[ev.Effect]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, ev.Move)]


def leave(router: RouterState, request_id: str, now: float) -> list[str]:
    """Do what a gateway does that moves a request: end the attempt and place the rest. Return which ones are to leave then."""
    effects = router.handle(ev.GatewayReported("g", ev.Finished(request_id, "CANCELLED")), now)
    answer = place(router, request(f"{request_id}.1", tokens=200, movable=True, resumed=True), now)
    assert isinstance(answer, ev.Placed)
    assert answer.step.instance_id != "a"
    return moved(effects)


def test_one_request_leaves_for_each_instance_that_has_no_prefill() -> None:
    router = fleet("bc", streams=4)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0", "r1"], "the cheapest first"
    assert leave(router, "r0", 1.1) == []
    assert leave(router, "r1", 1.2) == [], "both others compute now"
    assert moved(router.handle(ev.GatewayReported("g", ev.FirstToken("r0.1")), 2.0)) == ["r2"]
    assert moved(router.handle(ev.Tick(), 2.5)) == [], "one is under way"
    assert leave(router, "r2", 2.6) == []
    assert moved(router.handle(ev.GatewayReported("g", ev.FirstToken("r1.1")), 3.0)) == ["r3"]
    assert leave(router, "r3", 3.1) == []
    assert router.reservations.counters("a").num_requests == 0
    router.check_invariants()


def test_one_leaves_at_a_time_if_the_others_always_have_something_to_compute() -> None:
    router = fleet("b")
    place(router, request("other", tokens=500, exclude=("a",)), 1.0)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    assert leave(router, "r0", 1.1) == []
    assert moved(router.handle(ev.Tick(), 5.0)) == [], "it is still being computed"
    assert moved(router.handle(ev.GatewayReported("g", ev.FirstToken("r0.1")), 6.0)) == ["r1"]


def test_what_cannot_go_on_elsewhere_stays() -> None:
    router = fleet(streams=1)
    place(router, request("whole", tokens=10, exclude=("b", "c")))
    place(router, request("alone", tokens=10, movable=True, exclude=("b", "c")), gateway="")
    place(router, request("failed there", tokens=10, movable=True, exclude=("b", "c")))
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]


def test_nothing_leaves_while_no_other_could_take_it_at_once() -> None:
    router = fleet("b", streams=2, limits=SaturationLimits(max_requests=2))
    for number in range(2):
        place(router, request(f"other {number}", tokens=500, exclude=("a",)))
        router.handle(ev.FirstToken(f"other {number}"), 0.5)
    assert moved(router.handle(DRAIN, 1.0)) == []
    router.handle(ev.GatewayReported("g", ev.Finished("other 0", "OK")), 2.0)
    assert moved(router.handle(ev.Tick(), 2.1)) == ["r0"]
    alone = fleet("", streams=1)
    assert moved(alone.handle(DRAIN, 1.0)) == []


def test_a_request_that_stays_though_it_was_told_to_leave_makes_room_and_is_told_again() -> None:
    router = fleet("b", streams=2)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    assert moved(router.handle(ev.Tick(), 1.0 + LEAVES_WITHIN_S)) == ["r1"]
    assert moved(router.handle(ev.Tick(), 3.5 + LEAVES_WITHIN_S)) == []
    assert moved(router.handle(ev.Tick(), 1.0 + TELL_AGAIN_S)) == ["r0"]


def test_a_request_that_waits_for_its_first_token_is_the_cheapest() -> None:
    router = fleet(streams=1, waits=9_000)
    assert moved(router.handle(DRAIN, 1.0)) == ["waits", "r0"]


def test_an_order_tells_for_what_its_instance_was_chosen() -> None:
    """Another instance may be able to take a prompt, and unable to go on with an answer."""
    router = fleet("b", streams=0, waits=100)
    [order] = [effect for effect in router.handle(DRAIN, 1.0) if isinstance(effect, ev.Move)]
    assert order == ev.Move("waits", "g", unbegun=True)
    # Its gateway had the first token when it got the order, and ignores it.
    effects = router.handle(ev.GatewayReported("g", ev.FirstToken("waits")), 1.1)
    assert [effect for effect in effects if isinstance(effect, ev.Move)] == [ev.Move("waits", "g")]


@pytest.mark.parametrize(
    "end",
    [
        lambda router: router.handle(ev.DrainsChanged({}), 1.5),
        lambda router: router.handle(ev.DrainsChanged({"a": "1"}), 1.5),
        lambda router: hello(router, "a", 9, 1.5, incarnation="2"),
    ],
    ids=["resumed", "only drained", "restarted"],
)
def test_moves_end_with_the_drain(end: Callable[[RouterState], object]) -> None:
    router = fleet("b", streams=2)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    end(router)
    assert moved(router.handle(ev.Tick(), 9.0)) == []


def test_an_order_that_came_before_its_instance_holds() -> None:
    router = state()
    router.handle(ev.DrainsChanged({"a": "2"}, frozenset("a")), 0.0)
    join(router, "a", 1)
    place(router, request("r", tokens=10, movable=True))
    join(router, "b", 2)
    assert moved(router.handle(ev.Tick(), 1.0)) == []
    join(router, "a", 3, incarnation="2")
    assert moved(router.handle(ev.Tick(), 2.0)) == ["r"]


def test_many_reports_make_few_looks() -> None:
    router = fleet("b", streams=2)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    leave(router, "r0", 1.0)
    assert moved(router.handle(ev.GatewayReported("g", ev.FirstToken("r0.1")), 1.0 + LOOK_EVERY_S / 2)) == []
    assert moved(router.handle(ev.Tick(), 1.0 + LOOK_EVERY_S)) == ["r1"]


def test_gateways_learn_that_an_instance_s_agent_is_gone() -> None:
    router = fleet(streams=2)
    router.handle(ev.Tick(), 9.0)
    router.handle(ev.AgentLost(1, "a"), 10.0)
    assert router.handle(ev.Tick(), 39.0) == []
    moves = [effect for effect in router.handle(ev.Tick(), 40.0) if isinstance(effect, ev.Move)]
    assert moves == [ev.Move("r0", "g", lost=True), ev.Move("r1", "g", lost=True)]
    stopped = fleet(streams=2)
    assert moved(stopped.handle(ev.AgentGoodbye(1, "a"), 10.0)) == [], "its engine may go on"


def test_only_as_many_leave_as_there_are_places() -> None:
    """The decisions of one look do not see each other."""
    router = fleet("bc", streams=4, limits=SaturationLimits(max_requests=4))
    for name, other, count in (("b", "c", 3), ("c", "b", 4)):
        for number in range(count):
            place(router, request(f"{name}{number}", tokens=10, exclude=("a", other)))
            router.handle(ev.FirstToken(f"{name}{number}"), 0.5)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]


def test_a_request_that_the_policy_would_hold_stays() -> None:
    class Reluctant(Policy):
        name = "reluctant"

        def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
            return hold("busy", max_hold_s=30.0)

    router = fleet("b")
    set_policy(router, Reluctant())
    assert moved(router.handle(DRAIN, 1.0)) == []


def test_nothing_leaves_while_others_are_held() -> None:
    router = fleet("b", streams=2, limits=SaturationLimits(max_requests=2))
    place(router, request("b0", tokens=10, exclude=("a",)))
    place(router, request("b1", tokens=10, exclude=("a",)))
    held = router.handle(ev.PlaceRequested(request("held", tokens=10), "g"), 0.5)
    assert held == []
    router.handle(DRAIN, 1.0)
    assert len(router.held_requests.queue) == 1
    assert moved(router.handle(ev.Tick(), 2.0)) == []


def test_a_request_that_left_an_instance_may_come_back_to_it() -> None:
    """A rolling restart of two instances."""
    router = fleet("b", streams=1)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    leave(router, "r0", 1.1)
    router.handle(ev.GatewayReported("g", ev.FirstToken("r0.1")), 1.2)
    join(router, "a", 9, incarnation="2", now=60.0)
    assert moved(router.handle(ev.DrainsChanged({"b": "1"}, frozenset("b")), 61.0)) == ["r0.1"]


def test_requests_that_ran_when_this_router_took_the_pool_leave_too() -> None:
    router = state()
    join(router, "a", 1)
    join(router, "b", 2)
    streams = tuple(
        ev.OpenStream(request(f"r{number}", tokens=100, movable=movable), "a", Phase.DECODE, 0)
        for number, movable in enumerate((True, False))
    )
    router.handle(ev.GatewayHello("g", streams), 0.0)
    finish(router)
    assert moved(router.handle(DRAIN, 1.0)) == ["r0"]
    assert moved(router.handle(ev.Tick(), 9.0)) == []


def test_those_that_do_not_leave_come_last() -> None:
    router = fleet("b", streams=3)
    moves = [moved(router.handle(DRAIN if not at else ev.Tick(), 1.0 + 2.5 * at)) for at in range(9)]
    assert moves[:3] == [["r0"], ["r1"], ["r2"]]
    assert moves[6:9] == [["r0"], ["r1"], ["r2"]]
    assert router._moves._notices.keys() == {"r0", "r1", "r2"}
    router.handle(ev.DrainsChanged({}), 30.0)
    assert router._moves._notices == {}


def test_a_look_at_many_requests_makes_few_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    router = fleet("b", streams=200)
    made: list[str] = []
    decide = router._decider.decide

    def counted(asked: PlacementRequest, now: float) -> object:
        made.append(asked.request_id)
        return decide(replace(asked, exclude=("a", "b")), now)

    monkeypatch.setattr(router._decider, "decide", counted)
    assert moved(router.handle(DRAIN, 1.0)) == []
    assert len(made) == MOST_DECISIONS
    router.handle(ev.Tick(), 2.0)
    assert len(set(made)) == 2 * MOST_DECISIONS
