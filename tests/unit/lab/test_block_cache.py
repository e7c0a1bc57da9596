"""Runs of blocks must come and go as single blocks would."""

from __future__ import annotations

from collections import Counter, OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.block_cache import BlockCache, Holding


class Plain:
    """The same, block by block: what vLLM's BlockPool does."""

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


def chain(path: list[int]) -> list[int]:
    """Hashes of a prompt whose blocks are `path`: equal where all before is equal."""
    hashes, name = [], 1
    for one in path:
        name = name * 3 + one
        hashes.append(name)
    return hashes


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(0, 3), st.integers(0, 5)),
        max_size=40,
    )
)
def test_runs_are_blocks(actions: list[tuple[list[int], int, int]]) -> None:
    cache, plain = BlockCache(16, 16), Plain(16)
    held: list[tuple[list[int], Holding, list[int]]] = []
    for path, blank, number in actions:
        hashes = chain(path)
        # A hit stops early, now and then, so that known blocks are computed again.
        limit = len(hashes) - (number % 2)
        found = plain.lookup(hashes[:limit])
        assert cache.hits(hashes, limit) == len(found)
        idle = sum(not plain.references[block] for block in found)
        assert cache.idle(hashes, len(found)) == idle
        missing = len(hashes) - len(found) + blank
        if missing + idle <= cache.free:
            plain.hold(found)
            holding = cache.hold(hashes, len(found))
            blocks, removed = plain.allocate(missing)
            evicted = cache.allocate(holding, missing)
            assert (list(evicted.hashes) if evicted else []) == removed
            there = {value for value, of in plain.blocks_of.items() if of}
            gone = Counter(removed) - Counter(evicted.left if evicted else ())
            assert set(gone) == set(removed) - there
            whole = len(hashes) - len(found)
            plain.store(blocks[:whole], hashes[len(found) :])
            again = cache.store(holding, hashes[len(found) :])
            assert set(again) == there & set(hashes[len(found) :])
            held.append((hashes, holding, found + blocks))
        elif held:
            _, holding, blocks = held.pop(number % len(held))
            plain.release(blocks)
            cache.release(holding)
        cache.check()
        assert cache.free == len(plain.free)
        assert cache.cached_hashes() == {value: len(blocks) for value, blocks in plain.blocks_of.items() if blocks}
