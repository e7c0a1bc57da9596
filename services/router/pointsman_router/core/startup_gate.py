"""Decides when a router that has just started knows enough of the fleet to place. Pure; `now` is in s on the router's clock.

After a start, agents reconnect one by one. Placing at once would send every request to the first instance, and a model whose
agents are not connected yet would seem not to exist. Gateways remember the fleet that an earlier router sent them, so the router
also waits for the instances that gateways name.
"""

from __future__ import annotations

from collections.abc import Iterable

from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.placement_types import InstanceState


class StartupGate:
    """Says which pools are starting: until a pool's instances have synced, one of them is ready, and all instances that gateways
    remember have synced, too; at most `limit_s` after the first event."""

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
        """Return whether the time limit is reached; no pool is starting any more then."""
        return self._until is not None and now >= self._until

    def expect(self, instance_ids: Iterable[str], instances: InstanceRegistry, now: float) -> bool:
        """Also wait for those of these instances that have not synced yet. All pools are then checked again, so one that had
        started may be starting again. Return whether any instance is newly waited for. Mutates."""
        missing = {instance_id for instance_id in instance_ids if _missing(instances, instance_id)} - self._expected
        if self.over(now) or not missing:
            return False
        self._expected |= missing
        self._started.clear()
        return True

    def starting(self, pool: str, instances: InstanceRegistry, now: float) -> bool:
        """Return whether placements of `pool` ("": the whole fleet) must wait. A pool that has started stays so unless `expect`
        adds instances. Mutates."""
        if self.over(now) or pool in self._started:
            return False
        self._expected = {instance_id for instance_id in self._expected if _missing(instances, instance_id)}
        states = {record.state for record in (instances.members(pool, pool) if pool else instances.records())}
        if self._expected or InstanceState.READY not in states or InstanceState.SYNCING in states:
            return True
        self._started.add(pool)
        return False


def _missing(instances: InstanceRegistry, instance_id: str) -> bool:
    record = instances.get(instance_id)
    return record is None or record.state is InstanceState.SYNCING
