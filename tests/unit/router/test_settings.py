"""Settings of the router that need their own parsing."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

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


def test_a_variable_of_a_setting_that_is_gone_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_ROUTER_CIRCUIT_MAX_OPEN_S", "60")
    monkeypatch.setenv("POINTSMAN_ROUTER_ROUTER_ID", "r")
    assert RouterSettings().router_id == "r"
