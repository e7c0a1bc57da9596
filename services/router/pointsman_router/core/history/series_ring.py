"""A ring buffer of the newest values of several measures, one value per time step, in memory allocated once. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

# The newest bucket of an empty ring: lower than any clock.
NONE = -(1 << 62)


class SeriesRing:
    """Values of `measures` measures in the newest `buckets` buckets (numbers of time steps), as 4-byte floats; NaN: unknown."""

    __slots__ = ("_buckets", "_measures", "_values", "newest")

    def __init__(self, measures: int, buckets: int) -> None:
        self._measures = measures
        self._buckets = buckets
        self._values = array("f", [math.nan]) * (measures * buckets)
        self.newest = NONE

    @property
    def size_bytes(self) -> int:
        """Memory of the values, in bytes."""
        return self._values.itemsize * len(self._values)

    def put(self, bucket: int, values: Sequence[float]) -> None:
        """Add a bucket, later than all before it, with one value for each measure. Skipped buckets become NaN. Mutates."""
        for skipped in range(max(self.newest + 1, bucket - self._buckets + 1), bucket):
            self._values[skipped % self._buckets :: self._buckets] = self._unknown()
        self._values[bucket % self._buckets :: self._buckets] = array("f", values)
        self.newest = bucket

    def read(self, measure: int, first: int, last: int) -> list[float]:
        """Return the values of one measure in the buckets `first` to `last`; NaN for buckets that are not, or no longer, kept."""
        offset, oldest = measure * self._buckets, self.newest - self._buckets
        return [
            self._values[offset + bucket % self._buckets] if oldest < bucket <= self.newest else math.nan
            for bucket in range(first, last + 1)
        ]

    def _unknown(self) -> array[float]:
        return array("f", [math.nan]) * self._measures
