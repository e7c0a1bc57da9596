"""The age of a load sample."""

from __future__ import annotations

import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core.load_age import MAX_AGE_MS, age_ms


@pytest.mark.parametrize(
    ("sampled_at", "now", "age"),
    [(7.0, 7.001, 1), (7.0, 7.0, 0), (8.0, 7.0, 0), (0.0, 1e8, MAX_AGE_MS)],
    ids=["1 ms", "none", "of the future", "too old"],
)
def test_an_age_fits_its_field(sampled_at: float, now: float, age: int) -> None:
    assert agent_pb2.Load(sample_age_ms=age_ms(sampled_at, now)).sample_age_ms == age
