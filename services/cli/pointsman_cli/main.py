"""`pointsman`: the command line of all services and of the operators' commands.

Only the module of the given command is imported. Otherwise a router would import the gateway's tokenizers, which costs memory
and time. The list of commands is a table here, so that `pointsman --help` imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
import typer.core
import typer.main


class _Commands(typer.core.TyperGroup):
    """The group of all commands, which registers a command when it has been found on the command line, wherever it stands there.
    Otherwise only the commands' lines are needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse what stands before the command. Ends the program for a flag of the command."""
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0].startswith("-") and args[0].partition("=")[0] not in {*own, "--"}:
            ctx.fail(
                f"{args[0]} is no flag of pointsman; a command's flags follow it, as in: pointsman COMMAND {args[0]}"
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command whose name is the first of `args`."""
        if args[0] in COMMANDS:
            _register(args[0])
        elif args[0] in MOVED:
            typer.echo(
                f"pointsman: {args[0]} is no command any more; from a checkout: python -m {MOVED[args[0]]}", err=True
            )
            raise typer.Exit(2)
        else:
            _register_lines()
        self.commands = _registered()
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        _register_lines()
        self.commands = _registered()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return what a command's name that begins with `incomplete` may be."""
        _register_lines()
        self.commands = _registered()
        return super().shell_complete(ctx, incomplete)


app = typer.Typer(name="pointsman", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


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


RUN, ASK, CHANGE, MEASURE = "Run it", "Look and ask", "Change the fleet", "Measure and simulate"


@dataclass(frozen=True)
class Command:
    """A command, which `register` adds to the app.

    `panel`: its part of `pointsman --help`; empty: not shown there. `line`: its line there, the first sentence of its own help.
    `extras`: those whose packages it imports, with commas between.
    """

    name: str  # as typed after `pointsman`
    panel: str
    extras: str
    register: Callable[[], None]
    line: str


def _with_settings(panel: str, extras: str, name: str, settings: str, run: str, line: str, more: str = "") -> Command:
    """Return a command whose flags are the fields of a settings class, and `line` and `more` its help. `settings` and `run`: that
    class and what runs the command, as MODULE:NAME."""

    def register() -> None:
        from pointsman_common.io.settings import add_settings_command

        add_settings_command(app, name, resolve_name(settings), resolve_name(run), help_=f"{line}\n\n{more}".strip())

    return Command(name, panel, extras, register, line)


def _in_lab(panel: str, name: str, module: str, settings: str, line: str, extras: str = "lab") -> Command:
    module = f"pointsman_lab.{module}"
    return _with_settings(panel, extras, name, f"{module}:{settings}", f"{module}:run", line)


def _on_fleet(panel: str, name: str, line: str) -> Command:
    return Command(name, panel, "cli", _fleet_commands, line)


def _fleet_commands() -> None:
    from pointsman_cli.fleet_commands import add_fleet_commands

    add_fleet_commands(app)


def _router() -> None:
    from pointsman_cli.installed_policies import installed_policies
    from pointsman_common.io.settings import add_settings_command
    from pointsman_router.io.main import run
    from pointsman_router.io.settings import RouterSettings

    run_with_policies = partial(run, policies=installed_policies())
    add_settings_command(app, "router", RouterSettings, run_with_policies, help_=COMMANDS["router"].line)


def _settings() -> None:
    from pointsman_cli.settings_page import settings

    app.command("settings")(settings)


def _shadow() -> None:
    from pointsman_shadow.io.commands import add_shadow_commands

    add_shadow_commands(app)


def _trace() -> None:
    from pointsman_cli.trace_convert import convert
    from pointsman_lab.workload.trace_commands import app as trace_commands

    trace_commands.command()(convert)
    app.add_typer(trace_commands, name="trace")


def _analyze() -> None:
    from pointsman_lab.report.analyze_command import analyze

    app.command("analyze")(analyze)


_LISTED = (
    _with_settings(
        RUN, "agent,gateway,router", "up", "pointsman_cli.up:UpSettings", "pointsman_cli.up:run_up",
        "Run router, agent and gateway together on this node, without Redis.",
    ),
    Command("router", RUN, "router", _router, "Run a router, which places requests on engines."),
    _with_settings(
        RUN, "gateway", "gateway", "pointsman_gateway.io.settings:GatewaySettings", "pointsman_gateway.io.main:run",
        "Run a gateway, which serves the HTTP API to clients.",
    ),
    _with_settings(
        RUN, "agent", "agent", "pointsman_agent.io.settings:AgentSettings", "pointsman_agent.io.main:run",
        "Run a node's agent, which reports its engines to routers.",
    ),
    _with_settings(
        RUN, "gateway,router", "serve", "pointsman_cli.one_process_settings:OneProcessSettings",
        "pointsman_cli.one_process:run_serve", "Run a router and a gateway in one process, for one gateway.",
        "Both are configured by their own variables, POINTSMAN_ROUTER_... and POINTSMAN_GATEWAY_..., which `pointsman settings` "
        "lists; only POINTSMAN_GATEWAY_ROUTERS has no effect.",
    ),
    _on_fleet(ASK, "doctor", "Check a fleet and print what to change."),
    _on_fleet(ASK, "instances", "List the instances of a fleet with their state, load, cached keys and sessions."),
    _on_fleet(ASK, "decisions", "List the newest decisions of all routers: where each request was placed, and why."),
    _on_fleet(ASK, "explain", "Explain why a request was placed where it was."),
    _on_fleet(ASK, "what-if", "Show where past requests would have been placed under another policy."),
    _on_fleet(ASK, "policies", "Print policies with their formulas, reasons, sources, and settings with bounds."),
    Command(
        "settings", ASK, "agent,gateway,router,shadow", _settings,
        "Print all settings of all services, with flags, variables and defaults, as a Markdown page.",
    ),
    _on_fleet(CHANGE, "set-policy", "Change the policy of a router and of all routers that share its Redis."),
    _on_fleet(CHANGE, "cordon", "Stop placing on an instance until `uncordon`."),
    _on_fleet(CHANGE, "uncordon", "Place on an instance again after `cordon`."),
    _on_fleet(CHANGE, "drain", "Stop placing on an instance until its engine restarts, or until --resume."),
    _on_fleet(CHANGE, "weight", "Limit an instance to a part of its fair share of new sessions."),
    _in_lab(
        MEASURE, "demo", "live.demo_command", "DemoSettings",
        "Run the whole control plane on this machine, with emulated engines.",
        extras="agent,gateway,lab,router",
    ),
    Command(
        "shadow", MEASURE, "shadow", _shadow,
        "Compare another router's placements with Pointsman's, without placing anything.",
    ),
    _in_lab(
        MEASURE, "simulate", "experiments.simulate_command", "SimulateSettings",
        "Simulate a trace on modelled instances, in virtual time.",
    ),
    _in_lab(
        MEASURE, "compare", "experiments.compare_command", "CompareSettings",
        "Compare policies on the same draws of a trace, with confidence intervals.",
    ),
    _in_lab(
        MEASURE, "replay", "live.replay_command", "ReplaySettings", "Replay a trace against a live gateway.",
    ),
    _in_lab(MEASURE, "emulate", "emulator.emulated_engine", "EmulateSettings", "Run an emulated vLLM server."),
    _in_lab(
        MEASURE, "profile", "live.profile_command", "ProfileSettings",
        "Measure the step costs of an idle vLLM, and write a profile file.",
    ),
    Command("trace", MEASURE, "lab", _trace, "Generate, describe and convert traces."),
    Command(
        "analyze", MEASURE, "lab", _analyze,
        "Report latencies, splits, tails, instances over time, hotspots and matched pairs of replays and simulations.",
    ),
    # They check the simulation, not a fleet.
    _in_lab(
        "", "calibrate", "live.calibrate_command", "CalibrateSettings",
        "Replay a trace live, simulate it with measured costs, and compare the two.",
    ),
    _in_lab(
        "", "agree", "live.agree_command", "AgreeSettings",
        "Compare policies live and simulated, on the same draws of sessions.",
    ),
)  # fmt: skip
COMMANDS: Mapping[str, Command] = {command.name: command for command in _LISTED}


# Former commands, and the modules of a checkout that do what they did.
MOVED = {"findings": "studies.findings", "study": "studies.admission, or studies.default"}


def main() -> None:
    """Entry point of the `pointsman` command."""
    app()


def _registered() -> Any:
    return typer.main.get_group(app).commands


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

    def command() -> None:
        raise NotImplementedError("this command is only a line of the help")

    for name, listed in COMMANDS.items():
        line = listed.line if all(map(is_installed, listed.extras.split(","))) else _not_installed(listed.extras)
        app.command(name, help=line, rich_help_panel=listed.panel, hidden=not listed.panel)(command)


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
