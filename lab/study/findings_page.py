"""docs/findings.md from trials: its figures, for the template that holds the sentences around them. Pure but for reading that.

No figure is written into the template: what the trials do not give comes from the code's own constants, and results of runs that
are none of these trials from data/findings_side_runs.toml.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import msgspec

from pointsman.lab.engine.interface import EngineConfig
from pointsman.lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman.lab.experiments.paired_statistics import CONFIDENCE, Estimate, difference_by_seed
from pointsman.lab.live.model_accuracy import GOAL, LiveComparison, largest_error, table
from pointsman.lab.report.measures import ALL, Measures
from pointsman.lab.study.findings_cells import (
    ABLATIONS,
    BASE,
    LOOSER,
    OURS,
    OVERLOADED,
    PLACEMENT_S,
    SENSITIVITY_CASES,
    SLOW,
    TOKENISE_TOKEN_S,
    VARIANTS,
    Load,
)
from pointsman.router.core.policy.registry import make_policy

DATA = Path(__file__).parents[1] / "data"
TEMPLATE, SIDE_RUNS = DATA / "findings.md.jinja", DATA / "findings_side_runs.toml"
TTFT, TTFT99, E2E90, E2E99, TPOT = "ttft_p90_s", "ttft_p99_s", "e2e_p90_s", "e2e_p99_s", "tpot_p90_s"
PEERS = ("dynamo_kv", "sglang_cache_aware", "llmd_default", "aibrix_prefix", "preble")
GOAL_CLOSED, GOAL_CLOSED_FLAG, GOAL_TPOT = 0.75, 0.5, 1.8
LOWEST, CLOSED = "lowest", "closed"


class StoredTrial(msgspec.Struct, frozen=True):
    """A trial of the study. `cell` has everything that the trial depends on, but its seed."""

    trace: str
    load: str
    threshold: int
    policy: str
    seed: int
    cell: str
    commit: str
    measures: Measures


@dataclass(frozen=True)
class TableKey:
    """Where a table's trials were run."""

    trace: str
    load: str
    threshold: int

    @property
    def name(self) -> str:
        """For people, without the trace."""
        return self.load + (f", threshold {self.threshold}" if self.threshold else "")

    def __str__(self) -> str:
        return f"{self.trace}, {self.name}"


class Cell(dict[str, dict[int, Mapping[str, float]]]):
    """The trials of a place: policy -> seed -> metric -> value, of all requests."""

    def by_seed(self, policy: str, metric: str) -> dict[int, float]:
        """A metric's values."""
        return {seed: found[metric] for seed, found in self.get(policy, {}).items() if metric in found}

    def mean(self, policy: str, metric: str) -> float | None:
        """Over all seeds; None without any."""
        values = self.by_seed(policy, metric).values()
        return statistics.fmean(values) if values else None

    def difference(self, policy: str, metric: str, base: str = BASE) -> Estimate | None:
        """The paired difference to `base`; None for `base` itself, and without common seeds."""
        if policy == base:
            return None
        return difference_by_seed(self.by_seed(policy, metric), self.by_seed(base, metric))

    def ratio(self, policy: str, metric: str, base: str = BASE) -> float | None:
        """Mean over mean, of the seeds that both policies have run."""
        ours, theirs = self.by_seed(policy, metric), self.by_seed(base, metric)
        common = ours.keys() & theirs.keys()
        below = sum(theirs[seed] for seed in common)
        return sum(ours[seed] for seed in common) / below if below else None

    def closed(self, policy: str) -> float | None:
        """The share of the gap in TTFT p90 from `BASE` to the floor that a policy closes; None without it or one of the three."""
        found, base, floor = (self.mean(name, TTFT) for name in (policy, BASE, FLOOR))
        if found is None or base is None or floor is None or base <= floor:
            return None
        return (base - found) / (base - floor)

    def relative(self, metric: str) -> str:
        """Our difference to `BASE` as a share of it."""
        difference, base = self.difference(OURS, metric), self.mean(BASE, metric)
        if difference is None or not base:
            return "-"
        return "=" if difference.verdict == "no difference" else f"{difference.mean / base:+.0%}"

    @property
    def policies(self) -> list[str]:
        """All but the ablations of ours: bounds first, then by TTFT p90."""
        names = [name for name in self if name not in ABLATIONS]
        return sorted(names, key=lambda name: (name not in BOUNDS, self.mean(name, TTFT) or 0.0))

    @property
    def other_policies(self) -> list[str]:
        """The other policies, bounds and ablations of ours left out."""
        return [name for name in self if name not in (OURS, *BOUNDS, *ABLATIONS)]

    def best_other_policy(self) -> tuple[str, float]:
        """The other policy with the least TTFT p90, and its ratio to ours on common draws."""
        ratios = {name: self.ratio(name, TTFT, OURS) or float("inf") for name in self.other_policies}
        best = min(ratios, key=ratios.__getitem__)
        return best, ratios[best]

    def on_common_draws(self, *policies: str) -> Cell:
        """The trials under the seeds that all of `policies` have run: a share of means has to be one of the same draws' means."""
        common = set.intersection(*(set(self.get(name, {})) for name in policies))
        return Cell(
            {name: {seed: one for seed, one in seeds.items() if seed in common} for name, seeds in self.items()}
        )


