"""The benchmark that compares a shortlist with all candidates."""

from __future__ import annotations

import pytest

from bench.shortlist import CASES, VARIABLE, Case, cases, shortlist
from pointsman_router.core import fleet_view_builder
from pointsman_router.core.policy.base import SettingError


def test_cases_are_read() -> None:
    assert cases("unified:128:knee:3,lpwl:256:light:1") == [
        Case("unified", 128, "knee", 3),
        Case("lpwl", 256, "light", 1),
    ]
    assert {(case.policy, case.instances) for case in cases(CASES)} == {
        (policy, instances) for policy in ("unified", "foresight") for instances in (128, 256)
    }


@pytest.mark.parametrize("text", ["unified", "unified:128:heavy:1", "unified:many:knee:1"])
def test_a_case_that_cannot_be_read_is_reported(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|POLICY:INSTANCES:LOAD:DRAWS"):
        cases(text)


def test_an_unknown_policy_is_reported() -> None:
    with pytest.raises(SettingError):
        cases("unify:128:knee:1")


def test_the_same_draws_are_placed_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "unified:6:knee:2")
    small = {figure.metric: figure for figure in shortlist()}
    # In so small a pool all candidates are considered, with or without a shortlist.
    assert {figure.ratio for figure in small.values()} == {1.0}
    assert "paired ratio 1.000, 1.000 to 1.000 (2 draws of" in small["shortlist_unified_6_knee_ttft_p90_s"].note
    monkeypatch.setattr(fleet_view_builder, "MAX_FULL_VIEW", 2)
    monkeypatch.setattr("pointsman_router.core.shortlist.LEAST_LOADED", 1)
    monkeypatch.setattr("pointsman_router.core.shortlist.MOST_CACHED", 1)
    short = {figure.metric: figure for figure in shortlist()}
    assert [short[name].baseline for name in short] == [small[name].baseline for name in small]
    assert any(short[name].value != small[name].value for name in short)
