"""Which instance holds which block keys. Pure.

Dicts map a key to a bit mask of slots; a slot stands for one instance's copy. Masks are shared objects, so a key costs its dict
entry and little more. The dicts are many and small, because a dict that grows, or is swept, holds the event loop: for
milliseconds at 30,000 keys, for a second at 8 million. Dropping an instance only retires its slot: the retired bits are swept out
dict by dict, a few at a time, in one pass over all keys once several have gathered, so that a fleet that resyncs at once is not
scanned once for each instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

UNBOUNDED = 1 << 62

# Keys are hashes: their lowest bits name their dict.
SHARDS = 4_096
_SHARD = SHARDS - 1
# Sweeping costs one pass over all keys; this many retired slots share it.
SWEEP_AFTER = 8
# So many keys are looked at in one turn, which takes about two milliseconds; four times as many where room is needed at once.
SWEEP_KEYS = 3_000
TURNS_FOR_ROOM = 4
# From this share of its bound on the index does not wait for more slots to share a sweep.
SHORT_OF_ROOM = 0.75
# Masks that are not in use any more are kept with the others until there are so many.
MAX_SHARED = 1 << 16


class IndexFull(Exception):
    """The index would hold more keys than it may."""


class PrefixIndex:
    """Sets of keys by owner, at most `max_keys` different ones. An owner is any hashable name; `add` makes it known."""

    def __init__(self, max_keys: int = UNBOUNDED, sweep_keys: int = SWEEP_KEYS) -> None:
        self.max_keys = max_keys
        self._sweep_keys = sweep_keys
        self._masks: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._size = 0
        self._shared: dict[int, int] = {}
        # By owner, the one bit of its slot; and by slot, its owner.
        self._bit_of: dict[str, int] = {}
        self._owner_of: dict[int, str] = {}
        self._count: dict[str, int] = {}
        # Slots that wait for a sweep, and those that are swept now from the dicts that are `_unswept`.
        self._retired: set[int] = set()
        self._sweeping: set[int] = set()
        self._unswept: list[int] = []
        # Counts the changes of owners' bits.
        self.generation = 0
        # Whether keys did not fit since the last turn of a sweep.
        self._refused = False

    def __len__(self) -> int:
        """Keys held by at least one owner, and those of retired slots that are not swept yet."""
        return self._size

    def count(self, owner: str) -> int:
        """How many keys `owner` holds."""
        return self._count.get(owner, 0)

    def holds(self, owner: str, key: int) -> bool:
        """Whether `owner` holds `key`."""
        return bool(self._masks[key & _SHARD].get(key, 0) & self._bit_of.get(owner, 0))

    def run_end(self, owner: str, keys: Sequence[int], start: int, stop: int) -> int:
        """Where, from `start` to at most `stop`, the run of `keys` ends that `owner` holds: it holds the key before, if that is
        not before `start`, and not the one there. Keys are chained, as for `runs`: O(log of what it holds) look-ups."""
        bit = self._bit_of.get(owner)
        if bit is None:
            return start
        masks = self._masks
        # Most runs are of no key or a few: strides that double, and then bisection in the last one.
        low, high, stride = start, stop, 1
        while low < high:
            at = min(low + stride, high) - 1 if stride else (low + high) >> 1
            key = keys[at]
            if masks[key & _SHARD].get(key, 0) & bit:
                low, stride = at + 1, stride * 2
            else:
                high, stride = at, 0
        return low

    def has_room(self, count: int) -> bool:
        """Whether `count` more keys fit in."""
        return self._size + count <= self.max_keys

    def add(self, owner: str, keys: Collection[int]) -> int:
        """Give keys to `owner`; returns how many it did not hold before. Mutates, unless they do not fit: IndexFull. May sweep,
        for some milliseconds at most."""
        masks = self._masks
        for _ in range(TURNS_FOR_ROOM):
            if self.has_room(len(keys)) or not (self._retired or self._unswept):
                break
            self._sweep_on()
        if not self.has_room(len(keys)) and not self.has_room(sum(key not in masks[key & _SHARD] for key in keys)):
            self._refused = True
            raise IndexFull
        bit, shared = self._bit(owner), self._known_masks()
        alone = shared.setdefault(bit, bit)
        new, added = 0, 0
        for key in keys:
            shard = masks[key & _SHARD]
            mask = shard.get(key)
            if mask is None:
                shard[key] = alone
                new += 1
            elif not mask & bit:
                mask |= bit
                shard[key] = shared.setdefault(mask, mask)
                added += 1
        self._size += new
        self._count[owner] = self._count.get(owner, 0) + new + added
        return new + added

    def remove(self, owner: str, keys: Collection[int]) -> int:
        """Take keys from `owner`; returns how many it held. Mutates."""
        bit = self._bit_of.get(owner)
        if bit is None:
            return 0
        masks, shared = self._masks, self._known_masks()
        gone, removed = 0, 0
        for key in keys:
            shard = masks[key & _SHARD]
            mask = shard.get(key, 0)
            if mask == bit:
                del shard[key]
                gone += 1
            elif mask & bit:
                mask ^= bit
                shard[key] = shared.setdefault(mask, mask)
                removed += 1
        self._size -= gone
        self._count[owner] -= gone + removed
        return gone + removed

    def drop(self, owner: str) -> None:
        """Forget all keys of `owner`. Mutates."""
        bit = self._bit_of.pop(owner, None)
        if bit is None:
            return
        self.generation += 1
        slot = bit.bit_length() - 1
        del self._owner_of[slot]
        del self._count[owner]
        self._retired.add(slot)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep has begun and is to be gone on with soon."""
        return bool(self._unswept)

    def sweep(self) -> None:
        """Free a part of what dropped owners held, if there is enough of it, or room is short. To be called now and then.
        Mutates."""
        short = self._refused or self._size > SHORT_OF_ROOM * self.max_keys
        if self._unswept or len(self._retired) >= (1 if short else SWEEP_AFTER):
            self._refused = False
            self._sweep_on()

    def leading_blocks(self, keys: Sequence[int], owners: Iterable[str]) -> dict[str, int]:
        """For each of `owners`: how many of `keys`, counted from the first, it holds."""
        blocks = dict.fromkeys(owners, 0)
        owner_of = self._owner_of
        for count, mask in self.runs(keys, self.mask(blocks)):
            while mask:
                slot = mask.bit_length() - 1
                blocks[owner_of[slot]] = count
                mask ^= 1 << slot
        return blocks

    def mask(self, owners: Iterable[str]) -> int:
        """The bits of `owners`, without those that hold nothing; good until `generation` changes."""
        bit_of, mask = self._bit_of, 0
        for owner in owners:
            mask |= bit_of.get(owner, 0)
        return mask

    def owners(self, mask: int) -> list[str]:
        """Whose bits they are."""
        found = []
        while mask:
            slot = mask.bit_length() - 1
            found.append(self._owner_of[slot])
            mask ^= 1 << slot
        return found

    def runs(self, keys: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
        """How many of `keys`, counted from the first, the owners in `mask` hold: (count, their bits), the highest count first;
        those that hold none are left out.

        Keys are chained, so whoever holds one holds those before it: each owner's end is found by bisection, all owners together
        on one mask, in O(distinct ends x log keys) look-ups. Where an engine evicted a block and kept its successor, the end of
        one of the runs is found; the engine's own report of cached tokens tells the difference afterwards.
        """
        masks = self._masks
        # Each entry: owners that hold keys[:low], and do not hold keys[high] unless that is the end. The last one's ends are
        # behind those of all before it.
        spans = [(0, len(keys), mask)] if mask else []
        while spans:
            low, high, mask = spans.pop()
            while low < high:
                middle = (low + high) >> 1
                key = keys[middle]
                holding = masks[key & _SHARD].get(key, 0) & mask
                if holding == mask:
                    low = middle + 1
                elif holding:
                    spans.append((low, middle, mask ^ holding))
                    low, mask = middle + 1, holding
                else:
                    high = middle
            if low and mask:
                yield low, mask

    def keys_of(self, owner: str) -> set[int]:
        """All keys of `owner`, by a pass over the whole index: for tests and dumps."""
        bit = self._bit_of.get(owner, 0)
        return {key for shard in self._masks for key, mask in shard.items() if mask & bit}

    def sets(self) -> dict[str, set[int]]:
        """All keys by owner, as `keys_of`."""
        return {owner: self.keys_of(owner) for owner in self._bit_of}

    def check_invariants(self) -> None:
        """Raise AssertionError when counts and bits disagree."""
        assert self._size == sum(map(len, self._masks)) <= self.max_keys
        assert set(self._count) == set(self._bit_of) == set(self._owner_of.values())
        assert not (self._retired | self._sweeping) & set(self._owner_of)
        assert not self._retired & self._sweeping
        assert bool(self._sweeping) == bool(self._unswept)
        keys_with = Counter(mask for shard in self._masks for mask in shard.values())
        for owner, count in self._count.items():
            bit = self._bit_of[owner]
            assert count == sum(keys for mask, keys in keys_with.items() if mask & bit), owner
        assert 0 not in keys_with
        known = sum(1 << slot for slot in {*self._owner_of, *self._retired, *self._sweeping})
        assert not any(mask & ~known for mask in keys_with)

    def _known_masks(self) -> dict[int, int]:
        if len(self._shared) > MAX_SHARED:
            # Those in use stay shared with each other, and the next of each is shared with those that follow.
            self._shared.clear()
        return self._shared

    def _bit(self, owner: str) -> int:
        bit = self._bit_of.get(owner)
        if bit is None:
            slot = 0
            while slot in self._owner_of or slot in self._retired or slot in self._sweeping:
                slot += 1
            bit = self._bit_of[owner] = 1 << slot
            self._owner_of[slot] = owner
            self._count[owner] = 0
            self.generation += 1
        return bit

    def _sweep_on(self) -> None:
        """One turn of a sweep; a new one begins when the one before is done. Slots that retire meanwhile wait for the next."""
        if not self._unswept:
            self._sweeping, self._retired = self._retired, set()
            self._unswept = list(range(SHARDS))
        keep = ~sum(1 << slot for slot in self._sweeping)
        shared, looked_at = self._known_masks(), 0
        while self._unswept and looked_at < self._sweep_keys:
            number = self._unswept.pop()
            before = self._masks[number]
            after = self._masks[number] = {}
            for key, mask in before.items():
                if mask := mask & keep:
                    after[key] = shared.setdefault(mask, mask)
            self._size -= len(before) - len(after)
            looked_at += len(before)
        if not self._unswept:
            self._sweeping = set()
