"""Lab commands of the `pointsman` command line. Each function registers one, and imports no more than that needs."""

from __future__ import annotations

import typer

from pointsman_common.io.settings import add_settings_command


def add_emulate(app: typer.Typer) -> None:
    """Register `emulate`."""
    from pointsman_lab.emulator.emulated_engine import EmulateSettings, run

    add_settings_command(app, "emulate", EmulateSettings, run, help_="Run an emulated vLLM server.")


def add_profile(app: typer.Typer) -> None:
    """Register `profile`."""
    from pointsman_lab.live.profile_command import ProfileSettings, run

    add_settings_command(
        app, "profile", ProfileSettings, run, help_="Measure the step costs of an idle vLLM, and write a profile file."
    )


def add_replay(app: typer.Typer) -> None:
    """Register `replay`."""
    from pointsman_lab.live.replay_command import ReplaySettings, run

    add_settings_command(app, "replay", ReplaySettings, run, help_="Replay a trace against a live gateway.")


def add_simulate(app: typer.Typer) -> None:
    """Register `simulate`."""
    from pointsman_lab.experiments.simulate_command import SimulateSettings, run

    add_settings_command(
        app, "simulate", SimulateSettings, run, help_="Simulate a trace on modelled instances, in virtual time."
    )


def add_compare(app: typer.Typer) -> None:
    """Register `compare`."""
    from pointsman_lab.experiments.compare_command import CompareSettings, run

    add_settings_command(
        app,
        "compare",
        CompareSettings,
        run,
        help_="Compare policies on the same draws of a trace, with confidence intervals.",
    )


def add_calibrate(app: typer.Typer) -> None:
    """Register `calibrate`."""
    from pointsman_lab.live.calibrate_command import CalibrateSettings, run

    add_settings_command(
        app,
        "calibrate",
        CalibrateSettings,
        run,
        help_="Replay a trace live, simulate it with measured costs, and compare the two.",
    )


def add_agree(app: typer.Typer) -> None:
    """Register `agree`."""
    from pointsman_lab.live.agree_command import AgreeSettings, run

    add_settings_command(
        app, "agree", AgreeSettings, run, help_="Compare policies live and simulated, on the same draws of sessions."
    )


def add_demo(app: typer.Typer) -> None:
    """Register `demo`."""
    from pointsman_lab.live.demo_command import DemoSettings, run

    add_settings_command(
        app, "demo", DemoSettings, run, help_="Run the whole control plane on this machine, with emulated engines."
    )


def add_analyze(app: typer.Typer) -> None:
    """Register `analyze`."""
    from pointsman_lab.report.analyze_command import analyze

    app.command("analyze")(analyze)


def add_trace(app: typer.Typer) -> None:
    """Register `trace`, a group of commands."""
    from pointsman_lab.workload.trace_commands import app as trace_commands

    app.add_typer(trace_commands, name="trace")
