"""Tracks pools that have left the fleet until what was learned of them is dropped. Pure; times in s on the router's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

# How long what was learned of a pool without an instance is kept, s. It outlasts the restart of an only instance, or a scaling to
# zero for a few minutes.
KEPT_S = 900.0


class GonePools:
    """The pools without an instance that are still to be forgotten, and since when they have none."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[str]:
        return iter(self._since)

    def left(self, pools: Iterable[str], now: float) -> None:
        """Add pools that have lost their last instance, or that were taken over without one. Mutates."""
        for pool in pools:
            self._since.setdefault(pool, now)

    def due(self, is_back: Callable[[str], bool], is_used: Callable[[str], bool], now: float) -> list[str]:
        """Return the pools to forget at `now`, each once: without an instance for KEPT_S, and not `is_used` (called only for
        these). Pools that are back are removed. Mutates."""
        self._since = {pool: since for pool, since in self._since.items() if not is_back(pool)}
        due = [pool for pool, since in self._since.items() if since + KEPT_S <= now and not is_used(pool)]
        for pool in due:
            del self._since[pool]
        return due
