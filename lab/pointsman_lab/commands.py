"""Lab commands of the `pointsman` command line."""

from __future__ import annotations

import typer

from pointsman_common.io.settings import add_settings_command
from pointsman_lab.emulator.emulated_engine import EmulateSettings
from pointsman_lab.emulator.emulated_engine import run as run_emulator
from pointsman_lab.experiments.compare_command import CompareSettings
from pointsman_lab.experiments.compare_command import run as run_comparison
from pointsman_lab.experiments.simulate_command import SimulateSettings
from pointsman_lab.experiments.simulate_command import run as run_simulation
from pointsman_lab.live.agree_command import AgreeSettings
from pointsman_lab.live.agree_command import run as run_agreement
from pointsman_lab.live.calibrate_command import CalibrateSettings
from pointsman_lab.live.calibrate_command import run as run_calibration
from pointsman_lab.live.demo_command import DemoSettings
from pointsman_lab.live.demo_command import run as run_demo
from pointsman_lab.live.profile_command import ProfileSettings
from pointsman_lab.live.profile_command import run as run_profiler
from pointsman_lab.live.replay_command import ReplaySettings
from pointsman_lab.live.replay_command import run as run_replay
from pointsman_lab.report.analyze_command import analyze
from pointsman_lab.study.admission_command import AdmissionStudySettings
from pointsman_lab.study.admission_command import run as run_admission_study
from pointsman_lab.study.default_command import DefaultStudySettings
from pointsman_lab.study.default_command import run as run_default_study
from pointsman_lab.study.findings_command import FindingsSettings
from pointsman_lab.study.findings_command import run as run_findings
from pointsman_lab.workload.trace_commands import app as trace_commands


def add_lab_commands(app: typer.Typer) -> None:
    """Register the lab's commands on `app`."""
    add_settings_command(app, "emulate", EmulateSettings, run_emulator, help_="Run an emulated vLLM server.")
    add_settings_command(
        app,
        "profile",
        ProfileSettings,
        run_profiler,
        help_="Measure the step costs of an idle vLLM, and write a profile file.",
    )
    add_settings_command(app, "replay", ReplaySettings, run_replay, help_="Replay a trace against a live gateway.")
    add_settings_command(
        app,
        "simulate",
        SimulateSettings,
        run_simulation,
        help_="Simulate a trace on modelled instances, in virtual time.",
    )
    add_settings_command(
        app,
        "compare",
        CompareSettings,
        run_comparison,
        help_="Compare policies on the same draws of a trace, with confidence intervals.",
    )
    add_settings_command(
        app,
        "findings",
        FindingsSettings,
        run_findings,
        help_="Run the missing trials of docs/findings.md, and write the document.",
    )
    add_settings_command(
        app,
        "calibrate",
        CalibrateSettings,
        run_calibration,
        help_="Replay a trace live, simulate it with measured costs, and compare the two.",
    )
    add_settings_command(
        app,
        "agree",
        AgreeSettings,
        run_agreement,
        help_="Compare policies live and simulated, on the same draws of sessions.",
    )
    app.command("analyze")(analyze)
    study = typer.Typer(
        no_args_is_help=True, help="Studies beside those of docs/findings.md: of admission, and of the default policy."
    )
    add_settings_command(
        study,
        "admission",
        AdmissionStudySettings,
        run_admission_study,
        help_="Run the missing trials of the study of admission, and write its section.",
    )
    add_settings_command(
        study,
        "default",
        DefaultStudySettings,
        run_default_study,
        help_="Find the cells in which a policy is worse than the default one.",
    )
    app.add_typer(study, name="study")
    app.add_typer(trace_commands, name="trace")
    add_settings_command(
        app, "demo", DemoSettings, run_demo, help_="Run the whole control plane on this machine, with emulated engines."
    )
