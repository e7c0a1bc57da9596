"""Runs of blocks must be allocated and evicted as single blocks would be."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman_lab.engine.block_cache import BlockCache, HeldBlocks


class Plain:
    """The same cache block by block, as in vLLM's BlockPool."""

    def __init__(self, capacity: int) -> None:
        self.references = [0] * capacity
        self.hash_of: list[int | None] = [None] * capacity
        self.blocks_of: dict[int, list[int]] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))

    def lookup(self, hashes: list[int]) -> list[int]:
        found = []
        for value in hashes:
            if not self.blocks_of.get(value):
                break
            found.append(self.blocks_of[value][0])
        return found

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] += 1

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        removed = []
        for block in blocks:
            self.references[block] = 1
            if (value := self.hash_of[block]) is not None:
                self.hash_of[block] = None
                self.blocks_of[value].remove(block)
                removed.append(value)
        return blocks, removed

    def store(self, blocks: list[int], hashes: list[int]) -> None:
        for block, value in zip(blocks, hashes, strict=True):
            self.hash_of[block] = value
            self.blocks_of.setdefault(value, []).append(block)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None
                if self.hash_of[block] is None:
                    self.free.move_to_end(block, last=False)


def chain(path: list[int], name: int = 1) -> list[int]:
    """Hashes of a prompt whose blocks are `path`, after the block `name`. Two hashes are equal if all blocks up to them are."""
    hashes = []
    for part in path:
        name = name * 3 + part
        hashes.append(name)
    return hashes


@dataclass(eq=False)
class Sequence:
    """A request: what it holds in the cache and in the plain pool, and the hashes of its blocks, `stored` so far."""

    hashes: list[int]
    holding: HeldBlocks
    blocks: list[int]
    stored: int


class RunsAreBlocks(RuleBasedStateMachine):
    """Several sequences allocate shared and other blocks in turn, fill them step by step, and release them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.plain = BlockCache(24, 16), Plain(24)
        self.sequences: list[Sequence] = []

    def take(self, sequence: Sequence, count: int) -> None:
        """Allocate blocks; both caches must evict the same blocks for them, in the same order."""
        blocks, removed = self.plain.allocate(count)
        sequence.blocks += blocks
        evicted = self.cache.allocate(sequence.holding, count)
        assert (list(evicted.hashes) if evicted else []) == removed
        there = {value for value, of in self.plain.blocks_of.items() if of}
        gone = Counter(removed) - Counter(evicted.still_cached if evicted else ())
        assert set(gone) == set(removed) - there

    def fill(self, sequence: Sequence, count: int) -> None:
        """Compute `count` more blocks; the cache must report those that another sequence has computed, too."""
        end = min(sequence.stored + count, len(sequence.hashes))
        hashes = sequence.hashes[sequence.stored : end]
        there = {value for value, of in self.plain.blocks_of.items() if of}
        self.plain.store(sequence.blocks[sequence.stored : end], hashes)
        assert self.cache.store(sequence.holding, hashes) == tuple(value for value in hashes if value in there)
        sequence.stored = end

    @rule(
        path=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=7),
        stops_early=st.sampled_from([0, 0, 1, 3]),
        empty=st.integers(0, 2),
        filled=st.sampled_from([9, 9, 1, 2, 3]),
    )
    def admit(self, path: list[int], stops_early: int, empty: int, filled: int) -> None:
        """Some hits stop early, so that known blocks are computed again; other sequences compute the same blocks meanwhile."""
        hashes = chain(path)
        found = self.plain.lookup(hashes[: max(len(hashes) - stops_early, 0)])
        idle = sum(not self.plain.references[block] for block in found)
        assert self.cache.find(hashes, len(hashes) - stops_early) == (len(found), idle)
        missing = len(hashes) - len(found) + empty
        if missing + idle > self.cache.free:
            return
        self.plain.hold(found)
        sequence = Sequence(hashes, self.cache.hold(hashes, len(found)), found, len(found))
        self.take(sequence, missing)
        self.fill(sequence, filled)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 99), count=st.integers(1, 7))
    def go_on(self, number: int, count: int) -> None:
        """Compute blocks of a prompt or of an answer."""
        self.fill(self.sequences[number % len(self.sequences)], count)

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 99), path=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def answer(self, number: int, path: list[int]) -> None:
        """A sequence grows beyond the blocks of its admission, if blocks are free for it."""
        sequence = self.sequences[number % len(self.sequences)]
        hashes = chain(path, sequence.hashes[-1])
        if missing := max(len(sequence.hashes) + len(hashes) - len(sequence.blocks), 0):
            if missing > self.cache.free:
                return
            self.take(sequence, missing)
        sequence.hashes = sequence.hashes + hashes

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        """A sequence ends, or is preempted, with all its blocks full or not."""
        sequence = self.sequences.pop(number % len(self.sequences))
        self.plain.release(sequence.blocks)
        self.cache.release(sequence.holding)

    @rule(evicted=st.integers(1, 24))
    def press(self, evicted: int) -> None:
        """Allocate up to `evicted` of the cached blocks, which evicts them, and release them at once."""
        sequence = Sequence([], HeldBlocks(), [], 0)
        self.take(sequence, min(self.cache.empty + evicted, self.cache.free))
        self.plain.release(sequence.blocks)
        self.cache.release(sequence.holding)

    @precondition(lambda self: not self.sequences)
    @rule()
    def forget(self) -> None:
        """Clear both caches while nothing is held."""
        assert self.cache.clear()
        self.plain = Plain(24)

    @invariant()
    def same(self) -> None:
        """Both caches have the same content."""
        self.cache.check()
        assert self.cache.free == len(self.plain.free)
        there = {value: len(blocks) for value, blocks in self.plain.blocks_of.items() if blocks}
        assert self.cache.cached_hashes() == there
        assert len(self.cache) == len(there)


RunsAreBlocks.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRunsAreBlocks = RunsAreBlocks.TestCase


def copies(release: list[int]) -> RunsAreBlocks:
    """Three sequences compute the same four blocks at once, and a fourth one two others; they end in the order `release`."""
    both = RunsAreBlocks()
    for _ in range(3):
        both.admit([0, 0, 0, 0], stops_early=0, empty=0, filled=0)
    both.admit([1, 1], stops_early=0, empty=0, filled=9)
    for number in 0, 1, 2:
        both.go_on(number, 4)
    for number in release:
        both.release(number)
        both.same()
    return both


def press(both: RunsAreBlocks, *evicted: int) -> None:
    for count in evicted:
        both.press(count)
        both.same()


def test_copies_are_cut_where_they_are_in_the_order_of_eviction() -> None:
    both = copies([1, 2, 0, 0])
    # One sequence continues from the middle of the shared blocks, and holds the first of them.
    both.admit([0, 0, 1], stops_early=0, empty=0, filled=9)
    press(both, 1, 2, 1, 4, 4, 4)
    both.release(0)
    press(both, 24)


def test_of_copies_the_oldest_is_hit() -> None:
    both = copies([0, 0, 1, 0])
    press(both, 4)
    both.admit([0, 0, 0, 0], stops_early=0, empty=0, filled=9)
    both.release(0)
    press(both, 2, 2, 2, 4)
