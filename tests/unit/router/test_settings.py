"""Settings of the router that need their own parsing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pointsman_common.io.settings import InvalidSetting
from pointsman_router.io.router import Router
from pointsman_router.io.settings import RouterSettings


def test_policy_settings_are_json_in_a_flag_and_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"decider": "heuristic", "heavy_new_tokens": 500}
    text = '{"decider": "heuristic", "heavy_new_tokens": 500}'
    assert RouterSettings(policy_settings=text).policy_settings == wanted
    monkeypatch.setenv("POINTSMAN_ROUTER_POLICY_SETTINGS", text)
    assert RouterSettings().policy_settings == wanted


@pytest.mark.parametrize("text", ["{", "[1]", "1", '{"a": null}'])
def test_policy_settings_that_are_no_object_name_their_field(text: str) -> None:
    with pytest.raises(ValidationError, match="policy_settings"):
        RouterSettings(policy_settings=text)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"policy": "dynamo_kv"}, "policy", "policy 'dynamo_kv' belongs to the lab, which is not installed: pointsman[lab]"),
        ({"policy": "sticky", "policy_settings": {"x": 1}}, "policy_settings", "x: policy sticky has no such setting"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_is_told_by_the_setting(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        Router(RouterSettings(**given))
    assert (refused.value.field, refused.value.message) == (field, message)


def test_a_variable_of_a_setting_that_is_gone_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_ROUTER_CIRCUIT_MAX_OPEN_S", "60")
    monkeypatch.setenv("POINTSMAN_ROUTER_ROUTER_ID", "r")
    assert RouterSettings().router_id == "r"
