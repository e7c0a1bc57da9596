"""The requests of pools without an owner that answers: when they are asked again, placed without a router, or refused. Pure.

A pool has no owner that answers from the moment at which the owner's session ends, or at which it says that it does not serve the
pool, until a router answers a request of the pool. All requests of the pool have this one clock, whether they are new or have
waited at the router that was lost.

While there is no session to ask, requests wait. When there is one, they are asked in the order in which their clients came, and
later ones behind them. If the router answers that it does not serve the pool, only the oldest is asked, again and again, until
one is not refused at once. When the pool has had no owner for the caller's limit, requests are placed without a router, at the
pace of LocalPace. Parked requests are not: that would pass the admission of sessions by. They wait for an owner until the bound
that their router told, and are then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from pointsman_gateway.core.request.local_pace import LocalPace

# Interval between two requests that are sent to a router which did not serve the pool, s. A router that has not refused a request
# after this time serves the pool.
RETRY_S = 0.1
# Interval between two rounds of local placements, s.
ROUND_S = 0.02
# Maximum number of a pool's requests that one call of `due` asks again, and that it places: the caller serves others between two.
MAX_AT_ONCE = 256
# Maximum number of requests that a round of local placements passes over because their own instances have no room.
MAX_PASSED_OVER = 64
# What is added to the number of open requests of an instance that fails: it comes after all others.
LAST = 1_000_000


@dataclass(slots=True)  # a frozen one takes twice as long to make, and thousands may be made at once
class WaitingRequest:
    """A request without a router. `asked_at`: when it was first to be placed, s. `tokens` of the prompt. `exclude`: instances
    that must not be chosen. `computed_at`: the instance that has computed a part of the prompt; empty: none. `parked_until`: end
    of the bound within which a router had parked it, s; None: it is not parked."""

    request_id: str  # the attempt's id, as routers know it
    asked_at: float
    tokens: int = 0
    exclude: Collection[str] = ()
    computed_at: str = ""
    parked_until: float | None = None
    sequences: int = 1  # that its engine will run: prompts times answers to each


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the request to the pool's router."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PlaceAt:
    """Place the request without a router. It is counted as open at the instance, with its number of sequences."""

    request_id: str
    instance_id: str
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class RefuseWaiting:
    """Refuse the request: `parked` if the bound of a parked request has passed, else because every instance is excluded."""

    request_id: str
    parked: bool


End: TypeAlias = Ask | PlaceAt | RefuseWaiting
_Entry: TypeAlias = tuple[float, int, WaitingRequest]
_IdsOf: TypeAlias = Callable[[str], Collection[str]]  # instances' ids by a pool's name, or by a request's id


@dataclass(slots=True)
class _Pool:
    """A pool that has, or lately had, no owner that answers. `since` is its clock, None once a router has answered."""

    since: float | None
    connected: bool = False  # there is a router to ask
    connected_at: float = 0.0  # since when this router is there to ask; anew when it begins anew
    refused: bool = False  # that router said that it does not serve the pool
    ask_at: float = 0.0  # when the oldest request is sent to it again
    sent: bool = False  # one was sent to it, and is not refused yet
    place_at: float = 0.0  # of the next round of local placements
    waiting: dict[str, _Entry] = field(default_factory=dict)  # by request id; all that wait, parked or not
    # In order of age; entries that are not in `waiting` any more are skipped.
    unparked: list[_Entry] = field(default_factory=list)
    parked: list[_Entry] = field(default_factory=list)  # as `unparked`, of the parked requests
    bounds: list[tuple[float, int, str]] = field(default_factory=list)  # heap of (parked_until, number, request id)

    def add(self, entry: _Entry) -> None:
        request = entry[2]
        self.waiting[request.request_id] = entry
        if request.parked_until is None:
            _push(self.unparked, entry, self.waiting)
        else:
            _push(self.parked, entry, self.waiting)
            heappush(self.bounds, (request.parked_until, entry[1], request.request_id))

    def oldest(self) -> WaitingRequest | None:
        """Remove and return the request that came first."""
        for heap in (self.unparked, self.parked):
            while heap and self.waiting.get(heap[0][2].request_id) is not heap[0]:
                heappop(heap)
        heaps = [heap for heap in (self.unparked, self.parked) if heap]
        if not heaps:
            return None
        entry = heappop(min(heaps))
        del self.waiting[entry[2].request_id]
        return entry[2]

    def next_unparked(self) -> _Entry | None:
        """Remove from the heap, and return, the oldest request that is not parked; it stays in `waiting`."""
        while self.unparked:
            entry = heappop(self.unparked)
            if self.waiting.get(entry[2].request_id) is entry:
                return entry
        return None

    def next_bound(self) -> float | None:
        while self.bounds:
            _, number, request_id = self.bounds[0]
            if (entry := self.waiting.get(request_id)) is not None and entry[1] == number:
                return self.bounds[0][0]
            heappop(self.bounds)
        return None

    def may_place(self, limit_s: float) -> float | None:
        """Return from when on requests are placed without a router; None while there is one to ask."""
        if self.since is None or (self.connected and not self.refused) or not self.unparked:
            return None
        return max(self.since + limit_s, self.place_at)


class WaitingForOwner:
    """The pools without an owner that answers, and their requests. Times are those of one monotonic clock, s.

    `limit_s` of the calls: how long a pool may have no owner before its requests are placed without a router.
    """

    def __init__(self, pace: LocalPace) -> None:
        self._pace = pace
        self._pools: dict[str, _Pool] = {}
        self._pool_of: dict[str, str] = {}
        self._number = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._pool_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pool_of

    def pool_of(self, request_id: str) -> str | None:
        """Return the pool for whose owner a request waits; None if it does not wait."""
        return self._pool_of.get(request_id)

    def pools(self) -> list[str]:
        """Return the pools that have, or lately had, no owner that answers."""
        return list(self._pools)

    def since(self, pool: str) -> float | None:
        """Return since when the pool has no owner that answers; None if it has one."""
        known = self._pools.get(pool)
        return known.since if known is not None else None

    def must_wait(self, pool: str) -> bool:
        """Return whether a new request of the pool has to wait, since there is nobody to ask or earlier ones wait."""
        known = self._pools.get(pool)
        return known is not None and (not known.connected or known.refused or bool(known.waiting))

    # ---- routers ----

    def disconnected(self, pool: str, now: float, limit_s: float) -> None:
        """Record that there is no router to ask for the pool. Mutates."""
        known = self._pools.get(pool)
        if known is None:
            self._pools[pool] = _Pool(now)
        elif known.connected:
            self._lost(known, now, limit_s)
            known.connected = False

    def connected(self, pool: str, now: float, *, changed: bool) -> None:
        """Record that there is a router to ask for the pool; `changed`: another one than before, or one that begins anew.
        Mutates."""
        known = self._pools.get(pool)
        if known is not None and (changed or not known.connected):
            known.connected, known.connected_at, known.refused, known.sent = True, now, False, False
            self._drop_served(pool, known, unasked=True)

    def refused(self, pool: str, now: float, limit_s: float) -> None:
        """Record that the router that is asked said that it does not serve the pool. Mutates."""
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = _Pool(now, connected=True, connected_at=now)
        else:
            self._lost(known, now, limit_s)
        known.refused, known.sent, known.ask_at = True, False, now + RETRY_S

    def served(self, pool: str) -> bool:
        """Record that a router answered a request of the pool; return whether others wait. Mutates."""
        known = self._pools.get(pool)
        if known is None or not known.connected:
            return False
        known.since, known.refused, known.sent = None, False, False
        self._drop_served(pool, known)
        return bool(known.waiting)

    @staticmethod
    def _lost(known: _Pool, now: float, limit_s: float) -> None:
        # A router that was there for so long has served the pool, even if all that it was asked is held there.
        if known.since is None or (known.connected and not known.refused and now - known.connected_at > limit_s):
            known.since = now

    def _drop_served(self, pool: str, known: _Pool, *, unasked: bool = False) -> None:
        if known.connected and not known.waiting and (known.since is None or unasked):
            del self._pools[pool]

    # ---- requests ----

    def add(self, pool: str, request: WaitingRequest) -> None:
        """Let a request wait; if the pool has an owner that answers, until the next call of `due`. Mutates."""
        self._number += 1
        self._pool_of[request.request_id] = pool
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = _Pool(None, connected=True)
        known.add((request.asked_at, self._number, request))

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended; no effect if it does not wait. Mutates."""
        if (pool := self._pool_of.pop(request_id, None)) is not None:
            known = self._pools[pool]
            del known.waiting[request_id]
            self._drop_served(pool, known)

    def due(self, now: float, limit_s: float, instances: _IdsOf, unfit: _IdsOf = lambda _: ()) -> list[End]:
        """Return what happens now, and remove those requests. `instances` returns the ids of a pool's instances that answer,
        `unfit` those that a request about to be placed must not get, besides the ones that it excludes. Mutates."""
        ends: list[End] = []
        for pool, known in list(self._pools.items()):
            if not known.waiting:
                continue
            ends += self._out_of_bounds(known, now)
            ends += self._asked(known, now)
            if (at := known.may_place(limit_s)) is not None and now >= at:
                placed = list(self._placed(known, instances(pool), unfit, now))
                known.place_at = now if len(placed) == MAX_AT_ONCE else now + ROUND_S
                ends += placed
            self._drop_served(pool, known)
        for end in ends:
            del self._pool_of[end.request_id]
        if not self._pool_of:
            self._pace.drop_full_buckets(now)
        return ends

    def wake_at(self, pool: str, now: float, limit_s: float) -> float | None:
        """Return when `due` has something to do for the pool, s; None: only after another call."""
        known = self._pools.get(pool)
        if known is None or not known.waiting:
            return None
        times = [known.next_bound(), known.may_place(limit_s)]
        if known.connected:
            times.append(known.ask_at if known.refused else now)
        return min((at for at in times if at is not None), default=None)

    def _out_of_bounds(self, known: _Pool, now: float) -> Iterator[End]:
        while (bound := known.next_bound()) is not None and bound <= now:
            request_id = heappop(known.bounds)[2]
            del known.waiting[request_id]
            yield RefuseWaiting(request_id, parked=True)

    def _asked(self, known: _Pool, now: float) -> Iterator[End]:
        if not known.connected:
            return
        if known.refused:
            if now < known.ask_at:
                return
            if not known.sent:
                known.sent, known.ask_at = True, now + RETRY_S
                if (oldest := known.oldest()) is not None:
                    yield Ask(oldest.request_id)
                return
            # The one that was sent is answered or held by now: the router serves the pool.
            known.refused = known.sent = False
        for _ in range(MAX_AT_ONCE):
            if (oldest := known.oldest()) is None:
                return
            yield Ask(oldest.request_id)

    def _placed(self, known: _Pool, instances: Collection[str], unfit: _IdsOf, now: float) -> Iterator[End]:
        """Place the oldest requests, each at the instance with the fewest open requests among those that have room."""
        pace, passed_over, left = self._pace, list[_Entry](), MAX_AT_ONCE
        self._turn += 1
        room = [
            (pace.open.get(name, 0) + LAST * pace.fails(name, now), (at + self._turn) % len(instances), name)
            for at, name in enumerate(instances)
            if pace.has_room(name, now)
        ]
        heapify(room)
        while (room or not instances) and left and len(passed_over) < MAX_PASSED_OVER:
            if (entry := known.next_unparked()) is None:
                break
            left -= 1
            request = entry[2]
            exclude = {*request.exclude, *unfit(request.request_id)}
            own = request.computed_at if request.computed_at not in exclude else ""
            if all(instance_id in exclude for instance_id in instances):
                del known.waiting[request.request_id]
                yield RefuseWaiting(request.request_id, parked=False)
                continue
            if own and own in instances:
                chosen = own if pace.has_room(own, now) else ""
            else:
                chosen = self._emptiest(room, exclude, now, request.sequences)
            if not chosen:
                left += 1
                passed_over.append(entry)
                continue
            del known.waiting[request.request_id]
            pace.place(chosen, request.tokens, now, request.sequences)
            yield PlaceAt(request.request_id, chosen, request.sequences)
        for entry in passed_over:
            heappush(known.unparked, entry)

    def _emptiest(self, room: list[tuple[int, int, str]], exclude: Collection[str], now: float, sequences: int) -> str:
        """Return the first of `room` that is not excluded, with its place in the order after another request; "" if there is
        none. Mutates `room`."""
        excluded, chosen = list[tuple[int, int, str]](), ""
        while room and not chosen:
            count, turn, instance_id = heappop(room)
            if instance_id in exclude:
                excluded.append((count, turn, instance_id))
            elif self._pace.has_room(instance_id, now):
                chosen = instance_id
                heappush(room, (count + sequences, turn, instance_id))
        for entry in excluded:
            heappush(room, entry)
        return chosen


def _push(heap: list[_Entry], entry: _Entry, waiting: dict[str, _Entry]) -> None:
    if len(heap) > 2 * len(waiting) + 64:
        # Many have ended without their turn.
        heap[:] = [kept for kept in heap if waiting.get(kept[2].request_id) is kept]
        heapify(heap)
    heappush(heap, entry)
