"""The order in which the held requests of one pool are tried: by class, by tenants' shares, by rank. Pure.

Work is counted in tokens: the request's prefill, plus REQUEST_TOKENS for everything else.

1. Classes. The highest class with a request goes first. But a lower class that waits is owed `lower_share` of the work that is
   served of higher classes meanwhile. Once the owed work covers the cost of its first placeable request, this request goes before
   theirs. So a first request of c tokens waits for at most c / lower_share tokens of higher classes, plus one request. A higher
   class is delayed by `lower_share` of its own work for each lower class that waits. While no request of a lower class can be
   placed, its owed work grows up to about the cost of its most expensive request, since any of its requests may become the first
   placeable one.
2. Tenants of one class: the tenant with the least served work divided by its weight goes first. A tenant that begins to wait
   starts at the level of the tenants that wait already (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996; with
   prefill as the cost: the virtual token counter of Sheng et al., OSDI 2024).
3. Requests of one tenant: least rank first (HoldQueue: by penalty, age, and what their programs have been served).

A class without waiting requests has no state. All changes cost O(log n) comparisons, and a shift within lists of references. The
first k requests of the order cost O(queues + k log k), independent of how many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace, merge

import msgspec

# Cost of a request besides its prefill, tokens: its slot, and the decoding of an answer of unknown length. About the number of
# prefill tokens that a typical engine step computes beside its decodes.
REQUEST_TOKENS = 512


# A queue, by what its requests wait for: (requested model, the instance that must have less to do; empty: any instance).
QueueKey = tuple[str, str]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A request that waits."""

    request_id: str  # breaks ties of `since`
    tenant: str  # empty if all share one turn (HoldQueue.party)
    queue_key: QueueKey  # what it waits for
    level: int  # its class; 0: lowest
    rank: float  # its place within its tenant, least first
    since: float  # breaks ties of `rank`, s
    cost: float  # in tokens
    weight: float  # that of its tenant
    # The served work / weight with which its tenant begins to wait; None: that of the tenants that wait already.
    starts_at: float | None = None


# (rank, since, request id, entry). Request ids are unique, so entries are never compared.
_Ranked = list[tuple[float, float, str, Entry]]
# (served work / weight, number, tenant)
_Turn = tuple[float, int, str]


@dataclass(slots=True)
class _Tenant:
    """A tenant with waiting requests of one class."""

    name: str  # Entry.tenant
    number: int  # of two tenants with equal `served`, that with the lower number goes first
    served: float  # served work, tokens / weight
    waiting: float = 0.0  # waiting work, tokens / weight
    queues: dict[QueueKey, _Ranked] = field(default_factory=dict)  # its requests by rank

    @property
    def turn(self) -> _Turn:
        return self.served, self.number, self.name

    @property
    def end(self) -> _Turn:
        return self.served + self.waiting, self.number, self.name


