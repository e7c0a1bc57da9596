"""Intervals that stay true although a comparison ends as soon as it is decided. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# A comparison has at most so many values, and is looked at after FIRST_LOOK of them and after each further one.
MOST, FIRST_LOOK = 8, 3
# Chance that any look at a comparison of two equals shows a difference.
LEVEL = 0.05
# Critical value of Student's t after so many values. Up to then LEVEL * (values / MOST) ** SPENDING of the chance is spent.
SPENDING = 1.5
CRITICAL = {3: 9.252, 4: 6.062, 5: 4.484, 6: 3.709, 7: 3.256, 8: 2.956}


class Interval(NamedTuple):
    """A mean and its interval; infinite before the first look."""

    mean: float
    low: float = -math.inf
    high: float = math.inf

    def excludes(self, value: float) -> bool:
        """Whether a value is outside the interval."""
        return not self.low <= value <= self.high


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values and its repeated confidence interval, of which with a chance of 1 - LEVEL all looks
    contain the true mean, whenever and for whatever reason the comparison ends.

    Repeated intervals: Jennison and Turnbull, Interim analyses: the repeated confidence interval approach, J. R. Statist. Soc. B
    51 (1989). The chance is spent as in Kim and DeMets, Design and analysis of group sequential tests based on the type I error
    spending rate function, Biometrika 74 (1987), with the power SPENDING. For values of a normal distribution of unknown spread
    the values of t at the looks have one joint distribution, by which CRITICAL is computed (24 million draws; the unit tests draw
    again). Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    mean = statistics.fmean(values)
    if len(values) < FIRST_LOOK:
        return Interval(mean)
    half = CRITICAL[min(len(values), MOST)] * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
