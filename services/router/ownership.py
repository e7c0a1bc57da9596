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


class OwnedPools:
    """The pools whose requests this replica places: all of them (without a shared store), or those it has taken."""

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._taken: set[str] = set()

    def owns(self, pool: str) -> bool:
        """Whether this replica places the pool's requests."""
        return self._everything or pool in self._taken

    def take(self, pool: str) -> None:
        """Mutates."""
        self._taken.add(pool)

    def lose(self, pool: str) -> None:
        """Mutates."""
        self._taken.discard(pool)
