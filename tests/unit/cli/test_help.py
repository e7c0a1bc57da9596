"""`--help` shows the whole description of each setting, whatever characters are in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer
import typer.rich_utils
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

import studies.admission.__main__
import studies.default.__main__
import studies.findings.__main__  # noqa: F401
from pointsman_common.io.settings import ARGUMENT, PARTS, add_settings_command
from tests.support.docs.command_parsers import command_line

command_line()  # Imports all modules with settings.


def kinds(of: type[BaseSettings] = BaseSettings) -> Iterator[type[BaseSettings]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith(("pointsman_", "studies.")):
            yield kind
        yield from kinds(kind)


KINDS = sorted(set(kinds()), key=lambda kind: (kind.__module__, kind.__name__))


def plain(text: str) -> str:
    """Return the text without blanks and table lines."""
    return re.sub(r"[\s│]+", "", text)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_help_says_all_of_every_setting(kind: type[BaseSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", 2_000)
    app = typer.Typer()
    add_settings_command(app, "run", kind, lambda _: None, help_="Run it [as it is], with a [bold]sign[/bold].")
    app.command("other")(lambda: None)  # With a single command, typer would not expect its name.
    done = CliRunner().invoke(app, ["run", "--help"])
    assert done.exit_code == 0, done.output
    said = plain(done.output)
    assert plain("Run it [as it is], with a [bold]sign[/bold].") in said
    for name, field in kind.model_fields.items():
        assert plain(field.description or "") in said, name


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_shows_whole_names(kind: type[BaseSettings], columns: int) -> None:
    app = typer.Typer()
    add_settings_command(app, "run", kind, lambda _: None, help_="Run it.")
    app.command("other")(lambda: None)
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["run", "--help"]).output
    for name, field in kind.model_fields.items():
        if field.json_schema_extra != ARGUMENT:
            assert re.search(rf"--{name.replace('_', '-')}\b", shown), name


def test_the_parts_of_variables_are_all_there_are() -> None:
    prefixes = {str(kind.model_config["env_prefix"]) for kind in KINDS}
    assert {prefix.removeprefix("POINTSMAN_").split("_")[0] for prefix in prefixes} - {""} == set(PARTS)


def test_services_are_among_them() -> None:
    assert {"RouterSettings", "GatewaySettings", "AgentSettings", "UpSettings"} <= {kind.__name__ for kind in KINDS}
