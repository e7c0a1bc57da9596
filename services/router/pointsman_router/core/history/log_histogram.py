"""A histogram of times with bins of equal width on a logarithmic scale: quantiles need neither a list nor a sort. Pure."""

from __future__ import annotations

import math
from array import array

# Range of the bins, s. Times outside count in the first or the last bin.
LOWEST_S, HIGHEST_S = 1e-3, 1e3
BINS_PER_DECADE = 16
# Maximum ratio of a returned quantile, which is the middle of its bin, to the exact one, or the inverse.
MAX_ERROR = 10.0 ** (0.5 / BINS_PER_DECADE)

_DECADES = 6
_BINS = _DECADES * BINS_PER_DECADE
_MIDDLES = tuple(LOWEST_S * 10.0 ** ((number + 0.5) / BINS_PER_DECADE) for number in range(_BINS))
_LOG_LOWEST = math.log10(LOWEST_S)


class LogHistogram:
    """Counts of times by bin: 16 bins for each factor of ten, from 1 ms to 1,000 s, in 0.5 KB."""

    __slots__ = ("_bins", "count")

    def __init__(self) -> None:
        self._bins = array("I", bytes(4 * _BINS))
        self.count = 0

    def add(self, seconds: float) -> None:
        """Count one time, s; NaN is ignored. Mutates."""
        if math.isnan(seconds):
            return
        clamped = min(max(seconds, LOWEST_S), HIGHEST_S)
        self._bins[min(int((math.log10(clamped) - _LOG_LOWEST) * BINS_PER_DECADE), _BINS - 1)] += 1
        self.count += 1

    def quantiles(self, *shares: float) -> list[float]:
        """Return for each of `shares` (ascending, in (0, 1]) the smallest time that at least this share of all times do not
        exceed, s, rounded to the middle of its bin; NaN if there are no times."""
        if not self.count:
            return [math.nan] * len(shares)
        ranks = [max(math.ceil(self.count * share), 1) for share in shares]
        found: list[float] = []
        below = 0
        for number, counted in enumerate(self._bins):
            below += counted
            while len(found) < len(ranks) and below >= ranks[len(found)]:
                found.append(_MIDDLES[number])
            if len(found) == len(ranks):
                break
        return found

    def clear(self) -> None:
        """Remove all times. Mutates."""
        if self.count:
            self._bins = array("I", bytes(4 * _BINS))
            self.count = 0
