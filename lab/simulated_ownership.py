"""Who owns the pools in the course of a simulation: deaths, returns and hand-overs at the times that are set for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lab.agenda import Agenda
from lab.simulated_routers import Routers
from lab.simulation import Simulation
from services.router.ownership import preferred
from services.router.state import RouterState

# How long a replica has to be there until it is given what it is preferred for.
SETTLE_S = 6.0

# (router, now): the gateway and all agents open a stream to it.
Greet = Callable[[str, float], None]
# (pool, now): its owner is gone; what is still to come from it never will, or does not count.
Displaced = Callable[[str, float], None]
# (pool, router, now): the router owns the pool from now on.
Taken = Callable[[str, str, float], None]


class Ownership:
    """The changes of hands of a run's pools, and their consequences for gateway and agents by `greet`, `displaced`, `taken`."""

    def __init__(
        self,
        asked: Simulation,
        pools: Sequence[str],
        agenda: Agenda,
        routers: Routers,
        new_state: Callable[[str], RouterState],
        greet: Greet,
        displaced: Displaced,
        taken: Taken,
    ) -> None:
        """`new_state` makes a router of that name."""
        self._asked = asked
        self._pools = pools
        self._agenda = agenda
        self._routers = routers
        self._new_state = new_state
        self._greet = greet
        self._displaced = displaced
        self._taken = taken

    def begin(self) -> None:
        """Give every pool its first owner, and plan what is set. Mutates."""
        for pool in self._pools:
            if not self._routers.owner(pool):
                self._routers.take(pool, 0.0)
        if self._asked.owner_dies_s is not None:
            self._agenda.at(self._asked.owner_dies_s, self._owner_dies)
        if self._asked.hand_over_s is not None:
            self._agenda.at(self._asked.hand_over_s, partial(self._hand_over, self._pools[0]))

    def _owner_dies(self, now: float) -> None:
        if name := self._routers.owner(self._pools[0]):
            for pool in self._routers.die(name):
                self._displaced(pool, now)
                self._agenda.at(now + self._asked.takeover_s, partial(self._take_over, pool))
            if self._asked.back_s is not None:
                self._agenda.at(now + self._asked.back_s, partial(self._back, name))

    def _back(self, name: str, now: float) -> None:
        """The dead replica is there again. What it decides has other ids than what it decided in its first life."""
        self._routers.join(name, self._new_state(f"{name}-again"))
        self._greet(name, now)
        self._agenda.at(now + SETTLE_S, partial(self._settled, name))

    def _settled(self, name: str, now: float) -> None:
        for pool in self._pools:
            if preferred(pool, self._routers.states) == name and self._routers.owner(pool) != name:
                self._hand_over(pool, now)

    def _hand_over(self, pool: str, now: float) -> None:
        if self._routers.owner(pool):
            self._routers.lose(pool, now)
            self._displaced(pool, now)
            self._agenda.at(now + self._asked.handing_s, partial(self._take_over, pool))

    def _take_over(self, pool: str, now: float) -> None:
        self._taken(pool, self._routers.take(pool, now), now)
