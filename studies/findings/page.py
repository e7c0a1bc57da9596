"""Renders docs/findings.md: computes its figures from trials for a template of its sentences. Pure, but reads data files.

The template contains no figures. Figures that are not from trials are from the code's constants, and results of runs outside the
trials are in side_runs.toml.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman_lab.experiments.paired_statistics import CONFIDENCE
from pointsman_lab.live.model_accuracy import GOAL, LiveComparison, largest_error, table
from pointsman_lab.rival_policies.registry import make_policy
from studies.findings.cells import (
    ABLATIONS,
    BASE,
    LOOSER,
    OURS,
    OVERLOADED,
    PLACEMENT_S,
    SENSITIVITY_CASES,
    SLOW,
    TIER_CASES,
    TOKENISE_TOKEN_S,
    VARIANTS,
    Load,
)
from studies.findings.figures import (
    TTFT,
    Cell,
    StoredTrial,
    TableKey,
    cells_of,
    difference_text,
    each,
    fixed,
    percent,
    to,
)
from studies.findings.tiers import tier_section
from studies.marked_sections import TIERS, filled_template, with_section

TEMPLATE, SIDE_RUNS = (Path(__file__).with_name(name) for name in ("page.md.jinja", "side_runs.toml"))
TTFT99, E2E90, E2E99, TPOT = "ttft_p99_s", "e2e_p90_s", "e2e_p99_s", "tpot_p90_s"
PEERS = ("dynamo_kv", "sglang_cache_aware", "llmd_default", "llmd_affinity", "aibrix_prefix", "preble")
# Goals of OURS: shares of the gap in TTFT p90 to close without and with a threshold, and the largest TPOT p90 as a multiple of
# BASE's.
GOAL_CLOSED, GOAL_CLOSED_FLAG, GOAL_TPOT = 0.75, 0.5, 1.8
LOWEST, CLOSED = "lowest", "closed"


@dataclass(frozen=True)
class Claims:
    """Evidence for claims from the trials of one trace, as text by load; "" without the needed trials."""

    cells: Mapping[str, Cell]

    def against(self, policy: str, metric: str = TTFT) -> str:
        """Return a policy's metric relative to `BASE`'s, with the paired difference and its verdict."""

        def say(cell: Cell) -> str:
            difference, ratio = cell.difference(policy, metric), cell.ratio(policy, metric)
            if difference is None or ratio is None:
                return ""
            return f"{ratio - 1:+.0%}{difference_text(difference)} s, {difference.verdict}"

        return self._by_load(say)

    def spread(self) -> str:
        """Return the standard deviation of `BASE`'s TTFT p90 over the draws, as a share of its mean."""

        def say(cell: Cell) -> str:
            values = list(cell.by_seed(BASE, TTFT).values())
            return f"±{statistics.stdev(values) / statistics.fmean(values):.0%}" if len(values) > 1 else ""

        return self._by_load(say)

    def worst(self, count: int) -> str:
        """Return the `count` policies with the highest TTFT p90, as multiples of `BASE`'s."""

        def say(cell: Cell) -> str:
            names = (name for name in cell if name not in ABLATIONS)
            ratios = {name: ratio for name in names if (ratio := cell.ratio(name, TTFT)) is not None}
            ranked = sorted(ratios, key=lambda name: -ratios[name])[:count]
            return ", ".join(f"`{name}` {ratios[name]:.1f} x" for name in ranked)

        return self._by_load(say)

    def offloads(self, policy: str) -> str:
        """Return a policy's share of answers with offload."""

        def say(cell: Cell) -> str:
            share = cell.mean(policy, "offloads")
            return "" if share is None else f"{share:.1%} of all answers"

        return self._by_load(say)

    def best_of(self, policies: Sequence[str]) -> str:
        """Return the policy of `policies` with the lowest TTFT p90 relative to `BASE`'s on common draws."""

        def say(cell: Cell) -> str:
            ratios = {name: cell.ratio(name, TTFT) or float("inf") for name in policies if name in cell}
            best = min(ratios, key=ratios.__getitem__, default="")
            return f"`{best}`{difference_text(cell.difference(best, TTFT))} s" if best else ""

        return self._by_load(say)

    def _by_load(self, say: Callable[[Cell], str]) -> str:
        return "; ".join(f"{load}: {said}" for load, cell in self.cells.items() if (said := say(cell)))


