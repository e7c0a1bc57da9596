"""Detects that caches evict what sessions under way need again: the work of the last minute that was computed before. Pure."""

from __future__ import annotations

from math import floor

# Time over which work is summed, s, in slots of SLOT_S.
WINDOW_S, SLOT_S = 60.0, 2.0
_SLOTS = int(WINDOW_S / SLOT_S)


class Recomputation:
    """Sums of one pool over the last WINDOW_S: tokens of prompts that were placed and must be computed, and the part of them
    that had been computed for the same session and is cached nowhere any more. O(1) for each request."""

    def __init__(self) -> None:
        self._computed = [0.0] * _SLOTS
        self._again = [0.0] * _SLOTS
        self._sum_computed = self._sum_again = 0.0
        self._slot: int | None = None

    def add(self, computed: int, again: int, now: float) -> None:
        """Record a prompt of which `computed` tokens are to be computed, `again` of them once more. Mutates."""
        at = self._move(now) % _SLOTS
        self._computed[at] += computed
        self._again[at] += again
        self._sum_computed += computed
        self._sum_again += again

    def tokens(self, now: float) -> tuple[float, float]:
        """Return the tokens computed, and computed again, in the last WINDOW_S. Mutates."""
        self._move(now)
        return self._sum_computed, self._sum_again

    def share(self, now: float) -> float:
        """Return the share, 0 to 1, of the last minute's prefill that was computed again. Mutates."""
        computed, again = self.tokens(now)
        return min(again / computed, 1.0) if computed > 0 else 0.0

    def _move(self, now: float) -> int:
        """Forget the slots that have passed; return the number of the current one."""
        slot = floor(now / SLOT_S)
        if slot == self._slot:
            return slot
        if self._slot is None or slot - self._slot >= _SLOTS:
            self._computed, self._again = [0.0] * _SLOTS, [0.0] * _SLOTS
            self._sum_computed = self._sum_again = 0.0
        else:
            for passed in range(self._slot + 1, slot + 1):
                at = passed % _SLOTS
                self._sum_computed -= self._computed[at]
                self._sum_again -= self._again[at]
                self._computed[at] = self._again[at] = 0.0
        self._slot = slot if self._slot is None else max(slot, self._slot)
        return slot
