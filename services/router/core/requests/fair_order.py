"""The order in which the held requests of one pool are tried: by class, by tenants' shares, by rank. Pure.

Work is counted in tokens: the prefill that a request brings, and REQUEST_TOKENS for everything else about it.

1. Classes. The highest class with a request goes first. But a lower class that waits is owed `lower_share` of the work that is
   served of higher ones meanwhile; its first request that can go does so before theirs once so much is owed. So a first request
   of c tokens waits for c / lower_share tokens of higher classes at most (and for one request more), and a higher class is held
   up by `lower_share` of its own work for each lower class that waits. Where none of a lower class can go, it saves up what its
   dearest request needs and no more: which one will be the first that can go is not known beforehand.
2. Tenants of one class: the one whose served work divided by its weight is least. Who comes to wait begins where those are that
   wait already (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996; with prefill as the cost: the virtual token counter
   of Sheng et al., OSDI 2024).
3. Requests of one tenant: least rank first.

Nothing is remembered of a class in which nobody waits. All changes cost O(log n) comparisons, and a shift within lists of
references; the first k of the order cost O(lines + k log k), however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace, merge

import msgspec

# What a request costs besides its prefill: a slot, and the decoding of an answer whose length nobody knows. About the prefill
# tokens that a usual step computes beside its decodes.
REQUEST_TOKENS = 512


# What requests wait for: a model asked for, and the instance that is to have less to do (empty: any).
Line = tuple[str, str]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A request that waits: `level` of its class (0: lowest), `cost` in tokens, `weight` of its tenant, its `rank` there. Those
    of one `line` wait for the same."""

    request_id: str
    tenant: str
    line: Line
    level: int
    rank: float
    since: float
    cost: float
    weight: float


# (rank, since, request id, the entry): request ids are unique, so that entries are never compared.
_Ranked = list[tuple[float, float, str, Entry]]
# (served work by weight, number, tenant)
_Turn = tuple[float, int, str]


@dataclass(slots=True)
class _Tenant:
    """A tenant that waits in a class. `served` and `waiting` are tokens divided by weights; of two that are equal the one with
    the lower `number` goes first. `lines`: line -> its requests by rank."""

    name: str
    number: int
    served: float
    waiting: float = 0.0
    lines: dict[Line, _Ranked] = field(default_factory=dict)

    @property
    def turn(self) -> _Turn:
        return self.served, self.number, self.name

    @property
    def end(self) -> _Turn:
        return self.served + self.waiting, self.number, self.name


