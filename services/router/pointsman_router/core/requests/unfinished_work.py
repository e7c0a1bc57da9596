"""Applies long events in parts, and defers the events that depend on them. Pure.

A takeover brings thousands of reservations, a lost pool had as many, and a gateway's hello has thousands of streams. Applied in
one turn of the event loop, they would block agents, leases and every other pool for all of that time. Deferred events are handled
afterwards in order of arrival, so that the outcome is the same as for whole events, one after another. No placement sees half of
a pool's load, and a request's end never comes before its reservation. An exception: a lost pool belongs to another router as soon
as the loss is reported. Placements in it that wait are refused, and deferred events that would take it are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pointsman_router.core import events_and_effects as ev

# Number of reservations or streams that are applied in one turn, which takes about two milliseconds.
PART = 128

# Yields the effects of one step at a time. A step is applied when its effects are yielded.
WorkSteps = Iterator[list[ev.Effect]]

# Events that change one request, the requests of a pool, or requests in any pool.
_OF_A_REQUEST = (ev.PlaceRequested, ev.StreamOpened, ev.StepDone, ev.FirstToken, ev.Finished, ev.GatewayReported)
_TAKING = (ev.PoolTaken, ev.SessionsRead)
_OF_A_POOL = (*_TAKING, ev.PoolLost)
# A session may have requests in any pool, and its end must stay between those that came before and after it.
_OF_ANY_POOL = (ev.GatewayHello, ev.GatewayLost, ev.SessionEnded)


class UnfinishedWork:
    """The event that is being applied in parts, if any, and the events that wait for it. `pool_of`: returns the pool of a
    request's event, None if unknown."""

    def __init__(self, pool_of: Callable[[ev.Event], str | None]) -> None:
        self._pool_of = pool_of
        self._steps: WorkSteps | None = None
        self._waiting: deque[ev.Event] = deque()
        # The pools that the work and the deferred events concern. They stay until all work is done, since events of one request
        # must keep their order.
        self._pools: set[str] = set()
        self._all_pools = False

    def __bool__(self) -> bool:
        """Return whether any work is left."""
        return self._steps is not None or bool(self._waiting)

    def begin(self, event: ev.Event, steps: WorkSteps) -> list[ev.Effect]:
        """Apply the first part of `event`. No other event may be in progress. Mutates."""
        assert self._steps is None
        self._steps = steps
        effects = self._next_part()
        if self:
            self._concerns(event)
        return effects

    def defers(self, event: ev.Event) -> bool:
        """Return whether `event` must wait; if so, add it to the deferred events. Mutates."""
        if (self._steps is None and not self._waiting) or not self._has_to_wait(event):
            return False
        self._waiting.append(event)
        self._concerns(event)
        return True

    def drop_taking(self, pool: str) -> None:
        """Drop the deferred events that take a pool, because the pool is lost. Mutates."""
        self._waiting = deque(
            event for event in self._waiting if not (isinstance(event, _TAKING) and event.pool == pool)
        )

    def go_on(self, handle: Callable[[ev.Event], list[ev.Effect]]) -> list[ev.Effect]:
        """Apply the next part, or call `handle` with the next deferred event. Mutates."""
        effects: list[ev.Effect] = []
        if self._steps is not None:
            effects = self._next_part()
        elif self._waiting:
            effects = handle(self._waiting.popleft())
        if not self:
            self._pools.clear()
            self._all_pools = False
        return effects

    def _next_part(self) -> list[ev.Effect]:
        assert self._steps is not None
        effects: list[ev.Effect] = []
        for _ in range(PART):
            step = next(self._steps, None)
            if step is None:
                self._steps = None
                break
            effects += step
        return effects

    def _has_to_wait(self, event: ev.Event) -> bool:
        if isinstance(event, _OF_A_REQUEST):
            pool = self._pool_of(event)
            return self._all_pools or pool is None or pool in self._pools
        return isinstance(event, _OF_A_POOL + _OF_ANY_POOL)

    def _concerns(self, event: ev.Event) -> None:
        if isinstance(event, ev.PoolTaken | ev.SessionsRead | ev.PoolLost):
            self._pools.add(event.pool)
        elif isinstance(event, _OF_ANY_POOL):
            self._all_pools = True
