"""Where reservations and affinity outlive a router, and who owns which pool: nowhere and this one (memory), or Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from services.router import events as ev
from services.router.ownership import Owner

StoreEvent = ev.PoolTaken | ev.PoolLost | ev.StoreState
StoreEffect = ev.Reserved | ev.Released | ev.OwnerSet | ev.UsualSet
Stored = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Replica:
    """A live router of the fleet. `seen_at` is when it last gave a sign of life, in s on the loop's clock; None: nothing is
    shared. `about` is what it tells of itself."""

    router_id: str
    address: str
    seen_at: float | None
    about: str = ""


class Store(Protocol):
    """What the router needs of a store."""

    kind: str
    """"memory" or "redis"."""

    address: str
    """What gateways dial to reach this replica, as HOST:PORT; set before run()."""

    about: Callable[[], str]
    """What this replica tells the others of itself; set before run()."""

    on_orders: Callable[[str], None]
    """Called with the orders that operators have given, at whichever replica, when they change; set before run()."""

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""

    @property
    def answered_at(self) -> float | None:
        """When the shared store last answered, in s on the loop's clock; None without one, or before its first answer."""

    def replicas(self) -> list[Replica]:
        """The live replicas by id, as of that answer."""

    def owner(self, pool: str) -> Owner | None:
        """Who owns `pool`, as far as known; None when nobody does."""

    def holds(self, pool: str) -> bool:
        """Whether this replica may place the pool's requests at this moment."""

    def want(self, pools: Iterable[str]) -> None:
        """Take part in the ownership of these pools, besides those named before."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be kept; never blocks."""

    def after(self, pool: str, stored: Stored) -> None:
        """Call `stored(True)` once all that was recorded of `pool` so far is kept (or nothing can keep it: degraded), or
        `stored(False)` when another replica took the pool before that."""

    async def change_orders(self, change: Callable[[str], str]) -> bool:
        """Let all replicas, and those that start later, have what `change` makes of operators' orders ("": none yet); it may be
        called several times. False when the others get it only once the shared store is back."""

    async def run(self) -> None:
        """Work until cancelled; then give back what is owned."""


class MemoryStore:
    """One replica owns all pools; nothing outlives it."""

    kind = "memory"
    answered_at = None

    def __init__(self, router_id: str) -> None:
        self.epoch = 1
        self.address = ""
        self.about: Callable[[], str] = str
        self.on_orders: Callable[[str], None] = lambda orders: None
        self._orders = ""
        self._router_id = router_id

    def replicas(self) -> list[Replica]:
        """This one."""
        return [Replica(self._router_id, self.address, None, self.about())]

    def owner(self, pool: str) -> Owner | None:
        """This replica."""
        return Owner(self._router_id, self.address, self.epoch)

    def holds(self, pool: str) -> bool:
        """Always."""
        return True

    def want(self, pools: Iterable[str]) -> None:
        """Nothing to do."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Nothing to keep."""

    def after(self, pool: str, stored: Stored) -> None:
        """At once."""
        stored(True)

    async def change_orders(self, change: Callable[[str], str]) -> bool:
        """There is nobody else."""
        self._orders = change(self._orders)
        self.on_orders(self._orders)
        return True

    async def run(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()
