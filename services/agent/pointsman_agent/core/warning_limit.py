"""Limit of how often a warning is logged that one sender can cause with each message. Pure; times in s on one clock."""

from __future__ import annotations

import math


class WarningLimit:
    """Allows a warning when its cause first occurs, and from then on at most once every `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._warned_at = -math.inf
        self._occurrences = 0

    def occurred(self, now: float) -> int:
        """Record one occurrence. Return how many there were since the last warning, this one included, if a warning is due; else
        0. Mutates."""
        self._occurrences += 1
        if now - self._warned_at < self._interval_s:
            return 0
        occurrences, self._occurrences, self._warned_at = self._occurrences, 0, now
        return occurrences