class _Class:
    """The waiting requests of one class. `owed`: tokens that the class may be served before higher classes."""

    def __init__(self) -> None:
        self.owed = 0.0
        self.count = 0
        self.tenants: dict[str, _Tenant] = {}
        # turns: queue -> the turns of the tenants that wait in it. ends: the turn of each tenant after all of its waiting
        # requests are served.
        self.turns: dict[QueueKey, list[_Turn]] = {}
        self.ends: list[_Turn] = []
        self._costs: list[float] = []
        # _clock: served work / weight with which a tenant begins to wait. _ahead: the same of tenants that no longer wait and are
        # ahead of the clock.
        self._clock = 0.0
        self._ahead: dict[str, float] = {}
        self._prune_at = 64
        self._numbers = 0

    @property
    def dearest(self) -> float:
        """The cost of the most expensive request."""
        return self._costs[-1]

    def add(self, entry: Entry) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            self._numbers += 1
            served = max(self._ahead.pop(entry.tenant, 0.0), self._clock)
            if entry.starts_at is not None:
                served = entry.starts_at
            tenant = self.tenants[entry.tenant] = _Tenant(entry.tenant, self._numbers, served)
        else:
            _discard(self.ends, tenant.end)
        self._list(tenant, entry)
        insort(self.ends, tenant.end)
        self.count += 1

    def remove(self, entry: Entry) -> None:
        tenant = self.tenants[entry.tenant]
        _discard(self.ends, tenant.end)
        self._unlist(tenant, entry)
        if tenant.queues:
            insort(self.ends, tenant.end)
        else:
            del self.tenants[entry.tenant]
            self._keep_ahead(tenant)
        self.count -= 1

    def replace(self, old: Entry, new: Entry) -> None:
        tenant = self.tenants[old.tenant]
        _discard(self.ends, tenant.end)
        self._unlist(tenant, old)
        self._list(tenant, new)
        insort(self.ends, tenant.end)

    def serve(self, entry: Entry, cost: float) -> None:
        tenant = self.tenants[entry.tenant]
        self._clock = max(self._clock, tenant.served)
        for key in tenant.queues:
            _discard(self.turns[key], tenant.turn)
        _discard(self.ends, tenant.end)
        tenant.served += cost / entry.weight
        for key in tenant.queues:
            insort(self.turns[key], tenant.turn)
        insort(self.ends, tenant.end)
        self.remove(entry)

    def _list(self, tenant: _Tenant, entry: Entry) -> None:
        if entry.queue_key not in tenant.queues:
            tenant.queues[entry.queue_key] = []
            insort(self.turns.setdefault(entry.queue_key, []), tenant.turn)
        insort(tenant.queues[entry.queue_key], _listed(entry))
        tenant.waiting += entry.cost / entry.weight
        insort(self._costs, entry.cost)

    def _unlist(self, tenant: _Tenant, entry: Entry) -> None:
        ranked = tenant.queues[entry.queue_key]
        _discard(ranked, _listed(entry))
        tenant.waiting -= entry.cost / entry.weight
        del self._costs[bisect_left(self._costs, entry.cost)]
        if not ranked:
            del tenant.queues[entry.queue_key]
            turns = self.turns[entry.queue_key]
            _discard(turns, tenant.turn)
            if not turns:
                del self.turns[entry.queue_key]

    def _keep_ahead(self, tenant: _Tenant) -> None:
        if tenant.served > self._clock:
            self._ahead[tenant.name] = tenant.served
        if len(self._ahead) > self._prune_at:
            self._ahead = {name: served for name, served in self._ahead.items() if served > self._clock}
            self._prune_at = 2 * len(self._ahead) + 64

    def last(self, tenant: str | None) -> Iterator[str]:
        """Yield the ids of one tenant, or of all tenants (None), in the reverse of the order in which they are served."""
        names = [tenant] if tenant is not None else (name for _, _, name in reversed(self.ends))
        for name in names:
            if name in self.tenants:
                queues = [reversed(queue) for queue in self.tenants[name].queues.values()]
                yield from (listed[2] for listed in merge(*queues, reverse=True))

    def check_invariants(self) -> None:
        """Raise AssertionError if the lists are inconsistent."""
        queues = [queue for tenant in self.tenants.values() for queue in tenant.queues.values()]
        assert self.count == sum(map(len, queues)) > 0
        assert all(queue and queue == sorted(queue, key=lambda listed: listed[:3]) for queue in queues)
        turns = {
            key: sorted(tenant.turn for tenant in self.tenants.values() if key in tenant.queues)
            for key in {key for tenant in self.tenants.values() for key in tenant.queues}
        }
        assert self.turns == turns
        assert self.ends == sorted(tenant.end for tenant in self.tenants.values())
        assert self._costs == sorted(entry.cost for queue in queues for *_, entry in queue)
        assert not self._ahead.keys() & self.tenants.keys()
        assert len(self._ahead) <= self._prune_at
        for tenant in self.tenants.values():
            waiting = sum(entry.cost / entry.weight for queue in tenant.queues.values() for *_, entry in queue)
            assert abs(tenant.waiting - waiting) <= 1e-6 * (1.0 + waiting)


class _ClassWalk:
    """Iterates over the order of a class without changing the class. `full`: queues whose requests are skipped; may grow during
    the walk."""

    def __init__(self, of: _Class, full: Collection[QueueKey]) -> None:
        self.owed = of.owed
        self.dearest = of.dearest
        self._of = of
        self._full = full
        # _firsts: for each queue the turn of its first tenant from which nothing was taken (a heap). _passed: queue -> the place
        # of that tenant in the queue's turns.
        self._firsts = [(turns[0], key) for key, turns in of.turns.items() if key not in full]
        heapify(self._firsts)
        self._passed: dict[QueueKey, int] = {}
        # Tenant -> for each of its queues the first request that was not taken, and how many were taken (a heap).
        self._heads: dict[str, list[tuple[float, float, str, Entry, int]]] = {}
        self._taken_from: set[str] = set()
        self._again: list[_Turn] = []  # turns of the tenants in _taken_from, as if the taken requests had been served
        self._turn: _Turn = 0.0, 0, ""

    def head(self) -> Entry | None:
        """Return the next request; None if none is left."""
        while turns := [*self._again[:1], *self._first_turn()]:
            self._turn = min(turns)
            if heads := self._heads_of(self._turn[2]):
                return heads[0][3]
            heappop(self._again)
        return None

    def take(self, entry: Entry) -> None:
        """Continue as if the head, `entry`, had been served. Mutates."""
        served, number, name = self._turn
        if name in self._taken_from:
            heappop(self._again)
        self._taken_from.add(name)
        heads = self._heads[name]
        ranked, place = self._of.tenants[name].queues[entry.queue_key], heads[0][4] + 1
        if place < len(ranked):
            heapreplace(heads, (*ranked[place], place))
        else:
            heappop(heads)
        heappush(self._again, (served + entry.cost / entry.weight, number, name))

    def _first_turn(self) -> list[_Turn]:
        """Return the first turn among the tenants from which nothing was taken, as a list of one or none."""
        while self._firsts:
            turn, key = self._firsts[0]
            if key in self._full:
                heappop(self._firsts)
            elif turn[2] not in self._taken_from:
                return [turn]
            else:
                turns, place = self._of.turns[key], self._passed.get(key, 0) + 1
                self._passed[key] = place
                if place < len(turns):
                    heapreplace(self._firsts, (turns[place], key))
                else:
                    heappop(self._firsts)
        return []

    def _heads_of(self, tenant: str) -> list[tuple[float, float, str, Entry, int]]:
        heads = self._heads.get(tenant)
        if heads is None:
            of = self._of.tenants[tenant].queues
            heads = self._heads[tenant] = [(*ranked[0], 0) for key, ranked in of.items() if key not in self._full]
            heapify(heads)
        while heads and heads[0][3].queue_key in self._full:
            heappop(heads)
        return heads


