"""What gateways are told of the fleet: all of it when their stream opens, then what changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pointsman.router.core.instances.instance_registry import PoolInfo
from pointsman.router.core.ownership import Owner
from pointsman.router.io.convert.gateway_messages import instance_ref, owner_to_wire
from pointsman.router.io.convert.times import duration
from pointsman.router.v1 import placement_pb2


class ToldFleet:
    """The fleet as every gateway with an open stream has been told it. `ownerless_timeout_s` is in s."""

    def __init__(self, ownerless_timeout_s: float) -> None:
        self._ownerless_timeout = duration(ownerless_timeout_s)
        self._starting = True
        self._pools: dict[str, _ToldPool] = {}

    def update(
        self, pools: Iterable[PoolInfo], owner: Callable[[str], Owner | None], *, starting: bool
    ) -> placement_pb2.FleetUpdate | None:
        """What has changed since the last call, to be told to every gateway with an open stream; None: nothing. A pool that is
        the same object as then, with the same owner, is not looked at. Mutates."""
        update = placement_pb2.FleetUpdate(starting=starting)
        changed = starting is not self._starting
        self._starting = starting
        gone = set(self._pools)
        for pool in pools:
            gone.discard(pool.model)
            told = self._pools.get(pool.model)
            if told is None:
                told = self._pools[pool.model] = _ToldPool()
            if (pool_update := told.update(pool, owner(pool.model))) is not None:
                update.pools.append(pool_update)
                changed = True
        for model in sorted(gone):
            del self._pools[model]
            update.removed_models.append(model)
            changed = True
        return update if changed else None

    def whole(self) -> placement_pb2.Fleet:
        """All that has been told, for a gateway that opens its stream."""
        fleet = placement_pb2.Fleet(starting=self._starting, ownerless_timeout=self._ownerless_timeout)
        for _, told in sorted(self._pools.items()):
            told.write(fleet.pools.add())
        return fleet


class _ToldPool:
    """One pool as it has been told. References are kept: making them anew takes some microseconds each, for every instance."""

    def __init__(self) -> None:
        self._info: PoolInfo | None = None
        self._owner: Owner | None = None
        self._description: placement_pb2.Pool | None = None
        self._refs: dict[str, placement_pb2.InstanceRef] = {}

    def update(self, info: PoolInfo, owner: Owner | None) -> placement_pb2.PoolUpdate | None:
        """What gateways are to be told now; None where nothing of it is another. Mutates."""
        if info is self._info and owner == self._owner:
            return None
        update, changed = placement_pb2.PoolUpdate(model=info.model), False
        description = _description(info, owner)
        if description != self._description:
            update.description.CopyFrom(description)
            changed = True
        before = self._info.instances if self._info is not None else {}
        for instance_id in sorted(one for one, known in info.instances.items() if before.get(one) is not known):
            ref = instance_ref(info.instances[instance_id])
            if ref != self._refs.get(instance_id):  # an agent that came back tells the same once more
                self._refs[instance_id] = ref
                update.instances.append(ref)
                changed = True
        for instance_id in sorted(before.keys() - info.instances.keys()):
            del self._refs[instance_id]
            update.removed_instance_ids.append(instance_id)
            changed = True
        self._info, self._owner, self._description = info, owner, description
        return update if changed else None

    def write(self, pool: placement_pb2.Pool) -> None:
        """Fill an empty message. Mutates `pool`."""
        if self._description is not None:
            pool.CopyFrom(self._description)
        pool.instances.extend(ref for _, ref in sorted(self._refs.items()))


def _description(info: PoolInfo, owner: Owner | None) -> placement_pb2.Pool:
    return placement_pb2.Pool(
        model=info.model,
        served_names=info.served_names,
        lora_names=info.lora_names,
        model_root=info.model_root,
        max_model_len=info.max_model_len,
        owner=owner_to_wire(owner),
    )
