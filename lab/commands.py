"""The lab's part of the `pointsman` command line."""

from __future__ import annotations

import typer

from lab.analyze import analyze
from lab.calibrate import CalibrateSettings
from lab.calibrate import run as run_calibration
from lab.compare import CompareSettings
from lab.compare import run as run_comparison
from lab.demo import DemoSettings
from lab.demo import run as run_demo
from lab.emulator import EmulateSettings
from lab.emulator import run as run_emulator
from lab.findings import FindingsSettings
from lab.findings import run as run_findings
from lab.profiler import ProfileSettings
from lab.profiler import run as run_profiler
from lab.replay import ReplaySettings
from lab.replay import run as run_replay
from lab.simulate import SimulateSettings
from lab.simulate import run as run_simulation
from lab.trace_commands import app as trace_commands
from services.common.settings import add_settings_command


def add_lab_commands(app: typer.Typer) -> None:
    """Register the lab's commands on `app`."""
    add_settings_command(app, "emulate", EmulateSettings, run_emulator, help_="Run an emulated vLLM server.")
    add_settings_command(
        app,
        "profile",
        ProfileSettings,
        run_profiler,
        help_="Measure what an idle vLLM's steps cost, into a profile file.",
    )
    add_settings_command(app, "replay", ReplaySettings, run_replay, help_="Replay a trace against a live gateway.")
    add_settings_command(
        app,
        "simulate",
        SimulateSettings,
        run_simulation,
        help_="Play a trace over modelled instances, in virtual time.",
    )
    add_settings_command(
        app,
        "compare",
        CompareSettings,
        run_comparison,
        help_="Compare policies over the same draws of a trace, with confidence intervals.",
    )
    add_settings_command(
        app,
        "findings",
        FindingsSettings,
        run_findings,
        help_="Run the trials behind docs/findings.md, those that are missing, and write it.",
    )
    add_settings_command(
        app,
        "calibrate",
        CalibrateSettings,
        run_calibration,
        help_="Replay a trace live and in simulation, and say how far apart they are.",
    )
    app.command("analyze")(analyze)
    app.add_typer(trace_commands, name="trace")
    add_settings_command(
        app, "demo", DemoSettings, run_demo, help_="Show it all on this machine, with emulated engines."
    )
