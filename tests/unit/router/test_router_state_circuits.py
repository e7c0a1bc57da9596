"""Circuits as placements see them: who is passed over, who is tried, who is told."""

from __future__ import annotations

from typing import Any

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import NOT_ANSWERING, LifeSettings
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import Phase
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state

SETTINGS = LifeSettings(failures=2, first_open_s=1.0, max_open_s=4.0)


def fleet(*names: str) -> RouterState:
    state_ = state(life=SETTINGS)
    for number, name in enumerate(names):
        join(state_, name, number + 1)
    return state_


def placed_on(state_: RouterState, name: str, now: float, **changes: Any) -> str:
    answer = place(state_, request(name, tokens=100, **changes), now)
    assert isinstance(answer, ev.Placed), answer
    return answer.step.instance_id


def finish(state_: RouterState, name: str, outcome: str, now: float, status: int = 0) -> list[ev.Effect]:
    effects = state_.handle(ev.Finished(name, outcome, http_status=status), now)
    state_.check_invariants()
    return effects


def break_(state_: RouterState, instance: str, now: float = 0.0, status: int = 0) -> None:
    others = tuple(
        record.info.instance_id for record in state_.instances.records() if record.info.instance_id != instance
    )
    for number in range(SETTINGS.failures):
        assert placed_on(state_, f"{instance}{number}@{now}", now, exclude=others) == instance
        effects = finish(state_, f"{instance}{number}@{now}", "FAILED", now, status)
        assert (ev.FleetChanged() in effects) == (number == SETTINGS.failures - 1), "gateways are told at once"


def announced(state_: RouterState) -> list[str]:
    [pool] = state_.instances.pools()
    return sorted(pool.instances)


def announced_of(state_: RouterState, model: str) -> list[str]:
    return next(sorted(pool.instances) for pool in state_.instances.pools() if pool.model == model)


def test_an_instance_that_fails_gets_nothing_until_one_request_on_trial_is_answered() -> None:
    state_ = fleet("a", "b")
    break_(state_, "a")
    assert announced(state_) == ["b"]
    assert {placed_on(state_, f"r{number}", 0.5) for number in range(4)} == {"b"}
    assert placed_on(state_, "trial", 1.0) == "a", "idle, and its time is over"
    assert {placed_on(state_, f"s{number}", 1.0) for number in range(8)} == {"b"}
    assert ev.FleetChanged() in state_.handle(ev.FirstToken("trial"), 1.1)
    assert announced(state_) == ["a", "b"]
    assert placed_on(state_, "after", 1.2) == "a"


def test_a_failed_trial_opens_it_for_longer_and_a_cancelled_one_lets_the_next_try() -> None:
    state_ = fleet("a", "b")
    break_(state_, "a")
    assert placed_on(state_, "busy", 0.0) == "b", "so that a is the better place whenever it may be taken"
    assert placed_on(state_, "one", 1.0) == "a"
    finish(state_, "one", "CANCELLED", 1.0)
    assert placed_on(state_, "two", 1.0) == "a"
    finish(state_, "two", "FAILED", 1.0)
    assert placed_on(state_, "three", 2.9) == "b"
    assert placed_on(state_, "four", 3.0) == "a"


def test_where_all_fail_they_are_used_all_the_same() -> None:
    state_ = fleet("a", "b")
    break_(state_, "a", status=200)
    break_(state_, "b", status=200)
    assert announced(state_) == ["a", "b"]
    assert {placed_on(state_, f"r{number}", 0.1) for number in range(2)} == {"a", "b"}


def test_a_busy_instance_is_waited_for_rather_than_one_that_fails() -> None:
    state_ = state(life=SETTINGS, limits=SaturationLimits(max_requests=2))
    for number, name in enumerate("ab"):
        join(state_, name, number + 1)
    break_(state_, "a")
    assert [placed_on(state_, name, 0.1) for name in ("r", "s")] == ["b", "b"]
    assert not [
        effect
        for effect in state_.handle(ev.PlaceRequested(request("held", tokens=10), "g"), 0.2)
        if isinstance(effect, ev.Placed | ev.Refused)
    ]
    effects = finish(state_, "r", "OK", 0.3)
    [answer] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (answer.request_id, answer.step.instance_id) == ("held", "b")


