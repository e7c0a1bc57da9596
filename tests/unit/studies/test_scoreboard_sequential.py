"""The board's intervals: how often they show a difference where there is none, and how soon one that is there."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import stdtrit

from studies.scoreboard.sequential import CRITICAL, FIRST_LOOK, LEVEL, MOST, SPENDING, interval

DRAWS = 200_000
Drawn = NDArray[np.float64]


def shares_shown(values: Drawn) -> Drawn:
    """Return the share of the rows whose interval leaves out 0 at a look for the first time, by look."""
    shown, shares = np.zeros(len(values), bool), []
    for count in range(FIRST_LOOK, MOST + 1):
        taken = values[:, :count]
        t = np.abs(taken.mean(axis=1)) / (taken.std(axis=1, ddof=1) / math.sqrt(count))
        new = ~shown & (t > CRITICAL[count])
        shares.append(new.mean())
        shown |= new
    return np.array(shares)


def test_the_first_look_is_students() -> None:
    spent = LEVEL * (FIRST_LOOK / MOST) ** SPENDING
    assert CRITICAL[FIRST_LOOK] == pytest.approx(stdtrit(FIRST_LOOK - 1, 1 - spent / 2), abs=1e-3)


def test_each_look_spends_its_part_of_the_level() -> None:
    shares = shares_shown(np.random.default_rng(1).normal(0.0, 0.3, (DRAWS, MOST)))
    spent = [LEVEL * (count / MOST) ** SPENDING for count in range(FIRST_LOOK, MOST + 1)]
    assert np.cumsum(shares) == pytest.approx(spent, abs=0.0018)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda rng, shape: rng.standard_t(4, shape),
        lambda rng, shape: rng.laplace(0.0, 1.0, shape),
        # Rounds that are alike but for an outlier now and then.
        lambda rng, shape: rng.normal(0.0, 0.1, shape) + (rng.random(shape) < 0.1) * rng.normal(0.0, 1.0, shape),
    ],
    ids=["Student's, 4", "Laplace", "outliers"],
)
def test_equal_routers_differ_in_one_of_twenty_comparisons(
    drawn: Callable[[np.random.Generator, tuple[int, int]], Drawn],
) -> None:
    assert shares_shown(drawn(np.random.default_rng(2), (DRAWS, MOST))).sum() <= LEVEL * 1.1


def test_shorter_tails_and_skew_cost_little() -> None:
    uniform = np.random.default_rng(2).uniform(-1, 1, (DRAWS, MOST))
    assert shares_shown(uniform).sum() <= LEVEL * 1.7
    # The ratio of two measures, each with a long tail: its logarithm is symmetric. A difference of only one of them is not.
    rng = np.random.default_rng(3)
    ratios = np.log(rng.gamma(2.0, 1.0, (DRAWS, MOST))) - np.log(rng.gamma(2.0, 1.0, (DRAWS, MOST)))
    assert shares_shown(ratios).sum() <= LEVEL * 1.05
    tail = rng.lognormal(0.0, 0.5, (DRAWS, MOST)) - math.exp(0.125)
    assert shares_shown(tail).sum() <= LEVEL * 2


def test_a_clear_difference_is_shown_before_the_last_round() -> None:
    shares = shares_shown(np.random.default_rng(4).normal(math.log(1.5), 0.15, (20_000, MOST)))
    assert shares[:3].sum() > 0.7
    assert shares.sum() > 0.99


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=MOST + 2))
def test_the_interval_contains_the_mean(values: list[float]) -> None:
    found = interval(values)
    assert found.low <= found.mean <= found.high
    assert (found.low == -math.inf) is (len(values) < FIRST_LOOK)
    assert not found.excludes(found.mean)


def test_an_interval_leaves_out_what_differs() -> None:
    assert interval([1.0, 1.01, 0.99, 1.0]).excludes(0.0)
    assert not interval([1.0, -1.0, 1.0, 1.0]).excludes(0.0)
    with pytest.raises(ValueError, match="no values"):
        interval([])
