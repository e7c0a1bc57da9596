"""Held requests of several classes in a router: who goes first, who gives up a place for whom, and who is refused as too late."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.kv_load import LoadPrice
from pointsman_router.core.placement_types import FleetView, PrefixSource, Step, StepKind
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurveFit
from pointsman_router.core.priority import PRIORITIES, Priority
from pointsman_router.core.requests.deadlines import SURE_SAMPLES, SURE_SHARE, least_prefill_s
from pointsman_router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman_router.core.requests.place_or_hold import RETRY_S, _computed
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import candidate, join, request, set_policy, state
from tests.unit.router.test_hold_queue import Picky, answers, ask, busy, held, order, tell

BATCH, STANDARD, INTERACTIVE = PRIORITIES


def waits(name: str, priority: Priority = STANDARD, tenant: str = "", **changes: Any) -> HeldRequest:
    one = held(name, tenant=tenant, **changes)
    return replace(one, request=replace(one.request, priority=priority))


def test_freed_room_goes_to_the_highest_class() -> None:
    router, _ = busy()
    for number, priority in enumerate((BATCH, STANDARD, INTERACTIVE)):
        ask(router, priority, float(number), priority=priority)
    ended = "xa"
    for expected in (INTERACTIVE, STANDARD, BATCH):
        assert tell(router, ev.Finished(ended, "OK"), 5.0) == [(expected, "a")]
        ended = expected


def test_a_request_of_a_higher_class_does_not_wait_behind_those_of_lower_ones() -> None:
    router, _ = busy()
    for number in range(5):
        ask(router, f"b{number}", 0.0, priority=BATCH, tokens=10)
    router.views.limits = SaturationLimits(2)
    assert [effect.request_id for effect in ask(router, "i", 5.0, priority=INTERACTIVE, tokens=9_000)] == ["i"]


def test_when_the_queue_is_full_the_last_of_the_lowest_class_gives_up_its_place() -> None:
    router, _ = busy(size=3)
    for name, priority in (("b0", BATCH), ("s0", STANDARD), ("b1", BATCH)):
        assert ask(router, name, tokens=10 + len(router.held_requests.queue), priority=priority) == []
    [refused] = ask(router, "s1", priority=STANDARD)
    assert isinstance(refused, ev.Refused)
    assert (refused.request_id, refused.code, refused.retry_after_s) == ("b1", "RESOURCE_EXHAUSTED", 1.0)
    assert "a request of another class or tenant takes this request's place" in refused.message
    assert "STANDARD" not in refused.message, "nobody is told of others' classes"
    assert [effect.request_id for effect in ask(router, "i0", priority=INTERACTIVE)] == ["b0"]
    assert [effect.request_id for effect in ask(router, "b2", priority=BATCH)] == ["b2"]
    assert [effect.request_id for effect in ask(router, "s2", priority=STANDARD)] == ["s2"]
    assert [effect.request_id for effect in ask(router, "i1", priority=INTERACTIVE)] == ["s0"]  # longer than s1


def test_of_one_tenants_equal_requests_the_earliest_deadline_goes_first() -> None:
    queue = HoldQueue(QueueSettings())
    for name, needed in (("none", None), ("late", 20.0), ("soon", 2.0), ("beyond", 3_000.0)):
        changes: dict[str, Any] = {} if needed is None else {"first_token_by": needed}
        queue.add(waits(name, **changes))
    assert order(queue) == "soon late beyond none"  # the last two are refused after 30 s, whichever comes first


def test_a_deadline_gains_nothing_over_another_tenant_or_class() -> None:
    queue = HoldQueue(QueueSettings())
    queue.add(waits("i0", INTERACTIVE, "a"))
    queue.add(waits("s0", STANDARD, "a"))
    queue.add(waits("s1", STANDARD, "b"))
    queue.add(waits("s2", STANDARD, "b", first_token_by=0.5))
    assert order(queue) == "i0 s0 s2 s1"


def learned(names: str, limit: int, policy: Policy | None = None) -> RouterState:
    """A router that has learned a prefill curve, equal to the default one, and whose instances report their keys."""
    router, _ = busy(names, limit=limit, policy=policy)
    fit = router.prefill_observer._fits["m", ""] = PrefillCurveFit()
    for number in range(SURE_SAMPLES):
        tokens = (1_000, 8_000, 64_000)[number % 3]
        fit.learn(tokens, 0, DEFAULT_CURVE.cost_s(tokens, 0))
    return router


KEYS = tuple(range(4_000))
LEAST_S = SURE_SHARE * DEFAULT_CURVE.cost_s(64_000, 0)


def test_who_cannot_have_its_first_token_in_time_is_refused_instead_of_placed() -> None:
    router = learned("ab", limit=5)
    [refused] = ask(router, "r", tokens=64_000, keys=KEYS, ttft_deadline_s=LEAST_S - 0.1)
    assert isinstance(refused, ev.Refused)
    assert (refused.code, refused.retry_after_s, refused.pool) == ("DEADLINE_EXCEEDED", None, "m")
    assert f"needed within {LEAST_S - 0.1:.2f} s, but its prefill takes at least {LEAST_S:.2f} s" in refused.message
    assert len(router.reservations) == 2
    [placed] = ask(router, "q", tokens=64_000, keys=KEYS, ttft_deadline_s=LEAST_S + 0.1)
    assert isinstance(placed, ev.Placed)
    [over] = ask(router, "o", tokens=10, ttft_deadline_s=0.0)
    assert isinstance(over, ev.Refused)
    assert over.message == "the first token did not come within the time that X-Pointsman-TTFT-Timeout allows"
    dry = router.explain(request("dry", tokens=64_000, keys=KEYS, ttft_deadline_s=LEAST_S - 0.1), 0.0)
    assert isinstance(dry, ev.Refused)
    assert dry.code == "DEADLINE_EXCEEDED"


def test_an_explanation_tells_who_waits_before() -> None:
    router, _ = busy()
    for name, priority in (("b", BATCH), ("s", STANDARD), ("i", INTERACTIVE)):
        ask(router, name, priority=priority)
    answer = router.explain(request("x", priority=STANDARD), 0.0)
    assert isinstance(answer, ev.Refused)
    assert answer.message.endswith("(it would be held or refused; 3 wait, 2 of them STANDARD or higher)")


@pytest.mark.parametrize("unknown", ["tokens", "curve", "cache", "other hardware"])
def test_what_is_not_certain_refuses_nobody(unknown: str) -> None:
    router = learned("ab", limit=5)
    if unknown == "curve":
        router.prefill_observer._fits["m", ""].samples = SURE_SAMPLES - 1
    elif unknown == "cache":
        join(router, "c", 7, exact_prefix=False)
    elif unknown == "other hardware":
        join(router, "c", 7, hardware="faster")
    keys = () if unknown == "tokens" else KEYS
    [placed] = ask(router, "r", tokens=64_000, keys=keys, ttft_deadline_s=0.001)
    assert isinstance(placed, ev.Placed)


@pytest.mark.parametrize(("excluded", "counts"), [("draining", True), ("cordoned", True), ("not_answering", False)])
def test_a_prefix_that_can_be_fetched_from_an_instance_without_requests_counts(excluded: str, counts: bool) -> None:
    left = candidate(
        "a", new=4_000, cached=60_000, excluded=excluded, prefix_source=PrefixSource.EVENTS, kv_gives="MOONCAKE"
    )
    cold = candidate("b", new=64_000, prefix_source=PrefixSource.EVENTS)
    asked = request(tokens=64_000, keys=KEYS, sliceable_tokens=64_000)
    seen = FleetView((left, cold), curves={"": DEFAULT_CURVE}, fetch_price=LoadPrice(0.1, 1e-6))

    def least_s(view: FleetView) -> float:
        return least_prefill_s(asked, "m", view, lambda pool, hardware: SURE_SAMPLES)

    fetched_s = SURE_SHARE * DEFAULT_CURVE.cost_s(4_000, 60_000)
    assert least_s(seen) == (fetched_s if counts else LEAST_S)
    assert least_s(replace(seen, fetch_price=UNSET)) == LEAST_S
    assert least_s(replace(seen, candidates=(replace(left, kv_gives=""), cold))) == LEAST_S


def test_a_held_request_is_refused_as_soon_as_it_is_late() -> None:
    router = learned("a", limit=1)
    assert ask(router, "r", tokens=64_000, keys=KEYS, ttft_deadline_s=LEAST_S + 2.0) == []
    assert ask(router, "light", ttft_deadline_s=5.0) == []
    assert tell(router, ev.Tick(), 1.9) == []
    assert tell(router, ev.Tick(), 2.0) == [("r", "DEADLINE_EXCEEDED")]
    assert tell(router, ev.Tick(), 4.9) == []
    assert tell(router, ev.Tick(), 5.0) == [("light", "DEADLINE_EXCEEDED")]
    router.check_invariants()


def test_a_held_request_that_is_late_when_room_comes_is_refused_and_the_next_one_placed() -> None:
    router = learned("a", limit=1)
    ask(router, "late", ttft_deadline_s=1.0)
    ask(router, "next")
    assert tell(router, ev.Finished("xa", "OK"), 1.5) == [("late", "DEADLINE_EXCEEDED"), ("next", "a")]


def test_a_held_request_whose_prompt_was_cached_meanwhile_is_not_late() -> None:
    router = learned("a", limit=1)
    ask(router, "r", tokens=64_000, keys=KEYS, ttft_deadline_s=LEAST_S + 2.0)
    router.prefix_knowledge.index.add("a", KEYS)
    assert tell(router, ev.Tick(), 2.5) == []
    assert tell(router, ev.Finished("xa", "OK"), 3.0) == [("r", "a")]


def test_what_a_policy_holds_is_placed_while_there_is_time_for_its_prefill() -> None:
    router = learned("a", limit=0, policy=Picky())
    needed = LEAST_S / SURE_SHARE + 5.0
    assert ask(router, "heavy", tokens=64_000, keys=KEYS, ttft_deadline_s=needed) == []
    assert tell(router, ev.Tick(), 3.9) == []
    assert tell(router, ev.Tick(), 4.0) == [("heavy", "a")]


def test_a_slice_counts_for_what_it_computes() -> None:
    """Else the parts of one prompt would be counted again and again."""
    _router, [placed] = busy(limit=0)
    assert isinstance(placed, ev.Placed)
    [one] = placed.decision.view.candidates
    seen = replace(placed.decision.view, candidates=(replace(one, cached_tokens=100, new_tokens=900),))
    slice_, serve = Step(StepKind.PREFILL, "a", "part", prefix_tokens=400), Step(StepKind.SERVE, "a", "rest")
    for steps, computed in (((slice_,), 300), ((serve,), 900), ((slice_, serve), 900)):
        result = replace(placed.decision.result, steps=steps)
        assert _computed(replace(placed.decision, view=seen, result=result)) == computed


def test_a_request_keeps_its_class_and_deadline_for_its_decision() -> None:
    router, _ = busy(limit=5)
    [placed] = ask(router, "r", priority=INTERACTIVE, weight=3.0, ttft_deadline_s=9.0)
    kept = placed.decision.request
    assert (kept.priority, kept.weight, kept.ttft_deadline_s) == (INTERACTIVE, 3.0, 9.0)


@given(
    size=st.integers(20, 40),
    arrivals=st.lists(
        st.tuples(st.sampled_from(PRIORITIES), st.sampled_from("abc"), st.integers(1, 2_000)), max_size=60
    ),
    base=st.permutations(PRIORITIES),
)
@settings(max_examples=40, deadline=None)
def test_an_overloaded_router_answers_all_and_serves_lower_classes_too(
    size: int, arrivals: list[tuple[Priority, str, int]], base: list[Priority]
) -> None:
    """One instance for one request at a time, and for each that ends several of every class come: the queue is full. Each is
    answered once, and each lower class gets about the tenth of the work that it is owed."""
    router = state(limits=SaturationLimits(1), queue=QueueSettings(size=size, timeout_s=1e6))
    set_policy(router, make_policy("unified"))
    join(router, "a", 1)
    ask(router, "x0", tokens=10)
    asked: list[str] = []
    answered: list[str] = []
    served: list[Priority] = []
    numbers = count()

    def come(priority: Priority, tenant: str, tokens: int) -> None:
        asked.append(f"{priority}-{next(numbers)}")
        new = request(asked[-1], tokens=tokens, priority=priority, tenant=tenant)
        given_ = answers(router.handle(ev.PlaceRequested(new, "g"), 0.0))
        assert all(isinstance(effect, ev.Refused) for effect in given_)
        answered.extend(effect.request_id for effect in given_)

    def serve_one(running: str) -> str:
        now = 1.0 + len(served) * RETRY_S
        [placed] = [
            effect
            for effect in answers(router.handle(ev.Finished(running, "OK"), now))
            if isinstance(effect, ev.Placed)
        ]
        if not len(served) % 8:
            router.check_invariants()
        answered.append(placed.request_id)
        served.append(placed.decision.request.priority)
        return str(placed.request_id)

    for arrival in arrivals:
        come(*arrival)
    while len(router.held_requests.queue) < size:
        come(INTERACTIVE, "a", 500)
    running = "x0"
    for _ in range(240):
        running = serve_one(running)
        for priority in base:
            come(priority, "a", 500)
            come(priority, "b", 500)
        assert len(router.held_requests.queue) == size
    later = Counter(served[-110:])
    assert later[BATCH] >= 7, later
    assert later[STANDARD] >= 7, later
    while len(router.held_requests.queue):
        running = serve_one(running)
    assert sorted(answered) == sorted(asked)
