"""The order of KV-event batches from two sources, live and replayed. Pure.

The engine numbers its batches from 0. Live batches (SUB) can skip numbers: a late joiner, a slow one. Replayed batches
(DEALER) fill the hole, as far back as the engine's buffer goes, and overlap with live ones. This class says what to do with
each; it never lets a batch be applied twice or out of order.
"""

from __future__ import annotations

from enum import Enum


class BatchAction(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    """Seen before: ignore it."""
    GAP = "gap"
    """Batches between `applied` and this one are missing: replay from `applied + 1`, then offer this one again."""
    RESTART = "restart"
    """The publisher counts from the beginning: another lifetime."""


class EventOrder:
    """Where a subscriber stands. `applied` is the last batch in the cached blocks, -1 before the first."""

    def __init__(self, applied: int = -1) -> None:
        self.applied = applied
        self._last_live = -1

    def on_live(self, seq: int) -> BatchAction:
        """A live batch. A publisher never repeats itself, so a number that does not grow means a restart."""
        if seq <= self._last_live:
            return BatchAction.RESTART
        if seq <= self.applied:
            self._last_live = seq
            return BatchAction.DUPLICATE
        if seq > self.applied + 1:
            return BatchAction.GAP
        self._last_live = seq
        return BatchAction.APPLY

    def on_replayed(self, seq: int) -> BatchAction:
        """A replayed batch. HOLE: the buffer no longer has what was asked for."""
        if seq <= self.applied:
            return BatchAction.DUPLICATE
        return BatchAction.APPLY if seq == self.applied + 1 else BatchAction.GAP

    def mark_applied(self, seq: int) -> None:
        """`seq` is in the cached blocks now."""
        self.applied = seq

    def skip_to(self, seq: int) -> None:
        """Give up on everything before `seq`; the caller drops what it knew."""
        self.applied = seq - 1
