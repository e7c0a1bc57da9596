"""Trials: simulations of cells under seeds, run on all cores, and the comparison of their measures.

A cell is one way to run a workload: a policy with its settings, a load, an engine. A trial is a cell under a seed, which fixes
the draw. Cells of one load and engine see the same draws, so that their measures can be paired. A trial's measures depend on its
cell and seed alone, not on the number of processes or the process that runs it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from pointsman_common.io.child_command import end_with
from pointsman_lab.experiments.latency_bounds import BOUNDS, LatencyBound
from pointsman_lab.experiments.paired_statistics import Estimate, difference_by_seed, estimate
from pointsman_lab.report.bundle import write_bundle
from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.measures import ALL, Measures, measure
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.forks import Forks, with_forks
from pointsman_lab.workload.session_starts import Arrivals, Session, draw_sessions
from pointsman_lab.workload.subagents import Subagents, with_subagents
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TraceRequest, first_sessions, require_think_times

# A trace file, or a picklable function that returns the requests of a seed.
TraceSource = Path | Callable[[int], Sequence[TraceRequest]]


@dataclass(frozen=True)
class Workload:
    """Source of requests, the starts of their sessions, which of them are sub-agents, and which fork. `sessions`: number of the
    trace's first sessions to use (0: all)."""

    source: TraceSource  # of the requests
    arrivals: Arrivals = field(default_factory=Arrivals)  # when sessions start
    sessions: int = 0
    subagents: Subagents = field(default_factory=Subagents)  # default: none
    forks: Forks = field(default_factory=Forks)  # default: none


@dataclass(frozen=True)
class Cell:
    """One way to run a workload. `policy` labels the compared policy; `load` labels the conditions: cells of one load are paired.

    The seed of `simulation` is replaced by the trial's. Its policy may be one of pointsman_lab.experiments.latency_bounds.BOUNDS.
    """

    policy: str
    load: str
    workload: Workload
    simulation: SimulationConfig


@dataclass(frozen=True)
class Trial:
    """Measures of a cell under a seed."""

    policy: str
    load: str
    seed: int
    measures: Measures


@dataclass(frozen=True)
class MetricComparison:
    """One metric of one group of requests: its mean over trials, and its paired difference to the baseline (None without one)."""

    load: str  # as Cell.load
    policy: str  # as Cell.policy
    baseline: str  # the policy that `policy` is compared with; may be `policy` itself
    group: str  # all, a class as class_of() names it, or by RULE (see measure())
    metric: str  # as measure() names it; times end with _s
    value: Estimate  # of `policy`, over the seeds that have the metric
    difference: Estimate | None  # policy - baseline, over the seeds that both have

    @property
    def verdict(self) -> str:
        """Verdict of the difference (see Estimate.verdict); empty without a difference, as for the baseline itself."""
        return self.difference.verdict if self.difference else ""


def run_trial(
    cell: Cell, seed: int, on_sample: Callable[[InstanceSample], None] | None = None
) -> tuple[list[RequestRecord], Measures]:
    """Run a cell under a seed in this process; return its records and measures. `on_sample` is passed to Simulator. Raises
    ValueError (TraceError, SimulationError, SettingError) for a cell that cannot be run."""
    sessions = drawn(cell.workload, seed)
    config = replace(cell.simulation, seed=seed)
    if config.timing == "think":
        require_think_times(sessions)
    if config.policy in BOUNDS:
        records = LatencyBound(sessions, config).run()
        return records, measure(records, {})
    simulator = Simulator(iter(sessions), config, on_sample)
    records = simulator.run()
    return records, measure(records, simulator.busy_s)


