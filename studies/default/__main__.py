"""`python -m studies.default`: runs the cells in which a policy must be no worse than `unified` to become the default,
and writes the section of docs/findings.md that tells the changes.

Each trial's figures are a line of a file, so an interrupted run resumes with the missing trials. A cell gets more seeds until all
its limits are decided.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import msgspec
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_lab.experiments.trials import run_trial
from pointsman_lab.report.bundle import git_commit
from studies import TRACES
from studies.command import run_study
from studies.default.cells import BASELINE, DefaultCell, default_cells
from studies.default.limits import PASS, SEEDS, changes, failed_more, figures, seeds_needed, table, verdict
from studies.marked_sections import DEFAULT, filled_template, write_section
from studies.stored_trials import append_trial, read_trials

TEMPLATE = Path(__file__).with_name("section.md.jinja")

# By policy, then seed: the figures of a cell's trials.
Trials = dict[str, dict[int, Mapping[str, float]]]


class DefaultStudySettings(BaseSettings):
    """Settings of the study."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_STUDY_DEFAULT_")

    policy: str = Field("auto", description="policy that is compared with unified")
    traces: Path = Field(TRACES, description="folder of the shared traces; cells of missing traces are left out")
    cells: str = Field("*", description="names of the cells to run and to show, as a pattern: 'agentic*'")
    first_seed: int = Field(6_000, ge=0, description="seed of the first trial; the policies were tuned on other seeds")
    seeds: int = Field(SEEDS[-1], ge=1, description="maximum number of seeds of a cell")
    results: Path = Field(
        Path("docs/results/default.jsonl"),
        description="file of the trials; trials in it are not run again, so remove it when a policy's code has changed",
    )
    render_only: bool = Field(False, description="run no trials; write the section from the stored ones")
    out: Path = Field(Path("docs/findings.md"), description="document with the section")


class StoredFigures(msgspec.Struct, frozen=True):
    """A line of the file: a trial's figures. `key`: everything that it depends on, except its seed and the code."""

    cell: str  # DefaultCell.name
    policy: str  # BASELINE, or the one compared with it
    seed: int  # of the sessions' draw and of the simulation
    key: str
    commit: str  # of the code that ran it, see git_commit(); empty: unknown
    took_s: float  # elapsed time, s
    figures: dict[str, float]  # metric -> value, see limits.figures()


def run(settings: DefaultStudySettings) -> None:
    """Run the missing trials, seed by seed over all cells, and write the section. Exits with 2 if no cell matches."""
    cells = [cell for cell in default_cells(settings.traces) if fnmatch(cell.name, settings.cells)]
    if not cells:
        typer.echo(f"python -m studies.default: no cell is called {settings.cells}", err=True)
        raise typer.Exit(2)
    found = {cell.name: _stored(cell, settings) for cell in cells}
    for _ in SEEDS if not settings.render_only else ():
        _run_missing(cells, found, settings)
    _write(found, settings)
    typer.echo(
        f"{settings.out}: written from {sum(len(seeds) for trials in found.values() for seeds in trials.values())} trials"
    )


def _run_missing(cells: Sequence[DefaultCell], found: Mapping[str, Trials], settings: DefaultStudySettings) -> None:
    """Run the trials that the cells lack for their next look, seed by seed, so that at any time all cells have about as many.
    Mutates `found`."""
    wanted = {cell.name: min(_seeds_needed(found[cell.name], settings.policy), settings.seeds) for cell in cells}
    for number in range(max(wanted.values())):
        seed = settings.first_seed + number
        for cell, policy in product(cells, (BASELINE, settings.policy)):
            if number < wanted[cell.name] and seed not in found[cell.name][policy]:
                found[cell.name][policy][seed] = _run(cell, policy, seed, settings.results)
        _write(found, settings)


def _seeds_needed(trials: Trials, policy: str) -> int:
    ours, base = trials[policy], trials[BASELINE]
    return seeds_needed(changes(ours, base), more_failed=failed_more(ours, base))


def _run(cell: DefaultCell, policy: str, seed: int, results: Path) -> Mapping[str, float]:
    started = time.perf_counter()
    found = figures(*run_trial(cell.cell(policy), seed))
    took_s = time.perf_counter() - started
    append_trial(results, StoredFigures(cell.name, policy, seed, cell.key(policy), git_commit(), took_s, found))
    return found


def _stored(cell: DefaultCell, settings: DefaultStudySettings) -> Trials:
    """Return the stored trials of a cell."""
    policies = (BASELINE, settings.policy)
    keys = {cell.key(policy): policy for policy in policies}
    trials: Trials = {policy: {} for policy in policies}
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    for trial in read_trials(settings.results, StoredFigures):
        if trial.key in keys and trial.seed in seeds:
            trials[keys[trial.key]][trial.seed] = trial.figures
    return trials


def _write(found: Mapping[str, Trials], settings: DefaultStudySettings) -> None:
    rows = {
        name: (
            changes(trials[settings.policy], trials[BASELINE]),
            failed_more(trials[settings.policy], trials[BASELINE]),
        )
        for name, trials in found.items()
    }
    passed = sum(verdict(its_changes, more_failed=more_failed) == PASS for its_changes, more_failed in rows.values())
    section = filled_template(
        TEMPLATE,
        {},
        policy=settings.policy,
        base=BASELINE,
        table=table(rows),
        passed=passed,
        cells=len(rows),
        first_seed=settings.first_seed,
        seeds=settings.seeds,
    )
    write_section(settings.out, DEFAULT, section)


if __name__ == "__main__":
    run_study(
        "default", DefaultStudySettings, run, help_="Find the cells in which a policy is worse than the default one."
    )
