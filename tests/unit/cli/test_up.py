"""Which services `pointsman up` starts, and with which variables."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pointsman_agent.io.settings import AgentSettings
from pointsman_cli import up
from pointsman_cli.one_process_settings import OneProcessSettings
from pointsman_cli.up import (
    LOG_LEVELS,
    PARTS_OWN,
    LocalFleet,
    UpSettings,
    check,
    screen,
    services,
    stopping_line,
    unusable_addresses,
    with_ports,
)
from pointsman_common.io.settings import InvalidSetting, add_settings_command, holder_of
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


@pytest.mark.parametrize(
    ("given", "variables", "said"),
    [
        ({"policy": "nope"}, {}, "--policy: no policy 'nope'"),
        ({}, {"POINTSMAN_UP_POLICY": "nope"}, "POINTSMAN_UP_POLICY: no policy"),
        ({}, {"POINTSMAN_ROUTER_POLICY": "nope"}, "POINTSMAN_ROUTER_POLICY: no policy"),
        ({"policy": "unified:foo=1"}, {}, "--policy: foo: policy unified has no such setting"),
        ({"engine": ["foo"]}, {}, "--engine: not an engine URL: 'foo'"),
        ({"log_level": "loud"}, {}, "--log-level: "),
        ({"tokenizer": ["m=/nowhere"]}, {}, "--tokenizer: m: /nowhere has no tokenizer.json that can be read"),
        ({"state_dir": "/dev/null/x"}, {}, "--state-dir: /dev/null/x cannot be written: Not a directory"),
        ({}, {"POINTSMAN_ROUTER_QUEUE_SIZE": "-3"}, "POINTSMAN_ROUTER_QUEUE_SIZE: "),
        ({}, {"POINTSMAN_GATEWAY_API_KEYS_FILE": ""}, "POINTSMAN_GATEWAY_API_KEYS_FILE: it is set, but empty"),
        ({}, {"POINTSMAN_AGENT_SCRAPE_INTERVAL_S": "x"}, "POINTSMAN_AGENT_SCRAPE_INTERVAL_S: "),
    ],
)
def test_what_cannot_be_used_is_told_in_up_s_words(
    given: dict[str, Any], variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POINTSMAN_AGENT_STATE_DIR", str(tmp_path))
    with pytest.raises(InvalidSetting) as invalid:
        check(UpSettings(**{"engine": [ENGINE], **given}))
    found = invalid.value
    assert f"{holder_of(found.kind, found.field, given)}: {found.message}".startswith(said)


def test_what_can_be_used_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    check(UpSettings(engine=[ENGINE], tokenizer=[f"m={tmp_path}", "n=owner/name"], state_dir=tmp_path / "a/b"))


def test_one_address_is_not_given_twice() -> None:
    settings = UpSettings(
        engine=[ENGINE], listen="127.0.0.1:0", console="127.0.0.1:9102", router_metrics="127.0.0.1:9102"
    )
    assert "--console 127.0.0.1:9102: --router-metrics has the same address" in unusable_addresses(settings)


def test_no_address_of_its_own_is_an_engine_s() -> None:
    given: dict[str, Any] = dict.fromkeys(("picker", "router_metrics", "console", "agent_metrics"), "")
    settings = UpSettings(engine=["http://localhost:8080?gpus=0", "http://b:8080"], listen="0.0.0.0:8080", **given)
    assert unusable_addresses(settings)[-1] == "--engine http://localhost:8080: --listen has the same address"


def test_an_engine_may_have_the_port_of_an_address_of_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = dict.fromkeys(("picker", "router_metrics", "console"), "")
    settings = UpSettings(engine=[ENGINE], listen="192.0.2.1:8000", agent_metrics=":9101", **given)
    assert not [problem for problem in unusable_addresses(settings) if "the same address" in problem]

    def found(without: Collection[int]) -> tuple[list[str], int]:
        assert sorted(without) == [9101, 50051]
        return [ENGINE], 1

    monkeypatch.setattr(up, "find_engines", found)
    assert up._found_engines(settings) == [ENGINE]


@pytest.mark.parametrize(
    ("ports", "said"),
    [(0, "no port listens on this host; give the URL"), (3, "none of the 3 ports that listen on this host is a vLLM")],
)
def test_without_an_engine_it_is_told_what_to_give(ports: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "find_engines", lambda without: ([], ports))
    with pytest.raises(InvalidSetting, match=said) as invalid:
        up.run_up(UpSettings())
    assert invalid.value.field == "engine"
    assert "as http://HOST:PORT" in invalid.value.message


def test_settings_that_do_not_fit_together_are_named_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error is of no single field, and ended in a traceback."""
    monkeypatch.setenv("POINTSMAN_GATEWAY_TLS_CERT", "cert.pem")
    app = typer.Typer()
    add_settings_command(app, "up", UpSettings, up.run_up, help_="Run.")
    done = CliRunner().invoke(app, ["--engine", ENGINE])
    variables = [f"POINTSMAN_GATEWAY_TLS_{name}" for name in ("CERT", "KEY", "CLIENT_CA")]
    said = "pointsman up: {} and {} belong together, and {} needs both\n".format(*variables)
    assert (done.exit_code, done.output) == (2, said)


