"""Differences between paired trials, and how sure one can be of them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
# Of the differences, how many are left out at each end by trimmed_difference().
TRIMMED = 0.2


@dataclass(frozen=True)
class Estimate:
    """A mean of `trials` values and the half width of its 95 % confidence interval (None for a single trial)."""

    mean: float
    half_width: float | None
    trials: int

    @property
    def low(self) -> float:
        """The interval's lower end; without an interval minus infinity."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return math.inf if self.half_width is None else self.mean + self.half_width

    @property
    def differs(self) -> bool:
        """Whether the interval does not hold 0."""
        return not self.low <= 0 <= self.high

    @property
    def verdict(self) -> str:
        """Of a difference: "lower", "higher" or "no difference"; "one trial" where there is no interval."""
        if self.half_width is None:
            return "one trial"
        if not self.differs:
            return "no difference"
        return "lower" if self.mean < 0 else "higher"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its confidence interval: mean +- t * s / sqrt(n), with s the sample's standard deviation and
    t the quantile of Student's distribution with n - 1 degrees of freedom ("Student", The probable error of a mean,
    Biometrika 6, 1908). It assumes that means of so many values are about normal. ValueError without values."""
    if not values:
        raise ValueError("no values")
    count = len(values)
    if count == 1:
        return Estimate(values[0], None, 1)
    return Estimate(statistics.fmean(values), _quantile(count) * statistics.stdev(values) / math.sqrt(count), count)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The mean of value - baseline over pairs of trials that saw the same draw, and its confidence interval.

    Pairing takes out what both have in common, the luck of the draw: the interval is that of the differences, not of two
    means (Jain, The Art of Computer Systems Performance Analysis, 1991, section 13.4.1). ValueError for unequal lengths.
    """
    return estimate([value - base for value, base in zip(values, baseline, strict=True)])


def trimmed_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """paired_difference() without the fifth of the differences that are lowest and the fifth that are highest: of trials that
    something else on the machine disturbs now and then.

    Tukey and McLaughlin's interval (Less vulnerable confidence and significance procedures for location, Sankhya A 25, 1963):
    the trimmed mean +- t * s / ((1 - 2 * 0.2) * sqrt(n)), s being the standard deviation with those that were cut off put
    at the ends of what is left, and t having as many degrees of freedom as values are left, less one. ValueError for unequal
    lengths and for none.
    """
    differences = sorted(value - base for value, base in zip(values, baseline, strict=True))
    cut = int(TRIMMED * len(differences))
    if cut == 0:
        return estimate(differences)
    left = differences[cut:-cut]
    pulled_in = [left[0]] * cut + left + [left[-1]] * cut
    spread = statistics.stdev(pulled_in) / ((1 - 2 * TRIMMED) * math.sqrt(len(differences)))
    return Estimate(statistics.fmean(left), _quantile(len(left)) * spread, len(differences))


def difference_by_seed(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """paired_difference() over the seeds that both have; None where there are none."""
    common = [seed for seed in values if seed in baseline]
    if not common:
        return None
    return paired_difference([values[seed] for seed in common], [baseline[seed] for seed in common])


def _quantile(count: int) -> float:
    """Student's t for CONFIDENCE on both sides, with `count` - 1 degrees of freedom."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
