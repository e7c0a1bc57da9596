"""An index of the block keys that each instance has below its GPU: in host memory (HOST) and in storage (STORAGE). Pure.

An engine that finds a prefix on its GPU looks for the blocks after it in the lower tiers, and loads them. So what an instance has
of a prompt is a run of keys on the GPU, then a run in HOST, then a run in STORAGE. Each tier has its own PrefixIndex, and the
ends of the runs are searched for all instances at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity, Use, compatible
from pointsman_common.core.key_report_types import Tier
from pointsman_router.core.prefix.exact_index import UNBOUNDED, IndexFull, PrefixIndex

# Number of instances, those with the longest prefixes, whose runs in a lower tier are searched. Instances with equal ends count
# as one. Without a limit a decision on 64 instances that all continue differently takes twice as long.
MOST_CONTINUED = 16


class LowerBlocks(NamedTuple):
    """Numbers of leading blocks of a prompt that follow those on the GPU, by tier."""

    host: int = 0
    storage: int = 0


NO_BLOCKS = LowerBlocks()


class Store(NamedTuple):
    """A store that instances of one pool share. `part`: separates instances that are known to differ."""

    pool: str
    name: str
    part: int = 0


class LowerTiers:
    """Sets of keys by instance and tier, with at most `max_keys` different keys in each tier.

    Instances that share a store (`share`) have all blocks that any of them has reported in STORAGE.
    """

    def __init__(self, max_keys: int = UNBOUNDED) -> None:
        self.max_keys = max_keys
        # Made when the first key comes. A fleet without lower tiers pays nothing.
        self._indexes: dict[int, PrefixIndex] = {}
        # Instance -> its shared store, and the instances of each store.
        self._store_of: dict[str, Store] = {}
        self._stores: dict[Store, set[str]] = {}
        self._identities: dict[str, EngineIdentity] = {}
        # Store -> (generation of the STORAGE index, the bits of the store's instances at that time).
        self._store_masks: dict[Store, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        """Whether any key is known."""
        return any(map(len, self._indexes.values()))

    @property
    def sweeping(self) -> bool:
        """Whether a sweep is in progress; sweep() must then be called again soon."""
        return any(index.sweeping for index in self._indexes.values())

    def indexes(self) -> tuple[PrefixIndex, ...]:
        """Return the indexes that have keys."""
        return tuple(index for index in self._indexes.values() if len(index))

    def count(self, instance_id: str, tier: int) -> int:
        """Return how many keys an instance has reported in a tier."""
        index = self._indexes.get(tier)
        return index.count(instance_id) if index is not None else 0

    def different(self, tier: int) -> int:
        """Return how many different keys all instances together have reported in a tier."""
        index = self._indexes.get(tier)
        return len(index) if index is not None else 0

    def store_of(self, instance_id: str) -> Store | None:
        """Return the store that an instance shares with others; None if it shares none."""
        return self._store_of.get(instance_id)

    def share(self, instance_id: str, pool: str, name: str, identity: EngineIdentity = UNKNOWN_IDENTITY) -> None:
        """Set the name of the store in which an instance's STORAGE blocks are, among the instances of its pool; empty: no other
        instance uses it. Instances that are known to differ do not load each other's blocks, even from one store. Mutates."""
        if before := self._store_of.pop(instance_id, None):
            self._stores[before].discard(instance_id)
            if not self._stores[before]:
                del self._stores[before]
        self._identities.pop(instance_id, None)
        if name:
            self._identities[instance_id] = identity
            stores = (Store(pool, name, part) for part in count())
            store = next(store for store in stores if self._fits(identity, store))
            self._store_of[instance_id] = store
            self._stores.setdefault(store, set()).add(instance_id)
        after = self._store_of.get(instance_id)
        if before != after:
            for store in filter(None, (before, after)):
                self._store_masks.pop(store, None)
            self._set_bit(instance_id)

    def _fits(self, identity: EngineIdentity, store: Store) -> bool:
        there = {self._identities[name] for name in self._stores.get(store, ())}
        return all(compatible(identity, other, Use.KV) for other in there)

    def add(self, tier: int, instance_id: str, keys: Collection[int]) -> int:
        """Add keys to an instance's set in a tier; return how many were new to it. Raises IndexFull, with nothing added.
        Mutates."""
        return self._index(tier).add(instance_id, keys)

    def remove(self, tier: int, instance_id: str, keys: Collection[int]) -> int:
        """Remove keys from an instance's set in a tier; return how many it held. Mutates."""
        index = self._indexes.get(tier)
        return index.remove(instance_id, keys) if index is not None else 0

    def drop(self, instance_id: str) -> None:
        """Remove all keys of an instance. Its store stays known. Mutates; O(tiers)."""
        for index in self._indexes.values():
            index.drop(instance_id)
        self._set_bit(instance_id)

    def sweep(self) -> None:
        """Run one turn of each index's sweep, as PrefixIndex.sweep. Mutates."""
        for index in self._indexes.values():
            index.sweep()

    def continued(self, keys: Sequence[int], starts: Mapping[str, int]) -> dict[str, LowerBlocks]:
        """Return how many blocks of a prompt follow `starts`, the numbers of leading blocks on the GPUs, in each lower tier.
        Instances without any are left out, and of many those with shorter prefixes (MOST_CONTINUED)."""
        found: dict[str, LowerBlocks] = {}
        ends = starts
        host = self._indexes.get(Tier.HOST)
        if host is not None and len(host):
            reached = _run_ends(host, keys, starts, ())
            found = {name: LowerBlocks(host=end - starts[name]) for name, end in reached.items()}
            if reached:
                ends = {**starts, **reached}
        storage = self._indexes.get(Tier.STORAGE)
        if storage is not None and len(storage):
            for name, end in _run_ends(storage, keys, ends, self._stores_of(storage, ends)).items():
                found[name] = LowerBlocks(found.get(name, NO_BLOCKS).host, end - ends[name])
        return found

    def keys_of(self, instance_id: str, tier: int) -> set[int]:
        """Return all keys that an instance has reported in a tier, by a pass over the index; for tests and dumps."""
        index = self._indexes.get(tier)
        return index.keys_of(instance_id) if index is not None else set()

    def check_invariants(self) -> None:
        """Raise AssertionError if an index or the stores are inconsistent."""
        for index in self._indexes.values():
            index.check_invariants()
        assert {name: store for store, names in self._stores.items() for name in names} == self._store_of
        assert all(self._stores.values())

    def _index(self, tier: int) -> PrefixIndex:
        if (index := self._indexes.get(tier)) is None:
            index = self._indexes[tier] = PrefixIndex(self.max_keys)
            for instance_id in self._store_of:
                self._set_bit(instance_id)
        return index

    def _set_bit(self, instance_id: str) -> None:
        """Let an instance that shares a store have a bit in the STORAGE index, even if it has stored nothing itself."""
        storage = self._indexes.get(Tier.STORAGE)
        if storage is None:
            return
        if instance_id in self._store_of:
            storage.add(instance_id, ())
        elif not storage.count(instance_id):
            storage.drop(instance_id)

    def _stores_of(self, storage: PrefixIndex, names: Iterable[str]) -> tuple[int, ...]:
        """Return the bits of the instances of each shared store that one of `names` uses."""
        if not self._stores:
            return ()
        used = sorted({self._store_of[name] for name in names if name in self._store_of})
        for store in used:
            before = self._store_masks.get(store, (-1, 0))
            self._store_masks[store] = storage.generation, storage.mask_since(*before, self._stores[store])
        return tuple(self._store_masks[store][1] for store in used)


