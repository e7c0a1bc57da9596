"""`python -m studies.admission`: runs the study's missing trials, and writes its section of docs/findings.md."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from studies import TRACES
from studies.admission.cells import INSTANCES, plan_cells
from studies.admission.runs import AdmissionTrial, planned_trials, run_missing
from studies.admission.section import FRONTIER, PLOT, frontier, plot, section
from studies.command import run_study
from studies.marked_sections import ADMISSION, write_section


class AdmissionStudySettings(BaseSettings):
    """Settings of the study of admission."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_STUDY_ADMISSION_")

    traces: Path = Field(TRACES, description="folder of the shared traces; cells of missing traces are left out")
    seeds: int = Field(5, ge=1, description="maximum number of trials of each cell; many cells have two")
    first_seed: int = Field(0, ge=0, description="seed of the first trial")
    instances: int = Field(INSTANCES, ge=1, description="number of modelled instances; rates are in proportion to it")
    only: str = Field(
        "", description="regular expression; only cells whose SCENARIO / POLICY / ADMISSION match it are run"
    )
    quick: bool = Field(False, description="smoke test: few small sessions; its figures prove nothing")
    render_only: bool = Field(False, description="run no trials; write the section from the stored ones")
    results: Path = Field(
        Path("docs/results/admission.jsonl"),
        description="file of the trials; trials in it are not run again, so remove it when the code has changed what they show",
    )
    out: Path = Field(
        Path("docs/findings.md"), description="document with the section's marks; the plots are written beside it"
    )


def run(settings: AdmissionStudySettings) -> None:
    """Run the missing trials, one after the other, and write the section. Ctrl-C ends the trials; the section is then written
    from the stored ones. Exits with 2 without any."""
    planned = plan_cells(settings.traces, settings.instances, quick=settings.quick)
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    if not settings.render_only:
        chosen = [
            run for run in planned if re.search(settings.only, f"{run.scenario} / {run.policy} / {run.admission}")
        ]
        try:
            run_missing(chosen, seeds, settings.results, _print)
        except KeyboardInterrupt:
            typer.echo("interrupted")
    trials = planned_trials(planned, seeds, settings.results)
    if not trials:
        typer.echo(f"python -m studies.admission: no trials in {settings.results}", err=True)
        raise typer.Exit(2)
    missing = sum(min(cell.seeds, len(seeds)) for cell in planned) - len(trials)
    text = section(trials, missing, settings.instances, quick=settings.quick)
    write_section(settings.out, ADMISSION, text)
    settings.out.with_name(PLOT).write_text(plot(trials))
    settings.out.with_name(FRONTIER).write_text(frontier(trials))
    typer.echo(f"{settings.out}: written from {len(trials)} trials; {missing} planned trials are missing")


def _print(trial: AdmissionTrial) -> None:
    whole = trial.measures["all"]
    burst = trial.measures.get("burst", whole)
    typer.echo(
        f"{trial.scenario} / {trial.policy} / {trial.admission}, seed {trial.seed}: done {whole['done']:.1%}, "
        f"session time {burst.get('time_mean_s', 0.0):,.0f} s, {trial.run_s:.0f} s of CPU"
    )


if __name__ == "__main__":
    run_study(
        "admission",
        AdmissionStudySettings,
        run,
        help_="Run the missing trials of the study of admission, and write its section.",
    )
