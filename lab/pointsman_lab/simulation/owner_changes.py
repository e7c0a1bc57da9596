"""Changes of pool owners in a simulation: deaths, returns and hand-overs at the configured times. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.routers import Routers
from pointsman_router.core.ownership import preferred
from pointsman_router.core.router_state import RouterState

# Time from a replica's return until the pools that prefer it are handed over to it, s.
SETTLE_S = 6.0

# (router, now): opens the streams of the gateway and all agents to the router.
OpenStreams = Callable[[str, float], None]
# (pool, now): the pool's owner is gone; answers of it that have not arrived yet are void.
OnOwnerLost = Callable[[str, float], None]
# (pool, router, now): the router owns the pool from now on.
OnNewOwner = Callable[[str, str, float], None]


class OwnerChanges:
    """The changes of the pools' owners in a run. `open_streams`, `on_owner_lost` and `on_new_owner` pass them to gateway and
    agents."""

    def __init__(
        self,
        config: SimulationConfig,
        pools: Sequence[str],
        event_queue: EventQueue,
        routers: Routers,
        new_state: Callable[[str], RouterState],
        open_streams: OpenStreams,
        on_owner_lost: OnOwnerLost,
        on_new_owner: OnNewOwner,
    ) -> None:
        """`new_state` creates a router with the given name."""
        self._config = config
        self._pools = pools
        self._event_queue = event_queue
        self._routers = routers
        self._new_state = new_state
        self._open_streams = open_streams
        self._on_owner_lost = on_owner_lost
        self._on_new_owner = on_new_owner

    def begin(self) -> None:
        """Assign every pool its first owner, and schedule the configured changes. Mutates."""
        for pool in self._pools:
            if not self._routers.owner(pool):
                self._routers.acquire(pool, 0.0)
        if self._config.owner_dies_at_s is not None:
            self._event_queue.schedule(self._config.owner_dies_at_s, self._owner_dies)
        if self._config.hand_over_at_s is not None:
            self._event_queue.schedule(self._config.hand_over_at_s, partial(self._hand_over, self._pools[0]))

    def _owner_dies(self, now: float) -> None:
        if name := self._routers.owner(self._pools[0]):
            for pool in self._routers.kill(name):
                self._on_owner_lost(pool, now)
                self._event_queue.schedule(now + self._config.takeover_s, partial(self._take_over, pool))
            if self._config.owner_back_after_s is not None:
                self._event_queue.schedule(now + self._config.owner_back_after_s, partial(self._back, name))

    def _back(self, name: str, now: float) -> None:
        """Restart the dead replica. Its new router_id gives its decisions other ids than those before its death."""
        self._routers.add(name, self._new_state(f"{name}-again"))
        self._open_streams(name, now)
        self._event_queue.schedule(now + SETTLE_S, partial(self._settled, name))

    def _settled(self, name: str, now: float) -> None:
        for pool in self._pools:
            if preferred(pool, self._routers.states) == name and self._routers.owner(pool) != name:
                self._hand_over(pool, now)

    def _hand_over(self, pool: str, now: float) -> None:
        if self._routers.owner(pool):
            self._routers.release(pool, now)
            self._on_owner_lost(pool, now)
            self._event_queue.schedule(now + self._config.hand_over_takes_s, partial(self._take_over, pool))

    def _take_over(self, pool: str, now: float) -> None:
        self._on_new_owner(pool, self._routers.acquire(pool, now), now)