class _Class:
    """The waiting requests of one class. `owed`: tokens that it may be served before higher classes."""

    def __init__(self) -> None:
        self.owed = 0.0
        self.count = 0
        self.tenants: dict[str, _Tenant] = {}
        # Line -> the turns of the tenants that wait in it; and the turns that tenants have after all that they wait for.
        self.turns: dict[Line, list[_Turn]] = {}
        self.ends: list[_Turn] = []
        self._costs: list[float] = []
        # Where who comes to wait begins, and the tenants that do not wait and are ahead of it.
        self._clock = 0.0
        self._ahead: dict[str, float] = {}
        self._prune_at = 64
        self._numbers = 0

    @property
    def dearest(self) -> float:
        """What the request that costs most costs."""
        return self._costs[-1]

    def add(self, entry: Entry) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            self._numbers += 1
            served = max(self._ahead.pop(entry.tenant, 0.0), self._clock)
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
        if tenant.lines:
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
        for line in tenant.lines:
            _discard(self.turns[line], tenant.turn)
        _discard(self.ends, tenant.end)
        tenant.served += cost / entry.weight
        for line in tenant.lines:
            insort(self.turns[line], tenant.turn)
        insort(self.ends, tenant.end)
        self.remove(entry)

    def _list(self, tenant: _Tenant, entry: Entry) -> None:
        if entry.line not in tenant.lines:
            tenant.lines[entry.line] = []
            insort(self.turns.setdefault(entry.line, []), tenant.turn)
        insort(tenant.lines[entry.line], _listed(entry))
        tenant.waiting += entry.cost / entry.weight
        insort(self._costs, entry.cost)

    def _unlist(self, tenant: _Tenant, entry: Entry) -> None:
        ranked = tenant.lines[entry.line]
        _discard(ranked, _listed(entry))
        tenant.waiting -= entry.cost / entry.weight
        del self._costs[bisect_left(self._costs, entry.cost)]
        if not ranked:
            del tenant.lines[entry.line]
            turns = self.turns[entry.line]
            _discard(turns, tenant.turn)
            if not turns:
                del self.turns[entry.line]

    def _keep_ahead(self, tenant: _Tenant) -> None:
        if tenant.served > self._clock:
            self._ahead[tenant.name] = tenant.served
        if len(self._ahead) > self._prune_at:
            self._ahead = {name: served for name, served in self._ahead.items() if served > self._clock}
            self._prune_at = 2 * len(self._ahead) + 64

    def last(self, tenant: str | None) -> Iterator[str]:
        """The ids, those that come last first; of one tenant, or of all."""
        names = [tenant] if tenant is not None else (name for _, _, name in reversed(self.ends))
        for name in names:
            if name in self.tenants:
                lines = [reversed(line) for line in self.tenants[name].lines.values()]
                yield from (listed[2] for listed in merge(*lines, reverse=True))

    def check_invariants(self) -> None:
        """Raise AssertionError when the lists contradict each other."""
        lines = [line for tenant in self.tenants.values() for line in tenant.lines.values()]
        assert self.count == sum(map(len, lines)) > 0
        assert all(line and line == sorted(line, key=lambda listed: listed[:3]) for line in lines)
        turns = {
            line: sorted(one.turn for one in self.tenants.values() if line in one.lines)
            for line in {line for one in self.tenants.values() for line in one.lines}
        }
        assert self.turns == turns
        assert self.ends == sorted(one.end for one in self.tenants.values())
        assert self._costs == sorted(entry.cost for line in lines for *_, entry in line)
        assert not self._ahead.keys() & self.tenants.keys()
        assert len(self._ahead) <= self._prune_at
        for tenant in self.tenants.values():
            waiting = sum(entry.cost / entry.weight for line in tenant.lines.values() for *_, entry in line)
            assert abs(tenant.waiting - waiting) <= 1e-6 * (1.0 + waiting)


class _ClassWalk:
    """The order of a class as it is, without changing it. `full`: lines whose requests are passed over; it may grow."""

    def __init__(self, of: _Class, full: Collection[Line]) -> None:
        self.owed = of.owed
        self.dearest = of.dearest
        self._of = of
        self._full = full
        # Of each line the turn of its first tenant that was not taken from; and how many of its tenants were passed by.
        self._firsts = [(turns[0], line) for line, turns in of.turns.items() if line not in full]
        heapify(self._firsts)
        self._passed: dict[Line, int] = {}
        # Tenant -> of each of its lines the first request that was not taken, and how many were.
        self._lines: dict[str, list[tuple[float, float, str, Entry, int]]] = {}
        self._taken_from: set[str] = set()
        self._again: list[_Turn] = []  # the turns of these tenants, as if what was taken had been served
        self._turn: _Turn = 0.0, 0, ""

    def head(self) -> Entry | None:
        """Whose turn it is; None where nobody is left."""
        while turns := [*self._again[:1], *self._first_turn()]:
            self._turn = min(turns)
            if lines := self._lines_of(self._turn[2]):
                return lines[0][3]
            heappop(self._again)
        return None

    def take(self, entry: Entry) -> None:
        """Go on as if the head had been served. Mutates."""
        served, number, name = self._turn
        if name in self._taken_from:
            heappop(self._again)
        self._taken_from.add(name)
        lines = self._lines[name]
        ranked, place = self._of.tenants[name].lines[entry.line], lines[0][4] + 1
        if place < len(ranked):
            heapreplace(lines, (*ranked[place], place))
        else:
            heappop(lines)
        heappush(self._again, (served + entry.cost / entry.weight, number, name))

    def _first_turn(self) -> list[_Turn]:
        """The first turn of those whom nothing was taken from, if there is one."""
        while self._firsts:
            turn, line = self._firsts[0]
            if line in self._full:
                heappop(self._firsts)
            elif turn[2] not in self._taken_from:
                return [turn]
            else:
                turns, place = self._of.turns[line], self._passed.get(line, 0) + 1
                self._passed[line] = place
                if place < len(turns):
                    heapreplace(self._firsts, (turns[place], line))
                else:
                    heappop(self._firsts)
        return []

    def _lines_of(self, tenant: str) -> list[tuple[float, float, str, Entry, int]]:
        lines = self._lines.get(tenant)
        if lines is None:
            of = self._of.tenants[tenant].lines
            lines = self._lines[tenant] = [(*ranked[0], 0) for line, ranked in of.items() if line not in self._full]
            heapify(lines)
        while lines and lines[0][3].line in self._full:
            heappop(lines)
        return lines


