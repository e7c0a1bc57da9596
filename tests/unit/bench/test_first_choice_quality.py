"""The benchmark that compares a first choice with all candidates."""

from __future__ import annotations

import pytest

from bench.first_choice import CASES, VARIABLE, Case, cases, first_choice
from pointsman_router.core import policy_views
from pointsman_router.core.policy.base import SettingError


def test_cases_are_read() -> None:
    assert cases("unified:128:knee:3,lpwl:256:light:1") == [
        Case("unified", 128, "knee", 3),
        Case("lpwl", 256, "light", 1),
    ]
    assert {(one.policy, one.instances) for one in cases(CASES)} == {
        (policy, instances) for policy in ("unified", "foresight") for instances in (128, 256)
    }


@pytest.mark.parametrize("text", ["unified", "unified:128:heavy:1", "unified:many:knee:1"])
def test_a_case_that_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|POLICY:INSTANCES:LOAD:DRAWS"):
        cases(text)


def test_an_unknown_policy_is_told() -> None:
    with pytest.raises(SettingError):
        cases("unify:128:knee:1")


def test_the_same_draws_are_placed_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "unified:6:knee:2")
    small = {figure.metric: figure for figure in first_choice()}
    # In so small a pool all candidates are considered, with or without a first choice.
    assert {figure.ratio for figure in small.values()} == {1.0}
    assert "paired ratio 1.000, 1.000 to 1.000 (2 draws of" in small["first_choice_unified_6_knee_ttft_p90_s"].note
    monkeypatch.setattr(policy_views, "MANY", 2)
    monkeypatch.setattr("pointsman_router.core.first_choice.LEAST_LOADED", 1)
    monkeypatch.setattr("pointsman_router.core.first_choice.MOST_CACHED", 1)
    few = {figure.metric: figure for figure in first_choice()}
    assert [few[name].baseline for name in few] == [small[name].baseline for name in small]
    assert any(few[name].value != small[name].value for name in few)
