"""`python -m studies.findings`: runs and stores the trials behind docs/findings.md, and writes the document from them.

Each trial's measures are a line of a file. So an interrupted run resumes with the missing trials, and the document can be written
again without running any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.io.settings import Pairs
from pointsman_lab.experiments.trials import Trial, run_cells
from pointsman_lab.live.model_accuracy import LiveComparison, from_json
from pointsman_lab.report.bundle import git_commit
from pointsman_lab.report.terminal import make_console, make_progress
from studies import TRACES
from studies.command import run_study
from studies.findings.cells import LOADS, PlannedCell, plan_cells, tier_cells
from studies.findings.figures import StoredTrial, cells_of
from studies.findings.opening import plots, read_tables, router_table, with_opening
from studies.findings.page import render
from studies.findings.tiers import tier_section
from studies.marked_sections import (
    AGREEMENT,
    CALIBRATION,
    OF_STUDIES,
    ROUTERS,
    TIERS,
    section_of,
    with_section,
    write_front_section,
    write_section,
)
from studies.stored_trials import append_trial, read_trials


class FindingsSettings(BaseSettings):
    """Settings of the document and of its trials."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_FINDINGS_")

    traces: Path = Field(TRACES, description="folder of the shared traces; missing traces are left out")
    trials: int = Field(5, ge=1, description="number of trials of each cell")
    first_seed: int = Field(100, ge=0, description="seed of the first trial; the policies were tuned on other seeds")
    quick: bool = Field(
        False, description="smoke test: few sessions, instances and policies; its figures prove nothing"
    )
    render_only: bool = Field(False, description="run no trials; write the document from the stored ones")
    opening_only: bool = Field(
        False, description="run and read no trials; write the opening and the plots from the document's own tables"
    )
    tiers_only: bool = Field(
        False,
        description="run the trials with host memory and shared storage, and write their section of the document alone",
    )
    processes: int = Field(0, ge=0, description="number of processes; 0: one for each core")
    results: Path = Field(
        Path("docs/results/findings.jsonl"),
        description="file of the trials; trials in it are not run again, so remove it when a policy's code has changed",
    )
    calibration: Path = Field(
        Path("runs/calibration/calibration.json"),
        description="results of `pointsman calibrate`; without the file the document keeps its section",
    )
    agreements: Pairs = Field(
        ["emulated=runs/agreement/agreement.md", "real=runs/agreement-real/agreement.md"],
        description="ENGINES=FILE, a page of `pointsman agree` on emulated or real engines; missing files are left "
        "out, and without any the document keeps its section",
    )
    out: Path = Field(Path("docs/findings.md"), description="file of the document")


def run(settings: FindingsSettings) -> None:
    """Run the missing trials, tier by tier and seed by seed, and write the document. Ctrl-C ends the trials; the document is then
    written from the stored ones. Exits with 2 without any."""
    if settings.opening_only:
        _write(settings.out, settings.out.read_text())
        typer.echo(f"{settings.out}: wrote the opening and the plots from the document's tables")
        return
    cells = plan_cells(settings.traces, settings.trials, quick=settings.quick)
    if settings.tiers_only:
        cells = tier_cells(cells)
    stored = list(read_trials(settings.results, StoredTrial))
    seeds = range(settings.first_seed, settings.first_seed + settings.trials)
    if not settings.render_only:
        _run_missing(cells, stored, seeds, settings)
        stored = list(read_trials(settings.results, StoredTrial))
    wanted = {(cell.key, seed): cell for cell in cells for seed in seeds[: cell.trials]}
    # Two runs that write to one file may both have run a trial; the trial counts once.
    trials = {(trial.cell, trial.seed): trial for trial in stored}
    found = [(wanted[at], trial) for at, trial in trials.items() if at in wanted]
    missing = len(wanted) - len(found)
    if not found:
        typer.echo(f"python -m studies.findings: no trials in {settings.results}", err=True)
        raise typer.Exit(2)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    # The names of trace, load and policy are the plan's: they may have changed since the trial was stored. Its key identifies the
    # cell.
    place = {cell.key: number for number, cell in enumerate(cells)}
    renamed = [
        msgspec.structs.replace(trial, trace=cell.trace, load=cell.load, threshold=cell.threshold, policy=cell.policy)
        for cell, trial in sorted(found, key=lambda pair: place[pair[0].key])
    ]
    if settings.tiers_only:
        write_section(settings.out, TIERS, tier_section(cells_of(renamed), cells[0].trace))
    else:
        calibrated, agreements = _calibrated(settings.calibration), _agreements(settings.agreements)
        _write(settings.out, render(renamed, LOADS, missing, settings.quick, calibrated, agreements))
    typer.echo(f"{settings.out}: written from {len(found)} trials; {missing} planned trials are missing")


def _write(out: Path, document: str) -> None:
    """Write the document, with an opening made from its tables, the plots beside it, and README's table. The sections of other
    commands are kept, and those of whose figures there is no file."""
    before = out.read_text() if out.exists() else ""
    without_file = [name for name in (AGREEMENT, CALIBRATION) if not section_of(document, name)]
    for name in (*OF_STUDIES, *without_file):
        document = with_section(document, name, section_of(before, name))
    out.write_text(with_opening(document))
    for name, drawn in plots(document).items():
        out.with_name(name).write_text(drawn)
    write_front_section(out, ROUTERS, router_table(read_tables(document)))


def _calibrated(file: Path) -> list[tuple[str, list[LiveComparison]]]:
    return from_json(msgspec.json.decode(file.read_bytes())["loads"]) if file.exists() else []


def _agreements(named: Sequence[str]) -> dict[str, str]:
    files = {engines: Path(file) for engines, _, file in (pair.partition("=") for pair in named)}
    return {engines: file.read_text() for engines, file in files.items() if file.exists()}


def _run_missing(
    cells: Sequence[PlannedCell], stored: Iterable[StoredTrial], seeds: Sequence[int], settings: FindingsSettings
) -> None:
    have = {(trial.cell, trial.seed) for trial in stored}
    commit = git_commit()
    # Each tier gets all its trials before the next one starts: if time runs out, the most important cells are complete.
    rounds = {
        (tier, seed): [
            cell
            for cell in cells
            if cell.tier == tier and seed in seeds[: cell.trials] and (cell.key, seed) not in have
        ]
        for tier in sorted({cell.tier for cell in cells})
        for seed in seeds
    }
    with make_progress(make_console()) as progress:
        task = progress.add_task("trials", total=sum(map(len, rounds.values())))
        for (_, seed), missing in rounds.items():
            by_name = {(run.cell.load, run.cell.policy): run for run in missing}

            def ended(trial: Trial, by_name: Mapping[tuple[str, str], PlannedCell] = by_name) -> None:
                one = by_name[trial.load, trial.policy]
                line = StoredTrial(
                    one.trace, one.load, one.threshold, one.policy, trial.seed, one.key, commit, trial.measures
                )
                append_trial(settings.results, line)
                progress.advance(task)

            wanted = [run.cell for run in missing]
            if wanted and len(run_cells(wanted, [seed], settings.processes, ended)) < len(wanted):
                return  # Ctrl-C


if __name__ == "__main__":
    run_study(
        "findings", FindingsSettings, run, help_="Run the missing trials of docs/findings.md, and write the document."
    )
