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
    before = before or placement_pb2.Pool()
    removed = set[str]()
    changed = []
    for earlier, now in ((before.instances, after.instances), (before.other_instances, after.other_instances)):
        known = {instance.instance_id: instance for instance in earlier}
        removed |= known.keys() - {instance.instance_id for instance in now}
        changed.append([instance for instance in now if known.get(instance.instance_id) != instance])
    update = placement_pb2.PoolUpdate(
        model=after.model, instances=changed[0], other_instances=changed[1], removed_instance_ids=sorted(removed)
    )
    if _description(before) != _description(after):
        update.description.CopyFrom(_description(after))
    return update


def _description(pool: placement_pb2.Pool) -> placement_pb2.Pool:
    described = placement_pb2.Pool()
    described.CopyFrom(pool)
    del described.instances[:], described.other_instances[:]
    return described