@dataclass(frozen=True)
class Claims:
    """What the trials of one trace say to a claim, load by load; "" where they say nothing."""

    cells: Mapping[str, Cell]

    def against(self, policy: str, metric: str = TTFT) -> str:
        """A policy's metric against `BASE`'s."""

        def say(cell: Cell) -> str:
            difference, ratio = cell.difference(policy, metric), cell.ratio(policy, metric)
            if difference is None or ratio is None:
                return ""
            return f"{ratio - 1:+.0%}{_difference(difference)} s, {difference.verdict}"

        return self._by_load(say)

    def spread(self) -> str:
        """The standard deviation of `BASE`'s TTFT p90 over the draws."""

        def say(cell: Cell) -> str:
            values = list(cell.by_seed(BASE, TTFT).values())
            return f"±{statistics.stdev(values) / statistics.fmean(values):.0%}" if len(values) > 1 else ""

        return self._by_load(say)

    def worst(self, count: int) -> str:
        """The policies with the highest TTFT p90, as multiples of `BASE`'s."""

        def say(cell: Cell) -> str:
            names = (name for name in cell if name not in ABLATIONS)
            ratios = {name: ratio for name in names if (ratio := cell.ratio(name, TTFT)) is not None}
            ranked = sorted(ratios, key=lambda name: -ratios[name])[:count]
            return ", ".join(f"`{name}` {ratios[name]:.1f} x" for name in ranked)

        return self._by_load(say)

    def offloads(self, policy: str) -> str:
        """The share of answers whose prefill was elsewhere."""

        def say(cell: Cell) -> str:
            share = cell.mean(policy, "offloads")
            return "" if share is None else f"{share:.1%} of all answers"

        return self._by_load(say)

    def best_of(self, policies: Sequence[str]) -> str:
        """Of `policies` the one with the lowest TTFT p90 on `BASE`'s draws."""

        def say(cell: Cell) -> str:
            ratios = {name: cell.ratio(name, TTFT) or float("inf") for name in policies if name in cell}
            best = min(ratios, key=ratios.__getitem__, default="")
            return f"`{best}`{_difference(cell.difference(best, TTFT))} s" if best else ""

        return self._by_load(say)

    def _by_load(self, say: Callable[[Cell], str]) -> str:
        return "; ".join(f"{load}: {said}" for load, cell in self.cells.items() if (said := say(cell)))


@dataclass(frozen=True)
class Standing:
    """A row of our table: a place, its cell on common draws, the goals and which are not met."""

    place: TableKey
    cell: Cell
    best: str
    closed: float
    goal: float | None
    unmet: Sequence[str]

    @property
    def meets_ttft(self) -> bool:
        """Whether the goals of TTFT p90 are met."""
        return not {LOWEST, CLOSED} & {*self.unmet}

    @property
    def tpot(self) -> str:
        """As a multiple of `BASE`'s."""
        ours, base = self.cell.mean(OURS, TPOT), self.cell.mean(BASE, TPOT)
        return "-" if not ours or not base else f"{ours / base:.1f} x"


def render(
    results: Sequence[StoredTrial],
    loads: Mapping[str, Load],
    missing: int,
    quick: bool,
    calibrated: Sequence[tuple[str, Sequence[LiveComparison]]] = (),
) -> str:
    """The document. `missing` trials were planned and are not there; `calibrated` is what a calibration found."""
    everywhere: dict[TableKey, Cell] = {}
    for one in results:
        cell = everywhere.setdefault(TableKey(one.trace, one.load, one.threshold), Cell())
        cell.setdefault(one.policy, {})[one.seed] = one.measures[ALL]
    cells = {place: cell for place, cell in everywhere.items() if place.trace not in SENSITIVITY_CASES}
    traces = list(dict.fromkeys(place.trace for place in cells))
    whole = {place: cell for place, cell in cells.items() if not place.threshold}
    first = {place.load: cell for place, cell in whole.items() if place.trace == traces[0]}
    ablations = list(dict.fromkeys(name for cell in first.values() for name in cell if name in ABLATIONS))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"fixed": _fixed, "difference": _difference, "percent": _percent, "to": _to, "each": _each}
    text = environment.from_string(TEMPLATE.read_text()).render(
        bounds=BOUNDS,
        peers=PEERS,
        looser_name=LOOSER,
        confidence=CONFIDENCE,
        placement_s=PLACEMENT_S,
        tokenise_token_s=TOKENISE_TOKEN_S,
        tpot_goal=GOAL_TPOT,
        calibration_goal=GOAL,
        claims=Claims({load: cell for load, cell in first.items() if load != SLOW}),
        side=tomllib.loads(SIDE_RUNS.read_text()),
        results=results,
        commits=sorted({one.commit[:12] for one in results if one.commit}),
        seeds=sorted({one.seed for one in results}),
        loads=loads,
        missing=missing,
        quick=quick,
        block_size=EngineConfig.block_size,
        unified=make_policy(BASE),
        looser=make_policy(*VARIANTS[LOOSER]),
        tables=[
            (place, cell)
            for trace in traces
            for place, cell in whole.items()
            if place.trace == trace and place.load not in (SLOW, OVERLOADED)
        ],
        standings=_standings(cells),
        ablations=ablations,
        ablated={load: cell for load, cell in first.items() if any(name in cell for name in ablations)},
        elsewhere=_sensitivity(everywhere),
        calibration=table(calibrated) if calibrated else "",
        calibration_error=largest_error(calibrated),
    )
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip("\n") + "\n"


