"""Runs the trials of `pointsman study admission`, each once, and keeps them in a folder: one JSON file per cell and seed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pointsman.lab.experiments.trials import drawn, run_trial
from pointsman.lab.report.bundle import git_commit
from pointsman.lab.study.admission_cells import PlannedCell
from pointsman.lab.study.admission_measures import SessionMeasures, SessionOutcome, measure_sessions, outcomes


class AdmissionTrial(msgspec.Struct, frozen=True):
    """A trial: a cell under a seed. `key` is PlannedCell.key, `run_s` the time that the run took."""

    scenario: str
    policy: str
    admission: str
    seed: int
    key: str
    commit: str
    run_s: float
    measures: SessionMeasures
    sessions: list[SessionOutcome]


def run_missing(
    cells: Sequence[PlannedCell], seeds: Sequence[int], folder: Path, on_trial: Callable[[AdmissionTrial], None]
) -> None:
    """Run the trials that are not in `folder`, tier by tier and in each seed by seed: what is there is paired if time runs out.

    Several processes may run at once on one folder: a trial that another process has begun is left to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # That of the code that this process has loaded, whatever is committed while it runs.
    commit = git_commit()
    for tier in sorted({one.tier for one in cells}):
        for seed in seeds:
            for one in cells:
                file = _file(folder, one, seed)
                if one.tier == tier and not file.exists() and _claim(file):
                    on_trial(_run(one, seed, file, commit))


def read_trials(cells: Sequence[PlannedCell], seeds: Sequence[int], folder: Path) -> list[AdmissionTrial]:
    """Return the trials of `cells` that are in `folder`, in the order of the cells."""
    decoder = msgspec.json.Decoder(AdmissionTrial)
    files: Iterator[Path] = (_file(folder, one, seed) for one in cells for seed in seeds)
    return [decoder.decode(file.read_bytes()) for file in files if file.exists()]


def _run(one: PlannedCell, seed: int, file: Path, commit: str) -> AdmissionTrial:
    began = time.process_time()
    records, _ = run_trial(one.cell, seed)
    sessions = drawn(one.cell.workload, seed)
    measures = measure_sessions(sessions, records, one.cell.workload.arrivals)
    trial = AdmissionTrial(
        one.scenario,
        one.policy,
        one.admission,
        seed,
        one.key,
        commit,
        round(time.process_time() - began, 1),
        measures,
        outcomes(sessions, records),
    )
    # Renamed when it is complete: an interrupted run leaves no half a trial.
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(trial))
    part.replace(file)
    _lock(file).unlink(missing_ok=True)
    return trial


def _claim(file: Path) -> bool:
    """Return whether this process now has the trial. The claim of a process that has ended is void."""
    lock = _lock(file)
    if lock.exists() and not _alive(lock.read_text()):
        lock.unlink(missing_ok=True)
    try:
        with lock.open("x") as claimed:
            claimed.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    return True


def _lock(file: Path) -> Path:
    return file.with_suffix(".lock")


def _file(folder: Path, one: PlannedCell, seed: int) -> Path:
    name = "-".join(
        "".join(c if c.isalnum() else "_" for c in part) for part in (one.scenario, one.policy, one.admission)
    )
    return folder / f"{name}-{seed}-{hashlib.sha256(one.key.encode()).hexdigest()[:8]}.json"


def by_cell(trials: Sequence[AdmissionTrial]) -> Mapping[tuple[str, str, str], Mapping[int, AdmissionTrial]]:
    """Return the trials by (scenario, policy, admission) and seed."""
    found: dict[tuple[str, str, str], dict[int, AdmissionTrial]] = {}
    for one in trials:
        found.setdefault((one.scenario, one.policy, one.admission), {})[one.seed] = one
    return found
