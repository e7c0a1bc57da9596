"""Which replica owns which pool: who should take a free one, and what this replica owns. Pure."""

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
    """The replica that should take `pool`: the highest of xxh3(replica, pool); "" when there is none.

    Rendezvous hashing (Thaler and Ravishankar, 1998): all replicas agree without talking, and one that comes or goes moves
    only its own pools.
    """
    return max(
        router_ids, key=lambda router_id: (xxh3_64_intdigest(f"{router_id}\0{pool}".encode()), router_id), default=""
    )


class SettledReplicas:
    """Which other replicas have been alive for `settle_s`, in s: long enough to know the fleet, and not about to go again."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._since: dict[str, float] = {}
        self._offered: dict[str, set[str]] = {}

    def seen(self, live: Iterable[str], now: float) -> None:
        """These replicas are alive at `now`; one that was not for a moment begins anew. Mutates."""
        self._since = {router_id: self._since.get(router_id, now) for router_id in live}
        self._offered = {router_id: pools for router_id, pools in self._offered.items() if router_id in self._since}

    def successor(self, pool: str, own_id: str, now: float) -> str:
        """The replica that `own_id` should hand `pool` over to: the preferred one, once settled; "" when there is none, or it
        has been offered the pool before and not kept it."""
        one = preferred(pool, self._since)
        if one in ("", own_id) or now - self._since[one] < self._settle_s or pool in self._offered.get(one, ()):
            return ""
        return one

    def offered(self, pool: str, router_id: str) -> None:
        """The pool was handed over. Mutates."""
        self._offered.setdefault(router_id, set()).add(pool)


class OwnedPools:
    """The pools whose requests this replica places: all of them (without a shared store), or those it has taken."""

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._taken: set[str] = set()

    def owns(self, pool: str) -> bool:
        """Whether this replica places the pool's requests."""
        return self._everything or pool in self._taken

    @property
    def any(self) -> bool:
        """Whether it places any pool's requests, now or as soon as there are instances."""
        return self._everything or bool(self._taken)

    def take(self, pool: str) -> None:
        """Mutates."""
        self._taken.add(pool)

    def lose(self, pool: str) -> None:
        """Mutates."""
        self._taken.discard(pool)
