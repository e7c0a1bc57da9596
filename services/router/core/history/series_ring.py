"""The newest values of some measures, one for each step of time, in memory that is taken once. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

# As if this were the bucket before the first one: no clock is so low.
NONE = -(1 << 62)


class SeriesRing:
    """For each of `measures` measures the values of the newest `buckets` buckets (numbers of steps of time), as 4-byte floats.
    NaN: not known."""

    __slots__ = ("_buckets", "_measures", "_values", "newest")

    def __init__(self, measures: int, buckets: int) -> None:
        self._measures = measures
        self._buckets = buckets
        self._values = array("f", [math.nan]) * (measures * buckets)
        self.newest = NONE

    @property
    def size_bytes(self) -> int:
        """Memory of the values."""
        return self._values.itemsize * len(self._values)

    def put(self, bucket: int, values: Sequence[float]) -> None:
        """Keep one value for each measure of a bucket that is later than all before; those between are not known. Mutates."""
        for skipped in range(max(self.newest + 1, bucket - self._buckets + 1), bucket):
            self._values[skipped % self._buckets :: self._buckets] = self._unknown()
        self._values[bucket % self._buckets :: self._buckets] = array("f", values)
        self.newest = bucket

    def read(self, measure: int, first: int, last: int) -> list[float]:
        """The values of one measure in the buckets `first` to `last`; NaN where they are not, or no longer, kept."""
        offset, oldest = measure * self._buckets, self.newest - self._buckets
        return [
            self._values[offset + bucket % self._buckets] if oldest < bucket <= self.newest else math.nan
            for bucket in range(first, last + 1)
        ]

    def _unknown(self) -> array[float]:
        return array("f", [math.nan]) * self._measures