class PoolOrder:
    """The waiting requests of one pool. `remove`, `replace` and `serve` need the same entry that was added."""

    def __init__(self, lower_share: float) -> None:
        self._lower_share = lower_share
        self._classes: dict[int, _Class] = {}

    def __len__(self) -> int:
        return sum(waiting.count for waiting in self._classes.values())

    def count(self, level: int) -> int:
        """Return how many requests of a class wait."""
        return self._classes[level].count if level in self._classes else 0

    def queue_keys(self) -> set[QueueKey]:
        """Return the queues in which requests wait."""
        return {key for waiting in self._classes.values() for key in waiting.turns}

    def add(self, entry: Entry) -> None:
        """Add a waiting request. Mutates."""
        if entry.level not in self._classes:
            self._classes[entry.level] = _Class()
        self._classes[entry.level].add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove a request that was not served. Mutates."""
        self._classes[entry.level].remove(entry)
        self._forget_empty(entry.level)

    def replace(self, old: Entry, new: Entry) -> None:
        """Replace an entry by one with another queue, rank or cost; all else must be equal. Mutates."""
        self._classes[old.level].replace(old, new)

    def serve(self, entry: Entry, cost: float) -> None:
        """Remove a request that was served, and charge its tenant and class with `cost` tokens. Mutates."""
        served = self._classes[entry.level]
        served.owed = max(served.owed - cost, 0.0)
        for level, lower in self._classes.items():
            if level < entry.level:
                lower.owed = self._owed(lower, cost)
        served.serve(entry, cost)
        self._forget_empty(entry.level)

    def walk(self, full: Collection[QueueKey] = ()) -> Iterator[str]:
        """Yield the ids in the order in which the requests are served if all can be placed. The caller may add queues to `full`
        between two ids: their requests are skipped from then on, and the id that was yielded last then counts as not tried. The
        caller must not change anything else during the walk."""
        walks = [(level, _ClassWalk(self._classes[level], full)) for level in sorted(self._classes, reverse=True)]
        while heads := [(level, walk, head) for level, walk in walks if (head := walk.head()) is not None]:
            # The lowest class first. Otherwise its request would also wait for what is owed to the classes between.
            lower = (head for head in reversed(heads[1:]) if head[1].owed >= head[2].cost)
            level, chosen, entry = next(lower, heads[0])
            yield entry.request_id
            if entry.queue_key in full:
                continue
            chosen.owed = max(chosen.owed - entry.cost, 0.0)
            chosen.take(entry)
            for other_level, walk, _ in heads:
                if other_level < level:
                    walk.owed = self._owed(walk, entry.cost)

    def last(self, level: int, tenant: str | None) -> Iterator[str]:
        """Yield the ids of a class's requests, of one tenant or of all (None), in the reverse of the order in which they are
        served."""
        return self._classes[level].last(tenant) if level in self._classes else iter(())

    def check_invariants(self) -> None:
        """Raise AssertionError if the order is inconsistent."""
        for waiting in self._classes.values():
            assert waiting.owed >= 0.0
            waiting.check_invariants()

    def _owed(self, of: _Class | _ClassWalk, cost: float) -> float:
        """Return what a lower class is owed after `cost` tokens of a higher class were served. It does not grow further once it
        covers the lower class's most expensive request."""
        return of.owed + self._lower_share * cost if of.owed < of.dearest else of.owed

    def _forget_empty(self, level: int) -> None:
        if not self._classes[level].count:
            del self._classes[level]


def _listed(entry: Entry) -> tuple[float, float, str, Entry]:
    return entry.rank, entry.since, entry.request_id, entry


def _discard(keys: list[_Turn] | _Ranked, key: _Turn | tuple[float, float, str, Entry]) -> None:
    place = bisect_left(keys, key[:3])
    assert keys[place][:3] == key[:3]
    del keys[place]
