"""Runs the trials of `python -m studies.admission`, each once, and keeps them in a file: one line of JSON per cell and seed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pointsman_lab.experiments.trials import drawn, run_trial
from pointsman_lab.report.bundle import git_commit
from studies.admission.cells import PlannedCell
from studies.admission.measures import SessionMeasures, StartBin, bins_by_start, measure_sessions, outcomes
from studies.stored_trials import append_trial, read_trials


class AdmissionTrial(msgspec.Struct, frozen=True):
    """A trial: a cell under a seed. `key` is PlannedCell.key, `run_s` the CPU time that the run took."""

    scenario: str  # as in PlannedCell
    policy: str  # as in PlannedCell
    admission: str  # as in PlannedCell
    seed: int  # of the sessions' draw and of the simulation
    key: str
    commit: str  # of the code that ran it, see git_commit(); empty: unknown
    run_s: float
    measures: SessionMeasures  # by phase of the session starts, see measure_sessions()
    by_start: list[StartBin]  # one for each BIN_S of session starts, from 0 on


def run_missing(
    cells: Sequence[PlannedCell], seeds: Sequence[int], file: Path, on_trial: Callable[[AdmissionTrial], None]
) -> None:
    """Run the trials that are not in `file`, tier by tier and in each seed by seed: what is there is paired if time runs out.

    Several processes may run at once on one file: a trial that another process has begun is left to it. The claims are in a
    folder beside the file.
    """
    claims = file.with_suffix(".claims")
    claims.mkdir(parents=True, exist_ok=True)
    # That of the code that this process has loaded, whatever is committed while it runs.
    commit = git_commit()
    for tier in sorted({cell.tier for cell in cells}):
        for number, seed in enumerate(seeds):
            for cell in (planned for planned in cells if planned.tier == tier and number < planned.seeds):
                with _claimed(claims / f"{hashlib.sha256(cell.key.encode()).hexdigest()[:16]}-{seed}") as mine:
                    # Read with the claim: another process may just have stored it.
                    if mine and (cell.key, seed) not in _stored(file):
                        on_trial(_run(cell, seed, file, commit))


def planned_trials(cells: Sequence[PlannedCell], seeds: Sequence[int], file: Path) -> list[AdmissionTrial]:
    """Return the trials of `cells` that are in `file`, in the order of the cells."""
    stored = _stored(file)
    wanted = ((cell.key, seed) for cell in cells for seed in seeds[: cell.seeds])
    return [stored[name] for name in wanted if name in stored]


def _stored(file: Path) -> Mapping[tuple[str, int], AdmissionTrial]:
    """Return the trials in the file by key and seed."""
    return {(trial.key, trial.seed): trial for trial in read_trials(file, AdmissionTrial)}


def _run(planned: PlannedCell, seed: int, file: Path, commit: str) -> AdmissionTrial:
    began = time.process_time()
    records, _ = run_trial(planned.cell, seed)
    sessions = drawn(planned.cell.workload, seed)
    measures = measure_sessions(sessions, records, planned.cell.workload.arrivals)
    trial = AdmissionTrial(
        planned.scenario,
        planned.policy,
        planned.admission,
        seed,
        planned.key,
        commit,
        round(time.process_time() - began, 1),
        measures,
        bins_by_start(outcomes(sessions, records)),
    )
    append_trial(file, trial)
    return trial


@contextmanager
def _claimed(claim: Path) -> Iterator[bool]:
    """Yield whether this process has the trial within the block. The claim of a process that has ended is void."""
    if claim.exists() and not _alive(claim.read_text()):
        claim.unlink(missing_ok=True)
    try:
        with claim.open("x") as claimed:
            claimed.write(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        claim.unlink(missing_ok=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    return True


def by_cell(trials: Sequence[AdmissionTrial]) -> Mapping[tuple[str, str, str], Mapping[int, AdmissionTrial]]:
    """Return the trials by (scenario, policy, admission) and seed."""
    found: dict[tuple[str, str, str], dict[int, AdmissionTrial]] = {}
    for trial in trials:
        found.setdefault((trial.scenario, trial.policy, trial.admission), {})[trial.seed] = trial
    return found
