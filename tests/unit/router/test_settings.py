"""Settings of the router that need their own parsing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from pydantic import ValidationError

from pointsman_common.io.settings import InvalidSetting, load_settings
from pointsman_router.core.router_state import StateSettings
from pointsman_router.io.console.console import MAX_VIEWERS
from pointsman_router.io.router import Router
from pointsman_router.io.settings import RouterSettings

NO_SETTINGS = "policy sticky has no such setting; it has none"


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


@pytest.mark.parametrize("name", ["redis_url", "redis_sentinels"])
@pytest.mark.parametrize("text", ["s1:26379", "redis://:s3cret@s1:26379,s2:26379", "http://s1:26379"])
def test_a_redis_without_a_scheme_is_told_with_the_form_and_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    monkeypatch.setenv(f"POINTSMAN_ROUTER_{name.upper()}", text)
    with pytest.raises(typer.Exit):
        load_settings("pointsman router", RouterSettings)
    warnings = capsys.readouterr().err
    assert f"POINTSMAN_ROUTER_{name.upper()}" in warnings
    assert "write each server as redis://HOST:PORT, or rediss://HOST:PORT for TLS" in warnings
    assert "s3cret" not in warnings


def test_a_password_of_redis_may_have_a_comma() -> None:
    address = RouterSettings(
        redis_url="redis://:a,b@s1:1/0, rediss://s2/1?ssl_ca_certs=x,unix:///run/redis"
    ).redis_address
    assert address is not None
    assert address.urls == ("redis://:a,b@s1:1/0", "rediss://s2/1?ssl_ca_certs=x", "unix:///run/redis")


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"policy": "dynamo_kv"}, "policy", "policy 'dynamo_kv' belongs to the lab, which is not installed: pointsman[lab]"),
        ({"policy": "sticky", "policy_settings": {"x": 1}}, "policy_settings", f"x: {NO_SETTINGS}"),
        ({"policy": "sticky:x=1"}, "policy", f"x: {NO_SETTINGS}"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_is_told_by_the_setting(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        Router(RouterSettings(**given))
    assert (refused.value.field, refused.value.message) == (field, message)


def test_a_variable_of_a_former_setting_is_told_with_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in RouterSettings.REMOVED:
        monkeypatch.setenv(f"POINTSMAN_ROUTER_{name.upper()}", "60")
    monkeypatch.setenv("POINTSMAN_ROUTER_ROUTER_ID", "r")
    assert load_settings("pointsman router", RouterSettings).router_id == "r"
    documented = re.findall(
        r"^pointsman router: POINTSMAN_ROUTER_(\w+) .* its value is (\S+)$", capsys.readouterr().err, re.M
    )
    state = StateSettings()
    assert {name.lower(): float(value.replace(",", "")) for name, value in documented} == {
        "queue_ageing_tokens_per_s": state.queue.ageing_tokens_per_s,
        "queue_lower_class_share": state.queue.lower_class_share,
        "admission_interactive_s": state.admission.interactive_s,
        "admission_batch_s": state.admission.batch_s,
        "circuit_first_open_s": state.life.first_open_s,
        "circuit_max_open_s": state.life.max_open_s,
        "console_max_viewers": MAX_VIEWERS,
    }
