"""Tests of the rule by which a session is admitted, parked or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_router.core.admission_rule import AdmissionOutcome, AdmissionView, decide_admission

FULL = AdmissionView(size=20_000, weighted=95_000.0, capacity=100_000.0, largest=25_000, armed=True, bound_s=120.0)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, "PARK", "full"),
        ({"capacity": 0.0}, "ADMIT", "capacity_unknown"),
        ({"under_way": "tool_result"}, "ADMIT", "tool_result"),
        ({"armed": False}, "ADMIT", "not_armed"),
        ({"size": 250}, "ADMIT", "small"),
        ({"size": 5_000}, "ADMIT", "fits"),
        ({"size": 5_000, "before": 1}, "PARK", "full"),
        ({"size": 5_001}, "PARK", "full"),
        ({"size": 200_000, "weighted": 0.0}, "ADMIT", "fits"),
        ({"waited_s": 120.0}, "REFUSE", "bound"),
        ({"resumes": True}, "PARK", "full"),
        ({"resumes": True, "size": 5_000}, "ADMIT", "fits"),
        ({"resumes": True, "waited_s": 120.0}, "ADMIT", "resumed"),
        ({"size": 5_000, "waited_s": 120.0}, "ADMIT", "fits"),
    ],
)
def test_the_first_rule_that_applies_decides(changes: dict[str, Any], outcome: str, reason: str) -> None:
    verdict = decide_admission(replace(FULL, **changes))
    assert (verdict.outcome, verdict.reason) == (AdmissionOutcome(outcome), reason)


@given(
    st.builds(
        AdmissionView,
        size=st.integers(0, 10**6),
        weighted=st.floats(0, 1e7),
        capacity=st.floats(1, 1e7),
        largest=st.integers(1, 10**6),
        armed=st.booleans(),
        under_way=st.sampled_from(["session", "prefix", "parent", "tool_result"]),
        before=st.integers(0, 100),
        waited_s=st.floats(0, 700),
        bound_s=st.floats(1, 600),
    )
)
def test_work_under_way_is_never_parked_or_refused(view: AdmissionView) -> None:
    assert decide_admission(view).outcome is AdmissionOutcome.ADMIT


@given(st.integers(0, 10**6), st.floats(0, 1e7), st.integers(0, 5), st.floats(0, 700))
def test_nobody_is_parked_beyond_the_bound(size: int, weighted: float, before: int, waited_s: float) -> None:
    verdict = decide_admission(replace(FULL, size=size, weighted=weighted, before=before, waited_s=waited_s))
    assert verdict.outcome is not AdmissionOutcome.PARK or waited_s < FULL.bound_s
