"""The `pointsman shadow` commands."""

from __future__ import annotations

import typer

from pointsman.common.io.settings import add_settings_command
from pointsman.shadow.io.read_command import run_read
from pointsman.shadow.io.serve_command import run_serve
from pointsman.shadow.io.settings import ReadSettings, ServeSettings


def add_shadow_commands(app: typer.Typer) -> None:
    """Register `pointsman shadow serve` and `pointsman shadow read` on `app`."""
    group = typer.Typer(
        no_args_is_help=True, help="Beside another router: what Pointsman would do, without doing anything."
    )
    add_settings_command(
        group, "serve", ServeSettings, run_serve, help_="Take mirrored requests, and follow the router's access log."
    )
    add_settings_command(group, "read", ReadSettings, run_read, help_="Read an access log, in virtual time.")
    app.add_typer(group, name="shadow")
