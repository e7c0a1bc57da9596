"""The fleet as all routers together describe it: its pools, and which router places for each."""

from __future__ import annotations

from pointsman.gateway.core.told_fleet import OutOfStep, ToldFleet
from pointsman.router.v1 import placement_pb2

# Until a router has said how long a pool may have no owner.
DEFAULT_OWNER_TIMEOUT_S = 5.0


class PoolOwners:
    """The fleet as told by every router that a session stands with, by the session's address."""

    def __init__(self) -> None:
        self._fleets: dict[str, tuple[str, ToldFleet]] = {}
        self._pools: dict[str, placement_pb2.Pool] = {}
        self._pool_of: dict[str, str] = {}

    def pools(self) -> list[placement_pb2.Pool]:
        """The pools of all routers by name: each as its owner describes it, or else as the first router that knows it does. What
        changes is another object."""
        return [self._pools[model] for model in sorted(self._pools)]

    def pool_of(self, model: str) -> str:
        """The pool that a name means, or the name itself."""
        return self._pool_of.get(model, model)

    def owner(self, pool: str) -> placement_pb2.Owner | None:
        """Who places the pool's requests; None while nobody is known to."""
        known = self._pools.get(pool)
        return known.owner if known is not None and known.HasField("owner") else None

    def first_owner(self) -> placement_pb2.Owner | None:
        """The owner of the first pool by name that has one, which all gateways that know the same fleet agree on."""
        return next((pool.owner for _, pool in sorted(self._pools.items()) if pool.HasField("owner")), None)

    @property
    def timeout_s(self) -> float:
        """How long to wait for a pool to have an owner that answers, in s: as the most patient of the routers says."""
        told = [fleet.ownerless_timeout_s for _, fleet in self._fleets.values()]
        return max((one for one in told if one is not None), default=DEFAULT_OWNER_TIMEOUT_S)

    def addresses(self) -> set[str]:
        """The addresses of all owners."""
        return {pool.owner.address for pool in self._pools.values() if pool.HasField("owner")}

    def begin(self, address: str, router_id: str, fleet: placement_pb2.Fleet) -> None:
        """Take over all that the router at `address` says. Mutates."""
        self._fleets[address] = (router_id, ToldFleet(fleet))
        self._merge()

    def update(self, address: str, update: placement_pb2.FleetUpdate) -> None:
        """Take over what the router at `address` says has changed. Raises OutOfStep where that does not fit what it said before:
        the session is to be opened again. Mutates."""
        if address not in self._fleets:
            raise OutOfStep("the router tells what has changed of a fleet that it never told")
        self._fleets[address][1].apply(update)
        self._merge()

    def forget(self, address: str) -> None:
        """The session with the router at `address` ended. Mutates; the last one's word stays until there is another."""
        if self._fleets.pop(address, None) is not None and self._fleets:
            self._merge()

    def _merge(self) -> None:
        pools: dict[str, placement_pb2.Pool] = {}
        owners: dict[str, placement_pb2.Owner] = {}
        for _, fleet in self._fleets.values():
            for model, pool in fleet.pools.items():
                pools.setdefault(model, pool)
                # The higher epoch is right where two disagree: an owner that Redis cannot reach does not know its successor.
                if pool.HasField("owner") and pool.owner.epoch > self._epoch(owners, model):
                    owners[model] = pool.owner
        for router_id, fleet in self._fleets.values():
            owned = (model for model, owner in owners.items() if owner.router_id == router_id)
            pools |= {model: fleet.pools[model] for model in owned if model in fleet.pools}
        if any(fleet.starting for _, fleet in self._fleets.values()):
            for model, pool in self._pools.items():
                pools.setdefault(model, pool)
        self._pools = {model: _owned_by(owners.get(model), pool) for model, pool in pools.items()}
        self._pool_of = {}
        for model, pool in self._pools.items():
            for name in (*pool.served_names, *pool.lora_names):
                self._pool_of.setdefault(name, model)
        self._pool_of.update({model: model for model in self._pools})

    @staticmethod
    def _epoch(owners: dict[str, placement_pb2.Owner], model: str) -> int:
        return owners[model].epoch if model in owners else -1


def _owned_by(owner: placement_pb2.Owner | None, pool: placement_pb2.Pool) -> placement_pb2.Pool:
    """The pool with that owner; itself where it says so already."""
    if owner == (pool.owner if pool.HasField("owner") else None):
        return pool
    owned = placement_pb2.Pool()
    owned.CopyFrom(pool)
    owned.ClearField("owner")
    if owner is not None:
        owned.owner.CopyFrom(owner)
    return owned
