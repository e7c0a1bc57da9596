"""Which instance holds which block keys. Pure.

One dict maps a key to a bit mask of slots; a slot stands for one instance's copy. Masks are shared objects, so a key costs its
dict entry and little more. Dropping an instance only retires its slot: the retired bits are swept out in one pass over all keys
once several have gathered, so that a fleet that resyncs at once is not scanned once for each instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat

UNBOUNDED = 1 << 62

# Sweeping costs one pass over all keys; this many retired slots share it.
SWEEP_AFTER = 8


class IndexFull(Exception):
    """The index would hold more keys than it may."""


class PrefixIndex:
    """Sets of keys by owner, at most `max_keys` different ones. An owner is any hashable name; `add` makes it known."""

    def __init__(self, max_keys: int = UNBOUNDED) -> None:
        self.max_keys = max_keys
        self._mask_of: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        # By owner, the one bit of its slot; and by slot, its owner.
        self._bit_of: dict[str, int] = {}
        self._owner_of: dict[int, str] = {}
        self._count: dict[str, int] = {}
        self._retired: set[int] = set()
        self._retired_mask = 0

    def __len__(self) -> int:
        """Keys held by at least one owner, and those of retired slots that are not swept yet."""
        return len(self._mask_of)

    def count(self, owner: str) -> int:
        """How many keys `owner` holds."""
        return self._count.get(owner, 0)

    def holds(self, owner: str, key: int) -> bool:
        """Whether `owner` holds `key`."""
        return bool(self._mask_of.get(key, 0) & self._bit_of.get(owner, 0))

    def run_end(self, owner: str, keys: Sequence[int], start: int, stop: int) -> int:
        """Where, from `start` to at most `stop`, the first of `keys` is that `owner` does not hold; `stop` when it holds all."""
        bit = self._bit_of.get(owner)
        if bit is None:
            return start
        get = self._mask_of.get
        # One by one: looking many up at once costs more where a run is short, and little less where it is long.
        for at in range(start, stop):
            if not get(keys[at], 0) & bit:
                return at
        return stop

    def has_room(self, count: int) -> bool:
        """Whether `count` more keys fit in. May sweep."""
        if len(self._mask_of) + count > self.max_keys and self._retired:
            self._sweep()
        return len(self._mask_of) + count <= self.max_keys

    def add(self, owner: str, keys: Collection[int]) -> int:
        """Give keys to `owner`; returns how many it did not hold before. Mutates, unless they do not fit: IndexFull."""
        if not self.has_room(len(keys)) and not self.has_room(sum(key not in self._mask_of for key in keys)):
            raise IndexFull
        bit = self._bit(owner)
        mask_of, shared = self._mask_of, self._shared
        # Most of what is computed nobody had: it is entered at once.
        if mask_of.keys().isdisjoint(keys):
            before = len(mask_of)
            mask = shared.setdefault(bit, bit)
            for key in keys:
                mask_of[key] = mask
            added = len(mask_of) - before
        else:
            added = 0
            for key in keys:
                mask = mask_of.get(key, 0)
                if not mask & bit:
                    mask |= bit
                    mask_of[key] = shared.setdefault(mask, mask)
                    added += 1
        self._count[owner] = self._count.get(owner, 0) + added
        return added

    def remove(self, owner: str, keys: Collection[int]) -> int:
        """Take keys from `owner`; returns how many it held. Mutates."""
        bit = self._bit_of.get(owner)
        if bit is None:
            return 0
        mask_of, shared = self._mask_of, self._shared
        # Most of what is evicted nobody else had: all goes at once, and what others have comes back.
        masks = list(map(mask_of.pop, keys, repeat(0)))
        removed = masks.count(bit)
        if removed < len(masks):
            for key, mask in zip(keys, masks, strict=True):
                if left := mask & ~bit:
                    mask_of[key] = shared.setdefault(left, left)
                    removed += left != mask
        self._count[owner] -= removed
        return removed

    def drop(self, owner: str) -> None:
        """Forget all keys of `owner`. Mutates."""
        bit = self._bit_of.pop(owner, None)
        if bit is None:
            return
        slot = bit.bit_length() - 1
        del self._owner_of[slot]
        del self._count[owner]
        self._retired.add(slot)
        self._retired_mask |= bit
        if len(self._retired) >= SWEEP_AFTER:
            self._sweep()

    def leading_blocks(self, keys: Sequence[int], owners: Iterable[str]) -> dict[str, int]:
        """For each of `owners`: how many of `keys`, counted from the first, it holds.

        Keys are chained, so whoever holds one holds those before it: each owner's end is found by bisection, all owners together
        on one mask, in O(distinct ends x log keys) look-ups. Where an engine evicted a block and kept its successor, the end of
        one of the runs is found; the engine's own report of cached tokens tells the difference afterwards.
        """
        blocks = dict.fromkeys(owners, 0)
        bit_of, owner_of, get = self._bit_of, self._owner_of, self._mask_of.get
        alive = 0
        for owner in blocks:
            alive |= bit_of.get(owner, 0)
        # Each entry: owners that hold keys[:low], and do not hold keys[high] unless that is the end.
        spans = [(0, len(keys), alive)] if alive else []
        while spans:
            low, high, mask = spans.pop()
            while low < high:
                middle = (low + high) >> 1
                holding = get(keys[middle], 0) & mask
                if holding == mask:
                    low = middle + 1
                elif holding:
                    spans.append((low, middle, mask ^ holding))
                    low, mask = middle + 1, holding
                else:
                    high = middle
            while low and mask:
                slot = mask.bit_length() - 1
                blocks[owner_of[slot]] = low
                mask ^= 1 << slot
        return blocks

    def keys_of(self, owner: str) -> set[int]:
        """All keys of `owner`, by a pass over the whole index: for tests and dumps."""
        bit = self._bit_of.get(owner, 0)
        return {key for key, mask in self._mask_of.items() if mask & bit}

    def sets(self) -> dict[str, set[int]]:
        """All keys by owner, as `keys_of`."""
        return {owner: self.keys_of(owner) for owner in self._bit_of}

    def check_invariants(self) -> None:
        """Raise AssertionError when counts and bits disagree."""
        assert len(self._mask_of) <= self.max_keys
        assert set(self._count) == set(self._bit_of) == set(self._owner_of.values())
        assert not self._retired & set(self._owner_of)
        keys_with = Counter(self._mask_of.values())
        for owner, count in self._count.items():
            bit = self._bit_of[owner]
            assert count == sum(keys for mask, keys in keys_with.items() if mask & bit), owner
        assert 0 not in keys_with

    def _bit(self, owner: str) -> int:
        bit = self._bit_of.get(owner)
        if bit is None:
            slot = 0
            while slot in self._owner_of or slot in self._retired:
                slot += 1
            bit = self._bit_of[owner] = 1 << slot
            self._owner_of[slot] = owner
            self._count[owner] = 0
        return bit

    def _sweep(self) -> None:
        keep = ~self._retired_mask
        shared: dict[int, int] = {}
        swept: dict[int, int] = {}
        for key, mask in self._mask_of.items():
            if mask := mask & keep:
                swept[key] = shared.setdefault(mask, mask)
        self._mask_of, self._shared = swept, shared
        self._retired.clear()
        self._retired_mask = 0
