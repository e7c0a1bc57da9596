"""How decisions ended, summed up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman_router.core.analysis.outcome_stats import OutcomeStats, quantile
from pointsman_router.core.events_and_effects import Finished
from pointsman_router.core.placement_types import Decision
from pointsman_router.core.policy.base import decide, slice_of
from pointsman_router.core.policy.registry import make_policy
from tests.support.router_values import candidate, request, view


def decision(new: int, cached: int = 0, **changes: Any) -> Decision:
    asked = request("r", tokens=new + cached)
    seen = view(candidate("a", new=new, cached=cached))
    return replace(decide(make_policy("lmetric"), asked, "m", seen, random.Random(0), "d"), **changes)


def finished(outcome: str = "OK", **changes: Any) -> Finished:
    return Finished("r", outcome, **changes)


def test_what_a_request_s_own_slices_computed_is_no_hit() -> None:
    """Neither as predicted nor as reported. Of a gateway that does not tell it nothing is compared."""
    outcomes = OutcomeStats()
    first = replace(decision(30_000), result=slice_of(candidate("a", new=30_000), 20_000, "slice"))
    end = finished(cached_tokens=29_984, own_cached_tokens=29_984)
    outcomes.add(first, "OK", end)
    outcomes.add(replace(decision(30_000, 20_000), previous_id="d-0"), "OK", end)
    outcomes.add(first, "OK", finished(cached_tokens=29_984))
    assert (outcomes.total.reported, outcomes.total.reported_input_tokens) == (1, 30_000)
    assert (outcomes.total.predicted_cached_tokens, outcomes.total.reported_cached_tokens) == (0, 0)


def test_decisions_are_grouped_and_counted() -> None:
    outcomes = OutcomeStats()
    outcomes.add(decision(30_000, 10_000), "OK", finished(cached_tokens=8_000, timings_ms={"first_token": 500.0}))
    outcomes.add(decision(30_000, notes=("prefill_failed: 502",)), "OK", finished(timings_ms={"first_token": 0.0}))
    outcomes.add(decision(30_000, notes=("owner_gone",)), "FAILED", finished("FAILED"))
    outcomes.add(decision(100), "OPEN", None)
    heavy, light = outcomes.groups()
    assert (heavy.route_class, heavy.mode, heavy.reason, heavy.decided) == ("HEAVY", "COLOCATED", "lmetric", 3)
    assert heavy.outcomes == {"OK": 2, "FAILED": 1}
    assert (heavy.fell_back, heavy.input_tokens, heavy.first_tokens_s) == (1, 100_000, [0.5])
    assert (heavy.reported, heavy.reported_input_tokens) == (1, 40_000)
    assert (heavy.predicted_cached_tokens, heavy.reported_cached_tokens) == (10_000, 8_000)
    assert (light.route_class, light.decided, light.outcomes, light.reported) == ("LIGHT", 1, {"OPEN": 1}, 0)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.5, 3.0), ([3.0, 1.0], 0.5, 1.0), ([3.0, 1.0, 2.0], 0.5, 2.0), ([3.0, 1.0], 0.95, 3.0)],
)
def test_a_quantile_is_one_of_the_values(values: list[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == expected