# ---- foresight ----


def _standings(cells: Mapping[TableKey, Cell]) -> list[Standing]:
    found = []
    for place, whole in cells.items():
        cell = whole.on_common_draws(OURS, BASE, FLOOR)
        closed = cell.closed(OURS)
        if closed is None:
            continue
        best, ratio = cell.best_other_policy()
        goal = None if place.load in (SLOW, OVERLOADED) else GOAL_CLOSED_FLAG if place.threshold else GOAL_CLOSED
        unmet = _unmet(cell, lowest=ratio > 1.0, closed=goal is None or closed >= goal)
        found.append(Standing(place, cell, best, closed, goal, unmet))
    return found


def _unmet(cell: Cell, *, lowest: bool, closed: bool) -> list[str]:
    """The goals that a cell does not meet."""
    unmet = [name for name, met in ((LOWEST, lowest), (CLOSED, closed)) if not met]
    for metric, name in ((E2E90, "E2E p90"), (E2E99, "E2E p99")):
        found = cell.difference(OURS, metric)
        if found is not None and found.mean > 0 and (found.half_width is None or found.differs):
            unmet.append(name)
    tpot, base = cell.mean(OURS, TPOT), cell.mean(BASE, TPOT)
    return unmet + (["TPOT p90"] if tpot and base and tpot > GOAL_TPOT * base else [])


def _sensitivity(everywhere: Mapping[TableKey, Cell]) -> dict[str, object] | None:
    """Figures of other fleets, engines and sessions; None without any that the floor, `BASE` and `OURS` have run."""
    told = {place: cell for place, cell in everywhere.items() if place.trace in SENSITIVITY_CASES}
    told = {place: cell.on_common_draws(OURS, BASE, FLOOR) for place, cell in told.items()}
    cells = {place: cell for place, cell in told.items() if cell.get(OURS)}
    if not cells:
        return None
    loads = list(dict.fromkeys(place.load for place in cells))
    best = {place: cell.best_other_policy() for place, cell in cells.items()}
    extremes = []
    for metric, name in ((TTFT99, "TTFT p99"), (E2E90, "E2E p90"), (E2E99, "E2E p99"), (TPOT, "TPOT p90")):
        ratios = {place: ratio for place, cell in cells.items() if (ratio := cell.ratio(OURS, metric)) is not None}
        highest = max(ratios, key=ratios.__getitem__)
        extremes.append((name, statistics.median(ratios.values()), ratios[highest], highest))
    return {
        "trials": sorted({len(cell[OURS]) for cell in cells.values()}),
        "loads": loads,
        "rows": {
            (name, threshold): [cells.get(TableKey(name, load, threshold), Cell()) for load in loads]
            for name, threshold in dict.fromkeys((place.trace, place.threshold) for place in cells)
        },
        "cells": len(cells),
        "lost": [f"{place} (`{name}` {ratio - 1:+.0%})" for place, (name, ratio) in best.items() if ratio <= 1.0],
        "extremes": extremes,
    }


# ---- how figures are written ----


def _fixed(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _difference(difference: Estimate | None, digits: int = 2, scale: float = 1.0) -> str:
    """In brackets beside a mean: `=` for no difference."""
    if difference is None:
        return ""
    sign = f"{difference.mean * scale:+.{digits}f}"
    if difference.half_width is None:
        return f" ({sign})"
    if not difference.differs:
        return " (=)"
    return f" ({sign} ± {difference.half_width * scale:.{digits}f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _to(values: Sequence[float]) -> str:
    """From the first to the last, where they differ."""
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (values[0], values[-1])))


def _each(values: Sequence[float]) -> str:
    *most, last = (f"{value:,}" for value in values)
    return f"{', '.join(most)} and {last}"
