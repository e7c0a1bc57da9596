"""When a router that has just started knows enough to place. Pure; `now` is in s on the router's clock.

Right after a start agents come back one by one. Placing on the first of them would send every request to it, and asking for a
model whose agents are not there yet would look like asking for one that does not exist. Gateways remember the fleet that an
earlier router told them: whom they name is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from pointsman.router.core.instances.instance_registry import InstanceRegistry
from pointsman.router.core.types import InstanceState


class StartupGate:
    """A pool is starting until its instances have synced, one is ready, and all that gateways remember are known; at most
    `limit_s` after the first event."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: float | None = None
        self._started: set[str] = set()
        self._expected: set[str] = set()

    def begin(self, now: float) -> None:
        """Start the clock; later calls have no effect. Mutates."""
        if self._until is None:
            self._until = now + self._limit_s

    def over(self, now: float) -> bool:
        """Whether the time is up: from then on nothing is starting."""
        return self._until is not None and now >= self._until

    def expect(self, instance_ids: Iterable[str], instances: InstanceRegistry, now: float) -> bool:
        """Wait for these instances, too, as far as they are not in step yet: what had started may be starting again. Whether any
        is new. Mutates."""
        missing = {one for one in instance_ids if _missing(instances, one)} - self._expected
        if self.over(now) or not missing:
            return False
        self._expected |= missing
        self._started.clear()
        return True

    def starting(self, pool: str, instances: InstanceRegistry, now: float) -> bool:
        """Whether `pool` ("": all of them) must wait. Once started, it stays so unless more is expected. Mutates."""
        if self.over(now) or pool in self._started:
            return False
        self._expected = {one for one in self._expected if _missing(instances, one)}
        states = {record.state for record in (instances.members(pool, pool) if pool else instances.records())}
        if self._expected or InstanceState.READY not in states or InstanceState.SYNCING in states:
            return True
        self._started.add(pool)
        return False


def _missing(instances: InstanceRegistry, instance_id: str) -> bool:
    record = instances.get(instance_id)
    return record is None or record.state is InstanceState.SYNCING
