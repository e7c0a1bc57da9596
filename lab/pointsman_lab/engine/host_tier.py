"""The host tier of an engine model: a prefix cache of blocks in host memory, as vLLM's CPUOffloadingManager keeps it. Pure.

Modelled on vllm/v1/kv_offload/cpu/manager.py and policies/lru.py (0.32) with one block in a chunk. A block is cached by its hash,
once. While it is written it can be neither read nor evicted, and while a transfer reads it it cannot be evicted. The block that
was used least recently is evicted first. A block is used when it is first stored, and when a request ends that has stored, loaded
or offered it; the first block of a prompt then counts as used last, so that a prompt loses its end first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import msgspec

_WRITING = -1
# vLLM's names of the tiers, in events.
HOST, STORAGE = "CPU", "STORAGE"


class OffloadedStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks can be read from the tier `medium`. Each follows the block in `parents` (None: it is the first) and has its share of
    `token_ids`; both are empty for blocks without tokens."""

    medium: str
    hashes: tuple[int, ...]
    parents: tuple[int | None, ...] = ()
    token_ids: tuple[int, ...] = ()


class OffloadedRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks were evicted from the tier `medium`."""

    medium: str
    hashes: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What became of offered blocks: those to `write`, those that are `ready` already, and those `evicted` to make room. Blocks
    that another transfer writes are in none of them. Not `accepted`: there is no room for those to write, and nothing changed."""

    write: tuple[int, ...]
    ready: tuple[int, ...]
    evicted: tuple[int, ...] = ()
    accepted: bool = True


class HostTier:
    """At most `capacity` blocks, by their hashes. Raises ValueError for a capacity below 1."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least 1")
        self.capacity = capacity
        # By hash: _WRITING, or the number of transfers that read the block. The least recently used block is first.
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._writing = 0
        # Number of blocks that no transfer reads or writes.
        self._evictable = 0

    def __len__(self) -> int:
        """Return the number of blocks that can be read."""
        return len(self._blocks) - self._writing

    def leading(self, blocks: Sequence[int]) -> tuple[int, bool]:
        """Return how many leading `blocks` are cached, and whether all of these can be read."""
        cached, found, readable = self._blocks, 0, True
        for block in blocks:
            users = cached.get(block)
            if users is None:
                break
            found += 1
            if users == _WRITING:
                readable = False
        return found, readable

    def hashes(self) -> list[int]:
        """Return all blocks that can be read, the least recently used one first."""
        return [block for block, users in self._blocks.items() if users != _WRITING]

    def offer(self, blocks: Sequence[int]) -> Offer:
        """Offer blocks to store. Those to write get their place now, and written() ends that, unless not enough blocks can be
        evicted. Offered blocks are not evicted. Mutates."""
        cached = self._blocks
        write = tuple([block for block in blocks if block not in cached])
        ready = tuple([block for block in blocks if cached.get(block, _WRITING) != _WRITING])
        evicted: tuple[int, ...] = ()
        missing = len(write) - (self.capacity - len(cached))
        if missing > 0:
            found = self._least_recently_used(missing, protected=blocks) if missing <= self._evictable else None
            if found is None:
                return Offer(write, ready, accepted=False)
            evicted = found
            for block in evicted:
                del cached[block]
            self._evictable -= missing
        cached.update(dict.fromkeys(write, _WRITING))
        self._writing += len(write)
        return Offer(write, ready, evicted)

    def written(self, blocks: Iterable[int]) -> None:
        """Make blocks readable that offer() gave their place. Mutates."""
        for block in blocks:
            assert self._blocks[block] == _WRITING, block
            self._blocks[block] = 0
            self._writing -= 1
            self._evictable += 1

    def pin(self, blocks: Iterable[int]) -> None:
        """Protect readable blocks from eviction until unpin(), because a transfer reads them. Mutates."""
        for block in blocks:
            users = self._blocks[block]
            assert users != _WRITING, block
            self._evictable -= not users
            self._blocks[block] = users + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """End one pin() of these blocks. Mutates."""
        for block in blocks:
            users = self._blocks[block] - 1
            assert users >= 0, block
            self._blocks[block] = users
            self._evictable += not users

    def use(self, blocks: Iterable[int]) -> None:
        """Mark blocks as used, the last of them as the most recently used. Blocks that are not cached are ignored. Mutates."""
        cached = self._blocks
        for block in blocks:
            if block in cached:
                cached.move_to_end(block)

    def clear(self) -> None:
        """Remove all blocks. Mutates."""
        self._blocks.clear()
        self._writing = self._evictable = 0

    def check(self) -> None:
        """Raise AssertionError if the internal counts are inconsistent (for tests)."""
        users = self._blocks.values()
        assert len(users) <= self.capacity
        assert self._writing == sum(count == _WRITING for count in users)
        assert self._evictable == sum(count == 0 for count in users)
        assert all(count >= _WRITING for count in users)

    def _least_recently_used(self, count: int, protected: Collection[int]) -> tuple[int, ...] | None:
        """Return the `count` blocks to evict next; None if there are fewer."""
        kept, found = frozenset(protected), []
        for block, users in self._blocks.items():
            if not users and block not in kept:
                found.append(block)
                if len(found) == count:
                    return tuple(found)
        return None
