"""Applies the sessions that the shared store has, and those that clients have ended. Pure; times in s on one clock."""

from __future__ import annotations

from math import inf

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.ownership import OwnedPools


class SessionOwners:
    """The events about sessions. A pool's sessions are read from the store page by page, some seconds long, while clients end
    sessions: what a later page has of a session that has ended since the pool was taken is obsolete."""

    def __init__(self, affinity: Affinity, instances: InstanceRegistry, owned: OwnedPools) -> None:
        self._affinity = affinity
        self._instances = instances
        self._owned = owned
        self._taken_at: dict[str, float] = {}  # pools whose sessions are being read, and since when

    def pool_taken(self, pool: str, now: float) -> None:
        """Apply the takeover of a pool, whose sessions are read from now on. Mutates."""
        self._taken_at[pool] = now

    def pool_lost(self, pool: str) -> None:
        """Apply the loss of a pool. Mutates."""
        self._taken_at.pop(pool, None)

    def read(self, event: ev.SessionsRead, now: float) -> list[ev.Effect]:
        """Apply a page of session owners that were read for an owned pool. Mutates."""
        taken_at = self._taken_at.get(event.pool, inf)
        effects: list[ev.Effect] = []
        for session, owner in event.sessions.items():
            if self._affinity.ended_at(session) >= taken_at:
                if not self._affinity.owner(event.pool, session, now):
                    effects.append(ev.SessionDisowned(session, event.pool))
            else:
                self._affinity.recall(event.pool, session, owner, now)
        if event.last:
            self._taken_at.pop(event.pool, None)
        return effects

    def end(self, event: ev.SessionEnded, now: float) -> list[ev.Effect]:
        """Apply the end of a session in the pools that this replica owns. Mutates."""
        if not event.session:
            return []
        disowned = self._affinity.end(event.session, now)
        # An owner that is not read yet must not come back by another replica after the end is confirmed.
        unread = self._taken_at.keys() - disowned
        effects: list[ev.Effect] = [ev.SessionDisowned(event.session, pool) for pool in (*disowned, *sorted(unread))]
        if event.gateway_id:
            pools = tuple(pool.model for pool in self._instances.pools() if self._owned.owns(pool.model))
            effects.append(ev.SessionEndApplied(event.gateway_id, event.tenant, event.session_id, pools))
        return effects
