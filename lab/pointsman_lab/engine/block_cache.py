"""The engine model's KV blocks: reference counts, prefix cache and LRU eviction, as in vLLM's BlockPool. Pure.

Modelled on vllm/v1/core/block_pool.py (0.32). A freed block keeps its contents and its hash until it is allocated again. Blocks
without a hash are reused first, the others in the order in which they were freed, the tail of a sequence before its head. Two
requests that compute the same block at once hold two physical blocks of one hash, which is stored twice and removed twice.

It does not matter which physical block holds what, so no physical blocks are modelled. Blocks that follow each other in one chain
and were always held together are one run. An operation on a prompt's blocks therefore costs by its runs, not by its thousands of
blocks. Runs form a radix tree: a chain continues only at a run's end, and is found by the first hash of each of its runs. A run
is cut, with all its copies, where chains part, where a hit stops, and where a copy of some blocks loses its last ones.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from xxhash import xxh3_64_intdigest


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Full blocks became cached."""

    hashes: tuple[int, ...]  # in order
    parent: int | None  # the block before them; None: they are the first
    token_ids: tuple[int, ...]  # of these blocks
    session_id: str = ""  # of the request that holds them; empty: none
    cache_salt: str = ""  # of the same request; empty: none
    already_cached: tuple[int, ...] = ()  # those of the hashes that had physical blocks before


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """One physical block of each hash was evicted. For each hash in `still_cached` another one remained; the same hash may occur
    later in `hashes` for that one."""

    hashes: tuple[int, ...]
    still_cached: tuple[int, ...] = ()


class AllCleared(msgspec.Struct, frozen=True, gc=False):
    """Every block's hash was removed."""


def root_hash(seed: int, salt: str = "") -> int:
    """Return the hash before a prompt's first block. Hashes of different seeds cannot be compared, like those of two engines."""
    return xxh3_64_intdigest(salt.encode(), seed)


