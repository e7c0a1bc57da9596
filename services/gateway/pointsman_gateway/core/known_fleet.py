"""The fleet as one router describes it: a full description first, then changes. Pure."""

from __future__ import annotations

from bisect import bisect_left

from pointsman.router.v1 import placement_pb2


class OutOfStep(Exception):
    """An update does not fit the router's earlier description. The stream must be opened again, since a new stream starts with a
    full description."""


class KnownFleet:
    """The fleet as received on one stream. `pools` is by model; its messages are never changed: a pool that changes becomes a new
    object. `ownerless_timeout_s` is None if the router did not send it."""

    def __init__(self, fleet: placement_pb2.Fleet) -> None:
        self.starting = fleet.starting
        self.ownerless_timeout_s = (
            fleet.ownerless_timeout.ToNanoseconds() / 1e9 if fleet.HasField("ownerless_timeout") else None
        )
        self.pools: dict[str, placement_pb2.Pool] = {}
        # Ids of each pool's instances, in the order of the instances: sorted, for a binary search among a thousand.
        self._ids: dict[str, list[str]] = {}
        for pool in fleet.pools:
            self._ids[pool.model] = ids = [instance.instance_id for instance in pool.instances]
            if ids != sorted(ids):
                pool.instances.sort(key=lambda one: one.instance_id)
                ids.sort()
            self.pools[pool.model] = pool

    def apply(self, update: placement_pb2.FleetUpdate) -> None:
        """Apply an update. Removals of unknown pools and instances are ignored. Raises OutOfStep. Mutates."""
        self.starting = update.starting
        for model in update.removed_models:
            self.pools.pop(model, None)
            self._ids.pop(model, None)
        for changed in update.pools:
            self._apply(changed)

    def _apply(self, changed: placement_pb2.PoolUpdate) -> None:
        before, pool = self.pools.get(changed.model), placement_pb2.Pool()
        if not changed.HasField("description"):
            if before is None:
                raise OutOfStep(f"the router sent a change of the pool {changed.model!r}, which it has not described")
            # A copy takes a fifth of the time of adding the same instances one by one.
            pool.CopyFrom(before)
        else:
            pool.CopyFrom(changed.description)
            del pool.instances[:]
            pool.instances.extend(before.instances if before is not None else ())
        ids = self._ids.setdefault(changed.model, [])
        for instance_id in changed.removed_instance_ids:
            at = bisect_left(ids, instance_id)
            if ids[at : at + 1] == [instance_id]:
                del ids[at], pool.instances[at]
        for instance in changed.instances:
            at = bisect_left(ids, instance.instance_id)
            if ids[at : at + 1] == [instance.instance_id]:
                pool.instances[at].CopyFrom(instance)
            else:
                ids.insert(at, instance.instance_id)
                pool.instances.insert(at, instance)
        self.pools[changed.model] = pool
