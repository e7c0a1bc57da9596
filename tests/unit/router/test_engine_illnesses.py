"""Ill engines, and clients that are at fault themselves, as placements see them (rows of engine_life.py's evidence)."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman_common.core.key_report_types import Delta
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.apply_agent_reports import KEEP_IDLE_S, KEEP_OUT_S
from pointsman_router.core.instances.engine_life import OVERDUE_S
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import InstanceState, Load, PrefixSource
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import hello, join, place, request, state

# Errors that gateways retry, and tell as refused.
RETRIED = (500, 502, 503)


def fleet(*names: str, **settings_: Any) -> RouterState:
    state_ = state(**settings_)
    for number, name in enumerate(names):
        join(state_, name, number + 1)
        state_.handle(ev.LoadReported(number + 1, name, Load(0.0)), 0.0)
    return state_


def placed(state_: RouterState, name: str, now: float, **changes: Any) -> str:
    answer = place(state_, request(name, tokens=changes.pop("tokens", 100), streamed=True, **changes), now)
    assert isinstance(answer, ev.Placed), answer
    return answer.step.instance_id


def answer(state_: RouterState, name: str, now: float, *refused_by: str) -> list[ev.Effect]:
    effects = state_.handle(ev.FirstToken(name, refused_by), now)
    return effects + state_.handle(ev.Finished(name, "OK"), now)


def out(state_: RouterState) -> list[str]:
    return [record.info.instance_id for record in state_.instances.records() if record.life.opened]


def error(
    state_: RouterState, name: str, now: float, status: int, *, outcome: str = "REJECTED", alike: tuple[str, ...] = ()
) -> list[ev.Effect]:
    refused = outcome == "FAILED" or status in RETRIED
    return state_.handle(ev.Finished(name, outcome, http_status=status, refused=refused, alike=alike), now)


def send(state_: RouterState, name: str, now: float, ill: dict[str, int], *, bad: bool = False, **changes: Any) -> str:
    """Send a request as a gateway does: errors of a doubted instance, and all of RETRIED, are compared with what another answers.
    `ill`: the status with which an instance answers everything. `bad`: all answer 400. Return where it was first."""
    first = there = placed(state_, name, now, **changes)
    before: dict[int, list[str]] = {}
    tried: tuple[str, ...] = ()
    for attempt in range(3):
        request_id = f"{name}.{attempt}" if attempt else name
        status = ill.get(there, 400 if bad else 200)
        if status == 200:
            answer(state_, request_id, now, *tried)
            break
        alike = tuple(before.setdefault(status, []))
        compares = (status in RETRIED or state_.instances.doubts(there)) and attempt < 2 and not alike
        error(state_, request_id, now, status, outcome="FAILED" if compares else "REJECTED", alike=alike)
        before[status].append(there)
        tried = (*tried, there)
        if not compares:
            break
        again = place(state_, request(f"{name}.{attempt + 1}", tokens=100, streamed=True, exclude=tried), now)
        if isinstance(again, ev.Refused):
            break
        there = again.step.instance_id
    return first


# ---- V3: one status to everything ----


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 501, 503])
@pytest.mark.parametrize("worked", [True, False])
@pytest.mark.parametrize("pool", ["ab", "abc"])
def test_an_engine_that_answers_one_status_to_everything_gets_few_requests(
    status: int, worked: bool, pool: str
) -> None:
    state_ = fleet(*pool)
    for number in range(6 if worked else 0):
        send(state_, f"before{number}", 0.0, {})
    first = [send(state_, f"r{number}", 1.0 + number / 50, {"a": status}) for number in range(120)]
    assert out(state_) == ["a"]
    assert first[20:].count("a") <= 5
    state_.check_invariants()


def test_an_engine_whose_streams_break_after_their_first_token_gets_few_requests() -> None:
    """Four requests at a time, so that first tokens come between the breaks."""
    state_ = fleet("a", "b", "c")
    there: dict[str, str] = {}
    first = []
    for number in range(240):
        now, name = number / 50, f"r{number}"
        first.append(placed(state_, name, now))
        there[name] = first[-1]
        state_.handle(ev.FirstToken(name), now)
        if len(there) > 4:
            ends = next(iter(there))
            outcome = ev.Finished(ends, "FAILED", broke=True) if there.pop(ends) == "a" else ev.Finished(ends, "OK")
            state_.handle(outcome, now)
    assert out(state_) == ["a"]
    assert first[40:].count("a") <= 8
    state_.check_invariants()


@pytest.mark.parametrize("status", [400, 404, 501])
def test_without_retries_too(status: int) -> None:
    """A proxy that sends the requests in place of the gateway gets one answer for each."""
    state_ = fleet("a", "b", "c")
    first = []
    for number in range(120):
        now = number / 50
        first.append(placed(state_, f"r{number}", now))
        if first[-1] == "a":
            error(state_, f"r{number}", now, status)
        else:
            answer(state_, f"r{number}", now)
    assert out(state_) == ["a"]
    assert first[20:].count("a") <= 5
    state_.check_invariants()


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_counts_once_against_errors(streamed: bool) -> None:
    """Whether its first token is told or not: else the errors of clients seem rarer than they are."""
    state_ = fleet("a", "b")
    for number in range(10):
        placed(state_, f"r{number}", 0.0)
        if streamed:
            state_.handle(ev.FirstToken(f"r{number}"), 0.0)
        state_.handle(ev.Finished(f"r{number}", "OK"), 0.0)
    assert state_.instances.records()[0].life.pool.answers == 10


def test_an_error_on_trial_does_not_put_an_engine_in_again() -> None:
    state_ = fleet("a", "b")
    for number in range(3):
        placed(state_, f"f{number}", 0.0, exclude=("b",))
        state_.handle(ev.Finished(f"f{number}", "FAILED"), 0.0)
    assert out(state_) == ["a"]
    assert placed(state_, "busy", 0.0) == "b"
    assert placed(state_, "trial", 1.0) == "a"
    error(state_, "trial", 1.0, 404)
    assert out(state_) == ["a"]
    assert {placed(state_, f"r{number}", 2.9) for number in range(3)} == {"b"}, "longer than the first time"


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20), share=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]), pool=st.sampled_from(["ab", "abc"])
)
@example(seed=1, share=0.9, pool="abc")
def test_bad_requests_of_clients_take_nobody_out(seed: int, share: float, pool: str) -> None:
    state_, rng = fleet(*pool), random.Random(seed)
    for number in range(300):
        session = f"s{rng.randrange(8)}" if rng.random() < 0.5 else ""
        send(state_, f"r{number}", number / 50, {}, bad=rng.random() < share, session_id=session)
        assert out(state_) == []
    state_.check_invariants()


# ---- V2: silence ----


def test_a_silent_engine_is_out_ten_seconds_after_a_first_token_was_due_and_its_sessions_move() -> None:
    state_ = fleet("a", "b")
    for number in range(8):
        send(state_, f"s{number}", 0.0, {}, session_id="s", tenant="t")
    owner = placed(state_, "hangs", 1.0, session_id="s", tenant="t", movable=True)
    state_.handle(ev.Tick(), 1.0 + OVERDUE_S)
    assert out(state_) == []
    effects = state_.handle(ev.Tick(), 1.5 + OVERDUE_S)
    [changed] = [effect for effect in effects if isinstance(effect, ev.LifeChanged)]
    assert (changed.instance_id, changed.out, changed.cause) == (owner, True, "silence")
    assert ev.FleetChanged() in effects
    assert [effect for effect in effects if isinstance(effect, ev.Move)] == [
        ev.Move("hangs", "g", silent=True, unbegun=True)
    ]
    assert placed(state_, "next", 1.6 + OVERDUE_S, session_id="s", tenant="t") != owner
    assert ev.FleetChanged() in state_.handle(ev.FirstToken("hangs"), 13.0), "what answers is in again"
    assert out(state_) == []


def test_three_clients_that_leave_a_silent_engine_long_after_a_first_token_was_due_put_it_out() -> None:
    state_ = fleet("a", "b")
    for number in range(3):
        assert out(state_) == []
        now = 1.0 + 4 * number
        assert placed(state_, f"r{number}", now, exclude=("b",)) == "a"
        state_.handle(ev.Finished(f"r{number}", "CANCELLED"), now + 3.0)
    assert out(state_) == ["a"]
    assert placed(state_, "busy", 12.0) == "b"
    assert placed(state_, "next", 12.0) == "b"


def test_clients_that_leave_early_or_while_others_get_bytes_are_no_evidence() -> None:
    state_ = fleet("a")
    for number in range(10):
        placed(state_, f"early{number}", float(number))
        state_.handle(ev.Finished(f"early{number}", "CANCELLED"), number + 0.5)
        placed(state_, f"late{number}", float(number))
        state_.handle(ev.Heard({"a": 0.0}), number + 1.0)
        state_.handle(ev.Finished(f"late{number}", "CANCELLED"), number + 9.0)
    assert out(state_) == []


def test_what_an_engine_sent_before_a_request_does_not_speak_for_it_when_it_is_told_later() -> None:
    """Gateways tell every other second what they have received."""
    state_ = fleet("a", "b")
    placed(state_, "before", 0.0, exclude=("b",))
    state_.handle(ev.FirstToken("before"), 0.1)
    for number in range(3):
        placed(state_, f"r{number}", 0.5, exclude=("b",))
    state_.handle(ev.Heard({"a": 1.8}), 2.0)
    for number in range(3):
        state_.handle(ev.Finished(f"r{number}", "CANCELLED"), 20.0)
    assert out(state_) == ["a"]
    state_.handle(ev.Heard({"a": 2.0}), 21.0)
    assert out(state_) == ["a"], "of before it was put out"
    state_.handle(ev.Heard({"a": 1.0}), 22.0)
    assert out(state_) == []


def test_an_engine_that_sends_other_answers_is_not_silent() -> None:
    state_ = fleet("a", "b")
    there = placed(state_, "waits", 0.0)
    for second in range(60):
        state_.handle(ev.Heard({there: 0.0}), float(second))
        state_.handle(ev.Tick(), second + 0.5)
    assert out(state_) == []


def test_bytes_of_an_engine_without_an_agent_change_no_snapshot() -> None:
    state_ = fleet("a")
    placed(state_, "waits", 0.0)
    state_.handle(ev.Heard({"a": 0.0}), 1.0)
    assert isinstance(place(state_, request("nowhere", exclude=("a",)), 6.0), ev.Refused), "the load is old"
    state_.handle(ev.Heard({"a": 0.0}), 7.0)
    state_.check_invariants()


def test_answers_that_are_not_streamed_and_ends_of_lost_gateways_have_time() -> None:
    state_ = fleet("a", "b")
    assert isinstance(place(state_, request("whole", tokens=100, max_output_tokens=1_000), 0.0), ev.Placed)
    for second in range(55):
        state_.handle(ev.Tick(), float(second))
    assert out(state_) == []
    for number in range(5):
        placed(state_, f"r{number}", 60.0 + number / 10, exclude=("b",))
    state_.handle(ev.GatewayLost("g"), 61.0)
    state_.handle(ev.Heard({"a": 0.0, "b": 0.0}), 69.0)
    state_.handle(ev.Tick(), 77.0)
    assert len(state_.reservations) == 0
    assert out(state_) == []


def test_a_silent_engine_is_tried_by_one_request_at_a_time_with_growing_pauses() -> None:
    state_ = fleet("a", "b")
    placed(state_, "busy", 0.0, exclude=("a",))
    placed(state_, "hangs", 0.0, exclude=("b",), movable=True)
    trials, now, number = [], 0.0, 0
    while now < 200.0:
        now += 0.5
        number += 1
        for effect in state_.handle(ev.Tick(), now):
            if isinstance(effect, ev.Move):
                assert effect.silent
                state_.handle(ev.Finished(effect.request_id, "CANCELLED"), now)
        there = placed(state_, f"r{number}", now, movable=True)
        if there == "b":
            answer(state_, f"r{number}", now)
        else:
            trials.append(now)
    assert 4 <= len(trials) <= 8
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert pauses == sorted(pauses)


def refusals(answers: list[ev.Effect]) -> list[ev.Refused]:
    return [effect for effect in answers if isinstance(effect, ev.Refused)]


def asked(state_: RouterState, name: str, now: float) -> str:
    """Return where a request is placed; empty if it is refused."""
    answered = place(state_, request(name, tokens=100, streamed=True), now)
    if isinstance(answered, ev.Refused):
        assert (answered.code, answered.retry_after_s) == ("UNAVAILABLE", 1.0)
        return ""
    return answered.step.instance_id


@pytest.mark.parametrize("pool", ["a", "abc"])
def test_where_no_engine_is_reached_each_is_tried_by_one_request_a_second_and_the_others_are_refused(pool: str) -> None:
    state_ = fleet(*pool)
    placed_there, refused, now = 0, 0, 0.0
    for number in range(200):
        now = number / 20
        if (there := asked(state_, f"r{number}", now)) != "":
            placed_there += 1
            state_.handle(ev.Finished(f"r{number}", "FAILED"), now)
            assert there in pool
        else:
            refused += 1
    assert out(state_) == list(pool)
    assert placed_there <= (3 + 10) * len(pool)
    assert refused >= 200 - placed_there
    state_.check_invariants()
    there = next(filter(None, (asked(state_, f"t{number}", now + number / 20) for number in range(1, 30))))
    assert state_.handle(ev.FirstToken(next(iter(state_.reservations)).request_id), now + 2.0)
    assert [asked(state_, f"after{number}", now + 2.0) for number in range(20)] == [there] * 20
    state_.check_invariants()


def test_where_the_only_engine_is_silent_one_request_at_a_time_waits_and_its_answer_lets_all_in() -> None:
    state_ = fleet("a")
    for number in range(5):
        assert asked(state_, f"r{number}", 1.0) == "a"
    state_.handle(ev.Tick(), 1.5 + OVERDUE_S)
    assert out(state_) == ["a"]
    assert asked(state_, "soon", 1.6 + OVERDUE_S) == ""
    assert asked(state_, "trial", 2.5 + OVERDUE_S) == "a"
    assert {asked(state_, f"s{number}", 3.0 + number) for number in range(10, 18)} == {""}
    state_.handle(ev.Finished("trial", "CANCELLED"), 3.0 + OVERDUE_S)
    assert asked(state_, "trial-2", 3.0 + OVERDUE_S) == "a", "its client left early: another one tries"
    assert asked(state_, "more", 3.0 + OVERDUE_S) == ""
    state_.handle(ev.FirstToken("trial-2"), 20.0)
    assert {asked(state_, f"t{number}", 20.0) for number in range(8)} == {"a"}
    state_.check_invariants()


def test_a_pool_that_answers_errors_or_of_which_older_answers_go_on_is_not_refused() -> None:
    """Another engine, or a later moment, may answer; and what sends bytes is reached by others."""
    state_ = fleet("a", "b")
    for number in range(60):
        assert asked(state_, f"r{number}", 1.0) != ""
        state_.handle(ev.Finished(f"r{number}", "FAILED", http_status=200), 1.0)
    assert out(state_) == ["a", "b"]
    state_ = fleet("a")
    for number in range(3):
        assert asked(state_, f"r{number}", 1.0) == "a"
        state_.handle(ev.Finished(f"r{number}", "FAILED"), 1.0)
    assert asked(state_, "s0", 1.1) == ""
    state_.handle(ev.Heard({"a": 0.0}), 1.5)
    assert asked(state_, "s1", 1.6) == "", "it may have been sent before"
    state_.handle(ev.Heard({"a": 0.0}), 5.0)
    assert {asked(state_, f"t{number}", 5.0) for number in range(8)} == {"a"}
    state_.check_invariants()


def test_held_requests_of_a_pool_that_is_not_reached_wait_for_the_trial() -> None:
    state_ = fleet("a", limits=SaturationLimits(max_requests=3))
    for number in range(3):
        assert asked(state_, f"r{number}", 1.0) == "a"
    assert not refusals(state_.handle(ev.PlaceRequested(request("held", tokens=10, streamed=True), "g"), 1.0))
    state_.handle(ev.Tick(), 1.5 + OVERDUE_S)
    assert out(state_) == ["a"]
    for number in range(3):
        effects = state_.handle(ev.Finished(f"r{number}", "CANCELLED"), 1.6 + OVERDUE_S)
        assert not [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]
    effects = state_.handle(ev.Tick(), 2.5 + OVERDUE_S)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Placed)] == ["held"], "on trial"
    state_.check_invariants()


@pytest.mark.parametrize("how", ["snapshot", "resumed", "computed"])
def test_what_an_agent_that_begins_lists_shows_not_that_its_engine_lives(how: str) -> None:
    """The engine has computed some blocks, and then hangs. Its agent restarts, and tells of these blocks. `computed`: the engine
    goes on afterwards."""
    state_ = fleet("a", "b")
    asked = request("waits", prompt=list(range(160)), streamed=True, exclude=("b",))
    assert isinstance(place(state_, asked, 0.0), ev.Placed)
    state_.handle(ev.AgentLost(1, "a"), 1.0)
    old = list(asked.keys[:4])
    if how == "snapshot":
        join(state_, "a", 9, old, now=OVERDUE_S - 1.0)
    else:
        hello(state_, "a", 9, OVERDUE_S - 1.0, latest=1)
        state_.handle(ev.KeysReported(9, "a", Delta(1, 1, added=old)), OVERDUE_S - 1.0)
    if how == "computed":
        state_.handle(ev.KeysReported(9, "a", Delta(2, 1, added=list(asked.keys[4:6]))), OVERDUE_S - 1.0)
    state_.handle(ev.Tick(), OVERDUE_S + 1.0)
    assert out(state_) == ([] if how == "computed" else ["a"])
    state_.check_invariants()


# ---- V1 and K2: agents that are wrong or gone ----


def test_a_pool_whose_agents_all_call_it_unhealthy_is_placed_on() -> None:
    state_ = fleet("a", "b")
    for number, name in enumerate("ab"):
        state_.handle(ev.LoadReported(number + 1, name, Load(1.0, healthy=False)), 1.0)
    assert {placed(state_, f"r{number}", 1.0) for number in range(4)} == {"a", "b"}
    [pool] = state_.instances.pools()
    assert sorted(pool.instances) == ["a", "b"]


def test_an_unhealthy_engine_is_placed_on_while_it_answers_and_not_when_it_is_idle() -> None:
    state_ = fleet("a", "b")
    for number in range(4):
        placed(state_, f"r{number}", 0.0)
    state_.handle(ev.LoadReported(1, "a", Load(1.0, healthy=False)), 1.0)
    for number in range(4):
        answer(state_, f"r{number}", 2.0)
    assert {placed(state_, f"s{number}", 3.0) for number in range(4)} == {"a", "b"}
    assert {placed(state_, f"t{number}", 30.0) for number in range(12)} == {"b"}
    for number in range(1, 4):
        placed(state_, f"u{number}", 30.0, exclude=("a",))
        state_.handle(ev.Finished(f"u{number}", "FAILED"), 30.0)
    assert out(state_) == ["b"]
    assert placed(state_, "last", 30.0) == "a", "better than one whose requests fail"


def test_without_agents_a_pool_is_placed_on_by_what_is_known_while_it_answers() -> None:
    state_ = fleet("a", "b", lost_instance_s=10.0)
    prompt = list(range(64))
    there = place(state_, request("first", prompt=prompt, streamed=True), 0.0)
    assert isinstance(there, ev.Placed)
    answer(state_, "first", 0.5)
    for number, name in enumerate("ab"):
        state_.handle(ev.AgentLost(number + 1, name), 1.0)
    kept = [
        effect
        for second in range(2, 120)
        for effect in state_.handle(ev.Tick(), float(second))
        if isinstance(effect, ev.InstanceKept)
    ]
    assert sorted(effect.instance_id for effect in kept) == ["a", "b"]
    again = place(state_, request("again", prompt=[*prompt, 7], streamed=True), 120.0)
    assert isinstance(again, ev.Placed)
    record = state_.instances.get(again.step.instance_id)
    assert record is not None
    assert record.state is InstanceState.LOST
    assert state_.prefix_knowledge.source(record, 120.0) is PrefixSource.APPROXIMATE
    answer(state_, "again", 120.5)
    more = place(state_, request("more", prompt=[*prompt, 7, 8], streamed=True), 121.0)
    assert isinstance(more, ev.Placed)
    assert more.step.instance_id == again.step.instance_id
    assert more.decision.cached_tokens == 64, "learned from its own placements"
    join(state_, "a", 9, now=122.0)
    record = state_.instances.get("a")
    assert record is not None
    assert (record.state, record.kept) == (InstanceState.READY, False)


@pytest.mark.parametrize("why", ["asleep", "drained", "cordoned", "unhealthy"])
def test_an_instance_without_agent_stays_while_the_others_of_its_pool_take_no_requests(why: str) -> None:
    state_ = fleet("a", "b", lost_instance_s=10.0)
    if why == "drained":
        state_.handle(ev.DrainsChanged({"b": "1"}), 1.0)
    elif why == "cordoned":
        state_.handle(ev.OrdersChanged({"b": InstanceOrder(cordoned=True)}), 1.0)
    else:
        load = Load(1.0, suspended="asleep") if why == "asleep" else Load(1.0, healthy=False)
        state_.handle(ev.LoadReported(2, "b", load), 1.0)
    state_.handle(ev.AgentLost(1, "a"), 1.0)
    for second in range(2, 60):
        state_.handle(ev.Tick(), float(second))
    assert placed(state_, "late", 60.0) == "a"


def out_without_agent(*names: str) -> tuple[RouterState, float]:
    """Return a fleet in which the agent of `a` is gone for longer than lost_instance_s, and its requests fail; and the time."""
    state_ = fleet(*names, lost_instance_s=10.0)
    state_.handle(ev.AgentLost(1, "a"), 0.0)
    for number in range(3):
        placed(state_, f"f{number}", 1.0, exclude=("b",))
        state_.handle(ev.Finished(f"f{number}", "FAILED"), 1.0)
    assert out(state_) == ["a"]
    return state_, 1.0


def asked_often(state_: RouterState, now: float, until: float, *, fails: bool) -> list[float]:
    """Send two requests per second, of which `a` answers none if it `fails`. Return the times of those that it got."""
    there: list[float] = []
    while now < until:
        now += 0.5
        state_.handle(ev.Tick(), now)
        if state_.instances.get("b") is not None:
            state_.handle(ev.LoadReported(2, "b", Load(now)), now)
        got = place(state_, request(f"r{now}", tokens=100, streamed=True), now)
        if isinstance(got, ev.Refused):
            continue
        if got.step.instance_id == "a":
            there.append(now)
        if got.step.instance_id == "a" and fails:
            state_.handle(ev.Finished(f"r{now}", "FAILED"), now)
        else:
            answer(state_, f"r{now}", now)
    return there


@pytest.mark.parametrize("pool", ["a", "ab"])
def test_an_engine_without_an_agent_that_is_out_is_tried_until_it_answers(pool: str) -> None:
    """Its agent does not return. Requests that are no trials are refused, or go to the other one."""
    state_, now = out_without_agent(*pool)
    trials = asked_often(state_, now, 100.0, fails=True)
    assert 4 <= len(trials) <= 8
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert pauses == sorted(pauses)
    assert asked_often(state_, 100.0, 140.0, fails=False), "the engine has recovered"
    assert out(state_) == []
    state_.check_invariants()


@pytest.mark.parametrize(("pool", "kept_s"), [("a", KEEP_IDLE_S), ("ab", KEEP_OUT_S)])
def test_an_engine_without_an_agent_that_never_answers_again_leaves(pool: str, kept_s: float) -> None:
    state_, now = out_without_agent(*pool)
    asked_often(state_, now, kept_s - 1.0, fails=True)
    assert state_.instances.get("a") is not None
    asked_often(state_, kept_s - 1.0, kept_s + 2.0, fails=True)
    assert state_.instances.get("a") is None


# ---- A12: requests that kill engines ----


def test_requests_that_break_two_engines_take_nobody_out() -> None:
    state_ = fleet("a", "b", "c")
    for number in range(12):
        for name in "abc":
            send(state_, f"good{number}{name}", number + 0.0, {}, exclude=tuple(set("abc") - {name}))
        first = placed(state_, f"poison{number}", number + 0.1)
        state_.handle(ev.Finished(f"poison{number}", "FAILED", broke=True), number + 0.1)
        placed(state_, f"poison{number}.1", number + 0.1, exclude=(first,))
        end = ev.Finished(f"poison{number}.1", "REJECTED", broke=True, alike=(first,))
        state_.handle(end, number + 0.1)
        assert out(state_) == []
        assert [record.life.failures for record in state_.instances.records()] == [0, 0, 0]


def test_engines_that_break_everything_are_out_though_they_agree() -> None:
    state_ = fleet("a", "b", "c")
    for number in range(60):
        tried: tuple[str, ...] = ()
        for attempt in range(2):
            name = f"r{number}.{attempt}" if attempt else f"r{number}"
            there = placed(state_, name, number / 50, exclude=tried)
            if there == "c":
                answer(state_, name, number / 50)
                break
            last = bool(tried)
            end = ev.Finished(name, "REJECTED" if last else "FAILED", broke=True, alike=tried)
            state_.handle(end, number / 50)
            tried = (*tried, there)
    assert out(state_) == ["a", "b"]


@pytest.mark.parametrize("count", [100, None])
def test_an_engine_whose_answers_stop_is_out_and_they_move_if_its_own_count_says_so(count: int | None) -> None:
    state_ = fleet("a", "b")
    there = placed(state_, "r", 0.0, movable=True)
    stream = 1 + "ab".index(there)
    state_.handle(ev.FirstToken("r"), 0.5)
    moves: list[ev.Effect] = []
    for second in range(1, 16):
        report = ev.LoadReported(stream, there, Load(float(second), running=1, generation_tokens=count))
        state_.handle(report, float(second))
        if second >= 11:
            state_.handle(ev.Heard({}, ("r",)), float(second))
        moves += [effect for effect in state_.handle(ev.Tick(), float(second)) if isinstance(effect, ev.Move)]
    assert out(state_) == ([there] if count else [])
    assert moves[:1] == ([ev.Move("r", "g", silent=True)] if count else [])
    state_.check_invariants()
