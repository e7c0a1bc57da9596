"""Tests of parked requests: who is let in, in which order, who is refused and when, and what outlives a stream or an owner."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.admission_rule import AdmissionOutcome, decide_admission
from pointsman_router.core.analysis.decision_replay import admission_differences, differences, redecide
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Load, Phase, PlacementRequest
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.parked_requests import KEEP_AGE_S, KEYS_OF_ONE, LET_IN_AT_ONCE, LET_IN_PAUSE_S
from pointsman_router.core.requests.request_table import LEAVE_AT_ONCE
from pointsman_router.core.requests.unfinished_work import PART
from pointsman_router.core.requests.waiting_room import MAX_KEYS
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, request, state

ON = AdmissionSettings(True, interactive_s=30.0, standard_s=120.0, batch_s=600.0)


def fleet(*, capacity: int = 10_000, settings: AdmissionSettings = ON) -> RouterState:
    """One armed instance with a session of 8,000 tokens under way; 1,000 more tokens fit."""
    router = state(admission=settings)
    join(router, "a", 1, kv_capacity_tokens=capacity)
    ask(router, session("busy", 8_000), 0.0)
    router.admission.was_parked("m", 0.0)
    return router


def session(name: str, tokens: int, **changes: Any) -> PlacementRequest:
    first = crc32(name.encode()) << 20
    keys = tuple(range(first, first + tokens // 16))
    values: dict[str, Any] = {"keys": keys, "tenant": "t", "session_id": name, "parkable": True}
    return replace(request(f"r-{name}", tokens), **values | changes)


def ask(router: RouterState, asked: PlacementRequest, now: float, gateway: str = "g") -> list[ev.Effect]:
    effects = router.handle(ev.PlaceRequested(asked, gateway), now)
    return [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused | ev.Parked)]


def end(router: RouterState, name: str, now: float, reason: str = "STOP") -> list[ev.Effect]:
    effects = router.handle(ev.Finished(f"r-{name}", "OK", output_tokens=0, finish_reason=reason), now)
    return [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]


def placed(effects: list[ev.Effect]) -> list[str]:
    return [effect.request_id.removeprefix("r-") for effect in effects if isinstance(effect, ev.Placed)]


def test_a_new_session_that_does_not_fit_is_parked_and_let_in_when_another_is_idle() -> None:
    router = fleet()
    [parked] = ask(router, session("new", 3_000), 1.0)
    assert parked == ev.Parked("r-new", "g", "m", 1, 120.0)
    [answer] = end(router, "busy", 5.0)
    assert isinstance(answer, ev.Placed)
    admitted = answer.decision.request.admitted
    assert admitted is not None
    assert (admitted.verdict.reason, admitted.view.waited_s) == ("fits", 4.0)
    router.check_invariants()


def test_new_sessions_are_let_in_soon_when_none_of_many_others_returns() -> None:
    """The agents of a batch job end together; the caches hold a quarter of their contexts."""
    router = fleet(capacity=100_000)
    end(router, "busy", 0.0)
    router.handle(ev.Tick(), 2.0)
    for number in range(200):
        router.admission.pools["m"].armed = False
        ask(router, session(f"gone{number}", 2_000), 1.0)
        router.handle(ev.Finished(f"r-gone{number}", "OK", output_tokens=0, finish_reason="TOOL_CALLS"), 2.0)
    router.admission.was_parked("m", 2.0)
    assert isinstance(ask(router, session("new", 3_000), 2.5)[0], ev.Parked)
    now, effects = 2.5, list[ev.Effect]()
    while not placed(effects) and now < 60.0:
        now += 0.25
        effects = [effect for effect in router.handle(ev.Tick(), now) if isinstance(effect, ev.Placed)]
    assert placed(effects) == ["new"]
    assert now < 15.0
    for _ in range(40):
        now += 0.25
        router.handle(ev.Tick(), now)
    assert not router.admission.pools["m"].armed
    router.check_invariants()


def test_a_session_that_its_client_ends_makes_room_at_once() -> None:
    router = fleet()
    router.handle(ev.Finished("r-busy", "OK", output_tokens=0, finish_reason="TOOL_CALLS"), 0.5)
    ask(router, session("new", 9_500), 1.0)
    effects = router.handle(ev.SessionEnded("t", "busy"), 2.0)
    assert placed([effect for effect in effects if isinstance(effect, ev.Placed)]) == ["new"]
    router.check_invariants()


def test_without_admission_or_while_the_caches_suffice_nothing_is_parked() -> None:
    router = fleet(settings=AdmissionSettings())
    assert placed(ask(router, session("new", 3_000), 1.0)) == ["new"]
    assert router.admission.pools["m"].ledger.sessions.keys() == {"t/busy", "t/new"}
    router = fleet()
    router.admission.pools["m"].armed = False
    assert placed(ask(router, session("new", 3_000), 1.0)) == ["new"]


def test_an_unknown_kv_capacity_parks_nothing_and_says_so() -> None:
    router = fleet(capacity=0)
    assert placed(ask(router, session("new", 3_000), 1.0)) == ["new"]
    assert router.admission.status("m", 1.0).off_reason == "the KV capacity of a is unknown"


@pytest.mark.parametrize(
    "gone", [ev.AgentLost(1, "a"), ev.LoadReported(1, "a", Load(1.0, healthy=False))], ids=["lost", "unhealthy"]
)
def test_what_is_parked_stays_so_while_no_agent_reports_a_healthy_engine(gone: ev.Event) -> None:
    router = fleet()
    ask(router, session("new", 3_000), 1.0)
    router.handle(gone, 2.0)
    assert not any(let_in(router, ev.Tick(), now) for now in (2.0, 3.0, 4.0))
    assert (router.admission.armed("m", 4.0), router.parked_requests.queue.count("m")) == (True, 1)
    router.check_invariants()


@pytest.mark.parametrize(
    ("priority", "bound_s"), [(Priority.INTERACTIVE, 30.0), (Priority.STANDARD, 120.0), (Priority.BATCH, 600.0)]
)
def test_a_parked_request_is_refused_at_the_bound_of_its_class_with_its_place(
    priority: Priority, bound_s: float
) -> None:
    router = fleet()
    ask(router, session("new", 3_000, priority=priority), 1.0)
    assert router.retry_at == 1.0 + bound_s
    router.handle(ev.Tick(), bound_s)
    [refused] = [effect for effect in router.handle(ev.RetryDue(), 1.0 + bound_s) if isinstance(effect, ev.Refused)]
    assert (refused.code, refused.place) == ("RESOURCE_EXHAUSTED", 1)
    assert refused.retry_after_s is not None
    assert refused.admission is not None
    assert refused.admission.verdict.outcome is AdmissionOutcome.REFUSE
    assert decide_admission(refused.admission.view) == refused.admission.verdict
    router.check_invariants()


def test_a_clients_deadline_is_a_bound_too() -> None:
    router = fleet()
    [parked] = ask(router, session("new", 3_000, ttft_deadline_s=7.0), 1.0)
    assert isinstance(parked, ev.Parked)
    assert parked.bound_s == 7.0
    # A caller that cannot be told of parking keeps half of its time for the placement.
    [parked] = ask(router, session("old", 3_000, parkable=False, deadline_s=10.0), 1.0)
    assert isinstance(parked, ev.Parked)
    assert parked.bound_s == 5.0


def paused() -> RouterState:
    """fleet(), with a session "old" whose context the caches have lost."""
    router = state(admission=ON)
    join(router, "a", 1, kv_capacity_tokens=13_000)
    ask(router, session("old", 6_000), 0.0)
    end(router, "old", 1.0, "TOOL_CALLS")
    # What was placed counts for some seconds, while the engine's events are on their way; here none come.
    ask(router, session("busy", 8_000), 20.0)
    router.admission.was_parked("m", 20.0)
    return router


def resume(name: str = "again", tokens: int = 6_100, **changes: Any) -> PlacementRequest:
    return replace(session("old", tokens), request_id=f"r-{name}", **changes)


def test_a_session_whose_context_is_lost_waits_for_room_and_goes_on_in_its_turn() -> None:
    router = paused()
    [parked] = ask(router, resume(continues=True), 21.0)
    assert isinstance(parked, ev.Parked)
    ask(router, session("large", 9_000), 22.0)
    [answer] = end(router, "busy", 24.0)
    assert isinstance(answer, ev.Placed)
    admitted = answer.decision.request.admitted
    assert admitted is not None
    assert (answer.request_id, admitted.view.resumes, admitted.view.waited_s) == ("r-again", True, 3.0)
    assert admitted.view.size == 6_100
    router.check_invariants()


def test_a_session_that_waits_for_room_is_never_refused_but_goes_on_at_its_bound() -> None:
    router = paused()
    ask(router, resume(), 21.0)
    ask(router, session("new", 6_000), 21.0)
    answers = [effect for effect in router.handle(ev.RetryDue(), 141.0) if isinstance(effect, ev.Placed | ev.Refused)]
    assert placed(list(answers)) == ["again"]
    assert {answer.request_id for answer in answers if isinstance(answer, ev.Refused)} == {"r-new"}
    [decision] = [answer.decision for answer in answers if isinstance(answer, ev.Placed)]
    assert decision.request.admitted is not None
    assert decision.request.admitted.verdict.reason == "resumed"
    assert not admission_differences(decision.request.admitted)
    router.check_invariants()


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": "t/busy"},  # its parent waits for it
        {"agent_parent": "busy"},
        {"exclude": ("b",)},  # an instance has failed
        {"resumed": True},
        {"keys": ()},  # nothing is known of its context
        {"ttft_deadline_s": 7.0},  # it would be refused at its bound
    ],
)
def test_who_must_not_wait_for_room_does_not(changes: dict[str, Any]) -> None:
    assert placed(ask(paused(), resume(**changes), 21.0)) == ["again"]


def test_a_session_that_resumes_does_not_wait_for_its_own_room() -> None:
    router = state(admission=ON)
    join(router, "a", 1, kv_capacity_tokens=10_000)
    ask(router, session("old", 6_000), 0.0)
    end(router, "old", 1.0, "TOOL_CALLS")
    ask(router, session("busy", 8_000), 20.0)
    router.admission.was_parked("m", 20.0)
    assert isinstance(ask(router, resume(), 21.0)[0], ev.Parked)
    effects = [*end(router, "busy", 22.0), *router.handle(ev.SessionEnded("t", "busy"), 22.5)]
    assert placed(effects) == ["again"]
    router.check_invariants()


def test_a_session_that_waits_for_room_gives_its_place_to_nobody() -> None:
    router = paused()
    router.requests.room.limit_keys(500)
    assert isinstance(ask(router, resume(), 21.0)[0], ev.Parked)
    [answer] = ask(router, session("other", 6_000, tenant="u", priority=Priority.INTERACTIVE), 21.5)
    assert isinstance(answer, ev.Refused)
    assert answer.request_id == "r-other"
    assert router.parked_requests.queue.get("r-again") is not None
    router.check_invariants()


def test_a_parked_request_gives_a_session_that_was_ended_meanwhile_no_owner() -> None:
    router = fleet()
    assert isinstance(ask(router, session("new", 3_000), 1.0)[0], ev.Parked)
    router.handle(ev.SessionEnded("t", "new"), 2.0)
    effects = router.handle(ev.Finished("r-busy", "OK", output_tokens=0, finish_reason="STOP"), 5.0)
    assert placed([effect for effect in effects if isinstance(effect, ev.Placed)]) == ["new"]
    assert not [effect for effect in effects if isinstance(effect, ev.SessionOwnerSet)]
    assert not router.affinity.owner("m", "t/new", 5.0)


def test_a_session_that_has_begun_while_its_request_was_parked_goes_on_at_its_bound() -> None:
    router = fleet(capacity=20_000)
    ask(router, session("larger", 13_000), 1.0)
    assert isinstance(ask(router, session("new", 14_000), 2.0)[0], ev.Parked)
    small = replace(session("new", 64), request_id="r-small")
    assert placed(ask(router, small, 3.0)) == ["small"]
    effects = [effect for at in (121.0, 122.0) for effect in router.handle(ev.RetryDue(), at)]
    assert placed([effect for effect in effects if isinstance(effect, ev.Placed)]) == ["new"]
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Refused)] == ["r-larger"]
    router.check_invariants()


def test_a_session_with_little_to_compute_does_not_wait_for_room() -> None:
    assert placed(ask(paused(), resume(tokens=4_900), 21.0)) == ["again"]
    router = fleet()
    ask(router, replace(session("busy", 7_000), request_id="r-second"), 1.0)
    assert placed(ask(router, replace(session("busy", 12_000), request_id="r-third"), 2.0)) == ["third"]


def test_work_under_way_and_small_sessions_are_never_parked() -> None:
    router = fleet()
    ask(router, session("new", 3_000), 1.0)
    again = session("busy", 8_200)
    assert placed(ask(router, request("again", 8_200, keys=again.keys, tenant="t", session_id="busy"), 2.0)) == [
        "again"
    ]
    assert placed(ask(router, session("child", 3_000, parent="t/busy"), 2.0)) == ["child"]
    assert placed(ask(router, session("tool", 3_000, continues=True), 2.0)) == ["tool"]
    assert placed(ask(router, session("small", 100), 2.0)) == ["small"]
    [parked] = ask(router, session("orphan", 3_000, parent="t/unknown"), 2.0)
    assert isinstance(parked, ev.Parked)
    [parked] = ask(router, session("other", 3_000, tenant="u", parent="u/busy"), 2.0)
    assert isinstance(parked, ev.Parked)


def test_a_higher_class_goes_first_and_of_one_class_the_smaller_session() -> None:
    router = fleet(capacity=90_000)
    ask(router, session("fills", 81_900), 0.0)
    ask(router, session("large", 20_000), 1.0)
    ask(router, session("smaller", 10_000), 1.5)
    ask(router, session("urgent", 20_000, priority=Priority.INTERACTIVE), 2.0)
    assert [held.request.session_id for held in router.parked_requests.queue.order("m")] == [
        "urgent",
        "smaller",
        "large",
    ]


def test_a_session_waits_for_smaller_ones_by_the_time_of_its_prefill() -> None:
    """Attention makes a prompt of twice the length take more than twice the time."""
    router = fleet(capacity=90_000)
    ask(router, session("fills", 81_900), 0.0)
    ask(router, session("large", 40_000, priority=Priority.BATCH), 1.0)
    ask(router, session("smaller", 20_000, priority=Priority.BATCH), 301.0)
    assert [held.request.session_id for held in router.parked_requests.queue.order("m")] == ["smaller", "large"]


def test_a_session_that_was_admitted_counts_while_its_request_is_held() -> None:
    """Otherwise all sessions that wait are let in while the policy, or a limit, holds the first of them."""
    router = state(admission=ON, limits=SaturationLimits(max_requests=1))
    join(router, "a", 1, kv_capacity_tokens=20_000)
    ask(router, session("busy", 8_000), 0.0)
    router.admission.was_parked("m", 0.0)
    assert not ask(router, session("held", 6_000), 1.0)
    assert router.held_requests.queue.get("r-held") is not None
    [parked] = ask(router, session("next", 7_000), 2.0)
    assert isinstance(parked, ev.Parked)
    router.check_invariants()
    router.handle(ev.Finished("r-held", "CANCELLED"), 3.0)
    router.check_invariants()
    router.handle(ev.Tick(), 4.0)
    assert router.parked_requests.queue.get("r-next") is None


def test_the_tenant_with_the_least_weighted_size_for_its_weight_goes_first() -> None:
    router = fleet(capacity=90_000)
    ask(router, session("fills", 81_900, tenant="heavy"), 0.0)
    ask(router, session("h", 10_000, tenant="heavy"), 1.0)
    ask(router, session("l", 20_000, tenant="light"), 2.0)
    assert [held.request.session_id for held in router.parked_requests.queue.order("m")] == ["l", "h"]


def test_the_age_survives_a_refusal_and_a_lost_stream_for_ten_minutes() -> None:
    for pause_s, since in ((KEEP_AGE_S - 1.0, 1.0), (KEEP_AGE_S + 1.0, 121.0 + KEEP_AGE_S + 1.0)):
        router = fleet()
        ask(router, session("new", 3_000), 1.0)
        router.handle(ev.RetryDue(), 121.0)
        assert not len(router.parked_requests.queue)
        again = 121.0 + pause_s
        router.admission.pools["m"].armed = True
        router.parked_requests.expire(again)
        [parked] = ask(router, session("new", 3_000, request_id="second"), again)
        assert isinstance(parked, ev.Parked)
        assert parked.bound_s == 120.0
        assert next(iter(router.parked_requests.queue)).since == since
    router = fleet()
    ask(router, session("new", 3_000), 1.0)
    router.handle(ev.GatewayLost("g"), 5.0)
    assert not len(router.parked_requests.queue)
    ask(router, session("new", 3_000), 6.0, "h")
    assert next(iter(router.parked_requests.queue)).since == 1.0


def queued(count: int, *, capacity: int = 10_000_000, **changes: Any) -> tuple[RouterState, list[str]]:
    """A full pool at which `count` sessions are parked, and their names in their order."""
    router = fleet(capacity=capacity)
    ask(router, session("fills", capacity - 8_000 - 100), 0.5)
    names = [f"p{number:03}" for number in range(count)]
    for name in names:
        [parked] = ask(router, session(name, 200_000, **changes), 1.0)
        assert isinstance(parked, ev.Parked), parked
    return router, names


def let_in(router: RouterState, event: ev.Event, now: float) -> list[str]:
    effects = router.handle(event, now)
    assert not any(isinstance(effect, ev.Refused) for effect in effects)
    return placed(effects)


@pytest.mark.parametrize("how", ["policy", "tick", "release"])
def test_when_admission_ends_all_that_is_parked_is_let_in_at_a_pace_and_newcomers_stay_behind(how: str) -> None:
    router, names = queued(3 * LET_IN_AT_ONCE, keys=())
    router.admission.applies = lambda pool, now: False
    event: ev.Event = ev.PolicySet(router.policy)
    if how == "tick":
        event = ev.Tick()
    elif how == "release":
        event = ev.Finished("r-fills", "OK", output_tokens=0)
    entered, now = let_in(router, event, 2.0), 2.0
    assert len(entered) == LET_IN_AT_ONCE
    [parked] = ask(router, session("late", 200_000), 2.0)
    assert isinstance(parked, ev.Parked), "those that came first are not passed"
    assert placed(ask(router, session("child", 3_000, parent="t/busy"), 2.0)) == ["child"], "it is under way"
    while len(router.parked_requests.queue):
        assert router.retry_at == pytest.approx(now + LET_IN_PAUSE_S)
        now = router.retry_at or 0.0
        entered += let_in(router, ev.RetryDue(), now)
    assert entered == [*names, "late"]
    assert placed(ask(router, session("new", 200_000), now)) == ["new"]
    router.check_invariants()


def test_what_was_placed_while_admission_was_off_counts_when_it_begins() -> None:
    router = fleet()
    applies = False
    router.admission.applies = lambda pool, now: applies
    assert placed(ask(router, session("meanwhile", 50_000), 1.0)) == ["meanwhile"]
    applies = True
    [parked] = ask(router, session("new", 900), 2.0)
    assert isinstance(parked, ev.Parked)
    end(router, "meanwhile", 3.0)
    router.check_invariants()
    assert router.admission.pools["m"].ledger.sessions["t/meanwhile"].open == 0


def test_parked_requests_are_let_in_only_as_far_as_instances_and_held_requests_have_room() -> None:
    """Else they would be refused because the queue is full, long before their bound."""
    router = state(admission=ON, limits=SaturationLimits(max_requests=2), queue=QueueSettings(size=1))
    join(router, "a", 1, kv_capacity_tokens=10_000)
    ask(router, session("busy", 8_000), 0.0)
    router.admission.was_parked("m", 0.0)
    for number in range(5):
        ask(router, session(f"p{number}", 3_000), 1.0)
    router.admission.applies = lambda pool, now: False
    assert let_in(router, ev.Tick(), 2.0) == ["p0"]
    assert (router.held_requests.queue.count("m"), router.parked_requests.queue.count("m")) == (1, 3)
    for now, name in ((3.0, "busy"), (4.0, "p0"), (5.0, "p1")):
        let_in(router, ev.Finished(f"r-{name}", "OK", output_tokens=0), now)
    assert not len(router.parked_requests.queue)
    router.check_invariants()


def test_an_adapter_without_room_keeps_no_session_of_another_model_waiting() -> None:
    router = state(admission=ON, limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=1))
    join(router, "a", 1, kv_capacity_tokens=10_000, served_names=("lora",))
    for stream_id, name in enumerate("bc", 2):
        join(router, name, stream_id, kv_capacity_tokens=10_000, served_names=())
    for name in ("serves", "held"):
        ask(router, session(name, 100, model="lora"), 0.0)
    ask(router, session("busy", 29_800), 0.0)
    router.admission.was_parked("m", 0.0)
    ask(router, session("adapter", 3_000, model="lora"), 1.0)
    ask(router, session("base", 3_000), 2.0)
    assert [held.request.session_id for held in router.parked_requests.queue.order("m")] == ["adapter", "base"]
    assert placed(end(router, "busy", 3.0)) == ["base"]
    assert let_in(router, ev.Finished("r-serves", "OK", output_tokens=0), 4.0) == ["held"]
    assert [held.request.session_id for held in router.held_requests.queue] == ["adapter"]
    assert not len(router.parked_requests.queue)
    router.check_invariants()


def test_one_pools_crowd_does_not_keep_other_pools_waiting_when_admission_ends() -> None:
    router, _ = queued(3 * LET_IN_AT_ONCE, keys=())
    join(router, "b", 2, kv_capacity_tokens=10_000, model="n", served_names=())
    ask(router, session("fills-n", 9_000, model="n"), 1.0)
    router.admission.was_parked("n", 1.0)
    ask(router, session("urgent", 3_000, model="n", priority=Priority.INTERACTIVE), 1.0)
    router.admission.applies = lambda pool, now: False
    assert len(let_in(router, ev.Tick(), 2.0)) == LET_IN_AT_ONCE
    assert "urgent" in let_in(router, ev.RetryDue(), 2.0 + LET_IN_PAUSE_S)


def test_a_turn_lets_in_fewer_long_prompts() -> None:
    router, names = queued(12)
    router.admission.applies = lambda pool, now: False
    costs = 1 + 200_000 // 16 // KEYS_OF_ONE
    assert let_in(router, ev.Tick(), 2.0) == names[: -(-LET_IN_AT_ONCE // costs)]


def test_one_tenants_prompts_do_not_take_all_memory_nor_a_lower_class_all_places() -> None:
    router = fleet(capacity=90_000)
    room = router.requests.room
    room.limit_keys(2_000)
    ask(router, session("fills", 81_900), 0.0)
    for number in range(20):
        ask(router, session(f"b{number}", 3_200, priority=Priority.BATCH), 1.0)
    assert len(room.parked) == 10
    [gone, parked] = ask(router, session("i", 3_200, tenant="u", priority=Priority.INTERACTIVE), 2.0)
    assert isinstance(gone, ev.Refused)
    assert gone.code == "RESOURCE_EXHAUSTED"
    assert isinstance(parked, ev.Parked)
    assert parked.place == 1
    router.check_invariants()


def test_a_lost_gateways_parked_requests_leave_in_parts_and_those_it_asks_for_again_stay() -> None:
    router, names = queued(3 * LEAVE_AT_ONCE)
    router.handle(ev.GatewayLost("g"), 2.0)
    assert len(router.parked_requests.queue) == 2 * LEAVE_AT_ONCE
    assert router.retry_at == pytest.approx(2.001)
    end(router, "fills", 2.0)
    assert len(router.parked_requests.queue) == LEAVE_AT_ONCE, "nobody is let in meanwhile"
    [parked] = ask(router, session(names[-1], 200_000), 2.0)
    assert isinstance(parked, ev.Parked)
    effects = router.handle(ev.RetryDue(), 2.001)
    assert not any(isinstance(effect, ev.Placed | ev.Refused) for effect in effects)
    assert [held.request.session_id for held in router.parked_requests.queue] == [names[-1]]
    assert let_in(router, ev.Tick(), 3.0) == [names[-1]]
    router.check_invariants()


def test_a_lost_pools_parked_requests_are_answered_in_parts() -> None:
    router, names = queued(3 * LEAVE_AT_ONCE)
    effects = router.handle(ev.PoolLost("m"), 2.0)
    turns = 1
    while router.unfinished or router.requests.room.leaving:
        effects += router.handle(ev.GoOn() if router.unfinished else ev.RetryDue(), 2.0)
        turns += 1
    assert turns >= 2
    refused = [effect.request_id.removeprefix("r-") for effect in effects if isinstance(effect, ev.Refused)]
    assert sorted(refused) == sorted(names)
    assert not any(isinstance(effect, ev.Placed) for effect in effects)
    router.check_invariants()


def owner_of_two_pools(count: int, max_keys: int = MAX_KEYS) -> RouterState:
    """A router that owns m and n, both full, while `count` sessions of 187 block keys are parked in m."""
    router = state(admission=ON, owns_all=False)
    router.requests.room.limit_keys(max_keys)
    for stream_id, pool in enumerate("mn", 1):
        router.handle(ev.PoolTaken(pool), 0.0)
        join(router, f"i{pool}", stream_id, kv_capacity_tokens=10_000, model=pool, served_names=())
        ask(router, session(f"busy-{pool}", 8_000, model=pool), 0.0)
        router.admission.was_parked(pool, 0.0)
    for number in range(count):
        ask(router, session(f"p{number}", 3_000), 1.0)
    assert len(router.parked_requests.queue) == count
    return router


def test_a_hello_that_came_before_the_loss_of_a_pool_keeps_none_of_its_requests() -> None:
    router = owner_of_two_pools(8 * LEAVE_AT_ONCE)
    waiting = frozenset(held.request.request_id for held in router.parked_requests.queue)
    taken = tuple(Reservation(f"o{number}", "h", "in", "", 10, 10, pool="n") for number in range(2 * PART))
    effects = router.handle(ev.PoolTaken("n", taken), 2.0)
    effects += router.handle(ev.GatewayHello("g", waiting=waiting), 2.0)
    effects += router.handle(ev.PoolLost("m"), 2.0)
    while router.unfinished or router.requests.room.leaving:
        effects += router.handle(ev.GoOn() if router.unfinished else ev.RetryDue(), 2.0)
    answers = [effect for effect in effects if isinstance(effect, ev.Placed | ev.Refused)]
    assert {answer.request_id for answer in answers} == waiting
    assert all(isinstance(answer, ev.Refused) and answer.not_serving for answer in answers)
    assert not len(router.requests.room)
    router.check_invariants()


def test_a_request_of_a_lost_pool_that_gives_up_its_memory_is_sent_to_the_new_owner() -> None:
    router = owner_of_two_pools(8 * LEAVE_AT_ONCE, 192_000)
    router.handle(ev.PoolLost("m"), 2.0)
    for tenant in "uv":
        asked = session(tenant, 47_000 * 16, model="n", tenant=tenant)
        effects = router.handle(ev.PlaceRequested(asked, "g"), 2.0)
        assert router.parked_requests.queue.get(asked.request_id) is not None
        refused = [effect for effect in effects if isinstance(effect, ev.Refused)]
        assert all(effect.not_serving for effect in refused)
    assert len(refused) > LEAVE_AT_ONCE
    router.check_invariants()


def test_a_request_that_an_earlier_owner_parked_keeps_its_bound_and_arms_the_new_owner() -> None:
    router = state(admission=ON)
    join(router, "a", 1, kv_capacity_tokens=10_000)
    stream = ev.OpenStream(session("busy", 8_000), "a", Phase.DECODE, 0)
    router.handle(ev.GatewayHello("g", (stream,), frozenset({"r-new"})), 0.0)
    [parked] = ask(router, session("new", 3_000, parked_s=100.0), 1.0)
    assert isinstance(parked, ev.Parked)
    assert parked.bound_s == 20.0
    [refused] = ask(router, session("late", 3_000, parked_s=120.0), 1.0)
    assert isinstance(refused, ev.Refused)


def test_a_pool_that_is_lost_sends_its_parked_requests_to_the_new_owner() -> None:
    router = state(admission=ON, owns_all=False)
    router.handle(ev.PoolTaken("m"), 0.0)
    join(router, "a", 1, kv_capacity_tokens=10_000)
    ask(router, session("busy", 8_000), 0.0)
    router.admission.was_parked("m", 0.0)
    ask(router, session("new", 3_000), 1.0)
    [refused] = [effect for effect in router.handle(ev.PoolLost("m"), 2.0) if isinstance(effect, ev.Refused)]
    assert (refused.request_id, refused.not_serving) == ("r-new", True)
    while router.unfinished:
        router.handle(ev.GoOn(), 2.0)
    assert not router.admission.pools
    router.check_invariants()


def test_an_admission_is_made_again_from_its_record() -> None:
    router = fleet()
    [answer] = ask(router, session("fits", 900), 1.0)
    assert isinstance(answer, ev.Placed)
    decision, record = answer.decision, answer.decision.request.admitted
    assert record is not None
    assert admission_differences(record) == []
    assert not [
        difference for difference in differences(decision, redecide(decision)) if difference.startswith("admission")
    ]


def test_parked_work_counts_in_the_order_of_arrival_of_one_shot_requests_without_leaving_state() -> None:
    router = fleet()
    one_shot = request("one", 900, keys=tuple(range(56)), tenant="t")
    assert placed(ask(router, one_shot, 1.0)) == ["one"]
    before = len(router.admission.pools["m"].ledger)
    router.handle(ev.Finished("one", "OK", output_tokens=5), 2.0)
    assert len(router.admission.pools["m"].ledger) == before - 1


def test_explain_tells_the_admission_and_changes_nothing() -> None:
    router = fleet()
    answer = router.explain(session("new", 3_000), 1.0)
    assert isinstance(answer, ev.Refused)
    assert "would be parked" in answer.message
    assert not len(router.parked_requests.queue)
    answer = router.explain(session("small", 900), 1.0)
    assert not isinstance(answer, ev.Refused)
    assert answer.request.admitted is not None
    assert answer.request.admitted.verdict.reason == "fits"
    router.check_invariants()
