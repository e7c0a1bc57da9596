"""The `pointsman shadow` commands."""

from __future__ import annotations

import typer

from pointsman_common.io.settings import add_settings_command
from pointsman_shadow.io.read_command import run_read
from pointsman_shadow.io.serve_command import run_serve
from pointsman_shadow.io.settings import ReadSettings, ServeSettings


def add_shadow_commands(app: typer.Typer) -> None:
    """Register `pointsman shadow serve` and `pointsman shadow read` on `app`."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Compare another router's placements with Pointsman's, without placing anything.",
    )
    add_settings_command(
        group,
        "serve",
        ServeSettings,
        run_serve,
        help_="Compare live traffic: receive mirrored requests and follow the other router's access log.",
    )
    add_settings_command(
        group, "read", ReadSettings, run_read, help_="Compare recorded traffic: read an access log in virtual time."
    )
    app.add_typer(group, name="shadow")
