"""The engine model's KV blocks: reference counts, prefix cache and LRU eviction, as vLLM's BlockPool keeps them. Pure.

Modelled on vllm/v1/core/block_pool.py (0.32): a freed block keeps its contents and its hash until it is handed out again; blocks
without a hash are reused first, the others in the order in which they were freed, the tail of a sequence before its head; two
requests that compute the same block at once hold two physical blocks of one hash, stored twice and removed twice.

Which physical block holds what is of no consequence, so none is kept: blocks that follow each other in one chain and were always
held together are one run, and what happens to a prompt's blocks costs by its runs, not by its thousands of blocks. Runs are a
radix tree: a chain goes on from a run's end only, and is found by the first hash of each of its runs. Where chains part, where a
hit stops and where a copy of some blocks loses its last ones, runs are cut, all copies of them alike.
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
    """Full blocks became cached: `hashes` in order, after the block `parent` (None: the first), holding `token_ids`. Of those
    in `already_cached` there were blocks before."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    session_id: str = ""
    cache_salt: str = ""
    already_cached: tuple[int, ...] = ()


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """One physical block of each hash was evicted; of each in `still_cached` another one remained, which may follow in
    `hashes`."""

    hashes: tuple[int, ...]
    still_cached: tuple[int, ...] = ()


class AllCleared(msgspec.Struct, frozen=True, gc=False):
    """Every block's hash was forgotten."""


def root_hash(seed: int, salt: str = "") -> int:
    """The hash before a prompt's first block. Another seed gives hashes that cannot be compared, like another engine's."""
    return xxh3_64_intdigest(salt.encode(), seed)


def extend_hashes(hashes: list[int], root: int, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks. Each is chained over all tokens before it."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        words = array("I", token_ids[start : start + block_size])
        if sys.byteorder != "little":
            words.byteswap()
        parent = xxh3_64_intdigest(words.tobytes(), parent)
        hashes.append(parent)


@dataclass(eq=False, slots=True)
class _Run:
    """Findable blocks of one chain with the same holders. Never empty. While it `grows` its only holder, who made it, may append
    to it: nothing else follows it, and it has no copies."""

    hashes: list[int]
    holders: list[HeldBlocks]
    grows: bool = False


@dataclass(eq=False, slots=True)
class HeldBlocks:
    """One sequence's `blocks`, how many: `full` of them are cached, those after them are not yet."""

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
        # By a run's first hash the run to be hit, and in the order of their coming others of the same hashes.
        self._run_of: dict[int, _Run] = {}
        self._copies: dict[int, list[_Run]] = {}
        self._num_cached = 0
        # Runs that nobody holds; the first loses its last block first. An OrderedDict, because hits take runs out of its middle.
        self._evictable: OrderedDict[_Run, None] = OrderedDict()
        self._evictable_blocks = 0

    @property
    def empty(self) -> int:
        """Blocks that are free and hold nothing cached."""
        return self._empty

    @property
    def free(self) -> int:
        """Blocks that no request holds; those with a hash can still be hit."""
        return self._empty + self._evictable_blocks

    def find(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many leading blocks of a chain are cached, at most `limit`, and how many of these nobody holds, so that holding
        them lowers `free`.

        Whoever holds a block holds those before it, and lets go of them later: a block is never cached without its parent.
        """
        found = idle = 0
        for run, length in self._walk(hashes, limit):
            found += length
            if not run.holders:
                idle += length
        return found, idle

    def hold(self, hashes: Sequence[int], count: int) -> HeldBlocks:
        """Hold the first `count` blocks of a chain, which are cached. Mutates."""
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
        """How many different hashes are cached."""
        return self._num_cached

    def allocate(self, holding: HeldBlocks, count: int) -> BlocksRemoved | None:
        """Hand out `count` empty blocks; what was evicted for them. ValueError when fewer are free. Mutates."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked for, {self.free} are free")
        holding.blocks += count
        unused = min(count, self._empty)
        self._empty -= unused
        return self._evict(count - unused) if count > unused else None

    def store(self, holding: HeldBlocks, hashes: Sequence[int]) -> tuple[int, ...]:
        """Make the next blocks of `holding`, which are filled, cached under `hashes`; those that were so already. Mutates."""
        if not hashes:
            return ()
        # Whatever follows a block that is not cached is not either.
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
        """Let go of all blocks of `holding`. Mutates."""
        for run in reversed(holding.runs):
            run.holders.remove(holding)
            if not run.holders:
                self._evictable[run] = None
                self._evictable_blocks += len(run.hashes)
        self._empty += holding.blocks - holding.full
        holding.runs, holding.full, holding.blocks = [], 0, 0

    def clear(self) -> bool:
        """Forget every hash. False, and nothing done, while any block is held."""
        if self.free != self.capacity:
            return False
        self._run_of, self._copies = {}, {}
        self._evictable.clear()
        self._empty, self._evictable_blocks, self._num_cached = self.capacity, 0, 0
        return True

    def cached_hashes(self) -> dict[int, int]:
        """Every cached hash and how many physical blocks have it."""
        copies = self._copies
        return {value: 1 + len(copies.get(first, ())) for first, run in self._run_of.items() for value in run.hashes}

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (for tests)."""
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
        """The runs to be hit, from a chain's first block to at most `limit`, and how many blocks of each."""
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
        """Store copies of those blocks of a chain that are cached: of how many. Mutates."""
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
        """Make the first `length` blocks of `run`, and of its copies, runs of their own; that of them to be hit.

        What is left of each keeps its place in the order of eviction, and is followed by what was before it.
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
                # Its copies keep what it loses.
                self._split(run, len(run.hashes) - count)
            del self._evictable[run]
            count -= len(run.hashes)
            removed += reversed(run.hashes)
            if self._forget(run):
                still_cached += reversed(run.hashes)
        return BlocksRemoved(tuple(removed), tuple(still_cached))

    def _forget(self, run: _Run) -> bool:
        """Let go of a run; whether a copy of it remains."""
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
    """How many of the first `length` of `known` are those of a chain from `position` on: those after the first other one are
    others, too."""
    return bisect_left(range(length), True, key=lambda at: known[at] != hashes[position + at])
