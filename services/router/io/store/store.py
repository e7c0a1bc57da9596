"""Where reservations and affinity outlive a router, and who owns which pool: nowhere and this one (memory), or Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.ownership import Owner

StoreEvent = ev.PoolTaken | ev.SessionsRead | ev.PoolLost | ev.StoreState
StoreEffect = ev.Reserved | ev.Released | ev.SessionOwnerSet | ev.MeanWorkSet
Stored = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Replica:
    """A router of the fleet. `seen_at` is when it sent its last heartbeat, in s on the loop's clock; None: nothing is
    shared. `replica_info` is what it tells of itself."""

    router_id: str
    address: str
    seen_at: float | None
    replica_info: str = ""


class Store(Protocol):
    """What the router needs of a store."""

    kind: str
    """"memory" or "redis"."""

    address: str
    """What gateways dial to reach this replica, as HOST:PORT; set before run()."""

    replica_info: Callable[[], str]
    """What this replica tells the others of itself; set before run()."""

    on_operator_config: Callable[[str], None]
    """Called with the configuration that operators have set, at whichever replica, when they change; set before run()."""

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""

    @property
    def answered_at(self) -> float | None:
        """When the shared store last answered, in s on the loop's clock; None without one, or before its first answer."""

    def replicas(self) -> list[Replica]:
        """The live replicas by id, as of that answer."""

    def lost_replicas(self) -> list[Replica]:
        """Those that ended in the last day without taking leave and that none has replaced, the longest silent first, as of that
        answer; without their addresses."""

    def owner(self, pool: str) -> Owner | None:
        """Who owns `pool`, as far as known; None when nobody does."""

    def may_place(self, pool: str) -> bool:
        """Whether this replica may place the pool's requests at this moment."""

    def compete_for(self, pools: Iterable[str]) -> None:
        """Take part in the ownership of these pools, besides those named before."""

    def give_up(self, pool: str) -> None:
        """Take no part in the ownership of a pool any more, until it is competed for again."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be kept; never blocks."""

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored(True)` once all that was recorded of `pool` so far is kept (or nothing can keep it: degraded), or
        `stored(False)` when another replica took the pool before that."""

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Let all replicas, and those that start later, have what `change` makes of operators' configuration ("": none yet); it
        may be called several times. False when the others get it, merged with what they have, once the shared store is back."""

    async def run(self) -> None:
        """Work until cancelled; then give back what is owned."""


class MemoryStore:
    """One replica owns all pools; nothing outlives it."""

    kind = "memory"
    answered_at = None

    def __init__(self, router_id: str) -> None:
        self.epoch = 1
        self.address = ""
        self.replica_info: Callable[[], str] = str
        self.on_operator_config: Callable[[str], None] = lambda config: None
        self._config = ""
        self._router_id = router_id

    def replicas(self) -> list[Replica]:
        """This one."""
        return [Replica(self._router_id, self.address, None, self.replica_info())]

    def lost_replicas(self) -> list[Replica]:
        """None: there are no others."""
        return []

    def owner(self, pool: str) -> Owner | None:
        """This replica."""
        return Owner(self._router_id, self.address, self.epoch)

    def may_place(self, pool: str) -> bool:
        """Always."""
        return True

    def compete_for(self, pools: Iterable[str]) -> None:
        """Nothing to do."""

    def give_up(self, pool: str) -> None:
        """Nothing to do."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Nothing to keep."""

    def when_stored(self, pool: str, stored: Stored) -> None:
        """At once."""
        stored(True)

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """There is nobody else."""
        self._config = change(self._config)
        self.on_operator_config(self._config)
        return True

    async def run(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()