def _run_ends(
    index: PrefixIndex, keys: Sequence[int], starts: Mapping[str, int], stores: Sequence[int]
) -> dict[str, int]:
    """Return the ends of the runs of `keys` that begin at `starts` and that the owners hold in `index`; empty runs are left
    out."""
    last, bits, masks = len(keys), index.bits(), index.shards()
    shard = len(masks) - 1
    begun: list[tuple[int, int]] = []
    # One pass without calls, since it runs for each instance of a decision.
    for name, start in starts.items():
        if start < last and (bit := bits.get(name)) is not None:
            key = keys[start]
            holding = masks[key & shard].get(key, 0)
            if stores and holding:
                holding = _shared(holding, stores)
            if holding & bit:
                begun.append((start, bit))
    if not begun:
        return {}
    begun.sort()
    owner_of = index.slots()
    ends: dict[str, int] = {}
    for end, mask in _ends(index, keys, begun, stores):
        while mask:
            slot = mask.bit_length() - 1
            ends[owner_of[slot]] = end
            mask ^= 1 << slot
    return ends


def _shared(holding: int, stores: Iterable[int]) -> int:
    """Return the owners that hold a key if those in `holding` have reported it."""
    for store in stores:
        if holding & store:
            holding |= store
    return holding


def _ends(
    index: PrefixIndex, keys: Sequence[int], begun: Sequence[tuple[int, int]], stores: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the ends of runs as (end, bits of the owners), highest end first, of at most MOST_CONTINUED ends. `begun`: (start,
    bits of the owners that hold the key there), by start.

    Bisection for all owners on one mask, as PrefixIndex does it. At a key before an owner's start the owner counts as holding it.
    """
    starts = [start for start, _ in begun]
    # later[i]: the owners whose runs begin at starts[i] or after.
    later = [0] * (len(begun) + 1)
    for at in range(len(begun) - 1, -1, -1):
        later[at] = later[at + 1] | begun[at][1]
    last_start, masks = starts[-1], index.shards()
    shard = len(masks) - 1
    spans = [(starts[0] + 1, len(keys), later[0])]
    room = MOST_CONTINUED
    while spans:
        low, high, mask = spans.pop()
        while low < high:
            middle = (low + high) >> 1
            key = keys[middle]
            holding = masks[key & shard].get(key, 0)
            if stores and holding:
                holding = _shared(holding, stores)
            if middle < last_start:
                holding |= later[bisect_right(starts, middle)]
            holding &= mask
            if holding == mask:
                low = middle + 1
            elif holding:
                spans.append((low, middle, mask ^ holding))
                low, mask = middle + 1, holding
            else:
                high = middle
        yield low, mask
        room -= 1
        if not room:
            return


__all__ = ["NO_BLOCKS", "IndexFull", "LowerBlocks", "LowerTiers", "Store"]
