"""What counts as a change between a decision and its what-if, and the predicted change of TTFT."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.policy_comparison import PolicyComparison, ttft_change_s
from pointsman_router.core.placement_types import Decision, PolicyResult, PrefillBacklog, Step, StepKind
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurve
from tests.support.router_values import join, place, request, state

CURVE = PrefillCurve(base_s=0.1, token_s=0.001, pair_s=0.0)


def decided(curve: PrefillCurve = CURVE) -> Decision:
    """A prompt of 1,000 tokens on a fleet of two: a has 400 of them cached, and 2,000 tokens to compute before it."""
    fleet = state("round_robin")
    for number, name in enumerate("ab"):
        join(fleet, name, number)
    placed = place(fleet, request("r", 1_000))
    assert isinstance(placed, ev.Placed)
    made = placed.decision
    a, b = made.view.candidates
    backlog = PrefillBacklog(queue=((2_000, 0),), advanced_at=made.view.now)
    there = replace(a, cached_tokens=400, new_tokens=600, prefill_backlog=backlog)
    return replace(made, view=replace(made.view, candidates=(there, b), curves={"": curve}))


def plan(decision: Decision, *steps: tuple[StepKind, str]) -> Decision:
    result = PolicyResult(tuple(Step(kind, name, "why") for kind, name in steps), "why")
    one = decision.view.find(steps[-1][1]) if steps else None
    return replace(decision, result=result, cached_tokens=one.cached_tokens if one else 0)


SERVE, PREFILL = StepKind.SERVE, StepKind.PREFILL


@pytest.mark.parametrize(
    ("would", "changed"),
    [
        (((SERVE, "a"),), False),
        (((PREFILL, "a"),), False),
        (((PREFILL, "a"), (SERVE, "a")), False),
        (((SERVE, "b"),), True),
        (((PREFILL, "b"), (SERVE, "a")), True),
        ((), True),
    ],
)
def test_a_change_is_one_of_instances(would: tuple[tuple[StepKind, str], ...], changed: bool) -> None:
    comparison = PolicyComparison()
    made = decided()
    comparison.add(plan(made, (SERVE, "a")), plan(made, *would))
    assert (comparison.decided, comparison.changed, len(comparison.changes)) == (1, changed, changed)
    assert comparison.held == (not would)


def test_the_first_token_moves_by_what_is_ahead_and_by_its_own_prefill() -> None:
    made = decided()
    here, there = plan(made, (SERVE, "a")), plan(made, (SERVE, "b"))
    # On a the prompt waits for 2.1 s and takes 0.7 s; on b it takes 1.1 s.
    assert ttft_change_s(here, there) == pytest.approx(1.1 - 2.8)
    assert ttft_change_s(here, plan(made, (PREFILL, "b"), (SERVE, "a"))) == pytest.approx(1.1 - 2.8)
    assert ttft_change_s(here, plan(made)) is None
    comparison = PolicyComparison()
    for would in (there, here, plan(made)):
        comparison.add(here, would)
    assert (comparison.timed, comparison.ttft_change_s) == pytest.approx((2, 1.1 - 2.8))
    [group] = comparison.groups()
    assert (group.timed, group.ttft_change_s) == pytest.approx((2, 1.1 - 2.8))


def test_without_a_learned_curve_no_seconds_are_shown() -> None:
    made = decided(DEFAULT_CURVE)
    assert ttft_change_s(plan(made, (SERVE, "a")), plan(made, (SERVE, "b"))) is None
