"""The knee of response time over throughput: the load at which a fleet works best. Pure.

The knee is the load with the greatest power, which is throughput / mean response time. Below the knee, more load adds little
response time; above it, response time grows faster than throughput. At the knee the ray from the origin touches the curve of
response time over throughput (L. Kleinrock, Power and deterministic rules of thumb for probabilistic problems in computer
communications, ICC 1979). The definition has no parameter to choose. For a single queue with exponential times (M/M/1) the knee
is at half the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pointsman_lab.experiments.trials import Cell, Trial
from pointsman_lab.report.measures import ALL, Measures

# Share of the greatest power; a policy is saturated when its power at the highest rate is at most this.
SATURATED = 0.5


@dataclass(frozen=True)
class Knee:
    """The knee of one policy over loads that differ by the rate alone."""

    policy: str  # as its cells are labelled (Cell.policy)
    loads: tuple[str, ...]  # labels of the cells (Cell.load), one for each of `rates`
    rates: tuple[float, ...]  # of the sweep
    powers: tuple[float, ...]  # answers per s squared, at each rate
    agreement: float  # share of seeds whose own greatest power is at the knee

    @property
    def position(self) -> int:
        """Index of the knee in `rates`."""
        return max(range(len(self.powers)), key=self.powers.__getitem__)

    @property
    def rate(self) -> float:
        """The rate at the knee."""
        return self.rates[self.position]

    @property
    def inside(self) -> bool:
        """Whether the knee is neither the lowest nor the highest rate; at an edge the true knee may lie beyond the rates
        tried."""
        return 0 < self.position < len(self.rates) - 1

    @property
    def saturated(self) -> bool:
        """Whether the power at the highest rate is at most SATURATED of the greatest."""
        return self.powers[-1] <= SATURATED * max(self.powers)


def power(measures: Measures) -> float | None:
    """Return throughput / mean response time of one trial, in answers per s squared; None if too few requests were answered."""
    whole = measures[ALL]
    if "throughput" not in whole or not whole.get("e2e_mean_s"):
        return None
    return whole["throughput"] / whole["e2e_mean_s"]


def knees(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[Knee]:
    """Return the knee of every series of cells that differ only by the rate at which sessions start.

    The powers are means over the seeds that were run at every rate. A series with fewer than three rates, or without such a seed,
    is left out.
    """
    found = []
    for series in _series(cells):
        by_seed = [
            {
                trial.seed: power_of_trial
                for trial in trials
                if _of(trial, cell) and (power_of_trial := power(trial.measures)) is not None
            }
            for cell in series
        ]
        seeds = sorted(set.intersection(*(set(powers) for powers in by_seed)))
        if len(series) < 3 or not seeds:
            continue
        knee = Knee(
            policy=series[0].policy,
            loads=tuple(cell.load for cell in series),
            rates=tuple(cell.workload.arrivals.rate for cell in series),
            powers=tuple(fmean(powers[seed] for seed in seeds) for powers in by_seed),
            agreement=0.0,
        )
        agree = [by_seed[knee.position][seed] == max(powers[seed] for powers in by_seed) for seed in seeds]
        found.append(replace(knee, agreement=sum(agree) / len(seeds)))
    return found


def _series(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that are equal except for their rate; each group is sorted by rate."""
    found: list[tuple[Cell, list[Cell]]] = []
    for cell in cells:
        workload = cell.workload
        common = replace(cell, load="", workload=replace(workload, arrivals=replace(workload.arrivals, rate=1.0)))
        for key, series in found:
            if key == common:
                series.append(cell)
                break
        else:
            found.append((common, [cell]))
    return [sorted(series, key=lambda cell: cell.workload.arrivals.rate) for _, series in found]


def _of(trial: Trial, cell: Cell) -> bool:
    return (trial.policy, trial.load) == (cell.policy, cell.load)
