"""Which instances of a large pool a decision looks at: those with most of its prompt, and those with the least to do. Pure.

Looking at 1,000 instances costs a decision two milliseconds, and 300 KB of log. Of instances that have equally much of a prompt
the least loaded is the best one, whatever the policy's formula, so few of them need to be scored. The others are told in sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from pointsman.router.core.instances.instance_registry import InstanceRecord
from pointsman.router.core.load.reservations import Reservations
from pointsman.router.core.prefix.exact_index import PrefixIndex
from pointsman.router.core.types import Unseen

# A pool of so many instances is looked at in full.
MANY = 64
# How many that have most of the prompt, and how many of the least loaded in each order, are looked at in a larger one.
MOST_CACHED = 24
LEAST_LOADED = 16
# A token in decode weighs as in `unified`.
DECODE_WEIGHT = 0.01
# Of all that is kept for lists of instances: their lengths, 260 bytes for each place; and changes that all need not follow yet.
MAX_PLACES = 100_000
MAX_CHANGES = 4_096


# Two measures of an instance's load, and its id.
_Place: TypeAlias = tuple[float, float, str]
_Order: TypeAlias = list[_Place]


class _Load(NamedTuple):
    """What the open requests of an instance come to: their number, the tokens to compute for them, whether a prompt is being
    computed, and their input tokens."""

    requests: int
    work: float
    prefills: bool
    tokens: int


class PoolLoads:
    """The instances of a pool that answer to the same names, in two orders: by open requests and then work, and by work and then
    requests. `members` must have ids in ascending order. It is right once it has followed all changes."""

    def __init__(self, members: Sequence[InstanceRecord], reservations: Reservations) -> None:
        self.members = members
        self._reservations = reservations
        self._records = {record.info.instance_id: record for record in members}
        self._loads = {name: self._load(name) for name in self._records}
        self._by_requests: _Order = sorted((load.requests, load.work, name) for name, load in self._loads.items())
        self._by_work: _Order = sorted((load.work, load.requests, name) for name, load in self._loads.items())
        self._requests = sum(load.requests for load in self._loads.values())
        self._prefilling = sum(load.prefills for load in self._loads.values())
        self._tokens = sum(load.tokens for load in self._loads.values())
        self._masks: dict[PrefixIndex, tuple[int, int]] = {}

    def follow(self, instance_ids: Iterable[str] | None) -> None:
        """The open requests of these instances, of this pool or another, have changed; None: of any. Mutates."""
        for name in self._records if instance_ids is None else self._records.keys() & set(instance_ids):
            was, now = self._loads[name], self._load(name)
            if was != now:
                self._loads[name] = now
                _move(self._by_requests, (was.requests, was.work, name), (now.requests, now.work, name))
                _move(self._by_work, (was.work, was.requests, name), (now.work, now.requests, name))
                self._requests += now.requests - was.requests
                self._prefilling += now.prefills - was.prefills
                self._tokens += now.tokens - was.tokens

    def chosen(
        self,
        keys: Sequence[int],
        indexes: Sequence[PrefixIndex],
        named: Iterable[str],
        turn: int,
        eligible: Callable[[InstanceRecord], bool],
    ) -> list[InstanceRecord]:
        """The instances to look at, by id: those that are `named`, and of those that are `eligible` the ones that hold most of
        `keys` in each index and the least loaded. Of equally loaded ones `turn` (the pool's decisions so far) says which. Empty
        when none is eligible."""
        found: dict[str, InstanceRecord] = {}
        for order in (self._by_requests, self._by_work):
            room = LEAST_LOADED
            for _, _, name in _from_turn(order, turn):
                if eligible(record := self._records[name]):
                    found[name] = record
                    room -= 1
                    if not room:
                        break
        if not found:
            return []
        for index in indexes if keys else ():
            found.update(self._most_cached(keys, index, eligible))
        found.update((name, self._records[name]) for name in named if name in self._records)
        return [found[name] for name in sorted(found)]

    def unseen(self, seen: Sequence[InstanceRecord]) -> Unseen:
        """The sums over all the others."""
        loads = [self._loads[record.info.instance_id] for record in seen]
        return Unseen(
            instances=len(self._loads) - len(loads),
            num_requests=self._requests - sum([load.requests for load in loads]),
            prefilling=self._prefilling - sum([load.prefills for load in loads]),
            ongoing_tokens=self._tokens - sum([load.tokens for load in loads]),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the orders are not those of the loads."""
        assert self._loads == {name: self._load(name) for name in self._records}
        assert self._by_requests == sorted((load.requests, load.work, name) for name, load in self._loads.items())
        assert self._by_work == sorted((load.work, load.requests, name) for name, load in self._loads.items())
        assert self._requests == sum(load.requests for load in self._loads.values())
        assert self._prefilling == sum(load.prefills for load in self._loads.values())
        assert self._tokens == sum(load.tokens for load in self._loads.values())

    def _load(self, instance_id: str) -> _Load:
        counters = self._reservations.counters(instance_id)
        work = counters.pending_prefill_tokens + DECODE_WEIGHT * counters.ongoing_decode_tokens
        prefills = self._reservations.prefills(instance_id)
        return _Load(counters.num_requests, work, prefills, counters.ongoing_tokens)

    def _most_cached(
        self, keys: Sequence[int], index: PrefixIndex, eligible: Callable[[InstanceRecord], bool]
    ) -> Iterator[tuple[str, InstanceRecord]]:
        room = MOST_CACHED
        for _, mask in index.runs(keys, self._mask(index)):
            # Of many that hold equally much, those with the least to do come first.
            alike = index.owners(mask) if mask.bit_count() <= room else self._holding(mask, index)
            for name in alike:
                if eligible(record := self._records[name]):
                    yield name, record
                    room -= 1
                    if not room:
                        return

    def _mask(self, index: PrefixIndex) -> int:
        generation, mask = self._masks.get(index, (-1, 0))
        if generation != index.generation:
            mask = index.mask(self._records)
            self._masks[index] = index.generation, mask
        return mask

    def _holding(self, mask: int, index: PrefixIndex) -> Iterator[str]:
        return (name for _, _, name in self._by_work if index.mask((name,)) & mask)


class KeptLoads:
    """The PoolLoads of the lists of instances that were lately asked for: one for all names that the same instances answer to, of
    at most MAX_PLACES instances together. One follows changes when it is asked for, so that a placement by one name of hundreds
    does not pay for the others."""

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        # By pool and the id() of the list, the one asked for last at the end; each with how many changes it has followed.
        self._kept: OrderedDict[tuple[str, int], tuple[PoolLoads, int]] = OrderedDict()
        self._places = 0
        # By pool: what holds its lists.
        self._lists: dict[str, object] = {}
        # The instances that changed last, and how many did before them.
        self._changes: list[str] = []
        self._dropped = 0

    def changed(self, instance_ids: Iterable[str]) -> None:
        """The open requests of these instances have changed. Mutates; O(instances) in the mean."""
        self._changes.extend(instance_ids)
        # Nothing follows those of small pools.
        most = MAX_CHANGES if self._kept else 0
        if len(self._changes) > 2 * most:
            drop = len(self._changes) - most
            del self._changes[:drop]
            self._dropped += drop

    def of(self, pool: str, lists: object, members: Sequence[InstanceRecord]) -> PoolLoads:
        """Those of `members`, one of the `lists` of a pool (InstanceRegistry); lists that the pool had before are forgotten.
        Mutates; O(changes since it was asked for last)."""
        if self._lists.get(pool) is not lists:
            self.forget_pool(pool)
            self._lists[pool] = lists
        key, now = (pool, id(members)), self._dropped + len(self._changes)
        if (found := self._kept.pop(key, None)) is None:
            loads = PoolLoads(members, self._reservations)
            self._places += len(members)
            while self._places > MAX_PLACES and self._kept:
                self._places -= len(self._kept.popitem(last=False)[1][0].members)
        else:
            loads, followed = found
            self._follow(loads, followed)
        self._kept[key] = loads, now
        return loads

    def forget_pool(self, pool: str) -> None:
        """The pool is gone, or its instances are others. Mutates; O(lists that are kept)."""
        self._lists.pop(pool, None)
        for key in [key for key in self._kept if key[0] == pool]:
            self._places -= len(self._kept.pop(key)[0].members)

    def check_invariants(self) -> None:
        """Raise AssertionError when the orders are not those of the loads once changes are followed."""
        assert self._places == sum(len(loads.members) for loads, _ in self._kept.values())
        assert self._places <= MAX_PLACES or len(self._kept) == 1
        assert {pool for pool, _ in self._kept} <= self._lists.keys()
        for loads, followed in self._kept.values():
            self._follow(loads, followed)
            loads.check_invariants()

    def _follow(self, loads: PoolLoads, followed: int) -> None:
        loads.follow(self._changes[followed - self._dropped :] if followed >= self._dropped else None)


def _move(order: _Order, was: _Place, now: _Place) -> None:
    del order[bisect_left(order, was)]
    insort(order, now)


def _from_turn(order: _Order, turn: int) -> Iterator[_Place]:
    """In order, but of those that are first and equal the ones whose turn it is first: an idle fleet is used in full. Policies
    take turns among those that they are shown, so these stay the same for LEAST_LOADED turns."""
    first = order[0][:2]
    equal = bisect_right(order, first, key=lambda one: one[:2])
    start = turn - turn % LEAST_LOADED
    for step in range(equal):
        yield order[(start + step) % equal]
    for at in range(equal, len(order)):
        yield order[at]
