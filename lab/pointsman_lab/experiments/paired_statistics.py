"""Differences between paired trials, with confidence intervals. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
# Share of the differences that trimmed_difference() leaves out at each end.
TRIMMED = 0.2


@dataclass(frozen=True)
class Estimate:
    """A mean of `trials` values and the half width of its 95 % confidence interval (None for a single trial)."""

    mean: float
    half_width: float | None
    trials: int

    @property
    def low(self) -> float:
        """Lower end of the interval; minus infinity without an interval."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval; infinity without an interval."""
        return math.inf if self.half_width is None else self.mean + self.half_width

    @property
    def differs(self) -> bool:
        """Whether 0 is outside the interval."""
        return not self.low <= 0 <= self.high

    @property
    def verdict(self) -> str:
        """For an estimate of a difference: "lower", "higher" or "no difference"; "one trial" without an interval."""
        if self.half_width is None:
            return "one trial"
        if not self.differs:
            return "no difference"
        return "lower" if self.mean < 0 else "higher"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values and its confidence interval.

    The interval is mean +- t * s / sqrt(n), with s the sample's standard deviation and t the quantile of Student's distribution
    with n - 1 degrees of freedom ("Student", The probable error of a mean, Biometrika 6, 1908). It assumes that the mean of n
    values is about normally distributed. Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    count = len(values)
    if count == 1:
        return Estimate(values[0], None, 1)
    return Estimate(statistics.fmean(values), _quantile(count) * statistics.stdev(values) / math.sqrt(count), count)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean of value - baseline over pairs of trials that saw the same draw, with its confidence interval.

    Pairing removes the variation that both trials share, that of the draw: the interval is that of the differences, not of two
    means (Jain, The Art of Computer Systems Performance Analysis, 1991, section 13.4.1). Raises ValueError for unequal lengths.
    """
    return estimate([value - base for value, base in zip(values, baseline, strict=True)])


def trimmed_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return paired_difference() without the lowest fifth and the highest fifth of the differences. For trials that other load on
    the machine disturbs now and then.

    The interval is Tukey and McLaughlin's (Less vulnerable confidence and significance procedures for location, Sankhya A 25,
    1963): the trimmed mean +- t * s / ((1 - 2 * 0.2) * sqrt(n)). s is the standard deviation with each trimmed value replaced by
    the nearest value that is left. t has one degree of freedom less than values are left. Raises ValueError for unequal lengths
    and for no values.
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
    """Return paired_difference() over the seeds that both have; None if they have none in common."""
    common = [seed for seed in values if seed in baseline]
    if not common:
        return None
    return paired_difference([values[seed] for seed in common], [baseline[seed] for seed in common])


def _quantile(count: int) -> float:
    """Return Student's t for a two-sided interval of CONFIDENCE, with `count` - 1 degrees of freedom."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
