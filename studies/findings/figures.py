"""Figures of the study: its stored trials by cell, and how figures are written in docs/findings.md. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pointsman_lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman_lab.experiments.paired_statistics import Estimate, difference_by_seed
from pointsman_lab.report.measures import ALL, Measures
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from studies.findings.cells import ABLATIONS, BASE, OURS

TTFT = "ttft_p90_s"


class StoredTrial(msgspec.Struct, frozen=True):
    """A trial of the study. `cell` is PlannedCell.key: everything that the trial depends on, except its seed."""

    trace: str  # as in PlannedCell
    load: str  # as in PlannedCell
    threshold: int  # as in PlannedCell
    policy: str  # as in PlannedCell
    seed: int  # of the sessions' draw and of the simulation
    cell: str
    commit: str  # of the code that ran it, see git_commit(); empty: unknown
    measures: Measures  # by group of requests; ALL is what the document uses


@dataclass(frozen=True)
class TableKey:
    """Trace, load and threshold of a table's trials."""

    trace: str
    load: str
    threshold: int

    @property
    def name(self) -> str:
        """Load and threshold as text, without the trace."""
        return self.load + (f", threshold {self.threshold}" if self.threshold else "")

    def __str__(self) -> str:
        return f"{self.trace}, {self.name}"


class Cell(dict[str, dict[int, Mapping[str, float]]]):
    """The trials of one TableKey: policy -> seed -> metric -> value, over all requests."""

    def by_seed(self, policy: str, metric: str) -> dict[int, float]:
        """Return a metric's values by seed."""
        return {seed: found[metric] for seed, found in self.get(policy, {}).items() if metric in found}

    def mean(self, policy: str, metric: str) -> float | None:
        """Return a metric's mean over all seeds; None without values."""
        values = self.by_seed(policy, metric).values()
        return statistics.fmean(values) if values else None

    def difference(self, policy: str, metric: str, base: str = BASE) -> Estimate | None:
        """Return the paired difference to `base`; None for `base` itself, and without common seeds."""
        if policy == base:
            return None
        return difference_by_seed(self.by_seed(policy, metric), self.by_seed(base, metric))

    def ratio(self, policy: str, metric: str, base: str = BASE) -> float | None:
        """Return the ratio of the means over the seeds that both policies have run; None if the mean of `base` is 0 or
        missing."""
        ours, theirs = self.by_seed(policy, metric), self.by_seed(base, metric)
        common = ours.keys() & theirs.keys()
        below = sum(theirs[seed] for seed in common)
        return sum(ours[seed] for seed in common) / below if below else None

    def closed(self, policy: str) -> float | None:
        """Return the share of the gap in TTFT p90 from `BASE` to the floor that a policy closes; None without a gap or a
        value."""
        found, base, floor = (self.mean(name, TTFT) for name in (policy, BASE, FLOOR))
        if found is None or base is None or floor is None or base <= floor:
            return None
        return (base - found) / (base - floor)

    def relative(self, metric: str) -> str:
        """Format the difference of `OURS` to `BASE` as a share of `BASE`; "=" for no difference, "-" without values."""
        difference, base = self.difference(OURS, metric), self.mean(BASE, metric)
        if difference is None or not base:
            return "-"
        return "=" if difference.verdict == "no difference" else f"{difference.mean / base:+.0%}"

    @property
    def policies(self) -> list[str]:
        """All policies except the ablations of `OURS`: bounds first, then by TTFT p90."""
        names = [name for name in self if name not in ABLATIONS]
        return sorted(names, key=lambda name: (name not in BOUNDS, self.mean(name, TTFT) or 0.0))

    @property
    def other_policies(self) -> list[str]:
        """All policies except `OURS`, its ablations, the default, which takes it with other settings, and the bounds."""
        return [name for name in self if name not in (OURS, DEFAULT_POLICY, *BOUNDS, *ABLATIONS)]

    def best_other_policy(self) -> tuple[str, float]:
        """Return the other policy with the lowest TTFT p90, and the ratio of that to `OURS` on common draws."""
        ratios = {name: self.ratio(name, TTFT, OURS) or float("inf") for name in self.other_policies}
        best = min(ratios, key=ratios.__getitem__)
        return best, ratios[best]

    def on_common_draws(self, *policies: str) -> Cell:
        """Return the trials under the seeds that all `policies` have run, because a ratio of means must be over the same
        draws."""
        common = set.intersection(*(set(self.get(name, {})) for name in policies))
        return Cell(
            {name: {seed: trial for seed, trial in seeds.items() if seed in common} for name, seeds in self.items()}
        )


def cells_of(results: Sequence[StoredTrial]) -> dict[TableKey, Cell]:
    """Return all trials by their place."""
    found: dict[TableKey, Cell] = {}
    for trial in results:
        cell = found.setdefault(TableKey(trial.trace, trial.load, trial.threshold), Cell())
        cell.setdefault(trial.policy, {})[trial.seed] = trial.measures[ALL]
    return found


def fixed(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Format a value times `scale` with so many digits; "-" for None."""
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def difference_text(difference: Estimate | None, digits: int = 2, scale: float = 1.0) -> str:
    """Format a difference in brackets, to follow a mean: `=` for no difference; empty for None."""
    if difference is None:
        return ""
    sign = f"{difference.mean * scale:+.{digits}f}"
    if difference.half_width is None:
        return f" ({sign})"
    if not difference.differs:
        return " (=)"
    return f" ({sign} ± {difference.half_width * scale:.{digits}f})"


def percent(value: float | None) -> str:
    """Format a share as a percentage; "-" for None."""
    return "-" if value is None else f"{value:.0%}"


def to(values: Sequence[float]) -> str:
    """Format the first and the last value as a range; as one value if they are equal."""
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (values[0], values[-1])))


def each(values: Sequence[float]) -> str:
    """Format at least two values as a list in words."""
    *most, last = (f"{value:,}" for value in values)
    return f"{', '.join(most)} and {last}"
