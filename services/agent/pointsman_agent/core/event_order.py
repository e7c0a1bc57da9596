"""Ordering of KV-event batches from two sources, live and replayed. Pure.

The engine numbers its batches from 0. Live batches (SUB) skip numbers if the subscriber joins late or reads slowly. Replayed
batches (DEALER) fill the gap, as far back as the engine's buffer reaches, and overlap with live batches. `EventOrder` decides
what to do with each batch, so that no batch is applied twice or out of order.
"""

from __future__ import annotations

from enum import Enum


class BatchAction(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    """The batch is already applied: ignore it."""
    GAP = "gap"
    """Batches between `applied` and this one are missing: replay from `applied + 1`, then offer this batch again."""
    RESTART = "restart"
    """The publisher's sequence started over: another lifetime of the engine."""


class EventOrder:
    """Position of a subscriber. `applied` is the number of the last batch in the cached blocks, -1 before the first."""

    def __init__(self, applied: int = -1) -> None:
        self.applied = applied
        self._last_live = -1

    def on_live(self, seq: int) -> BatchAction:
        """Return what to do with a live batch. Live numbers always grow, so a number that does not grow means a restart.
        Mutates."""
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
        """Return what to do with a replayed batch. GAP: the engine's buffer no longer has the batches before it."""
        if seq <= self.applied:
            return BatchAction.DUPLICATE
        return BatchAction.APPLY if seq == self.applied + 1 else BatchAction.GAP

    def mark_applied(self, seq: int) -> None:
        """Record that batch `seq` is applied. Mutates."""
        self.applied = seq

    def skip_to(self, seq: int) -> None:
        """Continue at `seq` although batches before it are missing. The caller clears the cached blocks. Mutates."""
        self.applied = seq - 1