def test_a_refused_request_is_an_answer_and_a_new_incarnation_starts_anew() -> None:
    state_ = fleet("a", "b")
    for number in range(5):
        assert placed_on(state_, f"f{number}", 0.0, exclude=("b",)) == "a"
        finish(state_, f"f{number}", "FAILED", 0.0)
        assert placed_on(state_, f"r{number}", 0.0, exclude=("b",)) == "a"
        finish(state_, f"r{number}", "REJECTED", 0.0)
    assert announced(state_) == ["a", "b"]
    break_(state_, "a")
    decision = state_.explain(request("why", tokens=10), 0.0)
    assert not isinstance(decision, ev.Refused)
    assert {candidate.instance_id: candidate.excluded for candidate in decision.view.candidates} == {
        "a": NOT_ANSWERING,
        "b": "",
    }
    join(state_, "a", 9, incarnation="2")
    assert announced(state_) == ["a", "b"]


def refuse(state_: RouterState, name: str, now: float, **changes: object) -> list[ev.Effect]:
    """A request's attempt that its instance answers with a 500."""
    placed_on(state_, name, now, **changes)
    effects = state_.handle(ev.Finished(name, "FAILED", http_status=500, refused=True), now)
    state_.check_invariants()
    return effects


def answer(state_: RouterState, name: str, now: float, *refused_by: str) -> list[ev.Effect]:
    """Place the next attempt on another instance, which sends the first token."""
    placed_on(state_, name, now, exclude=refused_by)
    effects = state_.handle(ev.FirstToken(name, refused_by), now)
    state_.check_invariants()
    return effects


def test_requests_that_every_instance_refuses_exclude_nobody() -> None:
    state_ = fleet("a", "b", "c")
    for number in range(20):
        refuse(state_, f"bad{number}", 0.0)
        placed_on(state_, f"bad{number}.1", 0.0)
        state_.handle(ev.Finished(f"bad{number}.1", "REJECTED", http_status=500, refused=True), 0.0)
        for name in "abc":
            others = tuple(set("abc") - {name})
            assert placed_on(state_, f"good{number}{name}", 0.0, exclude=others) == name
            finish(state_, f"good{number}{name}", "OK", 0.0)
    assert announced(state_) == ["a", "b", "c"]


def test_instances_that_are_broken_alike_do_not_vouch_for_each_other() -> None:
    """Otherwise they would stay idle, and so the first choice of every request, for ever."""
    state_ = fleet("a", "b", "c")
    for name in "abc":
        placed_on(state_, f"well-{name}", 0.0, exclude=tuple(set("abc") - {name}))
        finish(state_, f"well-{name}", "OK", 0.0)
    for number in range(30):
        for name, outcome, alike in (("a", "FAILED", ()), ("b", "REJECTED", ("a",))):
            placed_on(state_, f"{name}{number}", 0.0, exclude=tuple(set("abc") - {name}))
            end = ev.Finished(f"{name}{number}", outcome, http_status=500, refused=True, alike=alike)
            state_.handle(end, 0.0)
            state_.check_invariants()
        placed_on(state_, f"c{number}", 0.0, exclude=("a", "b"))
        finish(state_, f"c{number}", "OK", 0.0)
    assert announced(state_) == ["c"]


def test_an_instance_that_refuses_what_others_answer_is_left_alone() -> None:
    state_ = fleet("a", "b")
    for number in range(SETTINGS.failures):
        refuse(state_, f"r{number}", 0.0, exclude=("b",))
        effects = answer(state_, f"r{number}.1", 0.0, "a")
        assert (ev.FleetChanged() in effects) == (number == SETTINGS.failures - 1)
    assert announced(state_) == ["b"]


def test_a_trial_that_is_refused_is_over_at_once() -> None:
    state_ = fleet("a", "b")
    break_(state_, "a")
    assert placed_on(state_, "busy", 0.0) == "b"
    refuse(state_, "trial", 1.0)
    assert {placed_on(state_, f"r{number}", 2.9) for number in range(2)} == {"b"}, "longer than the first time"