def extend_hashes(hashes: list[int], root: int, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` the missing hashes of the full blocks of `token_ids`. Each is chained over all tokens before it."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        words = array("I", token_ids[start : start + block_size])
        if sys.byteorder != "little":
            words.byteswap()
        parent = xxh3_64_intdigest(words.tobytes(), parent)
        hashes.append(parent)


@dataclass(eq=False, slots=True)
class _Run:
    """Cached blocks of one chain with the same holders. Never empty. While it `grows`, its only holder, which created it, may
    append to it: no run follows it, and it has no copies."""

    hashes: list[int]
    holders: list[HeldBlocks]
    grows: bool = False


@dataclass(eq=False, slots=True)
class HeldBlocks:
    """The blocks of one sequence: `blocks` is their number, and the first `full` of them are cached."""

    blocks: int = 0
    full: int = 0
    runs: list[_Run] = field(default_factory=list)


class BlockCache:
    """`capacity` physical blocks of `block_size` tokens."""

    def __init__(self, capacity: int, block_size: int) -> None:
        if capacity < 1 or block_size < 1:
            raise ValueError(f"capacity {capacity} and block_size {block_size} must be at least 1")
        self.capacity = capacity
        self.block_size = block_size
        self._empty = capacity
        # By a run's first hash: the run that a lookup finds.
        self._run_of: dict[int, _Run] = {}
        # By a run's first hash: other runs of the same hashes, oldest first.
        self._copies: dict[int, list[_Run]] = {}
        self._num_cached = 0
        # Runs without a holder, in eviction order; each loses its last block first. Hits remove runs from the middle.
        self._evictable: OrderedDict[_Run, None] = OrderedDict()
        self._evictable_blocks = 0

    @property
    def empty(self) -> int:
        """Number of blocks that are free and have no cached content."""
        return self._empty

    @property
    def free(self) -> int:
        """Number of blocks that no request holds; those with a hash can still be hit."""
        return self._empty + self._evictable_blocks

    def find(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """Return how many leading blocks of a chain are cached, at most `limit`, and how many of these have no holder, so that
        holding them lowers `free`.

        The holder of a block holds those before it too, and releases them later: a block is never cached without its parent.
        """
        found = idle = 0
        for run, length in self._walk(hashes, limit):
            found += length
            if not run.holders:
                idle += length
        return found, idle

    def hold(self, hashes: Sequence[int], count: int) -> HeldBlocks:
        """Hold the first `count` blocks of a chain, which must be cached. Mutates."""
        holding = HeldBlocks(blocks=count, full=count)
        for run, length in self._walk(hashes, count):
            if length < len(run.hashes):
                run = self._split(run, length)
            if not run.holders:
                del self._evictable[run]
                self._evictable_blocks -= length
            run.grows = False
            run.holders.append(holding)
            holding.runs.append(run)
        return holding

    def __len__(self) -> int:
        """Return the number of different hashes that are cached."""
        return self._num_cached

    def allocate(self, holding: HeldBlocks, count: int) -> BlocksRemoved | None:
        """Allocate `count` blocks to `holding`; return the evicted ones. Raises ValueError if fewer are free. Mutates."""
        if count > self.free:
            raise ValueError(f"{count} blocks requested, {self.free} are free")
        holding.blocks += count
        unused = min(count, self._empty)
        self._empty -= unused
        return self._evict(count - unused) if count > unused else None

    def store(self, holding: HeldBlocks, hashes: Sequence[int]) -> tuple[int, ...]:
        """Cache the next blocks of `holding`, which are filled, under `hashes`; return the hashes cached before. Mutates."""
        if not hashes:
            return ()
        # After a block that is not cached, no block is cached.
        already_cached = self._copy(holding, hashes) if hashes[0] in self._run_of else 0
        if new := hashes[already_cached:]:
            last = holding.runs[-1] if holding.runs else None
            if last is None or not last.grows:
                last = self._run_of[new[0]] = _Run([], [holding], grows=True)
                holding.runs.append(last)
            last.hashes += new
            self._num_cached += len(new)
        holding.full += len(hashes)
        return tuple(hashes[:already_cached])

    def release(self, holding: HeldBlocks) -> None:
        """Release all blocks of `holding`. Mutates."""
        for run in reversed(holding.runs):
            run.holders.remove(holding)
            if not run.holders:
                self._evictable[run] = None
                self._evictable_blocks += len(run.hashes)
        self._empty += holding.blocks - holding.full
        holding.runs, holding.full, holding.blocks = [], 0, 0

    def clear(self) -> bool:
        """Remove every hash. Return False, without a change, while any block is held."""
        if self.free != self.capacity:
            return False
        self._run_of, self._copies = {}, {}
        self._evictable.clear()
        self._empty, self._evictable_blocks, self._num_cached = self.capacity, 0, 0
        return True

    def cached_hashes(self) -> dict[int, int]:
        """Return every cached hash with its number of physical blocks."""
        copies = self._copies
        return {value: 1 + len(copies.get(first, ())) for first, run in self._run_of.items() for value in run.hashes}

    def check(self) -> None:
        """Raise AssertionError if the internal counts are inconsistent (for tests)."""
        assert self._empty >= 0
        assert self._evictable_blocks == sum(len(run.hashes) for run in self._evictable)
        assert all(self._copies.values())
        assert self._num_cached == sum(len(run.hashes) for run in self._run_of.values()) == len(self.cached_hashes())
        runs = []
        for first, hit in self._run_of.items():
            copies = self._copies.get(first, ())
            assert hit.hashes
            assert hit.hashes[0] == first
            assert all(copy.hashes == hit.hashes for copy in copies)
            assert not (copies and any(run.grows for run in (hit, *copies)))
            runs += [hit, *copies]
        assert {run for run in runs if not run.holders} == set(self._evictable)
        for run in runs:
            assert all(run in holding.runs for holding in run.holders)
            assert not run.grows or [holding.runs[-1] for holding in run.holders] in ([run], [])
        holders = {holding for run in runs for holding in run.holders}
        for holding in holders:
            assert holding.full == sum(len(run.hashes) for run in holding.runs)
        empty = self.capacity - self.free - sum(len(run.hashes) for run in runs if run.holders)
        assert empty >= sum(holding.blocks - holding.full for holding in holders)

    def _walk(self, hashes: Sequence[int], limit: int) -> Iterator[tuple[_Run, int]]:
        """Yield the runs that a lookup finds, from a chain's first block to at most `limit`, and the number of blocks of each."""
        run_of, limit, position = self._run_of, min(limit, len(hashes)), 0
        while position < limit and (run := run_of.get(hashes[position])) is not None:
            whole = len(run.hashes)
            length = min(whole, limit - position)
            if run.hashes[length - 1] != hashes[position + length - 1]:
                length = _matching_length(run.hashes, hashes, position, length)
            yield run, length
            if length < whole:
                return
            position += length

    def _copy(self, holding: HeldBlocks, hashes: Sequence[int]) -> int:
        """Store copies of those blocks of a chain that are cached; return their number. Mutates."""
        count = 0
        for run, length in self._walk(hashes, len(hashes)):
            if length < len(run.hashes):
                run = self._split(run, length)
            run.grows = False
            copy = _Run([*run.hashes], [holding])
            self._copies.setdefault(run.hashes[0], []).append(copy)
            holding.runs.append(copy)
            count += length
        return count

    def _split(self, run: _Run, length: int) -> _Run:
        """Split the first `length` blocks of `run`, and of its copies, into separate runs; return the one that a lookup finds.

        The rest of each run keeps its place in the eviction order; its head follows directly after it.
        """
        first = run.hashes[0]
        heads = []
        rests = [self._run_of[first], *self._copies.pop(first, ())]
        for rest in rests:
            head = _Run(rest.hashes[:length], [*rest.holders])
            del rest.hashes[:length]
            for holding in head.holders:
                holding.runs.insert(holding.runs.index(rest), head)
            if not head.holders:
                behind = [*self._evictable][[*self._evictable].index(rest) + 1 :]
                self._evictable[head] = None
                for other in behind:
                    self._evictable.move_to_end(other)
            heads.append(head)
        for runs in heads, rests:
            self._run_of[runs[0].hashes[0]] = runs[0]
            if runs[1:]:
                self._copies[runs[0].hashes[0]] = runs[1:]
        return heads[0]

    def _evict(self, count: int) -> BlocksRemoved:
        removed: list[int] = []
        still_cached: list[int] = []
        self._evictable_blocks -= count
        while count:
            run = next(iter(self._evictable))
            if count < len(run.hashes):
                if run.hashes[0] not in self._copies:
                    removed += run.hashes[: -count - 1 : -1]
                    del run.hashes[-count:]
                    self._num_cached -= count
                    break
                # The copies keep the blocks that this run loses, so all of them are cut.
                self._split(run, len(run.hashes) - count)
            del self._evictable[run]
            count -= len(run.hashes)
            removed += reversed(run.hashes)
            if self._forget(run):
                still_cached += reversed(run.hashes)
        return BlocksRemoved(tuple(removed), tuple(still_cached))

    def _forget(self, run: _Run) -> bool:
        """Remove a run; return whether a copy of it remains."""
        first = run.hashes[0]
        copies = self._copies.get(first)
        if copies is None:
            del self._run_of[first]
            self._num_cached -= len(run.hashes)
            return False
        if self._run_of[first] is run:
            self._run_of[first] = copies.pop(0)
        else:
            copies.remove(run)
        if not copies:
            del self._copies[first]
        return True


def _matching_length(known: Sequence[int], hashes: Sequence[int], position: int, length: int) -> int:
    """Return how many of the first `length` of `known` equal the chain's hashes from `position` on. All hashes after the first
    difference differ, so a binary search finds it."""
    return bisect_left(range(length), True, key=lambda at: known[at] != hashes[position + at])
