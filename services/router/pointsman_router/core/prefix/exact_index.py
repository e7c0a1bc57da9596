"""An index of the block keys that each instance holds. Pure.

Dicts map a key to a bit mask of slots; a slot stands for one instance's copy. Masks are shared objects, so a key costs little
more than its dict entry. The dicts are many and small, because a dict that grows, or is swept, blocks the event loop: for
milliseconds with 30,000 keys, for a second with 8 million.

Most owners have chained keys: who holds a key of a prompt holds all keys before it. A sparse owner (`set_sparse`) may hold a key
without those before it, and what it has cached of a prompt ends with the last key that it holds. Its anchors are chained, and no
key that it holds is behind the first anchor that is missing.

Dropping an instance only retires its slot. Once there are several retired slots, one pass over all keys clears their bits, a few
dicts at a time. So a fleet that resyncs at once does not cost one pass per instance.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice, pairwise
from types import MappingProxyType

from pointsman_common.core.block_keys import ANCHOR_KEYS, anchor_of

UNBOUNDED = 1 << 62

# Number of dicts, a power of two. Keys are hashes, and the lowest bits of a key select its dict.
SHARDS = 4_096
_SHARD = SHARDS - 1
# Number of retired slots with which a sweep starts. They share its cost, one pass over all keys.
SWEEP_AFTER = 8
# Number of keys that one turn of a sweep visits, which takes about two milliseconds.
SWEEP_KEYS = 3_000
# Maximum number of turns of a sweep that an `add` runs to get room.
TURNS_FOR_ROOM = 4
# Share of `max_keys` above which a sweep starts with a single retired slot.
SHORT_OF_ROOM = 0.75
# Number of shared masks above which their table is cleared. Until then it also keeps masks that are not in use any more.
MAX_SHARED = 1 << 16
# Number of different ends of a prompt on its owners from which these are remembered (20 kB with 64 owners), and of how many
# sessions they are.
MANY_RUNS = 8
MAX_RECENT = 1_024
# Number of recent changes of owners' bits that are kept for those who follow them (150 bytes each).
MAX_CHANGES = 4_096


class IndexFull(Exception):
    """Adding the keys would exceed the maximum number of keys of the index."""


class PrefixIndex:
    """Sets of keys by owner, with at most `max_keys` different keys. An owner is a name; `add` creates it."""

    def __init__(self, max_keys: int = UNBOUNDED, sweep_keys: int = SWEEP_KEYS) -> None:
        self.max_keys = max_keys
        self._sweep_keys = sweep_keys
        self._masks: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._size = 0
        self._shared: dict[int, int] = {}
        # Owner -> the bit of its slot; and slot -> owner.
        self._bit_of: dict[str, int] = {}
        self._owner_of: dict[int, str] = {}
        self._count: dict[str, int] = {}
        # The sparse owners, whether they have a slot or not, and the bits of those that have one.
        self._sparse: set[str] = set()
        self._sparse_bits = 0
        # Bits of slots. _retired: those that wait for a sweep. _sweeping: those that the current sweep clears. _used: both, and
        # those that have an owner. _unswept: numbers of the dicts that the sweep has not visited yet.
        self._retired = self._sweeping = self._used = 0
        self._unswept: list[int] = []
        # Session -> the runs that were found for its last prompt, if they were many; most recently used last.
        self._recent: dict[str, list[tuple[int, int]]] = {}
        # Number of changes of owners' bits so far, and the last ones: an owner got this bit, or lost it.
        self.generation = 0
        self._changes: deque[tuple[str, int]] = deque(maxlen=MAX_CHANGES)
        # Whether an `add` failed since sweep() last ran a turn.
        self._refused = False

    def __len__(self) -> int:
        """Return the number of keys that an owner holds, or a retired slot that is not swept yet."""
        return self._size

    def count(self, owner: str) -> int:
        """Return how many keys `owner` holds."""
        return self._count.get(owner, 0)

    def holds(self, owner: str, key: int) -> bool:
        """Return whether `owner` holds `key`."""
        return bool(self._masks[key & _SHARD].get(key, 0) & self._bit_of.get(owner, 0))

    def bits(self) -> Mapping[str, int]:
        """Return the bit of each owner; valid until `generation` changes, as those of `mask`."""
        return self._bit_of

    def slots(self) -> Mapping[int, str]:
        """Return the owner of each bit, by the bit's place; valid until `generation` changes."""
        return self._owner_of

    def shards(self) -> Sequence[Mapping[int, int]]:
        """Return the dicts of keys -> bits of holders, by the lowest bits of the key, for walks that probe many keys."""
        return self._masks

    def run_end(self, owner: str, keys: Sequence[int], start: int, stop: int) -> int:
        """Return the end of the run of `keys[start:stop]` that `owner` holds: the index of the first key that it does not hold,
        or `stop`. Assumes chained keys, as `runs` does. O(log(length of the run)) look-ups."""
        bit = self._bit_of.get(owner)
        if bit is None:
            return start
        masks = self._masks
        # Most runs have no key or a few. So the stride doubles until a key is missing, and bisection in the last stride follows.
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
        """Return whether `count` more keys fit."""
        return self._size + count <= self.max_keys

    def add(self, owner: str, keys: Collection[int]) -> int:
        """Add keys to `owner`'s set; return how many were new to it. Mutates. Raises IndexFull, with nothing added, if they do
        not fit. May first sweep retired slots, for a few milliseconds at most."""
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
        """Remove keys from `owner`'s set; return how many it held. Mutates."""
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
        """Remove `owner` and all its keys. Mutates; O(1), and a part of a sweep unless it has no keys any more."""
        bit = self._bit_of.pop(owner, None)
        if bit is None:
            return
        self._changed(owner, bit)
        self._sparse_bits &= ~bit
        del self._owner_of[bit.bit_length() - 1]
        if self._count.pop(owner):
            self._retired |= bit
        else:
            self._used ^= bit

    def set_sparse(self, owner: str, sparse: bool) -> None:
        """Set whether `owner` is sparse; it stays so when it is dropped. Mutates."""
        bit = self._bit_of.get(owner, 0)
        if sparse:
            self._sparse.add(owner)
            self._sparse_bits |= bit
        else:
            self._sparse.discard(owner)
            self._sparse_bits &= ~bit

    @property
    def sweeping(self) -> bool:
        """Whether a sweep is in progress; sweep() must then be called again soon."""
        return bool(self._unswept)

    def sweep(self) -> None:
        """Run one turn of a sweep, if one is in progress, enough slots are retired, or room is short. To be called regularly.
        Mutates."""
        short = self._refused or self._size > SHORT_OF_ROOM * self.max_keys
        if self._unswept or self._retired.bit_count() >= (1 if short else SWEEP_AFTER):
            self._refused = False
            self._sweep_on()

    def leading_blocks(
        self,
        keys: Sequence[int],
        owners: Iterable[str],
        known: Mapping[str, int] = MappingProxyType({}),
        session: str = "",
    ) -> dict[str, int]:
        """Return for each of `owners` how many of `keys`, counted from the first, it has cached. `known`: what an earlier call of
        `runs` found for some owners; they are not looked up again. `session`: a name that prompts share that begin alike; the
        next of them takes fewer look-ups. Mutates only what is remembered for that."""
        blocks = dict.fromkeys(owners, 0)
        if not self._sparse_bits and not (keys and (first := keys[0]) in self._masks[first & _SHARD]):
            return blocks  # Nobody has the first block, as of most new prompts.
        if known:
            blocks.update([(owner, count) for owner, count in known.items() if owner in blocks])
        owner_of = self._owner_of
        wanted = self.mask(blocks.keys() - known.keys() if known else blocks)
        before = self._recent.pop(session, None) if session else None
        runs = self._still_right(before, keys, wanted) if before else []
        for _, mask in runs:
            wanted ^= mask
        runs += self.runs(keys, wanted)
        if session and len(runs) >= MANY_RUNS:
            self._recent[session] = runs
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]
        for count, mask in runs:
            while mask:
                slot = mask.bit_length() - 1
                blocks[owner_of[slot]] = count
                mask ^= 1 << slot
        return blocks

    def mask(self, owners: Iterable[str]) -> int:
        """Return the bits of those `owners` that are known; valid until `generation` changes."""
        bit_of, mask = self._bit_of, 0
        for owner in owners:
            mask |= bit_of.get(owner, 0)
        return mask

    def mask_since(self, generation: int, mask: int, owners: Collection[str]) -> int:
        """Return what `mask(owners)` returns now, if it returned `mask` at an earlier `generation` (-1: it was not called).
        O(changes since then); O(owners) if these are more than MAX_CHANGES."""
        changes = self.generation - generation
        if changes > len(self._changes):
            return self.mask(owners)
        for owner, bit in islice(reversed(self._changes), changes):
            if owner in owners:
                mask ^= bit
        return mask

    def owners(self, mask: int) -> list[str]:
        """Return the owners of these bits."""
        found = []
        while mask:
            slot = mask.bit_length() - 1
            found.append(self._owner_of[slot])
            mask ^= 1 << slot
        return found

    def runs(self, keys: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
        """Yield how many of `keys`, counted from the first, the owners in `mask` have cached: (count, bits of owners with this
        count), highest count first. Owners that hold none are left out."""
        sparse = mask & self._sparse_bits
        if not sparse:
            return self._chained_runs(keys, mask)
        return merge(
            self._chained_runs(keys, mask ^ sparse), self._sparse_runs(keys, sparse), key=_count_of, reverse=True
        )

    def _still_right(self, runs: list[tuple[int, int]], keys: Sequence[int], mask: int) -> list[tuple[int, int]]:
        """Return what is right for `keys` and the owners in `mask` of the runs of a prompt that may have begun alike: keys are
        chained, so two look-ups show that a run ends where it ended. O(runs) look-ups."""
        masks, last, right = self._masks, len(keys), []
        mask &= ~self._sparse_bits
        for count, owners in runs:
            owners &= mask
            if not owners or count > last:
                continue
            key = keys[count - 1]
            owners &= masks[key & _SHARD].get(key, 0)
            if count < last:
                key = keys[count]
                owners &= ~masks[key & _SHARD].get(key, 0)
            if owners:
                right.append((count, owners))
                mask ^= owners
        return right

    def _sparse_runs(self, keys: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
        """As `runs`, for sparse owners. For each owner it goes from the first anchor that the owner lacks back to a key that the
        owner holds, for all owners together in one pass at most."""
        masks, last = self._masks, len(keys)
        anchors = [anchor_of(keys[at]) for at in range(ANCHOR_KEYS - 1, last, ANCHOR_KEYS)]
        ends = []
        for count, owners in self._chained_runs(anchors, mask):
            ends.append((min((count + 1) * ANCHOR_KEYS - 1, last), owners))
            mask ^= owners
        ends += [(min(ANCHOR_KEYS - 1, last), mask), (0, 0)]
        searching = 0
        for (end, owners), (stop, _) in pairwise(ends):
            searching |= owners
            for at in range(end - 1, stop - 1, -1):
                if not searching:
                    break
                key = keys[at]
                if holding := masks[key & _SHARD].get(key, 0) & searching:
                    yield at + 1, holding
                    searching ^= holding

    def _chained_runs(self, keys: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
        """As `runs`, for other owners.

        Keys are chained, so an owner that holds a key holds all keys before it. The end of each owner's run is found by
        bisection, for all owners together on one mask, in O(distinct ends x log keys) look-ups. If an engine evicted a block and
        kept its successor, the end of one of its runs is found; the engine's report of cached tokens later shows the difference.
        """
        masks = self._masks
        # Each entry: (low, high, mask of the owners that hold keys[:low] but not keys[high], if high is not the end). The ends of
        # the last entry's owners come after those of all entries before it.
        spans = [(0, len(keys), mask)] if mask else []
        while spans:
            low, high, mask = spans.pop()
            while low < high:
                middle = (low + high) >> 1
                key = keys[middle]
                holding = masks[key & _SHARD].get(key, 0) & mask
                if not holding:
                    high = middle
                elif holding == mask:
                    low = middle + 1
                else:
                    spans.append((low, middle, mask ^ holding))
                    low, mask = middle + 1, holding
            if low and mask:
                yield low, mask

    def keys_of(self, owner: str) -> set[int]:
        """Return all keys of `owner`, by a pass over the whole index; for tests and dumps."""
        bit = self._bit_of.get(owner, 0)
        return {key for shard in self._masks for key, mask in shard.items() if mask & bit}

    def sets(self) -> dict[str, set[int]]:
        """Return all keys by owner; for tests and dumps, as `keys_of`."""
        return {owner: self.keys_of(owner) for owner in self._bit_of}

    def check_invariants(self) -> None:
        """Raise AssertionError if counts and bits disagree."""
        assert self._size == sum(map(len, self._masks)) <= self.max_keys
        assert set(self._count) == set(self._bit_of) == set(self._owner_of.values())
        assert not self._retired & self._sweeping
        assert self._used == sum(self._bit_of.values()) + self._retired + self._sweeping
        assert bool(self._sweeping) == bool(self._unswept)
        keys_with = Counter(mask for shard in self._masks for mask in shard.values())
        for owner, count in self._count.items():
            bit = self._bit_of[owner]
            assert count == sum(keys for mask, keys in keys_with.items() if mask & bit), owner
        assert 0 not in keys_with
        assert self._sparse_bits == self.mask(self._sparse)
        assert not any(mask & ~self._used for mask in keys_with)

    def _known_masks(self) -> dict[int, int]:
        if len(self._shared) > MAX_SHARED:
            # Keys that share a mask still do. A mask that is made again after this is shared by the keys that get it from then
            # on.
            self._shared.clear()
        return self._shared

    def _bit(self, owner: str) -> int:
        bit = self._bit_of.get(owner)
        if bit is None:
            # The lowest free slot, so that masks stay short.
            bit = self._bit_of[owner] = ~self._used & (self._used + 1)
            self._used |= bit
            self._owner_of[bit.bit_length() - 1] = owner
            self._count[owner] = 0
            self._changed(owner, bit)
            if owner in self._sparse:
                self._sparse_bits |= bit
        return bit

    def _changed(self, owner: str, bit: int) -> None:
        self.generation += 1
        self._changes.append((owner, bit))

    def _sweep_on(self) -> None:
        """Run one turn of a sweep; start a new sweep if none is in progress. Slots that retire during a sweep wait for the
        next."""
        if not self._unswept:
            self._sweeping, self._retired = self._retired, 0
            self._unswept = list(range(SHARDS))
        keep = ~self._sweeping
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
            self._used ^= self._sweeping
            self._sweeping = 0


def _count_of(run: tuple[int, int]) -> int:
    return run[0]
