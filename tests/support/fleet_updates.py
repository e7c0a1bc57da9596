"""The update that a router sends for a changed fleet, computed from two whole fleets."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2


def fleet_update(before: placement_pb2.Fleet, after: placement_pb2.Fleet) -> placement_pb2.FleetUpdate:
    """Return the update that turns `before` into `after`."""
    known, now = ({pool.model: pool for pool in fleet.pools} for fleet in (before, after))
    return placement_pb2.FleetUpdate(
        starting=after.starting,
        pools=[_pool_update(known.get(model), pool) for model, pool in now.items() if known.get(model) != pool],
        removed_models=sorted(known.keys() - now.keys()),
    )


def _pool_update(before: placement_pb2.Pool | None, after: placement_pb2.Pool) -> placement_pb2.PoolUpdate:
    known = {instance.instance_id: instance for instance in before.instances} if before is not None else {}
    update = placement_pb2.PoolUpdate(
        model=after.model,
        instances=[instance for instance in after.instances if known.get(instance.instance_id) != instance],
        removed_instance_ids=sorted(known.keys() - {instance.instance_id for instance in after.instances}),
    )
    if before is None or _description(before) != _description(after):
        update.description.CopyFrom(_description(after))
    return update


def _description(pool: placement_pb2.Pool) -> placement_pb2.Pool:
    described = placement_pb2.Pool()
    described.CopyFrom(pool)
    del described.instances[:]
    return described
