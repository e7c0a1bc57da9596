"""The engine model's KV blocks: reference counts, prefix cache and LRU eviction, as vLLM's BlockPool keeps them. Pure.

Modelled on vllm/v1/core/block_pool.py (0.32): a freed block keeps its contents and its hash until it is handed out again; blocks
without a hash are reused first, the others in the order in which they were freed, the tail of a sequence before its head; two
requests that compute the same block at once hold two physical blocks of one hash, stored twice and removed twice.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks became findable: `hashes` in order, after the block `parent` (None: the first), holding `token_ids`."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    session_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One physical block of each hash was evicted; another one of the same hash may remain."""

    hashes: tuple[int, ...]


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


class BlockCache:
    """`capacity` physical blocks of `block_size` tokens."""

    def __init__(self, capacity: int, block_size: int) -> None:
        if capacity < 1 or block_size < 1:
            raise ValueError(f"capacity {capacity} and block_size {block_size} must be at least 1")
        self.capacity = capacity
        self.block_size = block_size
        self._references = [0] * capacity
        self._hash_of: list[int | None] = [None] * capacity
        self._blocks_of: dict[int, dict[int, None]] = {}
        # Next to be handed out first. An OrderedDict, because a hit takes blocks out of its middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))

    @property
    def free(self) -> int:
        """Blocks that no request holds; those with a hash can still be hit."""
        return len(self._free)

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`, at most `limit`. Does not hold them."""
        found: list[int] = []
        for value in hashes[:limit]:
            blocks = self._blocks_of.get(value)
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds, so that holding them lowers `free`."""
        return sum(not self._references[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Hand out `count` blocks; also the hashes that were evicted with their contents. ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        removed: list[int] = []
        for block in blocks:
            self._references[block] = 1
            evicted = self._hash_of[block]
            if evicted is not None:
                self._hash_of[block] = None
                self._forget(block, evicted)
                removed.append(evicted)
        return blocks, removed

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Make `blocks`, which the caller holds and has filled, findable under `hashes`."""
        for block, value in zip(blocks, hashes, strict=True):
            self._hash_of[block] = value
            self._blocks_of.setdefault(value, {})[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given from its head to its tail."""
        hashed: list[int] = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._free[block] = None
                self._free.move_to_end(block, last=False)
            else:
                hashed.append(block)
        self._free.update(OrderedDict.fromkeys(hashed))

    def clear(self) -> bool:
        """Forget every hash. False, and nothing done, while any block is held."""
        if len(self._free) != self.capacity:
            return False
        self._hash_of = [None] * self.capacity
        self._blocks_of = {}
        return True

    def cached_hashes(self) -> dict[int, int]:
        """Every findable hash and how many physical blocks have it."""
        return {value: len(blocks) for value, blocks in self._blocks_of.items()}

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (for tests)."""
        assert set(self._free) == {block for block, count in enumerate(self._references) if count == 0}
        assert all(count >= 0 for count in self._references)
        findable = {(block, value) for value, blocks in self._blocks_of.items() for block in blocks}
        assert findable == {(block, value) for block, value in enumerate(self._hash_of) if value is not None}

    def _forget(self, block: int, value: int) -> None:
        blocks = self._blocks_of[value]
        del blocks[block]
        if not blocks:
            del self._blocks_of[value]
