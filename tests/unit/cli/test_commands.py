"""What `pointsman` imports and says before it knows a command's module."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pointsman_cli import extras, installed_policies, main
from pointsman_lab.rival_policies.registry import POLICIES as WITH_RIVALS
from pointsman_router.core.policy.base import SettingError
from pointsman_router.core.policy.registry import LAB_POLICIES, POLICIES, make_policy
from tests.support.processes.pointsman import pointsman_command

# Runs a command line, and then prints the imported packages and modules of the project, except the command line's.
IMPORTED = """
import contextlib, sys
from pointsman_cli.main import main
with contextlib.suppress(SystemExit):
    main()
print(*(name for name in sys.modules if name.startswith("pointsman") and not name.startswith("pointsman_cli")))
"""


def said(*words: str) -> str:
    return subprocess.run(pointsman_command(*words), check=True, capture_output=True, text=True).stdout


def imported(*words: str) -> set[str]:
    ended = subprocess.run([sys.executable, "-c", IMPORTED, *words], check=True, capture_output=True, text=True)
    return set(ended.stdout.splitlines()[-1].split())


def test_the_help_shows_what_an_operator_does_and_imports_no_part() -> None:
    output = said("--help")
    panels = re.findall(r"^╭─ ([\w ]+?) ─", output, re.MULTILINE)
    assert panels == ["Options", main.RUN, main.ASK, main.CHANGE, main.MEASURE]
    shown = set(re.findall(r"^│ ([a-z][a-z-]*) ", output, re.MULTILINE))
    assert shown == {name for name, command in main.COMMANDS.items() if command.panel}
    assert not {command for command in shown if "stud" in command or "finding" in command}
    assert imported("--help") == imported() == imported("no-such-command") == set()


def test_the_version_is_the_distributions() -> None:
    assert said("--version") == f"pointsman {metadata.version('pointsman')}\n"
    assert imported("--version") == set()


def test_only_the_asked_commands_module_is_imported() -> None:
    found = imported("emulate", "--help")
    assert "pointsman_lab.emulator.emulated_engine" in found
    assert not {
        module for module in found if module.startswith(("pointsman_lab.live", "pointsman_router", "pointsman_agent"))
    }


def completed(typed: str) -> list[str]:
    """Return what bash offers after `pointsman TYPED`."""
    words = f"pointsman {typed}"
    asked = {"_POINTSMAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = Path(sys.executable).parent / "pointsman"
    ended = subprocess.run([script], env=os.environ | asked, check=True, capture_output=True, text=True)
    return ended.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    assert completed("") == [name for name, command in main.COMMANDS.items() if command.panel]
    assert completed("dr") == ["drain"]
    assert completed("--vers") == ["--version"]
    assert completed("drain --res") == ["--resume"]
    assert completed("trace g") == ["generate"]


def test_a_command_after_the_end_of_options_runs() -> None:
    assert said("--", "policies", "unified") == said("policies", "unified") != ""


@pytest.mark.parametrize("flag", ["--router", "--router=r:1", "-v"])
def test_a_flag_before_its_command_is_told_where_it_stands(flag: str) -> None:
    done = CliRunner().invoke(main.app, [flag, "instances"])
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", "").split())
    assert f"{flag} is no flag of pointsman; a command's flags follow it, as in: pointsman COMMAND {flag}" in said


@pytest.mark.parametrize("name", main.MOVED)
def test_a_former_command_is_told_with_the_module_that_does_it(name: str) -> None:
    ended = subprocess.run(pointsman_command(name), check=False, capture_output=True, text=True)
    said = f"pointsman: {name} is no command any more; from a checkout: python -m {main.MOVED[name]}\n"
    assert (ended.returncode, ended.stderr) == (2, said)
    for module in re.findall(r"studies\.\w+", main.MOVED[name]):
        assert importlib.util.find_spec(f"{module}.__main__") is not None


def test_a_command_that_is_only_a_line_of_the_help_does_not_end_as_if_it_had_run(app: typer.Typer) -> None:
    main._register_lines()
    for listed in app.registered_commands:
        assert listed.callback is not None
        with pytest.raises(NotImplementedError):
            listed.callback()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(main, "app", typer.Typer())
    return main.app


@pytest.mark.parametrize("name", ["pointsman_router.io.moved", "pointsman.router.v1.moved", "pointsman_lab"])
def test_a_missing_module_of_the_project_is_no_missing_extra(
    name: str, app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register() -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setitem(main.COMMANDS, "router", replace(main.COMMANDS["router"], register=register))
    with pytest.raises(ModuleNotFoundError):
        main._register("router")
    assert app.registered_commands == []


def test_a_missing_package_of_others_names_the_extra(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def register() -> None:
        raise ModuleNotFoundError("No module named 'redis.asyncio'", name="redis.asyncio")

    monkeypatch.setitem(main.COMMANDS, "router", replace(main.COMMANDS["router"], register=register))
    main._register("router")
    run = app.registered_commands[0].callback
    assert run is not None
    with pytest.raises(typer.Exit):
        run()
    assert capsys.readouterr().err == "pointsman router: redis is not installed; install pointsman[router]\n"


def test_rivals_policies_are_there_where_the_lab_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(WITH_RIVALS) - set(POLICIES) == set(LAB_POLICIES)
    assert installed_policies.installed_policies() is WITH_RIVALS
    monkeypatch.setattr(installed_policies, "is_installed", lambda extra: extra != "lab")
    assert installed_policies.installed_policies() is POLICIES
    for name in LAB_POLICIES:
        with pytest.raises(
            SettingError, match=r"belongs to the lab, which is not installed: pointsman\[lab\]"
        ) as error:
            make_policy(name)
        assert error.value.field == "name"


def test_an_extra_is_installed_if_all_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    own = metadata.distribution

    def find(name: str) -> metadata.Distribution:
        if name == "scipy":
            raise metadata.PackageNotFoundError(name)
        return own(name)

    monkeypatch.setattr(metadata, "distribution", find)
    installed = extras.is_installed.__wrapped__
    assert not installed("lab")
    assert installed("router")


def test_a_package_that_this_python_does_not_need_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = metadata.distribution

    def find(name: str) -> metadata.Distribution:
        if name.replace("-", ".") == "backports.zstd":
            raise metadata.PackageNotFoundError(name)
        return own(name)

    monkeypatch.setattr(metadata, "distribution", find)
    assert extras.is_installed.__wrapped__("gateway")
