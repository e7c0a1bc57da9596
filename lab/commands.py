"""The lab's part of the `pointsman` command line."""

from __future__ import annotations

import typer

from lab.emulator import EmulateSettings
from lab.emulator import run as run_emulator
from services.common.settings import add_settings_command


def add_lab_commands(app: typer.Typer) -> None:
    """Register the lab's commands on `app`."""
    add_settings_command(app, "emulate", EmulateSettings, run_emulator, help_="Run an emulated vLLM server.")
