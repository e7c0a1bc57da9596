"""`pointsman`: the command line of all services and of the operators' commands.

Only the module of the given command is imported. Otherwise a router would import the gateway's tokenizers, which costs memory
and time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import typer

app = typer.Typer(name="pointsman", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(
    help="A control plane for fleets of vLLM engines: it places each request where it starts soonest, and explains why."
)
def _pointsman() -> None:
    """Make `pointsman` a group even if only one command is registered."""


def _up() -> None:
    from pointsman_cli.up import UpSettings, run_up
    from pointsman_common.io.settings import add_settings_command

    add_settings_command(
        app, "up", UpSettings, run_up, help_="Run router, agent and gateway together on this node, without Redis."
    )


def _router() -> None:
    from pointsman_common.io.settings import add_settings_command
    from pointsman_router.io.main import run
    from pointsman_router.io.settings import RouterSettings

    add_settings_command(app, "router", RouterSettings, run, help_="Run a router, which places requests on engines.")


def _agent() -> None:
    from pointsman_agent.io.main import run
    from pointsman_agent.io.settings import AgentSettings
    from pointsman_common.io.settings import add_settings_command

    add_settings_command(
        app, "agent", AgentSettings, run, help_="Run a node's agent, which reports its engines to routers."
    )


def _gateway() -> None:
    from pointsman_common.io.settings import add_settings_command
    from pointsman_gateway.io.main import run
    from pointsman_gateway.io.settings import GatewaySettings

    add_settings_command(
        app, "gateway", GatewaySettings, run, help_="Run a gateway, which serves the HTTP API to clients."
    )


def _serve() -> None:
    from pointsman_cli.one_process import run_serve
    from pointsman_cli.one_process_settings import OneProcessSettings
    from pointsman_common.io.settings import add_settings_command

    add_settings_command(
        app, "serve", OneProcessSettings, run_serve, help_="Run a router and a gateway in one process, for one gateway."
    )


def _shadow() -> None:
    from pointsman_shadow.io.commands import add_shadow_commands

    add_shadow_commands(app)


def _lab() -> None:
    from pointsman_lab.commands import add_lab_commands

    add_lab_commands(app)


def _fleet_commands() -> None:
    from pointsman_cli.fleet_commands import add_fleet_commands

    add_fleet_commands(app)


def _settings() -> None:
    from pointsman_cli.settings_page import settings

    app.command("settings")(settings)


@dataclass(frozen=True)
class Group:
    """Commands that are registered together, and the extra whose packages they import."""

    register: Callable[[], None]
    extra: str
    names: tuple[str, ...]


GROUPS = (
    Group(_up, "all", ("up",)),
    Group(_router, "router", ("router",)),
    Group(_agent, "agent", ("agent",)),
    Group(_gateway, "gateway", ("gateway",)),
    Group(_serve, "all", ("serve",)),
    Group(_shadow, "shadow", ("shadow",)),
    Group(
        _lab,
        "lab",
        (
            "demo",
            "emulate",
            "replay",
            "simulate",
            "compare",
            "findings",
            "study",
            "profile",
            "calibrate",
            "agree",
            "analyze",
            "trace",
        ),
    ),
    Group(
        _fleet_commands,
        "cli",
        (
            "instances",
            "decisions",
            "explain",
            "policies",
            "drain",
            "cordon",
            "uncordon",
            "weight",
            "doctor",
            "what-if",
            "set-policy",
        ),
    ),
    Group(_settings, "all", ("settings",)),
)


def main() -> None:
    """Entry point of the `pointsman` command."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = [group for group in GROUPS if asked in group.names]
    for group in wanted or GROUPS:
        _register(group)
    app()


def _register(group: Group) -> None:
    """Register the commands of a group. If its extra is not installed, register commands that name the missing extra."""
    try:
        group.register()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package == "pointsman":
            raise  # A module of this package is in no extra, so this is a programming error.
        for name in group.names:
            _register_missing(name, group.extra, package)


def _register_missing(name: str, extra: str, package: str) -> None:
    def command() -> None:
        typer.echo(f"pointsman {name}: {package} is not installed; install pointsman[{extra}]", err=True)
        raise typer.Exit(1)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=f"Not installed: pointsman\\[{extra}].", context_settings=anything)(command)


if __name__ == "__main__":
    main()
