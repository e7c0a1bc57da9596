"""What a benchmark returns, and small helpers for taking figures on a noisy machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure. `baseline` is what it is compared to in the same run, or the goal where the note says so."""

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """value / baseline."""
        return self.value / self.baseline if self.baseline else None

    def row(self) -> dict[str, object]:
        """As a line of results.jsonl."""
        return {
            "metric": self.metric,
            "value": round(self.value, 4),
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "note": self.note,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
