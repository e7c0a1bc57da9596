"""Tests of the learned chances that an idle session returns."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.admission.return_chances import MOST_RETURNS, ReturnChances
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, answer_kind, bin_of


def test_before_anything_is_observed_the_chances_are_those_of_the_recorded_agents() -> None:
    chances = ReturnChances()
    # 92 % of the answers that called a tool, and 34 % of those that ended their turn, were followed by a request within 120 s.
    assert abs(chances.chance(AnswerKind.TOOL, 0) - 0.92) < 0.005
    assert abs(chances.chance(AnswerKind.STOP, 0) - 0.34) < 0.005


def test_a_session_that_is_idle_for_longer_is_less_likely_to_return() -> None:
    chances = ReturnChances()
    for kind in KINDS:
        by_bin = [chances.chance(kind, bin_) for bin_ in range(BINS)]
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(by_bin))


def test_sessions_that_never_return_lower_the_chance_and_returns_raise_it() -> None:
    one_turn, agents = ReturnChances(), ReturnChances()
    for _ in range(500):
        for bin_ in range(BINS):
            one_turn.passed(AnswerKind.FIRST_STOP, bin_)
        agents.returned(AnswerKind.FIRST_STOP, bin_of(5.0), 5.0)
    assert one_turn.chance(AnswerKind.FIRST_STOP, 0) < 0.05
    assert agents.chance(AnswerKind.FIRST_STOP, 0) > 0.9
    assert one_turn.chance(AnswerKind.STOP, 0) == ReturnChances().chance(AnswerKind.STOP, 0)


def test_the_learned_chance_is_the_share_that_returned_in_time() -> None:
    chances = ReturnChances()
    for number in range(4_000):
        if number % 4:
            chances.passed(AnswerKind.OTHER, 0)
            chances.returned(AnswerKind.OTHER, 1, 1.5)
        else:
            for bin_ in range(BINS):
                chances.passed(AnswerKind.OTHER, bin_)
    assert 0.68 < chances.chance(AnswerKind.OTHER, 0) < 0.76


def test_new_observations_replace_old_ones() -> None:
    chances = ReturnChances()
    for _ in range(int(MOST_RETURNS) + 1):
        chances.returned(AnswerKind.TOOL, 0, 0.5)
    before = chances.chance(AnswerKind.TOOL, 0)
    for _ in range(3 * int(MOST_RETURNS)):
        for bin_ in range(BINS - 1):
            chances.passed(AnswerKind.TOOL, bin_)
        chances.returned(AnswerKind.TOOL, BINS - 1, 1_300.0)
    assert chances.chance(AnswerKind.TOOL, 0) < before / 2


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.0, 5_000.0), st.booleans()), max_size=200))
def test_whatever_is_observed_a_chance_is_a_probability(seen: list[tuple[AnswerKind, float, bool]]) -> None:
    chances = ReturnChances()
    for kind, idle_s, returned in seen:
        bin_ = min(bin_of(idle_s), BINS - 1)
        for passed in range(bin_):
            chances.passed(kind, passed)
        if returned:
            chances.returned(kind, bin_, idle_s)
        else:
            chances.lost_sight(kind, bin_, min(idle_s, EDGES_S[bin_ + 1]))
    assert all(0.0 <= chance <= 1.0 for kind in KINDS for chance in chances.chances(kind))


def test_the_kind_of_an_answer_follows_from_its_reason_and_its_turn() -> None:
    assert answer_kind("TOOL_CALLS", 1) is AnswerKind.FIRST_TOOL
    assert answer_kind("TOOL_CALLS", 2) is AnswerKind.TOOL
    assert answer_kind("STOP", 3) is AnswerKind.STOP
    assert answer_kind("", 1) is AnswerKind.FIRST_OTHER
    assert answer_kind("LENGTH", 9) is AnswerKind.OTHER
