"""Merges the fleet descriptions of all routers: the pools, and the router that owns each."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.known_fleet import KnownFleet, OutOfStep
from pointsman_gateway.core.pool_state import names_of

# Ownerless timeout until a router has sent one, s.
DEFAULT_OWNER_TIMEOUT_S = 5.0


class PoolOwners:
    """The fleet as described by every router with which a session is open, by the session's address."""

    def __init__(self) -> None:
        self._fleets: dict[str, tuple[str, KnownFleet]] = {}
        self._pools: dict[str, placement_pb2.Pool] = {}
        self._pool_of: dict[str, str] = {}

    def pools(self) -> list[placement_pb2.Pool]:
        """Return the pools of all routers, sorted by name. Each is as its owner describes it; without its owner's description, as
        the first router with the pool does. A pool that changes becomes a new object."""
        return [self._pools[model] for model in sorted(self._pools)]

    def pool(self, model: str) -> placement_pb2.Pool | None:
        """Return a pool by its name; None if there is none."""
        return self._pools.get(model)

    def pool_of(self, model: str) -> str:
        """Return the pool that serves the model name or LoRA adapter `model`, or `model` itself if no pool does."""
        return self._pool_of.get(model, model)

    def owner(self, pool: str) -> placement_pb2.Owner | None:
        """Return the owner of the pool; None while no owner is known."""
        known = self._pools.get(pool)
        return known.owner if known is not None and known.HasField("owner") else None

    def first_owner(self) -> placement_pb2.Owner | None:
        """Return the owner of the first pool by name that has one. All gateways with the same view of the fleet agree on it."""
        return next((pool.owner for _, pool in sorted(self._pools.items()) if pool.HasField("owner")), None)

    @property
    def timeout_s(self) -> float:
        """How long to wait for a pool to have an owner that answers, s: the longest ownerless timeout of all routers."""
        timeouts = [fleet.ownerless_timeout_s for _, fleet in self._fleets.values()]
        return max((timeout_s for timeout_s in timeouts if timeout_s is not None), default=DEFAULT_OWNER_TIMEOUT_S)

    @property
    def complete(self) -> bool:
        """Whether the pools are certainly the whole fleet: a router describes it now, and none has just started."""
        return bool(self._fleets) and not any(fleet.starting for _, fleet in self._fleets.values())

    def addresses(self) -> set[str]:
        """Return the addresses of all owners."""
        return {pool.owner.address for pool in self._pools.values() if pool.HasField("owner")}

    def outdated_claims(self) -> list[tuple[str, str, placement_pb2.Owner]]:
        """Return (address, pool, owner) for each router that claims a pool of which another router is the owner, with a higher
        epoch."""
        return [
            (address, model, owner)
            for address, (router_id, fleet) in self._fleets.items()
            for model, pool in fleet.pools.items()
            if pool.HasField("owner") and pool.owner.router_id == router_id
            if (owner := self.owner(model)) is not None and owner.epoch > pool.owner.epoch
        ]

    def begin(self, address: str, router_id: str, fleet: placement_pb2.Fleet) -> None:
        """Replace the description from the router at `address` by `fleet`. Mutates."""
        self._fleets[address] = (router_id, KnownFleet(fleet))
        self._merge()

    def update(self, address: str, update: placement_pb2.FleetUpdate) -> None:
        """Apply changes that the router at `address` sent. Raises OutOfStep if they do not fit the router's earlier description;
        the session must then be opened again. Mutates."""
        if address not in self._fleets:
            raise OutOfStep("the router sent a change of the fleet before a full description of it")
        self._fleets[address][1].apply(update)
        self._merge()

    def forget(self, address: str) -> None:
        """Remove the description from `address`, whose session ended. The last description of all stays in use until another
        arrives. Mutates."""
        if self._fleets.pop(address, None) is not None and self._fleets:
            self._merge()

    def _merge(self) -> None:
        pools: dict[str, placement_pb2.Pool] = {}
        owners: dict[str, placement_pb2.Owner] = {}
        for _, fleet in self._fleets.values():
            for model, pool in fleet.pools.items():
                pools.setdefault(model, pool)
                # If two routers disagree, the higher epoch is right: an owner that cannot reach Redis is not aware of its
                # successor.
                known = owners.get(model)
                if pool.HasField("owner") and (known is None or pool.owner.epoch > known.epoch):
                    owners[model] = pool.owner
        for router_id, fleet in self._fleets.values():
            owned = (model for model, owner in owners.items() if owner.router_id == router_id)
            pools |= {model: fleet.pools[model] for model in owned if model in fleet.pools}
        if any(fleet.starting for _, fleet in self._fleets.values()):
            for model, pool in self._pools.items():
                pools.setdefault(model, pool)
        self._pools = {model: _owned_by(owners.get(model), pool) for model, pool in pools.items()}
        self._pool_of = {name: pool for name, (pool, _) in names_of(self._pools.values()).items()}


def _owned_by(owner: placement_pb2.Owner | None, pool: placement_pb2.Pool) -> placement_pb2.Pool:
    """Return `pool` with `owner` as its owner: `pool` itself if it already has that owner, else a copy."""
    if owner == (pool.owner if pool.HasField("owner") else None):
        return pool
    owned = placement_pb2.Pool()
    owned.CopyFrom(pool)
    owned.ClearField("owner")
    if owner is not None:
        owned.owner.CopyFrom(owner)
    return owned
