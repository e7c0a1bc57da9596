"""Operators' commands with what cannot be used: a sentence and status 2, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pointsman.cli import fleet_commands, router_call
from pointsman.common.io.auth import bearer

COMMANDS = (
    ["instances"],
    ["decisions"],
    ["explain", "r-1"],
    ["drain", "a"],
    ["cordon", "a"],
    ["uncordon", "a"],
    ["weight", "a", "0.1"],
    ["what-if", "--policy", "sticky"],
    ["set-policy", "sticky"],
    ["doctor"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=[words[0] for words in COMMANDS])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TLS_CA": "nowhere.pem"}, "nowhere.pem"),
        ({"TLS_CA": "garbage.pem"}, "TLS to router"),
        ({"TLS_CERT": "garbage.pem"}, "belong together"),
        ({"TLS_CERT": "garbage.pem", "TLS_KEY": "garbage.pem"}, "TLS to router"),
        ({"TOKEN_DIR": "tokens"}, "the operator's token"),
    ],
)
def test_what_cannot_be_used_is_said(
    command: list[str], variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "garbage.pem").write_text("no certificate")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/operator").write_bytes(b"\xff\xfe")
    for name, file in variables.items():
        monkeypatch.setenv(f"POINTSMAN_{name}", str(tmp_path / file))
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, [*command, "--router", "127.0.0.1:1"])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert done.output.startswith("pointsman: ")
    assert said in done.output


def test_a_route_class_that_there_is_not_is_said() -> None:
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["decisions", "--route-class", "warm"])
    assert done.exit_code == 2
    assert done.output == "pointsman: --route-class warm: one of LIGHT, MEDIUM, HEAVY is needed\n"


@pytest.mark.parametrize(
    ("files", "variables", "shown"),
    [
        (["observer"], [], "observer of the folder"),
        ([], ["OBSERVER"], "OBSERVER of the environment"),
        (["observer", "operator"], [], "operator of the folder"),
        (["observer"], ["OPERATOR"], "OPERATOR of the environment"),
        ([], [], ""),
    ],
)
def test_who_has_an_observer_s_token_alone_shows_that(
    files: list[str], variables: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_TOKEN_DIR", str(tmp_path))
    for role in files:
        (tmp_path / role).write_text(f"{role} of the folder\n")
    for role in variables:
        monkeypatch.setenv(f"POINTSMAN_{role}_TOKEN", f"{role} of the environment")
    assert router_call.credentials() == bearer(shown)
