"""Confidence intervals of paired trials, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.experiments.paired_statistics import (
    difference_by_seed,
    estimate,
    paired_difference,
    trimmed_difference,
)

numbers = st.floats(-1e3, 1e3)


def test_an_interval_by_hand() -> None:
    # Mean 3, sample variance 10 / 4, t(4) at 97.5 % is 2.776 in every table.
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert found.differs
    assert (found.low, found.high) == pytest.approx((1.037, 4.963), abs=1e-3)


def test_pairing_takes_out_what_both_share() -> None:
    baseline = [10.0, 200.0, 3_000.0]
    found = paired_difference([8.0, 198.0, 2_999.0], baseline)
    # Differences -2, -2, -1: mean -5/3, s = 1/sqrt(3), t(2) = 4.303.
    assert found.mean == pytest.approx(-5 / 3)
    assert found.half_width == pytest.approx(4.303 / 3, rel=1e-3)
    assert found.differs
    assert not estimate(baseline).differs


def test_one_trial_proves_nothing() -> None:
    found = paired_difference([1.0], [5.0])
    assert (found.mean, found.half_width, found.trials) == (-4.0, None, 1)
    assert not found.differs
    with pytest.raises(ValueError, match="no values"):
        estimate([])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_equal_trials_do_not_differ() -> None:
    assert not paired_difference([1.0, 2.0], [1.0, 2.0]).differs
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).differs


def test_a_trimmed_interval_by_hand() -> None:
    found = trimmed_difference([1.0, 2.0, 3.0, 4.0, 905.0], [0.0] * 5)
    # Left are 2, 3, 4; pulled in 2, 2, 3, 4, 4 with sample variance 4 / 4; t(2) = 4.303.
    assert (found.mean, found.trials) == (3.0, 5)
    assert found.half_width == pytest.approx(4.303 / (0.6 * math.sqrt(5)), rel=1e-3)
    three = [1.0, 2.0, 906.0]
    assert trimmed_difference(three, [0.0] * 3) == estimate(three), "too few to leave any out"


def test_trials_are_paired_by_their_seeds() -> None:
    found = difference_by_seed({1: 5.0, 2: 8.0, 3: 1.0}, {3: 2.0, 2: 9.0, 4: 7.0})
    assert found == paired_difference([8.0, 1.0], [9.0, 2.0])
    assert found.verdict == "lower"
    assert difference_by_seed({1: 5.0}, {2: 5.0}) is None


def test_a_difference_in_a_word() -> None:
    assert paired_difference([1.0], [5.0]).verdict == "one trial"
    assert paired_difference([1.0, 9.0], [5.0, 5.0]).verdict == "no difference"
    assert paired_difference([6.0, 6.01], [5.0, 5.0]).verdict == "higher"


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20), numbers)
def test_what_is_added_to_both_changes_nothing(pairs: list[tuple[float, float]], shift: float) -> None:
    values, baseline = zip(*pairs, strict=True)
    one = paired_difference(values, baseline)
    other = paired_difference([value + shift for value in values], [value + shift for value in baseline])
    swapped = paired_difference(baseline, values)
    assert other.mean == pytest.approx(one.mean, abs=1e-6)
    assert other.half_width == pytest.approx(one.half_width, abs=1e-5)
    assert swapped.mean == pytest.approx(-one.mean, abs=1e-9)