def test_a_trial_that_went_on_elsewhere_leaves_its_place_to_another() -> None:
    """The gateway already had an answer from another instance, and reports this when it reconnects."""
    state_ = fleet("a", "b")
    break_(state_, "a")
    assert placed_on(state_, "busy", 0.0) == "b"
    assert placed_on(state_, "trial", 1.0) == "a"
    stream = ev.OpenStream(request("trial", tokens=100), "b", Phase.DECODE, 0)
    state_.handle(ev.GatewayHello("g", (stream,), frozenset()), 1.1)
    state_.check_invariants()
    assert placed_on(state_, "next", 1.2) == "a"
    finish(state_, "trial", "OK", 1.3)
    assert {placed_on(state_, f"r{number}", 1.4) for number in range(3)} == {"b"}, "the next one is on trial"
    finish(state_, "next", "OK", 1.5)
    assert placed_on(state_, "after", 1.6) == "a"


def test_a_pool_that_changes_hands_begins_with_closed_circuits_and_gateways_are_told() -> None:
    state_ = fleet("a", "b")
    break_(state_, "a")
    assert announced(state_) == ["b"]
    assert ev.FleetChanged() in state_.handle(ev.PoolLost("m"), 0.5)
    state_.check_invariants()
    assert announced(state_) == ["a", "b"]


def test_ends_that_nobody_can_tell_open_no_circuit_and_close_none() -> None:
    state_ = fleet("a", "b")
    for number in range(4 * SETTINGS.failures):
        placed_on(state_, f"r{number}", 0.0, exclude=("b",))
        finish(state_, f"r{number}", ev.UNKNOWN, 0.0)
    assert announced(state_) == ["a", "b"]
    break_(state_, "a")
    assert placed_on(state_, "busy", 0.0) == "b"
    assert placed_on(state_, "trial", 1.0) == "a"
    finish(state_, "trial", ev.UNKNOWN, 1.0)
    assert announced(state_) == ["b"], "it has answered nothing"
    assert placed_on(state_, "next", 1.0) == "a", "another one is on trial"


def test_an_engine_that_came_back_with_another_model_is_not_on_trial_by_a_request_of_the_one_before() -> None:
    state_ = state(owns_all=False, life=LifeSettings(failures=1, first_open_s=1.0))
    for pool in "mn":
        state_.handle(ev.PoolTaken(pool), 0.0)
    join(state_, "c", 1, model="n", served_names=())
    join(state_, "b", 3)
    assert placed_on(state_, "bad", 0.0, model="n") == "c"
    finish(state_, "bad", "FAILED", 0.0)
    state_.handle(ev.StreamOpened("g", ev.OpenStream(request("old", tokens=100), "c", Phase.DECODE, 0)), 2.0)
    state_.check_invariants()
    join(state_, "d", 2, model="n", served_names=())
    state_.handle(ev.PoolLost("m"), 3.0)
    state_.check_invariants()
    assert placed_on(state_, "trial", 3.0, model="n", exclude=("d",)) == "c"
    finish(state_, "trial", "OK", 4.0)
    assert announced_of(state_, "n") == ["c", "d"]


def test_a_request_on_trial_is_so_no_longer_once_its_pool_is_lost_whatever_its_instance_serves_by_then() -> None:
    state_ = state(owns_all=False, life=LifeSettings(failures=1, first_open_s=1.0))
    for pool in "mn":
        state_.handle(ev.PoolTaken(pool), 0.0)
    join(state_, "c", 1)
    placed_on(state_, "bad", 0.0)
    finish(state_, "bad", "FAILED", 0.0)
    assert placed_on(state_, "trial", 2.0) == "c"
    join(state_, "c", 2, model="n", served_names=())  # the same incarnation
    state_.handle(ev.PoolLost("m"), 3.0)
    state_.check_invariants()
    assert placed_on(state_, "next", 3.0, model="n") == "c"
    assert placed_on(state_, "other", 3.0, model="n") == "c"
