"""`pointsman`: one command line for all services and for the questions people ask them.

Only the command that is run is imported: a router must neither carry the gateway's tokenizers in its memory nor wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

app = typer.Typer(name="pointsman", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(
    help="A control plane for fleets of vLLM: it places each request where it starts soonest, and can tell why."
)
def _pointsman() -> None:
    """Make `pointsman` a group even when a single command is registered."""


def _up() -> None:
    from services.common.settings import add_settings_command
    from services.up import UpSettings, run_up

    add_settings_command(
        app, "up", UpSettings, run_up, help_="Run router, agent and gateway together on this node, without Redis."
    )


def _router() -> None:
    from services.common.settings import add_settings_command
    from services.router.io.main import run
    from services.router.io.settings import RouterSettings

    add_settings_command(app, "router", RouterSettings, run, help_="Run a router.")


def _agent() -> None:
    from services.agent.main import run
    from services.agent.settings import AgentSettings
    from services.common.settings import add_settings_command

    add_settings_command(app, "agent", AgentSettings, run, help_="Run a node's agent.")


def _gateway() -> None:
    from services.common.settings import add_settings_command
    from services.gateway.main import run
    from services.gateway.settings import GatewaySettings

    add_settings_command(app, "gateway", GatewaySettings, run, help_="Run an HTTP gateway.")


def _shadow() -> None:
    from services.shadow.commands import add_shadow_commands

    add_shadow_commands(app)


def _lab() -> None:
    from lab.commands import add_lab_commands

    add_lab_commands(app)


def _ask() -> None:
    from services.ask import add_ask_commands

    add_ask_commands(app)


def _settings() -> None:
    from services.settings_page import settings

    app.command("settings")(settings)


GROUPS: dict[Callable[[], None], tuple[str, ...]] = {
    _up: ("up",),
    _router: ("router",),
    _agent: ("agent",),
    _gateway: ("gateway",),
    _shadow: ("shadow",),
    _lab: ("demo", "emulate", "replay", "simulate", "compare", "findings", "profile", "calibrate", "analyze", "trace"),
    _ask: ("instances", "decisions", "explain", "policies", "drain", "doctor", "what-if", "set-policy"),
    _settings: ("settings",),
}


def main() -> None:
    """Entry point of the `pointsman` command."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = [register for register, names in GROUPS.items() if asked in names]
    for register in wanted or GROUPS:
        register()
    app()


if __name__ == "__main__":
    main()
