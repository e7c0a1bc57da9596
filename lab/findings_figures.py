"""What the trials of a study come to, policy by policy: means, paired differences, and how they are written. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lab.floor import BOUNDS, FLOOR
from lab.paired import Estimate, difference_by_seed

BASE = "unified"
OURS = "foresight"
TTFT, TTFT99, E2E90, E2E99, TPOT = "ttft_p90_s", "ttft_p99_s", "e2e_p90_s", "e2e_p99_s", "tpot_p90_s"

# policy -> seed -> metric -> value, of all requests.
Cell = Mapping[str, Mapping[int, Mapping[str, float]]]


def values_of(cell: Cell, policy: str, metric: str) -> dict[int, float]:
    """By seed."""
    return {seed: found[metric] for seed, found in cell.get(policy, {}).items() if metric in found}


def mean_of(cell: Cell, policy: str, metric: str) -> float | None:
    """Over all seeds; None without any."""
    values = list(values_of(cell, policy, metric).values())
    return statistics.fmean(values) if values else None


def difference_of(cell: Cell, policy: str, metric: str, base: str = BASE) -> Estimate | None:
    """The paired difference to `base`; None for `base` itself, and without common seeds."""
    if policy == base:
        return None
    return difference_by_seed(values_of(cell, policy, metric), values_of(cell, base, metric))


def ratio_of(cell: Cell, policy: str, metric: str, base: str = BASE) -> float | None:
    """Mean over mean, of the seeds that both policies have run."""
    ours, theirs = values_of(cell, policy, metric), values_of(cell, base, metric)
    common = ours.keys() & theirs.keys()
    below = sum(theirs[seed] for seed in common)
    return sum(ours[seed] for seed in common) / below if below else None


def closed_by(cell: Cell, policy: str) -> float | None:
    """The share of the gap in TTFT p90 from `BASE` to the floor that a policy closes; None without a gap or one of the three."""
    found, base, floor = (mean_of(cell, name, TTFT) for name in (policy, BASE, FLOOR))
    return None if found is None or base is None or floor is None or base <= floor else (base - found) / (base - floor)


def best_rival(cell: Cell) -> tuple[str, float]:
    """Of the policies that were run beside ours the one with the least TTFT p90, and its ratio to ours on common draws."""
    ratios = {name: ratio_of(cell, name, TTFT, OURS) or float("inf") for name in rivals(cell)}
    best = min(ratios, key=ratios.__getitem__)
    return best, ratios[best]


def rivals(cell: Cell) -> list[str]:
    """The other policies of a cell, bounds and ablations of ours left out."""
    return [name for name in plain(cell) if name not in (OURS, *BOUNDS)]


def on_common_draws(cell: Cell, policies: Sequence[str]) -> Cell:
    """The cell's trials under the seeds that all of `policies` have run."""
    common = set.intersection(*(set(cell.get(name, {})) for name in policies))
    return {name: {seed: found for seed, found in by_seed.items() if seed in common} for name, by_seed in cell.items()}


def told(difference: Estimate | None, scale: float = 1.0, digits: int = 2) -> str:
    """As it stands in brackets beside a mean: `=` for no difference."""
    if difference is None:
        return ""
    sign = f"{difference.mean * scale:+.{digits}f}"
    if difference.half_width is None:
        return f" ({sign})"
    if not difference.differs:
        return " (=)"
    return f" ({sign} ± {difference.half_width * scale:.{digits}f})"


def number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    """With `digits` digits, or a dash."""
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def plain(cell: Cell) -> list[str]:
    """The policies of a cell, without the ablations of ours."""
    return [name for name in cell if not name.startswith(f"{OURS} ")]