def drawn(workload: Workload, seed: int) -> list[Session]:
    """Return the sessions of a seed's draw. Raises ValueError as run_trial does."""
    sessions = draw_sessions(_requests(workload, seed), workload.arrivals, seed)
    return with_forks(with_subagents(sessions, workload.subagents, seed), workload.forks, seed)


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    processes: int = 0,
    on_trial: Callable[[Trial], None] | None = None,
    bundles: Path | None = None,
) -> list[Trial]:
    """Run every cell under every seed on `processes` processes (0: one per available core; 1: this process).

    Returns the trials in the order of `cells`, then `seeds`; `on_trial` is called with each trial when it ends. With `bundles`
    each trial writes a bundle into that folder. Ctrl-C (KeyboardInterrupt) ends the run, and the ended trials are returned. The
    processes end with this one, however it ends. Raises what run_trial raises.
    """
    tasks = [(cell, seed) for cell in cells for seed in seeds]
    done: dict[int, Trial] = {}

    def ended(number: int, trial: Trial) -> None:
        done[number] = trial
        if on_trial:
            on_trial(trial)

    try:
        if (processes or cores()) == 1:
            for number, (cell, seed) in enumerate(tasks):
                ended(number, _trial(cell, seed, bundles))
        else:
            _spread(tasks, processes or cores(), bundles, ended)
    except KeyboardInterrupt:
        pass
    return [done[number] for number in sorted(done)]


def compare(trials: Iterable[Trial], baseline: str) -> list[MetricComparison]:
    """Compare every metric of every policy with `baseline` under the same load; in the order of the trials.

    The difference is over the seeds for which both policies have the metric; a trial without requests of the group does not
    count. A metric that no trial has is left out.
    """
    by_cell: dict[tuple[str, str], dict[int, Measures]] = {}
    for trial in trials:
        by_cell.setdefault((trial.load, trial.policy), {})[trial.seed] = trial.measures
    found = []
    for (load, policy), by_seed in by_cell.items():
        against = by_cell.get((load, baseline), {}) if policy != baseline else {}
        names = dict.fromkeys(
            (group, metric) for measures in by_seed.values() for group in measures for metric in measures[group]
        )
        for group, metric in sorted(names, key=lambda name: name[0] != ALL):
            values = _values(by_seed, group, metric)
            difference = difference_by_seed(values, _values(against, group, metric))
            estimated = estimate(list(values.values()))
            found.append(MetricComparison(load, policy, baseline, group, metric, estimated, difference))
    return found


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _values(by_seed: dict[int, Measures], group: str, metric: str) -> dict[int, float]:
    return {
        seed: measures[group][metric]
        for seed, measures in sorted(by_seed.items())
        if group in measures and metric in measures[group]
    }


def _trial(cell: Cell, seed: int, bundles: Path | None) -> Trial:
    samples: list[InstanceSample] = []
    records, measures = run_trial(cell, seed, samples.append if bundles is not None else None)
    if bundles is not None:
        folder = bundles / _file_name(cell.policy) / _file_name(cell.load) / f"seed {seed}"
        config = {"policy": cell.policy, "load": cell.load, "seed": seed, "workload": repr(cell.workload)}
        write_bundle(folder, config | {"simulation": repr(cell.simulation)}, records, measures, samples)
    return Trial(cell.policy, cell.load, seed, measures)


def _file_name(label: str) -> str:
    return label.replace("/", "_") or "default"


def _spread(
    tasks: Sequence[tuple[Cell, int]], processes: int, bundles: Path | None, ended: Callable[[int, Trial], None]
) -> None:
    others = set(multiprocessing.active_children())
    # Not "fork": this process may have threads (a progress bar's), and a fork would copy the locks that they hold.
    context = multiprocessing.get_context("spawn")
    # A parent that a signal kills cannot end its children, and they would wait for their next task forever.
    with ProcessPoolExecutor(min(processes, len(tasks)), context, end_with, (os.getpid(),)) as pool:
        try:
            # The children start now and inherit the blocked SIGINT, so that Ctrl-C reaches the parent alone.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                futures = {
                    pool.submit(_trial, cell, seed, bundles): number for number, (cell, seed) in enumerate(tasks)
                }
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for future in as_completed(futures):
                ended(futures[future], future.result())
        except BaseException:
            # The pool detects that its processes ended, and fails the remaining tasks.
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


@lru_cache(maxsize=4)
def _loaded(path: Path) -> list[TraceRequest]:
    return load_trace(path)


def _requests(workload: Workload, seed: int) -> Sequence[TraceRequest]:
    source = workload.source
    return first_sessions(_loaded(source) if isinstance(source, Path) else source(seed), workload.sessions)
