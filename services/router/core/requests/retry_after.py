"""How soon a refused request may come again: by how long requests of its pool and class waited lately. Pure.

A client that comes back before anything can have changed only fills the queue again, and one that waits longer than others loses
its turn. What waited is known at no cost: a mean is kept of the waits of those that were placed, displaced or given up.
"""

from __future__ import annotations

from dataclasses import dataclass

from pointsman.router.core.priority import Priority

# No client is sent away for longer; and what was waited so long ago tells nothing any more.
MOST_S = 60.0
# The share of the newest wait in the mean: some ten count.
RATE = 0.1


@dataclass(slots=True)
class _MeanWait:
    seconds: float
    at: float


class RetryAfter:
    """The mean waits of pools and classes, each forgotten when nothing has waited for MOST_S. Times in s on one clock."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._means: dict[tuple[str, Priority], _MeanWait] = {}

    def waited(self, pool: str, priority: Priority, seconds: float, now: float) -> None:
        """A request of the class waited so long in the pool, whatever became of it. Mutates; O(1)."""
        if (mean := self._means.get((pool, priority))) is None:
            self._means[pool, priority] = _MeanWait(seconds, now)
        else:
            mean.seconds += RATE * (seconds - mean.seconds)
            mean.at = now

    def seconds(self, pool: str, priority: Priority, waited_s: float = 0.0) -> float:
        """When to come again who was refused after having waited so long: as long as its class waits, or a higher one, which goes
        first; not sooner than it has waited itself. Between `least_s` and MOST_S."""
        first = [one for one in Priority if one.level >= priority.level]
        waits = [mean.seconds for one in first if (mean := self._means.get((pool, one))) is not None]
        return min(max(self._least_s, waited_s, *waits), max(MOST_S, self._least_s))

    def expire(self, now: float) -> None:
        """Forget what was waited long ago. Mutates."""
        self._means = {key: mean for key, mean in self._means.items() if now - mean.at < MOST_S}
