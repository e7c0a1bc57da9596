"""Counts the recent OFFLOAD decisions by answering instance. Pure; `now` is in s on a monotonic clock."""

from __future__ import annotations

from bisect import bisect_right


class Migrations:
    """The OFFLOAD decisions of the last `window_s`, by the instance that answers.

    While such a request prefills on another instance, its reservation is there. Without this count a lightly loaded instance
    would be chosen again and again before the first of these requests arrives (the reference system's anti-hotspot rule).
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._times: dict[str, list[float]] = {}

    def record(self, instance_id: str, now: float) -> None:
        """Count a decision at `now` that moved an answer to `instance_id`. Mutates."""
        self._times.setdefault(instance_id, []).append(now)

    def count(self, instance_id: str, now: float) -> int:
        """Return the number of decisions after now - window_s."""
        times = self._times.get(instance_id, [])
        return len(times) - bisect_right(times, now - self.window_s)

    def next_end(self, instance_id: str, now: float) -> float:
        """Return when the count next changes if nothing is recorded before; inf if it is 0."""
        times = self._times.get(instance_id, [])
        first = bisect_right(times, now - self.window_s)
        return times[first] + self.window_s if first < len(times) else float("inf")

    def expire(self, now: float) -> list[str]:
        """Drop the decisions before the window; return the instances whose count changed. Mutates."""
        expired = []
        for instance_id, times in list(self._times.items()):
            if past := bisect_right(times, now - self.window_s):
                expired.append(instance_id)
                del times[:past]
            if not times:
                del self._times[instance_id]
        return expired

    def drop(self, instance_id: str) -> None:
        """Drop the decisions of an instance. Mutates."""
        self._times.pop(instance_id, None)

    def check_invariants(self) -> None:
        """Raise AssertionError if times are out of order, or an instance is kept without any."""
        for times in self._times.values():
            assert times
            assert times == sorted(times)
