"""The section of docs/findings.md on host memory and shared storage: its figures from trials. Pure, but reads a data file.

The section is made from its own trials alone, so that it can be made again without those of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.experiments.paired_statistics import Estimate, difference_by_seed
from studies.findings.cells import NOT_REPORTED, TIER_CASES, TIER_LOAD, TIER_POLICIES
from studies.findings.figures import Cell, TableKey, difference_text, fixed, percent
from studies.marked_sections import filled_template

TEMPLATE = Path(__file__).with_name("tiers.md.jinja")
TTFT, SESSION = "ttft_p90_s", "session_mean_s"
NONE = "none"


@dataclass(frozen=True)
class Row:
    """A policy with tiers below: its trials, and those of the same policy without any."""

    policy: str
    name: str
    cell: Cell
    none: Cell

    def against_none(self, metric: str) -> Estimate | None:
        """Return a metric's paired difference to the policy without tiers below; None for that policy itself."""
        if self.cell is self.none:
            return None
        return difference_by_seed(self.cell.by_seed(self.policy, metric), self.none.by_seed(self.policy, metric))

    def share(self, metric: str) -> float:
        """Return the mean of a tier's share of the prompt tokens; a trial without the metric had nothing from that tier."""
        values = self.cell.by_seed(self.policy, metric).values()
        return sum(values) / len(self.cell[self.policy])

    @property
    def own_share(self) -> float:
        """Share of the prompt tokens that were in the engines' own caches."""
        return self.share("hit_ratio") - self.share("host_hit_ratio") - self.share("storage_hit_ratio")


def tier_section(cells: Mapping[TableKey, Cell], trace: str) -> str:
    """Return the section from the trials of TIER_CASES and those of `trace` without tiers; "" without either."""
    none = cells.get(TableKey(trace, TIER_LOAD, 0), Cell())
    cases = {name: cell for name in TIER_CASES if (cell := cells.get(TableKey(name, TIER_LOAD, 0)))}
    if not cases:
        return ""
    rows = [
        Row(policy, name, cell, none)
        for policy in TIER_POLICIES
        for name, cell in {NONE: none, **cases}.items()
        if policy in cell
    ]
    return filled_template(
        TEMPLATE,
        {"fixed": fixed, "difference": difference_text, "percent": percent, "seconds": _seconds},
        trace=trace,
        load=TIER_LOAD,
        profile=Profile(),
        scale=1_000,
        rows=rows,
        credit=_credit(cases),
    )


def _credit(cases: Mapping[str, Cell]) -> list[tuple[str, list[tuple[str, Estimate | None, Estimate | None]]]]:
    """Return for each policy the paired differences of what is reported to what is not, by case."""
    found = []
    for policy in TIER_POLICIES:
        compared = []
        for name, reported in cases.items():
            if (
                (unreported := cases.get(name + NOT_REPORTED)) is not None
                and policy in reported
                and policy in unreported
            ):
                ttft, session = (
                    difference_by_seed(reported.by_seed(policy, metric), unreported.by_seed(policy, metric))
                    for metric in (TTFT, SESSION)
                )
                compared.append((name, ttft, session))
        if compared:
            found.append((policy, compared))
    return found


def _seconds(difference: Estimate | None, digits: int = 2) -> str:
    text = difference_text(difference, digits).strip(" ()")
    return "no difference" if text == "=" else f"{text} s" if text else "-"
