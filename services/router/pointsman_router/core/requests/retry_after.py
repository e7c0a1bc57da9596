"""Computes how soon a refused client should retry, from how long requests of its pool and class waited lately. Pure.

A client that retries before anything can have changed only fills the queue again; a client that waits longer than others loses
its turn. The estimate costs nothing: it is the mean wait of the requests that were placed, displaced or refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from pointsman_router.core.priority import Priority

# Maximum retry-after time, s (unless `least_s` is longer). Also the age at which a mean without new waits is dropped.
MOST_S = 60.0
# Share of the newest wait in the mean, so that about the last ten waits count.
RATE = 0.1


@dataclass(slots=True)
class _MeanWait:
    seconds: float
    at: float


class RetryAfter:
    """The mean waits of pools and classes, each dropped after MOST_S without a new wait. Times in s on one clock."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._means: dict[tuple[str, Priority], _MeanWait] = {}

    def waited(self, pool: str, priority: Priority, seconds: float, now: float) -> None:
        """Count a request's wait in the mean of its pool and class, whatever its outcome. Mutates; O(1)."""
        if (mean := self._means.get((pool, priority))) is None:
            self._means[pool, priority] = _MeanWait(seconds, now)
        else:
            mean.seconds += RATE * (seconds - mean.seconds)
            mean.at = now

    def seconds(self, pool: str, priority: Priority, waited_s: float = 0.0) -> float:
        """Return the retry-after time of a request that was refused after `waited_s`: the longest of this wait and the mean waits
        of its class and of higher ones, which go first. At least `least_s`, at most MOST_S or `least_s` if longer."""
        first = [other for other in Priority if other.level >= priority.level]
        waits = [mean.seconds for other in first if (mean := self._means.get((pool, other))) is not None]
        return min(max(self._least_s, waited_s, *waits), max(MOST_S, self._least_s))

    def expire(self, now: float) -> None:
        """Drop means without a wait in the last MOST_S. Mutates."""
        self._means = {key: mean for key, mean in self._means.items() if now - mean.at < MOST_S}
