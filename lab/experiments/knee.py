"""Where a fleet's load is best: the knee of latency over throughput. Pure.

The knee is the load at which power, throughput / mean response time, is greatest: below it more load costs little time, above it
more time than it brings answers. Geometrically the ray from the origin touches the curve of response time over throughput there
(L. Kleinrock, Power and deterministic rules of thumb for probabilistic problems in computer communications, ICC 1979). It has no
parameter to choose, and of a single queue with exponential times (M/M/1) it is at half the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pointsman.lab.experiments.trials import Cell, Trial
from pointsman.lab.report.measures import ALL, Measures

# A sweep has reached saturation when power is down to this share of its greatest.
SATURATED = 0.5


@dataclass(frozen=True)
class Knee:
    """One policy's knee under one load but for the rate: `powers` (answers per s squared) at the `rates` of the sweep, and the
    rate of the greatest. `agreement` is the share of seeds that have their own greatest there."""

    policy: str
    loads: tuple[str, ...]
    rates: tuple[float, ...]
    powers: tuple[float, ...]
    agreement: float

    @property
    def position(self) -> int:
        """The knee's place among the rates."""
        return max(range(len(self.powers)), key=self.powers.__getitem__)

    @property
    def rate(self) -> float:
        """The rate at the knee."""
        return self.rates[self.position]

    @property
    def inside(self) -> bool:
        """Whether lower and higher rates were tried, too; otherwise the knee may lie beyond them."""
        return 0 < self.position < len(self.rates) - 1

    @property
    def saturated(self) -> bool:
        """Whether the highest rate is well beyond the knee."""
        return self.powers[-1] <= SATURATED * max(self.powers)


def power(measures: Measures) -> float | None:
    """Throughput / mean response time of one trial, in answers per s squared; None where too few were answered to tell."""
    whole = measures[ALL]
    if "throughput" not in whole or not whole.get("e2e_mean_s"):
        return None
    return whole["throughput"] / whole["e2e_mean_s"]


def knees(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[Knee]:
    """The knee of every policy, for cells that differ by nothing but the rate at which sessions start: of the mean power over the
    seeds that were run at every such rate. Left out where there are fewer than three rates, or no such seed."""
    found = []
    for series in _series(cells):
        by_seed = [
            {one.seed: told for one in trials if _of(one, cell) and (told := power(one.measures)) is not None}
            for cell in series
        ]
        seeds = sorted(set.intersection(*(set(one) for one in by_seed)))
        if len(series) < 3 or not seeds:
            continue
        knee = Knee(
            policy=series[0].policy,
            loads=tuple(cell.load for cell in series),
            rates=tuple(cell.workload.arrivals.rate for cell in series),
            powers=tuple(fmean(one[seed] for seed in seeds) for one in by_seed),
            agreement=0.0,
        )
        agree = [by_seed[knee.position][seed] == max(one[seed] for one in by_seed) for seed in seeds]
        found.append(replace(knee, agreement=sum(agree) / len(seeds)))
    return found


def _series(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells by what they have in common but for the rate, each by its rate."""
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