@dataclass(frozen=True)
class Standing:
    """A row of the table of `OURS`: its place, the cell on common draws, the goal of the closed gap and the goals that are not
    met."""

    place: TableKey  # the row's trace, load and threshold
    cell: Cell  # only the seeds that `OURS`, `BASE` and the floor have all run
    best: str  # the other policy with the lowest TTFT p90, by its ratio to that of `OURS`
    closed: float  # share of the TTFT p90 gap from `BASE` to the floor that `OURS` closes; below 0 if it is worse
    goal: float | None  # the least `closed` wanted; None: none under SLOW and OVERLOADED
    unmet: Sequence[str]  # names: LOWEST, CLOSED, or a latency as in tables

    @property
    def meets_ttft(self) -> bool:
        """Whether both goals of TTFT p90 are met."""
        return not {LOWEST, CLOSED} & {*self.unmet}

    @property
    def tpot(self) -> str:
        """TPOT p90 as a multiple of `BASE`'s."""
        ours, base = self.cell.mean(OURS, TPOT), self.cell.mean(BASE, TPOT)
        return "-" if not ours or not base else f"{ours / base:.1f} x"


def render(
    results: Sequence[StoredTrial],
    loads: Mapping[str, Load],
    missing: int,
    quick: bool,
    calibrated: Sequence[tuple[str, Sequence[LiveComparison]]] = (),
    agreements: Mapping[str, str] | None = None,
) -> str:
    """Return the document. `missing`: number of planned trials that are not in `results`. `calibrated`: a calibration's
    comparisons. `agreements`: pages of `pointsman agree`, by kind of engines."""
    everywhere = cells_of(results)
    apart = SENSITIVITY_CASES.keys() | TIER_CASES.keys()
    cells = {place: cell for place, cell in everywhere.items() if place.trace not in apart}
    traces = list(dict.fromkeys(place.trace for place in cells))
    whole = {place: cell for place, cell in cells.items() if not place.threshold}
    first = {place.load: cell for place, cell in whole.items() if place.trace == traces[0]}
    ablations = list(dict.fromkeys(name for cell in first.values() for name in cell if name in ABLATIONS))
    text = filled_template(
        TEMPLATE,
        {"fixed": fixed, "difference": difference_text, "percent": percent, "to": to, "each": each},
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
        commits=sorted({trial.commit[:12] for trial in results if trial.commit}),
        seeds=sorted({trial.seed for trial in results}),
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
        agreements=agreements or {},
    )
    return with_section(text.rstrip("\n") + "\n", TIERS, tier_section(everywhere, traces[0]))


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
    """Return the names of the goals that `OURS` does not meet in a cell."""
    unmet = [name for name, met in ((LOWEST, lowest), (CLOSED, closed)) if not met]
    for metric, name in ((E2E90, "E2E p90"), (E2E99, "E2E p99")):
        found = cell.difference(OURS, metric)
        if found is not None and found.mean > 0 and (found.half_width is None or found.differs):
            unmet.append(name)
    tpot, base = cell.mean(OURS, TPOT), cell.mean(BASE, TPOT)
    return unmet + (["TPOT p90"] if tpot and base and tpot > GOAL_TPOT * base else [])


def _sensitivity(everywhere: Mapping[TableKey, Cell]) -> dict[str, object] | None:
    """Return the figures of SENSITIVITY_CASES; None without a case in which the floor, `BASE` and `OURS` have run a common
    seed."""
    on_common = {place: cell for place, cell in everywhere.items() if place.trace in SENSITIVITY_CASES}
    on_common = {place: cell.on_common_draws(OURS, BASE, FLOOR) for place, cell in on_common.items()}
    cells = {place: cell for place, cell in on_common.items() if cell.get(OURS)}
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
