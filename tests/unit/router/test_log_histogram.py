"""Quantiles of times that are kept as counts in bins: how far off they are at most."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.history.log_histogram import HIGHEST_S, LOWEST_S, MAX_ERROR, LogHistogram


@given(st.lists(st.floats(1e-5, 1e5), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_at_most_a_bins_half_off_the_sample_of_its_rank(times: list[float], share: float) -> None:
    histogram = LogHistogram()
    for seconds in times:
        histogram.add(seconds)
    [found] = histogram.quantiles(share)
    exact = sorted(times)[max(math.ceil(len(times) * share), 1) - 1]
    exact = min(max(exact, LOWEST_S), HIGHEST_S)
    assert exact / (MAX_ERROR * 1.0001) <= found <= exact * MAX_ERROR * 1.0001


@given(st.lists(st.floats(0.001, 100.0)))
def test_quantiles_ascend_and_there_are_none_of_nothing(times: list[float]) -> None:
    histogram = LogHistogram()
    for seconds in [*times, math.nan]:
        histogram.add(seconds)
    half, most = histogram.quantiles(0.5, 0.9)
    assert half <= most if times else math.isnan(half) and math.isnan(most)
    histogram.clear()
    assert all(map(math.isnan, histogram.quantiles(0.5, 1.0)))
