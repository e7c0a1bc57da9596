"""When a router that has just started knows enough to place. Pure; `now` is in s on the router's clock.

Right after a start agents come back one by one. Placing on the first of them would send every request to it, and asking for a
model whose agents are not there yet would look like asking for one that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.domain import InstanceState
from services.router.fleet import InstanceRecord


class WarmUp:
    """A pool is cold until its instances have synced and one is ready, at most `limit_s` after the first event."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: float | None = None
        self._warm: set[str] = set()

    def begin(self, now: float) -> None:
        """Start the clock; later calls have no effect. Mutates."""
        if self._until is None:
            self._until = now + self._limit_s

    def over(self, now: float) -> bool:
        """Whether the time is up: from then on everything is warm."""
        return self._until is not None and now >= self._until

    def cold(self, pool: str, records: Sequence[InstanceRecord], now: float) -> bool:
        """Whether `pool` ("": all of them), whose instances are `records`, must wait. Once warm, always warm. Mutates."""
        if self.over(now) or pool in self._warm:
            return False
        states = {record.state for record in records}
        if InstanceState.READY not in states or InstanceState.SYNCING in states:
            return True
        self._warm.add(pool)
        return False
