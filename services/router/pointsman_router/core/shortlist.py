"""Selects the instances of a large pool that a decision considers: the best cached and the least loaded ones. Pure.

A decision that considers 1,000 instances takes two milliseconds and 300 KB of log. Of several instances that have equally much of
a prompt, the least loaded is the best by any policy's formula, so only a shortlist needs scores. Policies get the others in sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain
from typing import NamedTuple, TypeAlias

from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.core.load.reservations import Reservations
from pointsman_router.core.placement_types import Unseen
from pointsman_router.core.prefix.exact_index import PrefixIndex

# Maximum number of instances of a pool that is considered in full.
MAX_FULL_VIEW = 64
# Number of instances with most of the prompt, per index, that are considered in a larger pool.
MOST_CACHED = 24
# Number of those besides them, per index, that get no requests and can send what they have cached.
MOST_SENDING = 4
# Number of least loaded instances, per order and kind of hardware, that are considered in a larger pool.
LEAST_LOADED = 16
# Weight of a token in decode against a token to prefill, as in `unified`.
DECODE_WEIGHT = 0.01
# Maximum total length of the lists of instances that are kept (360 bytes per entry).
MAX_PLACES = 100_000
# Maximum number of recent changes that are kept for lists that have not applied them yet.
MAX_CHANGES = 4_096


# Two measures of an instance's load, and its id.
_Place: TypeAlias = tuple[float, float, str]
_Order: TypeAlias = list[_Place]


class _Load(NamedTuple):
    """The load of an instance's open requests: their number, the tokens to compute (those in decode weighted), whether any of
    them is in prefill, and their input tokens."""

    requests: int
    work: float
    prefills: bool
    tokens: int


class Shortlist(NamedTuple):
    """The instances of a large pool to consider, in ascending order of ids, and how many leading blocks of the prompt those have
    that were chosen for them, by index."""

    members: list[InstanceRecord]
    blocks: Mapping[PrefixIndex, Mapping[str, int]]


class PoolLoads:
    """The instances of a pool that answer to the same names, those of each kind of hardware in two orders: by open requests, then
    work; and by work, then open requests. The sums leave out those that only produce KV, unless all do. `members` must be in
    ascending order of ids. Orders and sums are correct once `follow` was called for all changes."""

    def __init__(self, members: Sequence[InstanceRecord], reservations: Reservations) -> None:
        self.members = members
        self._reservations = reservations
        self._records = {record.info.instance_id: record for record in members}
        self._loads = {name: self._load(name) for name in self._records}
        kinds: dict[str, list[str]] = {}
        for record in members:
            kinds.setdefault(record.info.hardware, []).append(record.info.instance_id)
        self._orders = [self._ordered(names) for names in kinds.values()]
        self._orders_of = {
            name: orders for orders, names in zip(self._orders, kinds.values(), strict=True) for name in names
        }
        answering = [record.info.instance_id for record in members if not record.info.produces_only]
        self._counted = frozenset(answering or self._records)
        counted = [self._loads[name] for name in self._counted]
        self._requests = sum(load.requests for load in counted)
        self._prefilling = sum(load.prefills for load in counted)
        self._tokens = sum(load.tokens for load in counted)
        self._masks: dict[PrefixIndex, tuple[int, int]] = {}

    def follow(self, instance_ids: Iterable[str] | None) -> None:
        """Update the orders after the open requests of these instances have changed (None: possibly of all). Ids of instances of
        other pools are ignored. Mutates."""
        for name in self._records if instance_ids is None else self._records.keys() & set(instance_ids):
            was, now = self._loads[name], self._load(name)
            if was != now:
                self._loads[name] = now
                by_requests, by_work = self._orders_of[name]
                _move(by_requests, (was.requests, was.work, name), (now.requests, now.work, name))
                _move(by_work, (was.work, was.requests, name), (now.work, now.requests, name))
                if name in self._counted:
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
        sends: Callable[[InstanceRecord], bool],
    ) -> Shortlist:
        """Return the instances to consider; none if none is eligible.

        They are those that are `named`, and of the `eligible` ones those that hold most of `keys` in each index and the least
        loaded of each kind of hardware: the load does not tell how fast an instance is. Among equally loaded ones, `turn` (the
        number of the pool's decisions so far) decides. Besides them come those of the others that hold most of `keys` and of
        which `sends` says that they can send them.
        """
        found: dict[str, InstanceRecord] = {}
        for orders in self._orders:
            for order in orders:
                room = LEAST_LOADED
                for _, _, name in _from_turn(order, turn):
                    if name in found or eligible(self._records[name]):
                        found[name] = self._records[name]
                        room -= 1
                        if not room:
                            break
                if room == LEAST_LOADED:  # none of the kind is eligible
                    break
        blocks: dict[PrefixIndex, Mapping[str, int]] = {}
        if not found:
            return Shortlist([], blocks)
        for index in indexes if keys else ():
            blocks[index] = cached = self._most_cached(keys, index, eligible, sends, found)
            found.update((name, self._records[name]) for name in cached)
        found.update((name, self._records[name]) for name in named if name in self._records)
        return Shortlist([found[name] for name in sorted(found)], blocks)

    def unseen(self, seen: Sequence[InstanceRecord], unwanted: Collection[str] = ()) -> Unseen:
        """Return the sums over all instances that are not in `seen`, without the `unwanted` ones, which get no requests. O(seen +
        unwanted)."""
        left_out = {record.info.instance_id for record in seen}.union(unwanted) & self._counted
        loads = [self._loads[name] for name in left_out]
        return Unseen(
            instances=len(self._counted) - len(loads),
            num_requests=self._requests - sum([load.requests for load in loads]),
            prefilling=self._prefilling - sum([load.prefills for load in loads]),
            ongoing_tokens=self._tokens - sum([load.tokens for load in loads]),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the orders or the sums differ from the instances' current loads."""
        assert self._loads == {name: self._load(name) for name in self._records}
        names = [[name for _, _, name in by_work] for _, by_work in self._orders]
        assert self._orders == list(map(self._ordered, names))
        assert sorted(chain(*names)) == list(self._records)
        counted = [self._loads[name] for name in self._counted]
        assert self._requests == sum(load.requests for load in counted)
        assert self._prefilling == sum(load.prefills for load in counted)
        assert self._tokens == sum(load.tokens for load in counted)

    def _ordered(self, names: Iterable[str]) -> tuple[_Order, _Order]:
        loads = [(self._loads[name], name) for name in names]
        by_requests: _Order = sorted((load.requests, load.work, name) for load, name in loads)
        return by_requests, sorted((load.work, load.requests, name) for load, name in loads)

    def _load(self, instance_id: str) -> _Load:
        counters = self._reservations.counters(instance_id)
        work = counters.pending_prefill_tokens + DECODE_WEIGHT * counters.ongoing_decode_tokens
        prefills = self._reservations.prefills(instance_id)
        return _Load(counters.num_requests, work, prefills, counters.ongoing_tokens)

    def _most_cached(
        self,
        keys: Sequence[int],
        index: PrefixIndex,
        eligible: Callable[[InstanceRecord], bool],
        sends: Callable[[InstanceRecord], bool],
        known: Container[str],
    ) -> dict[str, int]:
        """Return the instances that hold most of `keys`, with their numbers of blocks. Those in `known` are eligible."""
        cached: dict[str, int] = {}
        room, sending = MOST_CACHED, MOST_SENDING
        for count, mask in index.runs(keys, self._mask(index)):
            # If more instances than are needed hold equally much, those with the least work come first.
            alike = index.owners(mask) if mask.bit_count() <= room else self._holding(mask, index)
            for name in alike:
                if name in known or eligible(self._records[name]):
                    cached[name] = count
                    room -= 1
                    if not room:
                        return cached
                elif sending and sends(self._records[name]):
                    cached[name] = count
                    sending -= 1
        return cached

    def _mask(self, index: PrefixIndex) -> int:
        mask = index.mask_since(*self._masks.get(index, (-1, 0)), self._records)
        self._masks[index] = index.generation, mask
        return mask

    def _holding(self, mask: int, index: PrefixIndex) -> Iterator[str]:
        by_work = merge(*(by_work for _, by_work in self._orders))
        return (name for _, _, name in by_work if index.mask((name,)) & mask)


class KeptLoads:
    """A cache of PoolLoads by list of instances, least recently used first out, of at most MAX_PLACES instances in total.

    All names that the same instances answer to share one PoolLoads. A PoolLoads applies changes when it is requested, so a
    placement by one of hundreds of names does not pay for the others.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        # (pool, id() of the list of instances) -> PoolLoads and the number of changes it has applied; most recently used last.
        self._kept: OrderedDict[tuple[str, int], tuple[PoolLoads, int]] = OrderedDict()
        self._places = 0
        # Pool -> the object that holds the pool's lists of instances.
        self._lists: dict[str, object] = {}
        # The instances that changed last, and the number of earlier changes that are no longer kept.
        self._changes: list[str] = []
        self._dropped = 0

    def changed(self, instance_ids: Iterable[str]) -> None:
        """Record that the open requests of these instances have changed. Mutates; amortised O(instances)."""
        self._changes.extend(instance_ids)
        # Without any PoolLoads (all pools are small) no change is needed later.
        most = MAX_CHANGES if self._kept else 0
        if len(self._changes) > 2 * most:
            drop = len(self._changes) - most
            del self._changes[:drop]
            self._dropped += drop

    def of(self, pool: str, lists: object, members: Sequence[InstanceRecord]) -> PoolLoads:
        """Return the PoolLoads of `members`, one of the `lists` of a pool (InstanceRegistry). If the pool had other `lists`
        before, their PoolLoads are dropped. Mutates; O(changes since the last call for `members`)."""
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
        """Drop what is kept of a pool that is gone, or whose instances have changed. Mutates; O(lists that are kept)."""
        self._lists.pop(pool, None)
        for key in [key for key in self._kept if key[0] == pool]:
            self._places -= len(self._kept.pop(key)[0].members)

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping, or a PoolLoads that has applied all changes, is inconsistent."""
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
    """Yield the order's entries, with the equal ones at its start rotated by `turn`, so that all instances of an idle fleet are
    used. The rotation stays the same for LEAST_LOADED turns, since policies themselves rotate among the instances they see."""
    first = order[0][:2]
    equal = bisect_right(order, first, key=lambda place: place[:2])
    start = turn - turn % LEAST_LOADED
    for step in range(equal):
        yield order[(start + step) % equal]
    for at in range(equal, len(order)):
        yield order[at]
