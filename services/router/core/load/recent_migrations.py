"""How many answers each instance was lately given from elsewhere. Pure; `now` is in s on a clock that only grows."""

from __future__ import annotations

from bisect import bisect_right


class Migrations:
    """The OFFLOAD decisions of the last `window_s`, by the instance that serves.

    Until such a request has prefilled elsewhere its reservation is there, too; without this count a light instance would be
    chosen again and again before the first of them arrives (the reference system's anti-hotspot rule).
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._times: dict[str, list[float]] = {}

    def record(self, instance_id: str, now: float) -> None:
        """A decision at `now` moved an answer to `instance_id`. Mutates."""
        self._times.setdefault(instance_id, []).append(now)

    def count(self, instance_id: str, now: float) -> int:
        """Decisions after now - window_s."""
        times = self._times.get(instance_id, [])
        return len(times) - bisect_right(times, now - self.window_s)

    def next_end(self, instance_id: str, now: float) -> float:
        """When the count changes next if nothing is recorded meanwhile."""
        times = self._times.get(instance_id, [])
        first = bisect_right(times, now - self.window_s)
        return times[first] + self.window_s if first < len(times) else float("inf")

    def expire(self, now: float) -> list[str]:
        """Drop what is past the window; returns whose. Mutates."""
        expired = []
        for instance_id, times in list(self._times.items()):
            if past := bisect_right(times, now - self.window_s):
                expired.append(instance_id)
                del times[:past]
            if not times:
                del self._times[instance_id]
        return expired

    def drop(self, instance_id: str) -> None:
        """Forget an instance's. Mutates."""
        self._times.pop(instance_id, None)

    def check_invariants(self) -> None:
        """Raise AssertionError when times are out of order or an instance is kept without any."""
        for times in self._times.values():
            assert times
            assert times == sorted(times)
