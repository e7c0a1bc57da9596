"""`pointsman`: the command line of all services and of the operators' commands.

Only the module of the given command is imported. Otherwise a router would import the gateway's tokenizers, which costs memory
and time. The list of commands is a table here, so that `pointsman --help` imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

app = typer.Typer(name="pointsman", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        typer.echo(f"pointsman {metadata.version('pointsman')}")
        raise typer.Exit


@app.callback(
    help="A control plane for fleets of vLLM engines: it places each request where it starts soonest, and explains why."
)
def _pointsman(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make `pointsman` a group even if only one command is registered."""


def _up() -> None:
    from pointsman_cli.up import UpSettings, run_up
    from pointsman_common.io.settings import add_settings_command

    add_settings_command(
        app, "up", UpSettings, run_up, help_="Run router, agent and gateway together on this node, without Redis."
    )


def _router() -> None:
    from pointsman_cli.installed_policies import installed_policies
    from pointsman_common.io.settings import add_settings_command
    from pointsman_router.io.main import run
    from pointsman_router.io.settings import RouterSettings

    add_settings_command(
        app,
        "router",
        RouterSettings,
        partial(run, policies=installed_policies()),
        help_="Run a router, which places requests on engines.",
    )


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


def _lab(name: str) -> None:
    from pointsman_lab import commands

    getattr(commands, f"add_{name}")(app)


def _fleet_commands() -> None:
    from pointsman_cli.fleet_commands import add_fleet_commands

    add_fleet_commands(app)


def _settings() -> None:
    from pointsman_cli.settings_page import settings

    app.command("settings")(settings)


RUN, ASK, CHANGE, MEASURE = "Run it", "Look and ask", "Change the fleet", "Measure and simulate"


@dataclass(frozen=True)
class Command:
    """A command, which `register` adds to the app.

    `panel`: its part of `pointsman --help`; empty: not shown there. `line`: its line there, the first sentence of its own help.
    `extras`: those whose packages it imports, with commas between.
    """

    panel: str
    extras: str
    register: Callable[[], None]
    line: str


def _on_fleet(panel: str, line: str) -> Command:
    return Command(panel, "cli", _fleet_commands, line)


def _in_lab(panel: str, name: str, line: str) -> Command:
    return Command(panel, "lab", partial(_lab, name), line)


COMMANDS: Mapping[str, Command] = {
    "up": Command(
        RUN, "agent,gateway,router", _up, "Run router, agent and gateway together on this node, without Redis."
    ),
    "router": Command(RUN, "router", _router, "Run a router, which places requests on engines."),
    "gateway": Command(RUN, "gateway", _gateway, "Run a gateway, which serves the HTTP API to clients."),
    "agent": Command(RUN, "agent", _agent, "Run a node's agent, which reports its engines to routers."),
    "serve": Command(RUN, "gateway,router", _serve, "Run a router and a gateway in one process, for one gateway."),
    "doctor": _on_fleet(ASK, "Check a fleet and print what to change."),
    "instances": _on_fleet(ASK, "List the instances of a fleet with their state, load, cached keys and sessions."),
    "decisions": _on_fleet(ASK, "List the newest decisions of all routers: where each request was placed, and why."),
    "explain": _on_fleet(ASK, "Explain why a request was placed where it was."),
    "what-if": _on_fleet(ASK, "Show where past requests would have been placed under another policy."),
    "policies": _on_fleet(ASK, "Print policies with their formulas, reasons, sources, and settings with bounds."),
    "settings": Command(
        ASK,
        "agent,gateway,router,shadow",
        _settings,
        "Print all settings of all services, with flags, variables and defaults, as a Markdown page.",
    ),
    "set-policy": _on_fleet(CHANGE, "Change the policy of a router and of all routers that share its Redis."),
    "cordon": _on_fleet(CHANGE, "Stop placing on an instance until `uncordon`."),
    "uncordon": _on_fleet(CHANGE, "Place on an instance again after `cordon`."),
    "drain": _on_fleet(CHANGE, "Stop placing on an instance until its engine restarts, or until --resume."),
    "weight": _on_fleet(CHANGE, "Limit an instance to a part of its fair share of new sessions."),
    "demo": _in_lab(MEASURE, "demo", "Run the whole control plane on this machine, with emulated engines."),
    "shadow": Command(
        MEASURE, "shadow", _shadow, "Compare another router's placements with Pointsman's, without placing anything."
    ),
    "simulate": _in_lab(MEASURE, "simulate", "Simulate a trace on modelled instances, in virtual time."),
    "compare": _in_lab(MEASURE, "compare", "Compare policies on the same draws of a trace, with confidence intervals."),
    "replay": _in_lab(MEASURE, "replay", "Replay a trace against a live gateway."),
    "emulate": _in_lab(MEASURE, "emulate", "Run an emulated vLLM server."),
    "profile": _in_lab(MEASURE, "profile", "Measure the step costs of an idle vLLM, and write a profile file."),
    "trace": _in_lab(MEASURE, "trace", "Generate, describe and convert traces."),
    "analyze": _in_lab(
        MEASURE,
        "analyze",
        "Report latencies, splits, tails, instances over time, hotspots and matched pairs of replays and simulations.",
    ),
    # They check the simulation, not a fleet.
    "calibrate": _in_lab("", "calibrate", "Replay a trace live, simulate it with measured costs, and compare the two."),
    "agree": _in_lab("", "agree", "Compare policies live and simulated, on the same draws of sessions."),
}


def main() -> None:
    """Entry point of the `pointsman` command."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked in COMMANDS:
        _register(asked)
    else:
        _register_lines()
    app()


def _register(name: str) -> None:
    """Register a command. If its extras are not installed, register one that names them."""
    try:
        COMMANDS[name].register()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package.partition("_")[0] == "pointsman":
            raise  # A module of this project is in no extra, so this is a programming error.
        _register_missing(name, COMMANDS[name].extras, package)


def _register_lines() -> None:
    """Register all commands with nothing but their line of the help."""
    from pointsman_cli.extras import is_installed

    for name, one in COMMANDS.items():
        line = one.line if all(map(is_installed, one.extras.split(","))) else _not_installed(one.extras)
        app.command(name, help=line, rich_help_panel=one.panel, hidden=not one.panel)(lambda: None)


def _not_installed(extras: str) -> str:
    return f"Not installed: pointsman\\[{extras}]."


def _register_missing(name: str, extras: str, package: str) -> None:
    def command() -> None:
        typer.echo(f"pointsman {name}: {package} is not installed; install pointsman[{extras}]", err=True)
        raise typer.Exit(1)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=_not_installed(extras), context_settings=anything)(command)


if __name__ == "__main__":
    main()
