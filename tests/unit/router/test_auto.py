"""Which policy `auto` takes for a pool, by what is known of the pool."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, redecide
from pointsman_router.core.learning.pool_facts import LEARNED_AFTER, LEAST_KEPT_S, MAX_AGE_S, SETTLE_S, SURE_AFTER
from pointsman_router.core.placement_types import Decision, KvRole, KvTransfer, Load, PoolFacts, StepTotals
from pointsman_router.core.policy.auto import AdmissionChoice, Auto, admission_choice
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.policy.unified import Unified
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.convert.operator_messages import admission_status
from tests.support.router_values import join, place, request, set_policy, state

KNOWN = PoolFacts(instances=4, exact=4, learned=4, mean_cost=5.0)
OURS = Foresight(remainder_weight=1.0, interference=0.1, answer_factor=1.5)


@pytest.mark.parametrize(
    ("facts", "policy", "reason"),
    [
        (KNOWN, OURS, "times_predictable"),
        (replace(KNOWN, exact=2, learned=2), OURS, "times_predictable"),
        (replace(KNOWN, exact=1), Unified(), "few_exact_prefixes"),
        (replace(KNOWN, learned=1), Unified(), "curve_not_learned"),
        (replace(KNOWN, exact=1, learned=1), Unified(), "few_exact_prefixes"),
        (replace(KNOWN, mean_cost=0.5), OURS, "times_predictable"),
        (replace(KNOWN, mean_cost=0.4), Unified(), "prefills_short"),
        (replace(KNOWN, mean_cost=19.9), OURS, "times_predictable"),
        (replace(KNOWN, mean_cost=20.0), Unified(), "prefills_long"),
        (PoolFacts(3, 3, 3, mean_cost=5.0), OURS, "times_predictable"),
        (PoolFacts(2, 2, 2, mean_cost=0.4), Unified(), "prefills_short"),
        (PoolFacts(2, 2, 2, mean_cost=5.0), Unified(), "few_instances"),
        (PoolFacts(2, 2, 2, mean_cost=30.0), Unified(), "few_instances"),
        (PoolFacts(), Unified(), "few_exact_prefixes"),
    ],
)
def test_a_pool_gets_the_best_policy_for_what_is_known_of_it(facts: PoolFacts, policy: Policy, reason: str) -> None:
    taken = Auto().taken(facts)
    assert (taken.policy, taken.reason) == (policy, reason)


@pytest.mark.parametrize(
    ("policy", "facts", "switched_on", "expected"),
    [
        ("auto", KNOWN, False, AdmissionChoice(True, "times_predictable")),
        ("auto", replace(KNOWN, learned=0), False, AdmissionChoice(False, "curve_not_learned")),
        ("auto", replace(KNOWN, learned=0), True, AdmissionChoice(True, "setting")),
        ("auto", replace(KNOWN, mean_cost=0.1), False, AdmissionChoice(False, "prefills_short")),
        ("auto", PoolFacts(3, 3, 3, mean_cost=5.0), False, AdmissionChoice(True, "times_predictable")),
        ("auto", PoolFacts(2, 2, 2, mean_cost=5.0), False, AdmissionChoice(False, "few_instances")),
        ("auto", PoolFacts(2, 2, 2, mean_cost=30.0), True, AdmissionChoice(True, "setting")),
        ("auto", replace(KNOWN, mean_cost=30.0), False, AdmissionChoice(True, "prefills_long")),
        ("foresight", KNOWN, False, AdmissionChoice(False, "setting")),
        ("foresight", KNOWN, True, AdmissionChoice(True, "setting")),
    ],
)
def test_sessions_are_admitted_by_the_setting_or_where_auto_takes_foresight(
    policy: str, facts: PoolFacts, switched_on: bool, expected: AdmissionChoice
) -> None:
    assert admission_choice(make_policy(policy), facts, switched_on=switched_on) == expected


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        (KNOWN, OURS.without_holds()),
        (replace(KNOWN, learned=1), Unified()),
    ],
)
def test_a_hold_that_ends_is_placed_by_the_policy_that_the_pool_has(facts: PoolFacts, policy: Policy) -> None:
    assert Auto().without_holds(facts) == policy


OTHERS = ("b", "c")


def join_three(router: RouterState) -> None:
    """Instance a and OTHERS, which no request gets."""
    for number, name in enumerate(("a", *OTHERS), start=1):
        join(router, name, number)


def decided(router: RouterState, name: str, now: float, **asked: Any) -> Decision:
    answer = place(router, request(name, exclude=OTHERS, **asked), now)
    assert isinstance(answer, ev.Placed)
    return answer.decision


def report(router: RouterState, at: float) -> None:
    for agent, instance in enumerate(("a", *OTHERS), start=1):
        router.handle(ev.LoadReported(agent, instance, Load(at)), at)


def learn(router: RouterState, first: int, count: int, start: float) -> None:
    """Let prefills of 8,000 tokens end, one after another, while the agents report."""
    for number in range(first, first + count):
        at = start + number
        report(router, at)
        decided(router, f"r{number}", at, tokens=8_000)
        router.handle(ev.FirstToken(f"r{number}"), at + 0.5)
        router.handle(ev.Finished(f"r{number}", "OK"), at + 0.6)


def test_a_first_long_prompt_decides_nothing_though_engines_tell_their_steps() -> None:
    router = state("auto")
    join_three(router)
    for number in range(1, LEARNED_AFTER + 2):
        steps = StepTotals(number, number * 0.1, 0, number * 1_000, number * 1_000_000, number, number * 0.1)
        report(router, float(number))
        router.handle(ev.LoadReported(1, "a", Load(float(number), steps=steps)), float(number))
    assert router.prefill_observer.samples("m", "") >= LEARNED_AFTER
    reasons, at = [], LEARNED_AFTER + 2.0
    for number in range(SURE_AFTER + 1):
        at += MAX_AGE_S
        report(router, at)
        reasons.append(router.policy.taken(router.views.facts("m", at)).reason)
        decided(router, f"r{number}", at, tokens=10 if number else 20_000)
    assert reasons == ["curve_not_learned"] * SURE_AFTER + ["prefills_short"]


def test_a_pool_changes_its_policy_when_its_curve_is_learned() -> None:
    router = state("auto")
    join_three(router)
    learn(router, 0, LEARNED_AFTER - 1, 0.0)
    before = decided(router, "before", LEARNED_AFTER, tokens=8_000)
    assert (before.policy.name, before.result.policy) == ("auto", "unified")
    assert before.result.policy_reason == "curve_not_learned"
    facts = before.view.facts
    assert (facts.instances, facts.exact, facts.learned) == (3, 3, 0)
    assert facts.mean_cost == pytest.approx(8_000 / 5_000, rel=0.2)
    router.handle(ev.FirstToken("before"), LEARNED_AFTER + 0.5)
    after = decided(router, "after", LEARNED_AFTER + 0.5 + MAX_AGE_S, tokens=1_000)
    assert (after.policy.name, after.result.policy) == ("auto", "foresight")
    assert after.result.policy_reason == "times_predictable"
    for decision in (before, after):
        assert differences(decision, redecide(decision)) == []


def test_sessions_are_counted_under_every_policy_and_admitted_from_when_auto_takes_foresight() -> None:
    router, by_hand = state("auto"), state("foresight")
    for router_state in (router, by_hand):
        join_three(router_state)
        learn(router_state, 0, LEARNED_AFTER, 0.0)
        decided(router_state, "late", LEARNED_AFTER + MAX_AGE_S, tokens=8_000, session_id="s", tenant="t")
    assert router.admission.applies("m", LEARNED_AFTER + MAX_AGE_S)
    assert "t/s" in router.admission.pools["m"].ledger.sessions
    assert admission_status(router, "m", LEARNED_AFTER + MAX_AGE_S) is not None
    assert not router.admission.applies("other", 0.0)
    assert not by_hand.admission.applies("m", LEARNED_AFTER + MAX_AGE_S)
    assert "t/s" in by_hand.admission.pools["m"].ledger.sessions
    assert admission_status(by_hand, "m", LEARNED_AFTER + MAX_AGE_S) is None


def test_a_decision_of_another_policy_is_decided_as_auto_would_have_on_the_facts_of_then() -> None:
    router = state("lpwl")
    join_three(router)
    was = decided(router, "r", 0.0, tokens=1_000)
    assert (was.result.policy, was.result.policy_reason) == ("", "")
    learn(router, 1, LEARNED_AFTER, 1.0)
    would = router.what_if(was, make_policy("auto"))
    assert (would.result.policy, would.result.policy_reason) == ("unified", "curve_not_learned")


def test_instances_that_are_not_ready_or_only_prefill_do_not_count() -> None:
    router = state("auto")
    join(router, "a", 1)
    join(router, "b", 2, exact_prefix=False)
    join(router, "c", 3)
    producer = KvTransfer("MOONCAKE", "http://p", role=KvRole.PRODUCER)
    join(router, "p", 4, kv_transfer=producer)
    assert router.views.facts("m", 0.0) == PoolFacts(instances=3, exact=2)
    router.handle(ev.LoadReported(3, "c", Load(0.1, healthy=False)), 0.1)
    assert router.views.facts("m", 0.1) == PoolFacts(instances=3, exact=2)
    assert router.views.facts("m", MAX_AGE_S) == PoolFacts(instances=2, exact=1)
    assert router.views.facts("other", MAX_AGE_S) == PoolFacts()


def test_a_request_that_foresight_held_is_placed_when_the_pool_gets_another_policy() -> None:
    router = state("auto")
    join_three(router)
    learn(router, 0, LEARNED_AFTER, 0.0)
    router.handle(ev.Tick(), LEARNED_AFTER)
    late = LEARNED_AFTER + LEAST_KEPT_S
    report(router, late)
    decided(router, "first", late, tokens=60_000)
    held = router.handle(ev.PlaceRequested(request("held", 55_000, exclude=OTHERS), "g"), late + 0.1)
    assert not [effect for effect in held if isinstance(effect, ev.Placed)]
    set_policy(router, make_policy("foresight"), late + 0.2)
    assert len(router.held_requests.queue) == 1
    set_policy(router, make_policy("auto"), late + 0.3)
    assert len(router.held_requests.queue) == 1
    silent = late + router.settings.stale_keys_s + 0.5
    assert not [effect for effect in router.handle(ev.Tick(), silent) if isinstance(effect, ev.Placed)]
    effects = router.handle(ev.Tick(), silent + SETTLE_S)
    [placed] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (placed.request_id, placed.decision.result.policy) == ("held", "unified")
    router.check_invariants()
