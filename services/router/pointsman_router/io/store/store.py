"""The router's store: keeps reservations and session owners beyond a router's life, and decides which replica owns which pool.
MemoryStore keeps nothing, and one router owns all pools. RedisStore is in redis_store.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.ownership import Owner

StoreEvent = ev.PoolTaken | ev.SessionsRead | ev.PoolLost | ev.StoreState
StoreEffect = (
    ev.Reserved
    | ev.Released
    | ev.SessionOwnerSet
    | ev.SessionDisowned
    | ev.MeanWorkSet
    | ev.IdleSessionsSet
    | ev.PoolFactsSet
)
Stored = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Replica:
    """A router of the fleet. `seen_at`: time of its last heartbeat, s on the event loop's clock (None without a shared store).
    `replica_info`: what it reports about itself, as JSON."""

    router_id: str
    address: str
    seen_at: float | None
    replica_info: str = ""


class Store(Protocol):
    """The interface of a store."""

    kind: str
    """"memory" or "redis"."""

    address: str
    """HOST:PORT at which gateways reach this replica. Must be set before run()."""

    replica_info: Callable[[], str]
    """Returns what this replica reports to the others about itself. Must be set before run()."""

    on_operator_config: Callable[[str], None]
    """Called with the operator config whenever it changes, at whichever replica. Must be set before run()."""

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""

    @property
    def answered_at(self) -> float | None:
        """Time of the shared store's last answer, s on the event loop's clock. None without a shared store, or before its first
        answer."""

    def replicas(self) -> list[Replica]:
        """Return the live replicas ordered by id, as of the store's last answer."""

    def lost_replicas(self) -> list[Replica]:
        """Return the replicas that ended in the last day without deregistering and that no new replica has replaced, as of the
        store's last answer. Ordered by last heartbeat, oldest first; without addresses."""

    def owner(self, pool: str) -> Owner | None:
        """Return the owner of `pool`; None if it has none, or none is known."""

    def may_place(self, pool: str) -> bool:
        """Return whether this replica may place the pool's requests now."""

    def claimed(self, pool: str, owner: Owner) -> None:
        """Note that another replica claims to own `pool`, as a gateway tells."""

    def compete_for(self, pools: Iterable[str]) -> None:
        """Compete for the ownership of these pools, in addition to those of earlier calls."""

    def give_up(self, pool: str) -> None:
        """Stop competing for a pool, and release it if owned, until `compete_for` names it again."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Queue changes to be written. Never blocks."""

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored(True)` once all changes of `pool` that were recorded so far are written, or if the store is degraded and
        cannot write them. Call `stored(False)` if this replica does not own the pool, or loses it before that."""

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Replace the operator config of all replicas, also of later ones, by `change(config)`; `config` is "" at first. `change`
        may be called several times. Return False if the shared store does not answer: the others then receive the change later,
        merged with theirs."""

    async def run(self) -> None:
        """Keep ownership and write changes until cancelled, then release the owned pools."""


class MemoryStore:
    """A store without replicas: this router owns all pools, and nothing outlives it."""

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
        """Return this replica alone."""
        return [Replica(self._router_id, self.address, None, self.replica_info())]

    def lost_replicas(self) -> list[Replica]:
        """Return an empty list: no other replicas exist."""
        return []

    def owner(self, pool: str) -> Owner | None:
        """Return this replica."""
        return Owner(self._router_id, self.address, self.epoch)

    def may_place(self, pool: str) -> bool:
        """Return True."""
        return True

    def claimed(self, pool: str, owner: Owner) -> None:
        """Do nothing: there are no other replicas."""

    def compete_for(self, pools: Iterable[str]) -> None:
        """Do nothing: all pools are owned."""

    def give_up(self, pool: str) -> None:
        """Do nothing: all pools are owned."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Do nothing: nothing is written."""

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored(True)` at once."""
        stored(True)

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Replace this replica's operator config by `change(config)`. Return True."""
        self._config = change(self._config)
        self.on_operator_config(self._config)
        return True

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()
