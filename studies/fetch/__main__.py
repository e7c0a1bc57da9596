"""`python -m studies.fetch`: runs cells on engines that transfer KV and on engines that do not, and writes the section of
docs/findings.md that tells what fetching a cached prefix from another instance gains.

Each trial's figures are a line of a file, so an interrupted run resumes with the missing trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_lab.experiments.paired_statistics import estimate
from pointsman_lab.report.bundle import git_commit
from pointsman_lab.report.measures import measure
from studies import TRACES
from studies.command import run_study
from studies.default.limits import figures
from studies.fetch.cells import FetchCell, Run, cells, run_cell
from studies.marked_sections import FETCH, filled_template, write_section
from studies.stored_trials import append_trial, read_trials

TEMPLATE = Path(__file__).with_name("section.md.jinja")
SEEDS = 5
# Metric -> its name in the table and the unit's factor.
METRICS: Mapping[str, tuple[str, float]] = {
    "sharing_p90_s": ("sharing, TTFT p90 s", 1.0),
    "ttft_p50_s": ("TTFT p50 s", 1.0),
    "ttft_p90_s": ("TTFT p90 s", 1.0),
    "ttft_p99_s": ("TTFT p99 s", 1.0),
    "e2e_p90_s": ("E2E p90 s", 1.0),
    "session_mean_s": ("session s", 1.0),
    "tpot_p90_s": ("TPOT p90 ms", 1e3),
    "others_tpot_p90_s": ("others' TPOT p90 ms", 1e3),
    "filled_s": ("filled after s", 1.0),
    "computed_m": ("M tokens computed", 1.0),
    "fetched": ("fetched", 1.0),
}


class FetchStudySettings(BaseSettings):
    """Settings of the study."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_STUDY_FETCH_")

    traces: Path = Field(TRACES, description="folder of the shared traces; cells of missing traces are left out")
    first_seed: int = Field(8_100, ge=0, description="seed of the first trial; the policies were tuned on other seeds")
    results: Path = Field(
        Path("docs/results/fetch.jsonl"),
        description="file of the trials; trials in it are not run again, so remove it when a policy's code has changed",
    )
    render_only: bool = Field(False, description="run no trials; write the section from the stored ones")
    out: Path = Field(Path("docs/findings.md"), description="document with the section")


class FetchTrial(msgspec.Struct, frozen=True):
    """A line of the file: a trial's figures."""

    cell: str  # as in cells()
    policy: str  # the cell's
    transfers: bool  # whether the engines transfer KV
    seed: int  # of the sessions' draw, the forks' and the simulation
    commit: str  # of the code that ran it, see git_commit(); empty: unknown
    figures: dict[str, float]  # by METRICS


def run(settings: FetchStudySettings) -> None:
    """Run the missing trials and write the section."""
    trials = {
        (trial.cell, trial.policy, trial.transfers, trial.seed): trial.figures
        for trial in read_trials(settings.results, FetchTrial)
    }
    known = cells(settings.traces)
    seeds = range(settings.first_seed, settings.first_seed + SEEDS)
    for seed, (name, cell), transfers in product(seeds, known.items(), (False, True)):
        if settings.render_only or (name, cell.policy, transfers, seed) in trials:
            continue
        found = trials[name, cell.policy, transfers, seed] = _figures(run_cell(cell, seed, transfers=transfers))
        append_trial(settings.results, FetchTrial(name, cell.policy, transfers, seed, git_commit(), found))
    text = filled_template(
        TEMPLATE, {}, table=_table(known, trials, seeds), seeds=SEEDS, first_seed=settings.first_seed
    )
    write_section(settings.out, FETCH, text)
    typer.echo(f"{settings.out}: written from {len(trials)} trials")


def _figures(ran: Run) -> dict[str, float]:
    records, names = ran.records, {id(record) for record in ran.sharing}
    others = [record.tpot_s for record in records if id(record) not in names and record.tpot_s is not None]
    computed = sum((record.prompt_tokens or 0) - (record.cached_tokens or 0) for record in records)
    whole = figures(records, measure(records, ran.busy_s))
    return {name: value for name, value in whole.items() if name in METRICS} | {
        "sharing_p90_s": _p90([record.ttft_s for record in ran.sharing if record.ttft_s is not None]),
        "others_tpot_p90_s": _p90(others),
        "filled_s": ran.filled_s,
        "computed_m": computed / 1e6,
        "fetched": float(sum(record.reason == "fetch" for record in records)),
    }


def _p90(values: Sequence[float]) -> float:
    return float(np.percentile(values, 90)) if values else 0.0


def _table(
    known: Mapping[str, FetchCell],
    trials: Mapping[tuple[str, str, bool, int], Mapping[str, float]],
    seeds: Sequence[int],
) -> str:
    """Return a Markdown table: for each cell and policy the means without and with transfers, in bold where the 95 % interval of
    the paired differences does not contain 0."""
    lines = [
        f"| cell | policy | seeds | {' | '.join(name for name, _ in METRICS.values())} |",
        "|" + "---|" * (len(METRICS) + 3),
    ]
    for cell, policy in ((name, found.policy) for name, found in known.items()):
        pairs = [
            (trials[cell, policy, False, seed], trials[cell, policy, True, seed])
            for seed in seeds
            if (cell, policy, True, seed) in trials
        ]
        if pairs:
            texts = [_text([(a[name] * unit, b[name] * unit) for a, b in pairs]) for name, (_, unit) in METRICS.items()]
            lines.append(f"| {cell} | `{policy}` | {len(pairs)} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _text(pairs: Sequence[tuple[float, float]]) -> str:
    before, after = (float(np.mean(values)) for values in zip(*pairs, strict=True))
    if not before and not after:
        return "-"
    digits = 0 if max(before, after) >= 20 else 1 if max(before, after) >= 3 else 2
    text = f"{before:,.{digits}f} -> {after:,.{digits}f}"
    difference = estimate([b - a for a, b in pairs])
    return text if difference.low <= 0 <= difference.high else f"**{text}**"


if __name__ == "__main__":
    run_study("fetch", FetchStudySettings, run, help_="Find what fetching cached prefixes from other instances gains.")
