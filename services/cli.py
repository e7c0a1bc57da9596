"""`pointsman`: one command line for all services and for the questions people ask them."""

from __future__ import annotations

import typer

from lab.commands import add_lab_commands
from services.agent.main import run as run_agent
from services.agent.settings import AgentSettings
from services.ask import add_ask_commands
from services.common.settings import add_settings_command
from services.gateway.main import run as run_gateway
from services.gateway.settings import GatewaySettings
from services.router.io.main import run as run_router
from services.router.io.settings import RouterSettings
from services.up import UpSettings, run_up

app = typer.Typer(
    name="pointsman",
    help="A control plane for fleets of vLLM: it places each request where it starts soonest, and can tell why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `pointsman` command."""
    app()


add_settings_command(
    app, "up", UpSettings, run_up, help_="Run router, agent and gateway together on this node, without Redis."
)
add_settings_command(app, "router", RouterSettings, run_router, help_="Run a router.")
add_settings_command(app, "agent", AgentSettings, run_agent, help_="Run a node's agent.")
add_settings_command(app, "gateway", GatewaySettings, run_gateway, help_="Run an HTTP gateway.")
add_lab_commands(app)
add_ask_commands(app)

if __name__ == "__main__":
    main()
