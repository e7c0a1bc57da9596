"""The figure that benchmarks return, the table of figures, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured figure."""

    metric: str  # name in tables and in results.jsonl
    value: float  # in `unit`
    unit: str  # as shown: "s", "us", "1/s"; empty: a pure number
    baseline: float | None = None  # a value measured in the same run, or the goal if the note says so
    note: str = ""  # circumstances of the measurement, for the reader

    @property
    def ratio(self) -> float | None:
        """value / baseline; None without a baseline."""
        return self.value / self.baseline if self.baseline else None

    def row(self) -> dict[str, object]:
        """Return the JSON-ready object of a line of results.jsonl."""
        return {
            "metric": self.metric,
            "value": round(self.value, 4),
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "note": self.note,
        }


def figure_table(figures: Sequence[Figure]) -> Table:
    """Return a table with a row for each figure."""
    table = Table("metric", "value", "unit", "baseline", "ratio", "note", box=None, pad_edge=False)
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        baseline = "" if figure.baseline is None else f"{figure.baseline:,g}"
        table.add_row(figure.metric, f"{figure.value:,.2f}", figure.unit, baseline, ratio, figure.note)
    return table


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