class PoolOrder:
    """The waiting requests of one pool. An entry that was added is the one to be given when it is removed, replaced or served."""

    def __init__(self, lower_share: float) -> None:
        self._lower_share = lower_share
        self._classes: dict[int, _Class] = {}

    def __len__(self) -> int:
        return sum(one.count for one in self._classes.values())

    def count(self, level: int) -> int:
        """How many wait in a class."""
        return self._classes[level].count if level in self._classes else 0

    def lines(self) -> set[Line]:
        """The lines in which requests wait."""
        return {line for one in self._classes.values() for line in one.turns}

    def add(self, entry: Entry) -> None:
        """Let a request wait. Mutates."""
        if entry.level not in self._classes:
            self._classes[entry.level] = _Class()
        self._classes[entry.level].add(entry)

    def remove(self, entry: Entry) -> None:
        """A request waits no more, and was not served. Mutates."""
        self._classes[entry.level].remove(entry)
        self._forget_empty(entry.level)

    def replace(self, old: Entry, new: Entry) -> None:
        """Another line, rank or cost is known of a request; all else is equal. Mutates."""
        self._classes[old.level].replace(old, new)

    def serve(self, entry: Entry, cost: float) -> None:
        """A request was served, and has cost so many tokens. Mutates."""
        one = self._classes[entry.level]
        one.owed = max(one.owed - cost, 0.0)
        for level, lower in self._classes.items():
            if level < entry.level:
                lower.owed = self._owed(lower, cost)
        one.serve(entry, cost)
        self._forget_empty(entry.level)

    def walk(self, full: Collection[Line] = ()) -> Iterator[str]:
        """The ids in the order in which they are served if all can be. The caller may put lines into `full` on the way: their
        requests are passed over from then on, and the one that was told last then counts as not tried. It must not change
        anything else meanwhile."""
        walks = [(level, _ClassWalk(self._classes[level], full)) for level in sorted(self._classes, reverse=True)]
        while heads := [(level, walk, head) for level, walk in walks if (head := walk.head()) is not None]:
            # The lowest first: what is owed to one between would else come on top of what a lower one waits for.
            lower = (one for one in reversed(heads[1:]) if one[1].owed >= one[2].cost)
            level, chosen, entry = next(lower, heads[0])
            yield entry.request_id
            if entry.line in full:
                continue
            chosen.owed = max(chosen.owed - entry.cost, 0.0)
            chosen.take(entry)
            for other_level, walk, _ in heads:
                if other_level < level:
                    walk.owed = self._owed(walk, entry.cost)

    def last(self, level: int, tenant: str | None) -> Iterator[str]:
        """The ids of the requests of a class, from the one that is to go last; of one tenant, or of all."""
        return self._classes[level].last(tenant) if level in self._classes else iter(())

    def check_invariants(self) -> None:
        """Raise AssertionError when anything in here contradicts itself."""
        for one in self._classes.values():
            assert one.owed >= 0.0
            one.check_invariants()

    def _owed(self, of: _Class | _ClassWalk, cost: float) -> float:
        """What a lower class is owed after so much of a higher one; no more is saved up than its dearest request needs."""
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
