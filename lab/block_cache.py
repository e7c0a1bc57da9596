"""The engine model's KV blocks: reference counts, prefix cache and LRU eviction, as vLLM's BlockPool keeps them. Pure.

Modelled on vllm/v1/core/block_pool.py (0.32): a freed block keeps its contents and its hash until it is handed out again; blocks
without a hash are reused first, the others in the order in which they were freed, the tail of a sequence before its head; two
requests that compute the same block at once hold two physical blocks of one hash, stored twice and removed twice.

Which physical block holds what is of no consequence, so none is kept: blocks that follow each other in one chain and were always
held together are one run, and what happens to a prompt's blocks costs by its runs, not by its thousands of blocks.
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
    """Full blocks became findable: `hashes` in order, after the block `parent` (None: the first), holding `token_ids`. Of those
    in `again` there were blocks before."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    session_id: str = ""
    cache_salt: str = ""
    again: tuple[int, ...] = ()


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """One physical block of each hash was evicted; of each in `left` another one remained, which may follow in `hashes`."""

    hashes: tuple[int, ...]
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllCleared:
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
    """Findable blocks of one chain with the same holders; `start` is how many blocks of the chain come before. Never empty."""

    start: int
    hashes: list[int]
    holders: list[Holding]


@dataclass(eq=False, slots=True)
class Holding:
    """One sequence's `blocks`, how many: `full` of them are findable, those after them are not yet."""

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
        self._blank = capacity
        # The run to be hit, and in the order of their coming others that hold a block of the same hash.
        self._run_of: dict[int, _Run] = {}
        self._copies: dict[int, list[_Run]] = {}
        # Runs that nobody holds; the first loses its last block first. An OrderedDict, because hits take runs out of its middle.
        self._idle: OrderedDict[_Run, None] = OrderedDict()
        self._idle_blocks = 0

    @property
    def blank(self) -> int:
        """Blocks that are free and hold nothing findable."""
        return self._blank

    @property
    def free(self) -> int:
        """Blocks that no request holds; those with a hash can still be hit."""
        return self._blank + self._idle_blocks

    def hits(self, hashes: Sequence[int], limit: int) -> int:
        """How many leading blocks of a chain are findable, at most `limit`.

        Whoever holds a block holds those before it, and lets go of them later: a block is never findable without its parent, and
        the end is found by bisection.
        """
        run_of = self._run_of
        return bisect_left(hashes, True, 0, min(limit, len(hashes)), key=lambda value: value not in run_of)

    def idle(self, hashes: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks, which are findable, nobody holds, so that holding them lowers `free`."""
        return sum(length for run, _, length in self._walk(hashes, count) if not run.holders)

    def hold(self, hashes: Sequence[int], count: int) -> Holding:
        """Hold the first `count` blocks of a chain, which are findable. Mutates."""
        holding = Holding(blocks=count, full=count)
        for run, skipped, length in self._walk(hashes, count):
            if skipped and skipped + length < len(run.hashes):
                # Its beginning is a copy of what was hit before; when nobody holds it, it queues anew.
                copy = self._cut(run, 0, skipped)
                if not run.holders:
                    self._idle[copy] = None
                skipped = 0
            if skipped:
                run = self._cut(run, skipped, len(run.hashes))
            elif length < len(run.hashes):
                run = self._cut(run, 0, length)
            if not run.holders:
                self._idle.pop(run, None)
                self._idle_blocks -= length
            run.holders.append(holding)
            holding.runs.append(run)
        return holding

    def __len__(self) -> int:
        """How many different hashes are findable."""
        return len(self._run_of)

    def allocate(self, holding: Holding, count: int) -> BlocksRemoved | None:
        """Hand out `count` blank blocks; what was evicted for them. ValueError when fewer are free. Mutates."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked for, {self.free} are free")
        holding.blocks += count
        unused = min(count, self._blank)
        self._blank -= unused
        return self._evict(count - unused) if count > unused else None

    def store(self, holding: Holding, hashes: Sequence[int]) -> tuple[int, ...]:
        """Make the next blocks of `holding`, which are filled, findable under `hashes`; those that were so already. Mutates."""
        if not hashes:
            return ()
        last = holding.runs[-1] if holding.runs else None
        if last is None or len(last.holders) > 1:
            last = _Run(holding.full, [], [holding])
            holding.runs.append(last)
        last.hashes += hashes
        holding.full += len(hashes)
        # Whatever follows a block that is not findable is not either.
        run_of = self._run_of
        if hashes[0] not in run_of:
            # Half the time that an update with a dict of them takes.
            for value in hashes:
                run_of[value] = last
            return ()
        again = []
        for value in hashes:
            if run_of.setdefault(value, last) is not last:
                self._copies.setdefault(value, []).append(last)
                again.append(value)
        return tuple(again)

    def release(self, holding: Holding) -> None:
        """Let go of all blocks of `holding`. Mutates."""
        for run in reversed(holding.runs):
            run.holders.remove(holding)
            if not run.holders:
                self._idle[run] = None
                self._idle_blocks += len(run.hashes)
        self._blank += holding.blocks - holding.full
        holding.runs, holding.full, holding.blocks = [], 0, 0

    def clear(self) -> bool:
        """Forget every hash. False, and nothing done, while any block is held."""
        if self.free != self.capacity:
            return False
        self._run_of, self._copies = {}, {}
        self._idle.clear()
        self._blank, self._idle_blocks = self.capacity, 0
        return True

    def cached_hashes(self) -> dict[int, int]:
        """Every findable hash and how many physical blocks have it."""
        return {value: 1 + len(self._copies.get(value, ())) for value in self._run_of}

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (for tests)."""
        assert self._blank >= 0
        assert self._idle_blocks == sum(len(run.hashes) for run in self._idle)
        runs = {*self._run_of.values(), *(run for copies in self._copies.values() for run in copies)}
        assert all(copies for copies in self._copies.values())
        assert all(run.hashes for run in runs)
        assert {run for run in runs if not run.holders} == set(self._idle)
        found = [(value, run) for run in runs for value in run.hashes]
        known = [*self._run_of.items(), *((value, run) for value, copies in self._copies.items() for run in copies)]
        assert set(found) == set(known)
        assert len(found) == len(known)
        for run in runs:
            for holding in run.holders:
                at = holding.runs.index(run)
                assert run.start == sum(len(before.hashes) for before in holding.runs[:at])
                assert holding.full == sum(len(one.hashes) for one in holding.runs)
        held = {holding for run in runs for holding in run.holders}
        blank = self.capacity - self.free - sum(len(run.hashes) for run in runs if run.holders)
        assert blank >= sum(holding.blocks - holding.full for holding in held)

    def _walk(self, hashes: Sequence[int], count: int) -> Iterator[tuple[_Run, int, int]]:
        """The runs that hold the first `count` blocks, with the blocks of each that come before, and how many are meant."""
        position = 0
        while position < count:
            run = self._run_of[hashes[position]]
            skipped = position - run.start
            length = min(len(run.hashes) - skipped, count - position)
            if run.hashes[skipped + length - 1] != hashes[position + length - 1]:
                # It goes on as another chain does.
                pairs = zip(run.hashes[skipped:], hashes[position : position + length], strict=False)
                length = next(at for at, (one, other) in enumerate(pairs) if one != other)
            if self._copies and not self._copies.keys().isdisjoint(hashes[position : position + length]):
                # Where there are several of a block, the run may go on with another one than the first.
                meant = range(position + 1, position + length)
                length = next((at for at in meant if self._run_of[hashes[at]] is not run), position + length) - position
            yield run, skipped, length
            position += length

    def _cut(self, run: _Run, begin: int, end: int) -> _Run:
        """Make blocks begin..end of `run`, at its beginning or its end, a run of its own, which the caller holds at once.

        What is left of an idle run keeps its place in the order of eviction.
        """
        part = _Run(run.start + begin, run.hashes[begin:end], [*run.holders])
        del run.hashes[begin:end]
        if not begin:
            run.start += end
        for holding in part.holders:
            at = holding.runs.index(run)
            holding.runs.insert(at + 1 if begin else at, part)
        run_of = self._run_of
        if not self._copies:
            for value in part.hashes:
                run_of[value] = part
            return part
        for value in part.hashes:
            if run_of[value] is run:
                run_of[value] = part
            else:
                copies = self._copies[value]
                copies[copies.index(run)] = part
        return part

    def _evict(self, count: int) -> BlocksRemoved:
        removed: list[int] = []
        left: list[int] = []
        self._idle_blocks -= count
        while count:
            run = next(iter(self._idle))
            gone = run.hashes[: -count - 1 : -1]
            del run.hashes[-len(gone) :]
            if not run.hashes:
                del self._idle[run]
            count -= len(gone)
            removed += gone
            if self._copies:
                left += self._forget(run, gone)
            else:
                run_of = self._run_of
                for value in gone:
                    del run_of[value]
        return BlocksRemoved(tuple(removed), tuple(left))

    def _forget(self, run: _Run, gone: Sequence[int]) -> list[int]:
        """Let go of a run's last blocks; those of which another remains."""
        left = []
        for value in gone:
            copies = self._copies.get(value)
            if copies is None:
                del self._run_of[value]
                continue
            left.append(value)
            if self._run_of[value] is run:
                self._run_of[value] = copies.pop(0)
            else:
                copies.remove(run)
            if not copies:
                del self._copies[value]
        return left
