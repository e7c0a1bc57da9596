"""Tests of the share of prefill that is computed again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.admission.recomputation import SLOT_S, WINDOW_S, Recomputation


def test_the_share_is_of_all_tokens_of_the_last_minute() -> None:
    sums = Recomputation()
    sums.add(900, 0, 10.0)
    sums.add(100, 50, 20.0)
    assert sums.share(30.0) == 0.05


def test_work_is_forgotten_after_a_minute() -> None:
    sums = Recomputation()
    sums.add(100, 100, 10.0)
    assert sums.share(10.0 + WINDOW_S - 2 * SLOT_S) == 1.0
    assert sums.share(10.0 + WINDOW_S + SLOT_S) == 0.0


def test_without_work_the_share_is_0() -> None:
    assert Recomputation().share(5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 10_000), st.floats(0.0, 1.0)), max_size=60))
def test_the_sums_are_those_of_the_entries_in_the_window(entries: list[tuple[float, int, float]]) -> None:
    sums, now, listed = Recomputation(), 0.0, []
    for pause, tokens, share in entries:
        now += pause
        again = int(tokens * share)
        sums.add(tokens, again, now)
        listed.append((now, tokens, again))
    slot = now // SLOT_S
    inside = [(tokens, again) for at, tokens, again in listed if slot - at // SLOT_S < WINDOW_S / SLOT_S]
    computed, computed_again = sums.tokens(now)
    assert computed == sum(tokens for tokens, _ in inside)
    assert computed_again == sum(again for _, again in inside)
