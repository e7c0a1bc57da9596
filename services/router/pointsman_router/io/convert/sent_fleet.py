"""The fleet as it is sent to gateways: the whole fleet when a stream opens, then the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pointsman.router.v1 import placement_pb2
from pointsman_router.core.instances.instance_registry import PoolInfo
from pointsman_router.core.ownership import Owner
from pointsman_router.core.placement_types import InstanceInfo
from pointsman_router.io.convert.gateway_messages import instance_ref, owner_to_wire
from pointsman_router.io.convert.times import duration


class SentFleet:
    """The fleet as it was last sent to the gateways with an open stream."""

    def __init__(self, ownerless_timeout_s: float) -> None:
        self._ownerless_timeout = duration(ownerless_timeout_s)
        self._starting = True
        self._pools: dict[str, _SentPool] = {}

    def update(
        self, pools: Iterable[PoolInfo], owner: Callable[[str], Owner | None], *, starting: bool
    ) -> placement_pb2.FleetUpdate | None:
        """Return what has changed since the last call, to be sent to every gateway with an open stream; None if nothing has.
        A pool that is the same object with the same owner is not compared. Mutates."""
        update = placement_pb2.FleetUpdate(starting=starting)
        changed = starting is not self._starting
        self._starting = starting
        gone = set(self._pools)
        for pool in pools:
            gone.discard(pool.model)
            known = self._pools.get(pool.model)
            if known is None:
                known = self._pools[pool.model] = _SentPool()
            if (pool_update := known.update(pool, owner(pool.model))) is not None:
                update.pools.append(pool_update)
                changed = True
        for model in sorted(gone):
            del self._pools[model]
            update.removed_models.append(model)
            changed = True
        return update if changed else None

    def whole(self) -> placement_pb2.Fleet:
        """Return the fleet as of the last `update`, for a gateway that opens its stream."""
        fleet = placement_pb2.Fleet(starting=self._starting, ownerless_timeout=self._ownerless_timeout)
        for _, known in sorted(self._pools.items()):
            known.write(fleet.pools.add())
        return fleet


class _SentPool:
    """One pool as it was last sent. The instances' messages are kept, since making one takes some microseconds."""

    def __init__(self) -> None:
        self._info: PoolInfo | None = None
        self._owner: Owner | None = None
        self._description: placement_pb2.Pool | None = None
        self._refs: dict[str, placement_pb2.InstanceRef] = {}  # of all instances

    def update(self, info: PoolInfo, owner: Owner | None) -> placement_pb2.PoolUpdate | None:
        """Return what has changed of the pool since the last call; None if nothing has. Mutates."""
        if info is self._info and owner == self._owner:
            return None
        update, changed = placement_pb2.PoolUpdate(model=info.model), False
        description = _description(info, owner)
        if description != self._description:
            update.description.CopyFrom(description)
            changed = True
        placeable, others = (self._info.instances, self._info.others) if self._info is not None else ({}, {})
        removed = sorted((placeable.keys() - info.instances.keys()) | (others.keys() - info.others.keys()))
        for instance_id in removed:
            del self._refs[instance_id]
        update.removed_instance_ids.extend(removed)
        update.instances.extend(self._changed(placeable, info.instances))
        update.other_instances.extend(self._changed(others, info.others))
        changed = changed or bool(removed or update.instances or update.other_instances)
        self._info, self._owner, self._description = info, owner, description
        return update if changed else None

    def _changed(
        self, before: Mapping[str, InstanceInfo], now: Mapping[str, InstanceInfo]
    ) -> list[placement_pb2.InstanceRef]:
        """Return the new and changed instances, in order of ids. Mutates."""
        changed = []
        for instance_id in sorted(name for name, known in now.items() if before.get(name) is not known):
            ref = instance_ref(now[instance_id])
            if ref != self._refs.get(instance_id):  # an agent that reconnects reports the same again
                self._refs[instance_id] = ref
                changed.append(ref)
        return changed

    def write(self, pool: placement_pb2.Pool) -> None:
        """Write the pool as it was last sent into `pool`, an empty message. Mutates `pool`."""
        if self._description is not None:
            pool.CopyFrom(self._description)
        if self._info is not None:
            pool.instances.extend(self._refs[name] for name in sorted(self._info.instances))
            pool.other_instances.extend(self._refs[name] for name in sorted(self._info.others))


def _description(info: PoolInfo, owner: Owner | None) -> placement_pb2.Pool:
    return placement_pb2.Pool(
        model=info.model,
        served_names=info.served_names,
        lora_names=info.lora_names,
        model_root=info.model_root,
        max_model_len=info.max_model_len,
        owner=owner_to_wire(owner),
    )
