"""Pools that have left the fleet, until what was learned of them is forgotten. Pure; times in s on the router's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

# A deployment that restarts its only instance, or is scaled to none for a few minutes, finds what was learned of its pool.
KEPT_S = 900.0


class GonePools:
    """Since when each pool without an instance has been so. Holds those alone that are still to be forgotten."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def left(self, pools: Iterable[str], now: float) -> None:
        """These pools have lost their last instance, or were told of without one. Mutates."""
        for pool in pools:
            self._since.setdefault(pool, now)

    def due(self, is_back: Callable[[str], bool], is_used: Callable[[str], bool], now: float) -> list[str]:
        """The pools to be forgotten at `now`, each told once: gone for KEPT_S, and not `is_used`, which is asked of those alone.
        Mutates."""
        self._since = {pool: since for pool, since in self._since.items() if not is_back(pool)}
        due = [pool for pool, since in self._since.items() if since + KEPT_S <= now and not is_used(pool)]
        for pool in due:
            del self._since[pool]
        return due
