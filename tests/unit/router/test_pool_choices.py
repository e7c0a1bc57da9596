"""The policy that `auto` takes for a pool does not follow each resynchronisation, and each change of it is change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_common.core.key_report_types import SnapshotBegin
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, redecide
from pointsman_router.core.learning.pool_facts import COST_BAND, LEARNED_AFTER, LEAST_KEPT_S, SETTLE_S, PoolChoices
from pointsman_router.core.placement_types import Load, PoolFacts, StepTotals
from pointsman_router.core.policy.auto import FEW_INSTANCES, LONG_COST, SHORT_COST, Auto
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.prefill_curve import MeanWork, PrefillWork
from tests.support.router_values import join, place, request, set_policy, state

TICK_S = 0.5
NAMES = ("a", "b", "c")
# Its mean prefill is in the middle of what `foresight` is taken for.
MEAN_WORK = MeanWork(PrefillWork(20_000.0, 20_000.0 * 10_000.0), 1_000)
KNOWN = PoolFacts(8, 8, 8, mean_cost=4.0)


class Fleet:
    """Instances that report their steps to the owner of their pool, in virtual time."""

    def __init__(self, size: int = len(NAMES), facts: PoolFacts | None = None) -> None:
        self.now = 0.0
        self.streams: dict[str, int] = {}
        self.changes: list[tuple[float, ev.PolicyTaken]] = []
        self.stored: PoolFacts | None = facts
        self.take_over(NAMES[:size])

    def take_over(self, names: Sequence[str] = ()) -> None:
        """Let another router own the pool, to which `names` (default: the present instances) report."""
        names = names or list(self.streams)
        self.streams.clear()
        self.router = state("auto", owns_all=False, lost_instance_s=1.0)
        for name in names:
            self.join(name)
        self.handle(ev.PoolTaken("m", mean_work=MEAN_WORK, facts=self.stored))
        self.prefills = 0

    def handle(self, event: ev.Event) -> None:
        effects = self.router.handle(event, self.now)
        while self.router.unfinished:
            effects += self.router.handle(ev.GoOn(), self.now)
        self.changes += [(self.now, effect) for effect in effects if isinstance(effect, ev.PolicyTaken)]
        for effect in effects:
            if isinstance(effect, ev.PoolFactsSet):
                self.stored = effect.facts

    def join(self, name: str) -> None:
        self.streams[name] = stream_id = max(self.streams.values(), default=0) + 1
        join(self.router, name, stream_id, now=self.now)

    def resync(self, name: str) -> None:
        self.handle(ev.KeysReported(self.streams[name], name, SnapshotBegin(0)))

    def lose(self, name: str) -> None:
        if (stream_id := self.streams.pop(name, None)) is not None:
            self.handle(ev.AgentLost(stream_id, name))

    def wait(self, seconds: float, *, learns: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.prefills += 1
            tokens = 10_000 * self.prefills * learns
            steps = StepTotals(self.prefills, 0.0, 0, tokens, tokens * 5_000, self.prefills, 1.0 * self.prefills)
            for name, stream_id in self.streams.items():
                self.handle(ev.LoadReported(stream_id, name, Load(self.now, steps=steps)))
            self.handle(ev.Tick())

    @property
    def reason(self) -> str:
        return self.router.pool_policy("m", self.now).taken.reason


def settled(size: int = len(NAMES)) -> Fleet:
    """A fleet whose policy has been the same for long."""
    fleet = Fleet(size)
    fleet.router.views.facts("m", fleet.now)
    fleet.wait(90.0)
    assert fleet.reason == "times_predictable"
    fleet.changes.clear()
    return fleet


def test_an_instance_that_resynchronises_again_and_again_changes_nothing() -> None:
    fleet = settled()
    for _ in range(20):
        fleet.lose("c")
        fleet.wait(2.0)
        assert fleet.router.pool_policy("m", fleet.now).facts.instances < FEW_INSTANCES
        fleet.join("c")
        fleet.wait(8.0)
    for _ in range(20):
        fleet.resync("b")
        fleet.resync("c")
        fleet.wait(2.0)
        assert fleet.router.pool_policy("m", fleet.now).facts.exact < 2
        fleet.join("b")
        fleet.join("c")
        fleet.wait(8.0)
    assert fleet.changes == []


def test_an_instance_that_is_lost_for_good_changes_the_policy_once_and_the_change_is_told() -> None:
    fleet = settled()
    lost_at = fleet.now
    fleet.lose("c")
    fleet.wait(5.0)
    choice = fleet.router.pool_policy("m", fleet.now)
    assert (choice.taken.reason, choice.facts.instances) == ("times_predictable", 2)
    assert choice.asked is not None
    assert choice.asked.reason == "few_instances"
    fleet.wait(200.0)
    [(at, change)] = fleet.changes
    assert SETTLE_S <= at - lost_at <= SETTLE_S + 2.0
    assert change == ev.PolicyTaken("m", "unified", "few_instances", "foresight", "times_predictable", change.facts)
    assert change.facts.instances == 2
    assert fleet.stored == change.facts
    choice = fleet.router.pool_policy("m", fleet.now)
    assert (choice.taken.reason, choice.since, choice.asked) == ("few_instances", at, None)


def test_what_is_decided_while_a_change_waits_is_decided_again_in_the_same_way() -> None:
    fleet = settled()
    fleet.lose("c")
    for after in (0.0, 5.0, SETTLE_S + 2.0):
        fleet.wait(after)
        answer = place(fleet.router, request(f"after {after}", 8_000), fleet.now)
        assert isinstance(answer, ev.Placed)
        assert answer.decision.result.policy_reason == fleet.reason
        assert differences(answer.decision, redecide(answer.decision)) == []


def test_a_pool_that_starts_with_one_of_its_instances_is_not_delayed() -> None:
    fleet = Fleet(1)
    fleet.router.views.facts("m", fleet.now)
    fleet.wait(10.0)
    assert fleet.reason == "few_instances"
    fleet.join("b")
    fleet.wait(10.0)
    fleet.join("c")
    joined_at = fleet.now
    fleet.wait(20.0)
    [(at, change)] = fleet.changes
    assert change.reason == "times_predictable"
    assert at - joined_at <= SETTLE_S + 2.0


def test_a_curve_that_is_learned_counts_at_once() -> None:
    fleet = Fleet()
    assert fleet.reason == "curve_not_learned"
    fleet.wait((LEARNED_AFTER + 3) * TICK_S)
    [(_, change)] = fleet.changes
    assert (change.before_reason, change.reason) == ("curve_not_learned", "times_predictable")


def test_another_owner_keeps_the_policy_until_it_knows_better_for_a_minute() -> None:
    fleet = settled()
    fleet.take_over()
    assert fleet.reason == "times_predictable"
    fleet.wait(LEAST_KEPT_S - 2.0)
    assert fleet.changes == []
    fleet.take_over()
    begun = fleet.now
    fleet.wait(100.0, learns=False)
    [(at, change)] = fleet.changes
    assert change.reason == "curve_not_learned"
    assert LEAST_KEPT_S <= at - begun <= LEAST_KEPT_S + 2.0


def test_another_owner_of_a_pool_of_which_nothing_is_stored_chooses_at_once() -> None:
    fleet = Fleet()
    fleet.take_over()
    assert fleet.reason == "curve_not_learned"
    fleet.wait((LEARNED_AFTER + 3) * TICK_S)
    assert fleet.reason == "times_predictable"
    assert len(fleet.changes) == 1


def test_what_operators_choose_holds_at_once_and_is_told_without_a_reason() -> None:
    fleet = settled()
    set_policy(fleet.router, make_policy("lpwl"), fleet.now)
    assert fleet.router.pool_policy("m", fleet.now).taken.policy.name == "lpwl"
    fleet.lose("c")
    fleet.wait(2.0)
    set_policy(fleet.router, make_policy("auto"), fleet.now)
    assert fleet.reason == "few_instances"
    fleet.wait(2.0)
    assert [(change.policy, change.reason) for _, change in fleet.changes] == [
        ("lpwl", ""),
        ("unified", "few_instances"),
    ]


@pytest.mark.parametrize("bound", [SHORT_COST, LONG_COST])
def test_a_mean_cost_about_a_bound_does_not_change_the_policy(bound: float) -> None:
    kept = Choices(replace(KNOWN, mean_cost=bound))
    for number in range(600):
        kept.second(replace(KNOWN, mean_cost=bound * (1.0 + (0.9 if number // 60 % 2 else -0.9) * COST_BAND)))
    assert kept.changed_at == []
    kept.wait(replace(KNOWN, mean_cost=bound * 0.8), 20)
    assert len(kept.changed_at) == 1


class Choices:
    """PoolChoices of one pool, asked each second."""

    def __init__(self, facts: PoolFacts) -> None:
        self.now, self.facts = 0.0, facts
        self.choices = PoolChoices(lambda _pool, _now: self.facts, Auto().taken)
        self.choices.facts("m", self.now)
        self.changed_at: list[float] = []

    def second(self, facts: PoolFacts) -> None:
        self.now, self.facts = self.now + 1.0, facts
        before = self.choices.choice("m", self.now - 0.5).taken
        changes = [
            effect for effect in self.choices.tick(lambda _: True, self.now) if isinstance(effect, ev.PolicyTaken)
        ]
        after = Auto().taken(self.choices.facts("m", self.now))
        assert len(changes) == (not after.acts_as(before))
        self.changed_at += [self.now for _ in changes]

    def wait(self, facts: PoolFacts, seconds: int) -> None:
        for _ in range(seconds):
            self.second(facts)


COSTS = st.sampled_from([0.0, 0.3, 0.49, 0.51, 1.0, 7.9, 8.1, 12.0, 19.9, 20.1, 40.0])
COUNTS = st.integers(0, 4)
FACTS = st.builds(PoolFacts, COUNTS, COUNTS, COUNTS, COSTS)


@given(FACTS, st.lists(st.tuples(FACTS, st.sampled_from([1, 2, 5, 9, 12, 30, 61])), max_size=30), FACTS)
@settings(max_examples=100)
@example(KNOWN, [(replace(KNOWN, instances=2), 9), (KNOWN, 1)] * 10, KNOWN)
def test_a_policy_changes_once_a_minute_at_most_and_is_that_of_the_facts_in_the_end(
    first: PoolFacts, then: list[tuple[PoolFacts, int]], last: PoolFacts
) -> None:
    kept = Choices(first)
    for facts, seconds in then:
        kept.wait(facts, seconds)
    kept.wait(last, round(SETTLE_S + LEAST_KEPT_S))
    gaps = [later - earlier for earlier, later in zip(kept.changed_at, kept.changed_at[1:], strict=False)]
    assert all(gap >= LEAST_KEPT_S for gap in gaps)
    in_force = Auto().taken(kept.choices.facts("m", kept.now))
    near = [replace(last, mean_cost=last.mean_cost * factor) for factor in (1.0 - COST_BAND, 1.0, 1.0 + COST_BAND)]
    assert any(Auto().taken(facts).acts_as(in_force) for facts in near)


ACTIONS = st.tuples(
    st.sampled_from(["resync", "lose", "return", "take over"]),
    st.sampled_from(NAMES),
    st.sampled_from([0.5, 2.0, 9.0, 15.0, 40.0]),
)


@given(st.lists(ACTIONS, max_size=25))
@settings(max_examples=25)
def test_whatever_instances_and_owners_do_a_pool_changes_its_policy_once_a_minute(
    actions: list[tuple[str, str, float]],
) -> None:
    fleet = settled()
    for action, name, seconds in actions:
        match action:
            case "resync" if name in fleet.streams:
                fleet.resync(name)
            case "lose":
                fleet.lose(name)
            case "return":
                fleet.join(name)
            case "take over":
                fleet.take_over()
        fleet.wait(seconds)
    fleet.wait(SETTLE_S + LEAST_KEPT_S)
    times = [at for at, _ in fleet.changes]
    assert all(later - earlier >= LEAST_KEPT_S for earlier, later in itertools.pairwise(times))
    choice = fleet.router.pool_policy("m", fleet.now)
    assert Auto().taken(choice.facts).acts_as(choice.taken)
    fleet.router.check_invariants()
