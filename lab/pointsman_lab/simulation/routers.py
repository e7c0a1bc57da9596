"""The routers of a simulation: a single router, or replicas that share pools as they do through Redis. Pure.

Every replica is a RouterState and receives every report over its own channel. The next owner of a pool starts with what the last
owner stored for the pool: open reservations, owners of sessions, the mean work and the idle sessions. All other state is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.report_channel import Deliver, ReportChannel
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.idle_sessions import IdleSessions
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.ownership import preferred
from pointsman_router.core.placement_types import PoolFacts
from pointsman_router.core.prefill_curve import MeanWork
from pointsman_router.core.router_state import RouterState

# (router, effect, now): carries out a router's effect.
OnEffect = Callable[[str, ev.Effect, float], None]


@dataclass(slots=True)
class _StoredPool:
    """The content of the shared store for one pool."""

    reservations: dict[str, Reservation] = field(default_factory=dict)  # the open ones, by request id
    sessions: dict[str, str] = field(default_factory=dict)  # session -> id of the instance that owns it
    mean_work: MeanWork | None = None  # None: no owner has stored one
    idle_sessions: IdleSessions | None = None  # None: no owner has stored them
    idle_stored_at: float = 0.0  # time of the run at which idle_sessions was stored, s
    facts: PoolFacts | None = None  # by which the owner chose the pool's policy; None: no owner has stored them


class Routers:
    """All replicas by name, and the owner of each pool."""

    def __init__(
        self,
        states: Mapping[str, RouterState],
        pools: Sequence[str],
        channel: Callable[[str, Deliver], ReportChannel],
        on_effect: OnEffect,
        event_queue: EventQueue,
    ):
        """`channel` creates the channel from all agents to one router. A single router owns every pool from the start."""
        self._event_queue = event_queue
        # By router: the time of its next retry of held requests, s.
        self._retry_at: dict[str, float] = {}
        self.states: dict[str, RouterState] = {}
        self._new_channel = channel
        self._channels: dict[str, ReportChannel] = {}
        for name, state in states.items():
            self.add(name, state)
        self._on_effect = on_effect
        self._owner = dict.fromkeys(pools, "") if len(states) > 1 else dict.fromkeys(pools, next(iter(states)))
        self._last: dict[str, str] = {}
        self._stored = {pool: _StoredPool() for pool in pools} if len(states) > 1 else {}

    def owner(self, pool: str) -> str:
        """Return the router that places the pool's requests; empty while the pool has no owner."""
        return self._owner[pool]

    def report(self, event: ev.Event, now: float) -> None:
        """Send an agent's report to all routers. Mutates."""
        for channel in self._channels.values():
            channel.send(event, now)

    def report_to(self, name: str, event: ev.Event, now: float) -> None:
        """Send an agent's report to one router, unless the router is dead. Mutates."""
        if (channel := self._channels.get(name)) is not None:
            channel.send(event, now)

    def deliver_to_all(self, event: ev.Event, now: float) -> None:
        """Deliver an event to all routers at once. Mutates."""
        for name in list(self.states):
            self.deliver(name, event, now)

    def deliver(self, name: str, event: ev.Event, now: float) -> None:
        """Deliver an event to one router, store what it wants stored, and carry out its other effects. A dead router ignores it.
        Mutates."""
        if (state := self.states.get(name)) is None:
            return
        effects = state.handle(event, now)
        while state.unfinished:
            effects += state.handle(ev.GoOn(), now)
        for effect in effects:
            match effect:
                case ev.Reserved(reservation) if reservation.pool in self._stored:
                    self._stored[reservation.pool].reservations[reservation.request_id] = reservation
                case ev.Released(request_id, pool) if pool in self._stored:
                    self._stored[pool].reservations.pop(request_id, None)
                case ev.SessionOwnerSet(session, instance_id, pool) if pool in self._stored:
                    self._stored[pool].sessions[session] = instance_id
                case ev.SessionDisowned(session, pool) if pool in self._stored:
                    self._stored[pool].sessions.pop(session, None)
                case ev.MeanWorkSet(mean_work, pool):
                    if pool in self._stored:
                        self._stored[pool].mean_work = mean_work
                case ev.IdleSessionsSet(idle_sessions, pool):
                    if pool in self._stored:
                        self._stored[pool].idle_sessions, self._stored[pool].idle_stored_at = idle_sessions, now
                case ev.PoolFactsSet(facts, pool):
                    if pool in self._stored:
                        self._stored[pool].facts = facts
                case _:
                    self._on_effect(name, effect, now)
        scheduled = self._retry_at.get(name, now)
        if (retry_at := state.retry_at) is not None and (scheduled <= now or retry_at < scheduled):
            self._retry_at[name] = retry_at
            self._event_queue.schedule(retry_at, partial(self.deliver, name, ev.RetryDue()))

    def add(self, name: str, state: RouterState) -> None:
        """Add a replica that owns no pool, also after its death. Clients must send a hello first. Mutates."""
        self.states[name] = state
        self._channels[name] = self._new_channel(name, partial(self.deliver, name))

    def kill(self, name: str) -> list[str]:
        """Remove a router with all state that it has not stored; return the pools that have no owner now. Mutates."""
        del self.states[name], self._channels[name]
        freed = [pool for pool, owner in self._owner.items() if owner == name]
        self._owner |= dict.fromkeys(freed, "")
        return freed

    def release(self, pool: str, now: float) -> None:
        """Remove the pool's owner, so that another router acquires the pool. Mutates."""
        name, self._owner[pool] = self._owner[pool], ""
        self._last[pool] = name
        self.deliver(name, ev.PoolLost(pool), now)

    def acquire(self, pool: str, now: float) -> str:
        """Make a router the pool's owner and return its name: the preferred one of those that did not just release the pool.
        Mutates."""
        others = [name for name in self.states if name != self._last.get(pool)] or list(self.states)
        name = self._owner[pool] = preferred(pool, others)
        stored = self._stored[pool]
        reservations, age_s = tuple(stored.reservations.values()), now - stored.idle_stored_at
        taken = ev.PoolTaken(pool, reservations, stored.mean_work, stored.idle_sessions, age_s, stored.facts)
        self.deliver(name, taken, now)
        self.deliver(name, ev.SessionsRead(pool, dict(stored.sessions), last=True), now)
        return name
