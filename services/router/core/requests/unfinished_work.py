"""Events that take long are applied a part at a time, and those that depend on them wait. Pure.

A takeover brings thousands of reservations, a lost pool had as many, a gateway's hello has thousands of streams: applied in one
turn of the event loop they would hold up agents, leases and every other pool for as long as all of them take. What waits is
handled afterwards in the order of its coming, so that the outcome is that of whole events, one after another: no placement sees
half of a pool's load, and an end never comes before the reservation that it ends. But a pool is another router's as soon as its
loss is told: what waits to be placed in it is refused, and what waits to take it is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pointsman.router.core import events_and_effects as ev

# Reservations or streams applied in one turn, which takes about two milliseconds.
PART = 128

# One step's effects at a time; what has been taken has been applied.
Steps = Iterator[list[ev.Effect]]

# They change the requests of pools, or of a gateway in whatever pool.
_OF_A_REQUEST = (ev.PlaceRequested, ev.StreamOpened, ev.StepDone, ev.FirstToken, ev.Finished, ev.GatewayTold)
_TAKING = (ev.PoolTaken, ev.SessionsRead)
_OF_A_POOL = (*_TAKING, ev.PoolLost)
_OF_A_GATEWAY = (ev.GatewayHello, ev.GatewayLost)


class UnfinishedWork:
    """The event that is being applied, if any, and those that wait for it. `pool_of` tells the pool of a request's event, None
    where it is not known."""

    def __init__(self, pool_of: Callable[[ev.Event], str | None]) -> None:
        self._pool_of = pool_of
        self._steps: Steps | None = None
        self._waiting: deque[ev.Event] = deque()
        # What the work, and all that has waited for it, concerns. It stays so until all of it is done: events of one request
        # must keep their order.
        self._pools: set[str] = set()
        self._all_pools = False

    def __bool__(self) -> bool:
        """Whether anything is left to do."""
        return self._steps is not None or bool(self._waiting)

    def begin(self, event: ev.Event, steps: Steps) -> list[ev.Effect]:
        """Apply the first part of `event`; nothing else may be under way. Mutates."""
        assert self._steps is None
        self._steps = steps
        effects = self._next_part()
        if self:
            self._concerns(event)
        return effects

    def defers(self, event: ev.Event) -> bool:
        """Whether `event` waits; it is kept then. Mutates."""
        if not self or not self._has_to_wait(event):
            return False
        self._waiting.append(event)
        self._concerns(event)
        return True

    def drop_taking(self, pool: str) -> None:
        """The pool is lost: what waits to take it is void. Mutates."""
        self._waiting = deque(
            event for event in self._waiting if not (isinstance(event, _TAKING) and event.pool == pool)
        )

    def go_on(self, handle: Callable[[ev.Event], list[ev.Effect]]) -> list[ev.Effect]:
        """Apply the next part, or have the next event handled that waits. Mutates."""
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
        return isinstance(event, _OF_A_POOL + _OF_A_GATEWAY)

    def _concerns(self, event: ev.Event) -> None:
        if isinstance(event, ev.PoolTaken | ev.SessionsRead | ev.PoolLost):
            self._pools.add(event.pool)
        elif isinstance(event, _OF_A_GATEWAY):
            self._all_pools = True
