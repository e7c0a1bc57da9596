"""The command line of a study: `python -m studies.NAME`, with a flag for each of its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer
from pydantic_settings import BaseSettings

from pointsman_common.io.settings import add_settings_command

_S = TypeVar("_S", bound=BaseSettings)


def run_study(name: str, settings: type[_S], run: Callable[[_S], None], *, help_: str) -> None:
    """Call `run` with the settings of the command line and the environment, and exit."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    add_settings_command(app, f"studies.{name}", settings, run, help_=help_, program="python -m")
    app(prog_name=f"python -m studies.{name}")
