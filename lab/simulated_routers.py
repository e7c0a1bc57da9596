"""The routers of a simulation: one alone, or replicas that share pools as they do through Redis. Pure.

Every replica is a RouterState and hears every report, each on a link of its own. What the owner of a pool wants kept of it (open
reservations, owners of sessions, the usual work) is what its next owner begins with; all else went with the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lab.link import Link, Tell
from services.router import events as ev
from services.router.curve import UsualWork
from services.router.ownership import preferred
from services.router.reservations import Reservation
from services.router.state import RouterState

# (router, effect, now): what a router wants done.
Do = Callable[[str, ev.Effect, float], None]


@dataclass(slots=True)
class _Kept:
    """What the shared store has of one pool."""

    reservations: dict[str, Reservation] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    usual: UsualWork | None = None


class Routers:
    """All replicas by name, and who owns which pool."""

    def __init__(
        self, states: Mapping[str, RouterState], pools: Sequence[str], link: Callable[[str, Tell], Link], do: Do
    ):
        """`link` makes the way from all agents to one router. A lone router owns everything without being told."""
        self.states: dict[str, RouterState] = {}
        self._link = link
        self._links: dict[str, Link] = {}
        for name, state in states.items():
            self.join(name, state)
        self._do = do
        self._owner = dict.fromkeys(pools, "") if len(states) > 1 else dict.fromkeys(pools, next(iter(states)))
        self._last: dict[str, str] = {}
        self._kept = {pool: _Kept() for pool in pools} if len(states) > 1 else {}

    def owner(self, pool: str) -> str:
        """The router that places the pool's requests; empty while nobody does."""
        return self._owner[pool]

    def report(self, event: ev.Event, now: float) -> None:
        """An agent tells all routers. Mutates."""
        for link in self._links.values():
            link.send(event, now)

    def report_to(self, name: str, event: ev.Event, now: float) -> None:
        """An agent tells one router, if it still lives. Mutates."""
        if (link := self._links.get(name)) is not None:
            link.send(event, now)

    def tell_all(self, event: ev.Event, now: float) -> None:
        """Let every router hear of something at once. Mutates."""
        for name in list(self.states):
            self.tell(name, event, now)

    def tell(self, name: str, event: ev.Event, now: float) -> None:
        """Let one router hear of something, keep what it wants kept, and have the rest done; no effect on a dead one. Mutates."""
        if (state := self.states.get(name)) is None:
            return
        for effect in state.handle(event, now):
            match effect:
                case ev.Reserved(reservation) if reservation.pool in self._kept:
                    self._kept[reservation.pool].reservations[reservation.request_id] = reservation
                case ev.Released(request_id, pool) if pool in self._kept:
                    self._kept[pool].reservations.pop(request_id, None)
                case ev.OwnerSet(session, instance_id, pool) if pool in self._kept:
                    self._kept[pool].sessions[session] = instance_id
                case ev.UsualSet(usual, pool):
                    if pool in self._kept:
                        self._kept[pool].usual = usual
                case _:
                    self._do(name, effect, now)

    def join(self, name: str, state: RouterState) -> None:
        """A replica that owns nothing is there (again); whoever speaks to it begins with a hello. Mutates."""
        self.states[name] = state
        self._links[name] = self._link(name, partial(self.tell, name))

    def die(self, name: str) -> list[str]:
        """A router is gone, and with it all that it alone knew; the pools that nobody owns now. Mutates."""
        del self.states[name], self._links[name]
        freed = [pool for pool, owner in self._owner.items() if owner == name]
        self._owner |= dict.fromkeys(freed, "")
        return freed

    def lose(self, pool: str, now: float) -> None:
        """The pool's owner gives it up, to another one. Mutates."""
        name, self._owner[pool] = self._owner[pool], ""
        self._last[pool] = name
        self.tell(name, ev.PoolLost(pool), now)

    def take(self, pool: str, now: float) -> str:
        """The replica that all prefer, of those that did not just give the pool up, owns it from now on: its name. Mutates."""
        others = [name for name in self.states if name != self._last.get(pool)] or list(self.states)
        name = self._owner[pool] = preferred(pool, others)
        kept = self._kept[pool]
        reservations = tuple(kept.reservations.values())
        self.tell(name, ev.PoolTaken(pool, reservations, dict(kept.sessions), kept.usual), now)
        return name
