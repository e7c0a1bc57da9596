"""Which services `pointsman up` starts, and with which variables."""

from __future__ import annotations

import os

import pytest

from pointsman_agent.io.settings import AgentSettings
from pointsman_cli.one_process_settings import OneProcessSettings
from pointsman_cli.up import LOG_LEVELS, PARTS_OWN, UpSettings, services
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_lab.live.demo_command import DemoSettings, given_flags
from pointsman_router.io.settings import RouterSettings

ENGINE = "http://127.0.0.1:8000"


def test_router_and_gateway_share_a_process_unless_the_gateway_has_several() -> None:
    settings = UpSettings(engine=[ENGINE, "http://b:1"], policy="foresight", tokenizer=["m=/t"])
    shared, variables = services(settings, {})
    apart, _ = services(settings, {"POINTSMAN_GATEWAY_PROCESSES": "2"})
    assert (shared, apart) == (["agent", "serve"], ["agent", "router", "gateway"])
    assert variables["POINTSMAN_AGENT_ENGINES"] == f"{ENGINE} http://b:1"
    assert variables["POINTSMAN_ROUTER_POLICY"] == "foresight"
    assert variables["POINTSMAN_GATEWAY_TOKENIZERS"] == "m=/t"
    # Agent and gateway ask the router that listens beside them.
    for part in ("AGENT", "GATEWAY"):
        assert variables[f"POINTSMAN_{part}_ROUTERS"] == variables["POINTSMAN_ROUTER_LISTEN"]


def test_a_parts_own_variable_counts_where_neither_flag_nor_variable_of_up_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {variable: f"h:{number}" for number, variable in enumerate(PARTS_OWN.values(), 1)}
    own |= {"POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S": "7.0", **dict.fromkeys(LOG_LEVELS, "debug")}
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    _, variables = services(UpSettings(), os.environ)
    assert {**os.environ, **variables}.items() >= own.items()
    monkeypatch.setenv("POINTSMAN_UP_POLICY", "sticky")
    settings = UpSettings(listen="h:99", log_level="error")
    _, variables = services(settings, os.environ)
    # What `up` itself waits for is what the gateway gets.
    assert (settings.listen, settings.router_listen) == ("h:99", own["POINTSMAN_ROUTER_LISTEN"])
    assert variables["POINTSMAN_GATEWAY_LISTEN"] == "h:99"
    assert variables["POINTSMAN_ROUTER_POLICY"] == "sticky"
    assert {variables[level] for level in LOG_LEVELS} == {"error"}
    assert UpSettings(policy="random").policy == "random"


def test_every_variable_that_up_sets_is_a_parts() -> None:
    known = {
        f"{kind.model_config['env_prefix']}{name.upper()}"
        for kind in (AgentSettings, RouterSettings, GatewaySettings, OneProcessSettings)
        for name in kind.model_fields
    }
    assert services(UpSettings(engine=[ENGINE]), {})[1].keys() <= known
    assert {*PARTS_OWN, "log_level"} == UpSettings.model_fields.keys()


def test_the_demo_passes_on_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_flags(DemoSettings(), "policy") == []
    assert given_flags(DemoSettings(policy="sticky"), "policy") == ["--policy", "sticky"]
    monkeypatch.setenv("POINTSMAN_DEMO_SPEEDUP", "2")
    assert given_flags(DemoSettings(), "speedup") == ["--speedup", "2.0"]
