"""Tests of the learned chances that an idle session returns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.admission.return_chances import KEEP_S, MOST_RETURNS, ReturnChances
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, answer_kind, bin_of


def test_before_anything_is_observed_the_chances_are_those_of_the_recorded_agents() -> None:
    chances = ReturnChances()
    # 92 % of the answers that called a tool, and 34 % of those that ended their turn, were followed by a request within 120 s.
    assert chances.stays_idle(AnswerKind.TOOL, 0.0, 120.0) == pytest.approx(0.08, abs=0.005)
    assert chances.stays_idle(AnswerKind.STOP, 0.0, 120.0) == pytest.approx(0.66, abs=0.005)
    for kind in KINDS:
        assert chances.chance(kind, 0) == pytest.approx(1.0 - chances.stays_idle(kind, 0.0, KEEP_S))


def test_a_session_that_is_idle_for_longer_is_less_likely_to_return() -> None:
    chances = ReturnChances()
    for kind in KINDS:
        by_bin = [chances.chance(kind, bin_) for bin_ in range(BINS)]
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(by_bin))


def idle(chances: ReturnChances, kind: AnswerKind, times: Mapping[float, float]) -> None:
    """Sessions of a kind that were idle for these times, and then returned. `times`: idle time -> number of sessions; those of an
    infinite time are idle until the last bin's end."""
    now = chances._watched_at
    for bin_, (start, end) in enumerate(pairwise(EDGES_S)):
        exposure_s = sum(count * max(min(idle_s, end) - start, 0.0) for idle_s, count in times.items())
        counts = [[0] * BINS for _ in KINDS]
        counts[kind][bin_] = 1
        now += exposure_s
        chances.watch(counts, now)
    for idle_s, count in times.items():
        for _ in range(int(count) if idle_s < inf else 0):
            chances.returned(kind, bin_of(idle_s))


def test_sessions_that_never_return_lower_the_chance_and_returns_raise_it() -> None:
    one_turn, agents = ReturnChances(), ReturnChances()
    idle(one_turn, AnswerKind.FIRST_STOP, {inf: 500})
    idle(agents, AnswerKind.FIRST_STOP, {5.0: 500})
    assert one_turn.chance(AnswerKind.FIRST_STOP, 0) < 0.05
    assert agents.chance(AnswerKind.FIRST_STOP, 0) > 0.9
    assert one_turn.chance(AnswerKind.STOP, 0) == ReturnChances().chance(AnswerKind.STOP, 0)


def test_the_learned_chance_is_the_share_that_returned_in_time() -> None:
    chances = ReturnChances()
    for _ in range(40):
        idle(chances, AnswerKind.OTHER, {1.5: 75, inf: 25})
    assert 0.68 < chances.chance(AnswerKind.OTHER, 0) < 0.76


def test_new_observations_replace_old_ones() -> None:
    chances = ReturnChances()
    idle(chances, AnswerKind.TOOL, {0.5: MOST_RETURNS + 1})
    before = chances.chance(AnswerKind.TOOL, 0)
    idle(chances, AnswerKind.TOOL, {1_300.0: 3 * MOST_RETURNS})
    assert chances.chance(AnswerKind.TOOL, 0) < before / 2


def test_idle_times_in_which_no_session_is_seen_for_long_keep_their_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_router.core.admission.return_chances.MOST_RETURNS", 30.0)
    chances, prior = ReturnChances(), ReturnChances()
    for _ in range(1_100):
        idle(chances, AnswerKind.TOOL, {0.5: 16})
    assert chances.stays_idle(AnswerKind.TOOL, 300.0, 3_000.0) == prior.stays_idle(AnswerKind.TOOL, 300.0, 3_000.0)
    assert chances.chance(AnswerKind.TOOL, 0) > 0.99


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.0, 3_000.0), st.booleans()), max_size=50))
def test_whatever_is_observed_a_chance_is_a_probability(seen: list[tuple[AnswerKind, float, bool]]) -> None:
    chances = ReturnChances()
    for kind, idle_s, returned in seen:
        idle(chances, kind, {idle_s if returned else inf: 1})
        assert all(0.0 < share <= 1.0 for share in chances.presence)
    assert all(0.0 <= chance <= 1.0 for kind in KINDS for chance in chances.chances(kind))


def test_the_kind_of_an_answer_follows_from_its_reason_and_its_turn() -> None:
    assert answer_kind("TOOL_CALLS", 1) is AnswerKind.FIRST_TOOL
    assert answer_kind("TOOL_CALLS", 2) is AnswerKind.TOOL
    assert answer_kind("STOP", 3) is AnswerKind.STOP
    assert answer_kind("", 1) is AnswerKind.FIRST_OTHER
    assert answer_kind("LENGTH", 9) is AnswerKind.OTHER
