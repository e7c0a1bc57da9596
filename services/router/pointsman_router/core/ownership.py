"""Ownership of pools: which replica should take a free pool, and which pools this replica owns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica that owns a pool: its id, the address that gateways dial, and the epoch of its ownership (0: unknown)."""

    router_id: str
    address: str
    epoch: int


def preferred(pool: str, router_ids: Iterable[str]) -> str:
    """Return the replica that should own `pool`: the one with the highest xxh3(replica, pool); "" if there is no replica.

    This is rendezvous hashing (Thaler and Ravishankar, 1998): all replicas agree without communication, and a replica that joins
    or leaves changes the preferred owner of its own pools only.
    """
    return max(
        router_ids, key=lambda router_id: (xxh3_64_intdigest(f"{router_id}\0{pool}".encode()), router_id), default=""
    )


class SettledReplicas:
    """The live replicas, and since when each is alive. A replica is settled after `settle_s` (s): it then knows the fleet, and is
    unlikely to stop again soon."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._since: dict[str, float] = {}
        self._offered: dict[str, set[str]] = {}

    def seen(self, live: Iterable[str], now: float) -> None:
        """Record which replicas are alive at `now`. The time of a replica that was absent starts again. Mutates."""
        self._since = {router_id: self._since.get(router_id, now) for router_id in live}
        self._offered = {router_id: pools for router_id, pools in self._offered.items() if router_id in self._since}

    def successor(self, pool: str, own_id: str, now: float) -> str:
        """Return the replica that `own_id` should hand `pool` over to: the preferred one, once it has settled.

        Return "" if this is `own_id` itself or no replica, or if that replica was offered the pool before and did not keep it.
        """
        replica = preferred(pool, self._since)
        if (
            replica in ("", own_id)
            or now - self._since[replica] < self._settle_s
            or pool in self._offered.get(replica, ())
        ):
            return ""
        return replica

    def offered(self, pool: str, router_id: str) -> None:
        """Record that the pool was handed over to `router_id`. Mutates."""
        self._offered.setdefault(router_id, set()).add(pool)


class OwnedPools:
    """The pools whose requests this replica places: all pools (`everything`, without a shared store), or those it owns."""

    def __init__(self, *, everything: bool) -> None:
        self.everything = everything
        self._taken: set[str] = set()

    def owns(self, pool: str) -> bool:
        """Return whether this replica places the pool's requests."""
        return self.everything or pool in self._taken

    @property
    def any(self) -> bool:
        """Whether this replica places the requests of any pool, now or as soon as instances exist."""
        return self.everything or bool(self._taken)

    def take(self, pool: str) -> None:
        """Add an owned pool. Mutates."""
        self._taken.add(pool)

    def lose(self, pool: str) -> None:
        """Remove an owned pool, if present. Mutates."""
        self._taken.discard(pool)