class Told(LocalFleet):
    """Services that tell `engines` and `models`."""

    def __init__(self, settings: UpSettings, engines: list[dict[str, Any]], models: dict[str, Any]) -> None:
        super().__init__(settings)
        self.listed = engines, models

    def health(self) -> tuple[int, dict[str, Any]]:
        return (200 if self.listed[1] else 503), {"models": self.listed[1]}

    def engines(self) -> list[dict[str, Any]]:
        return self.listed[0]


def test_the_screen_names_what_is_missing_and_the_flag_that_mends_it() -> None:
    settings = UpSettings(engine=[ENGINE, "http://127.0.0.1:8001"])
    instance = {"instance_id": "127.0.0.1:8000", "prefix_reason": ""}
    well = {"engine": ENGINE, "healthy": True, "problem": "", "instances": [instance]}
    absent = {"engine": "http://127.0.0.1:8001", "healthy": False, "problem": "connection refused", "instances": []}
    exact = {"m": {"exact": True, "reason": ""}}
    lines = [*screen(settings, Told(settings, [well], exact))]
    assert [line.split()[0] for line in lines] == ["OpenAI", "router", "console", "engines", "models", "policy"]
    lines = [*screen(settings, Told(settings, [well, absent], exact))]
    assert lines[3:5] == ["engines      1 of 2 ready", "             http://127.0.0.1:8001: connection refused"]
    blind = well | {"instances": [instance | {"prefix_reason": "it publishes none"}]}
    text = "\n".join(screen(settings, Told(settings, [blind], {"m": {"exact": False, "reason": "no file"}})))
    assert "KV events of 127.0.0.1:8000: it publishes none" in text
    assert "--kv-events-config" in text
    assert "--tokenizer m=FOLDER" in text
    assert "(answers 503 until an engine is ready)" in "\n".join(screen(settings, Told(settings, [absent], {})))


def test_an_address_without_a_host_or_a_port_is_one_that_can_be_reached() -> None:
    given = UpSettings(engine=[ENGINE], listen=":0", router_listen="0.0.0.0:0", agent_metrics="[::]:9101", console="")
    settings = with_ports(given)
    ports = [int(text.rpartition(":")[2]) for text in (settings.listen, settings.router_listen)]
    assert all(ports)
    assert ports[0] != ports[1]
    assert (settings.listen, settings.router_listen) == (f":{ports[0]}", f"0.0.0.0:{ports[1]}")
    _, variables = services(settings, {})
    assert variables["POINTSMAN_GATEWAY_LISTEN"] == settings.listen
    assert variables["POINTSMAN_AGENT_ROUTERS"] == f"localhost:{ports[1]}"
    first, second, *_ = screen(settings, Told(settings, [], {"m": {"exact": True, "reason": ""}}))
    assert first == f"OpenAI API   http://localhost:{ports[0]}/v1   (on all interfaces)"
    assert f"localhost:{ports[1]}   (pointsman instances, decisions, explain with --router localhost" in second


def test_what_a_stop_waits_for() -> None:
    assert stopping_line(0, 30.0) == "stopping"
    assert stopping_line(2, 30.0) == "stopping: waiting up to 30 s for 2 open requests; Ctrl-C again does not wait"
