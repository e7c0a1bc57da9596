"""The newest values of some measures: which are kept, and that the memory stays what it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.history.series_ring import SeriesRing

NAN = math.nan


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1000, width=32)), max_size=40), st.integers(1, 12))
def test_a_ring_has_the_newest_buckets_and_nothing_else(puts: list[tuple[int, float]], buckets: int) -> None:
    ring, written, bucket = SeriesRing(2, buckets), dict[int, float](), 0
    size = ring.size_bytes
    for step, value in puts:
        bucket += step
        written[bucket] = value
        ring.put(bucket, (value, -value))
    expected = [written.get(number, NAN) if number > bucket - buckets else NAN for number in range(bucket + 3)]
    assert ring.read(0, 0, bucket + 2) == pytest.approx(expected, nan_ok=True)
    assert ring.read(1, 0, bucket + 2) == pytest.approx([-value for value in expected], nan_ok=True)
    assert ring.size_bytes == size
