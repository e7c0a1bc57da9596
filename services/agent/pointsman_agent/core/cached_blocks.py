"""Reference-counted copy of one instance's prefix cache, under block keys. Pure.

An engine names a block by its own hash and may hold the block several times. Routers need a set of 64-bit keys
(pointsman_common.core.block_keys) per tier. `CachedBlocks` maps engine hashes to keys. It counts references per (hash,
location), then blocks per (tier, key). Only the changes 0 -> 1 and 1 -> 0 of the second count become Deltas. A key of a
block that the engine does not hold is worse than a missing key, so blocks whose chain to the root is uncertain are ignored.

If the engine has several KV cache groups, `GroupedBlocks` determines the keys of its own cache, and other tiers are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import msgspec

from pointsman_agent.core.event_keys import block_keys, has_extra_keys, root_of
from pointsman_agent.core.grouped_blocks import FULL_KINDS, Group, GroupedBlocks, SavedNode, Unsupported
from pointsman_agent.core.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from pointsman_common.core.block_keys import KEY_TOKENS, digest_of
from pointsman_common.core.key_report_types import Delta, Tier

# Maximum number of deltas kept for routers that resume.
RING_DELTAS = 4096
_MASK = (1 << 64) - 1
# Attention kinds in which a hit needs every block before it. A chain of keys can express only these.
_CHAINED_KINDS = FULL_KINDS | {None, "unknown"}


# (medium, locality, ownership) as the engine reports them. The same block can be in several locations.
BlockLocation = tuple[str, str, str]


def location_of(event: BlockStored | BlockRemoved) -> BlockLocation:
    """Return the location that an event names. No medium means the engine's own cache."""
    return (event.medium or "GPU").upper(), event.locality or "", event.ownership or ""


def tier_of(place: BlockLocation) -> Tier:
    """Return the tier of a location. A CPU engine reports its own cache as GPU, too; CPU always means an offloading connector."""
    medium, locality, _ = place
    if medium == "GPU":
        return Tier.DEVICE
    return Tier.HOST if medium == "CPU" and locality != "REMOTE" else Tier.STORAGE


def _in_own_cache(event: BlockStored | BlockRemoved) -> bool:
    return tier_of(location_of(event)) is Tier.DEVICE


class Block(msgspec.Struct, gc=False):
    """One engine block: the keys of its tokens in order, and the number of references per location. `parent` is the hash of the
    block before it, and `depth` the number of blocks from the prompt's start up to it; None and 0 if they are not known."""

    keys: tuple[int, ...]
    refs: dict[BlockLocation, int] = {}
    parent: BlockHash | None = None
    depth: int = 0


@dataclass(slots=True)
class BlockEventCounts:
    """Counts of what the events so far did, in blocks."""

    batches: int = 0  # number of batches of events
    stored: int = 0  # named by storing events of all tiers, also if they are held already
    removed: int = 0  # named by removal events, known or not
    resets: int = 0  # number of resets that events told of
    unknown_removed: int = 0  # of the removed ones, those without a reference at the event's location
    orphans: int = 0  # of the stored ones, those whose keys were not known
    malformed: int = 0  # of the stored ones, those of events whose sizes or token ids do not fit


class CachedBlocks:
    """The reference-counted copy of one instance's prefix cache.

    After `restore`, `apply` and `clear` are the only mutators. `capacity_blocks` is the number of blocks of the engine's own
    cache (0: unknown). More references than that prove that some are counted twice. From then on the first removal of a
    block drops all of its references at that location. `speculative`: the engine decodes speculatively. This changes the rules of
    hits with several groups in a way that events do not show, so such an engine has no keys.
    """

    def __init__(
        self,
        model: str,
        *,
        capacity_blocks: int = 0,
        speculative: bool = False,
        ring: int = RING_DELTAS,
        latest_seq: int = 0,
    ) -> None:
        self.model = model
        self.capacity_blocks = capacity_blocks
        self.speculative = speculative
        self.latest_seq = latest_seq
        self.blocks: dict[BlockHash, Block] = {}
        self.grouped: GroupedBlocks | None = None
        """The blocks if the engine has several KV cache groups; `blocks` is then empty."""
        self.counts = BlockEventCounts()
        self.digest = 0
        self.extra_keys_seen = False
        """Whether a block had extra keys (cache salt, images). Offloading connectors' events do not carry them."""
        self.chunks: dict[tuple[BlockHash, BlockLocation], tuple[BlockHash, ...]] = {}
        """Offloaded chunks of several blocks: (hash of the last block, location) -> the blocks before it, from the end."""
        self.chunk_blocks = 0
        """Number of blocks of an offloaded chunk; 0 before the first chunk."""
        self.unusable_reason = ""
        """Why this instance's keys cannot be known; empty while they can. Once set, there are no keys and events are ignored."""
        self._keys: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._ring: deque[Delta] = deque(maxlen=ring)
        self._device_refs = 0
        self._refcounts_unsure = False
        # Blocks that left in the current batch. An offloading connector's events come after those of the engine's own cache.
        self._departed: dict[BlockHash, Block] = {}
        # Blocks whose keys were computed from an event without extra keys, and that the engine's own cache has not confirmed.
        self._assumed: set[BlockHash] = set()
        self._added: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._removed: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._cleared = False

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def key_count(self) -> int:
        """Number of (tier, key) pairs."""
        return sum(len(keys) for keys in self._keys.values())

    @property
    def empty(self) -> bool:
        """Whether there are no blocks. With several KV cache groups there can be blocks without a key."""
        return not self.blocks and (self.grouped is None or not self.grouped.nodes)

    @property
    def oldest_seq(self) -> int:
        """Sequence number of the first delta in the ring; latest_seq + 1 when the ring is empty."""
        return self._ring[0].seq if self._ring else self.latest_seq + 1

    @property
    def refcounts_unsure(self) -> bool:
        """True after references were found to be counted twice, until the next clear."""
        return self._refcounts_unsure

    def keys(self, tier: Tier) -> KeysView[int]:
        """Return the set of keys in `tier`."""
        return self._keys[tier].keys()

    def delta(self, seq: int) -> Delta:
        """Return the delta `seq`. Raises LookupError if the ring does not have it."""
        index = seq - self.oldest_seq
        if not 0 <= index < len(self._ring):
            raise LookupError(f"delta {seq} is not in the ring of {self.oldest_seq}..{self.latest_seq}")
        return self._ring[index]

    # -- changing ------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> bool:
        """Apply one batch and return whether the set changed. One batch appends at most one Delta per tier. Mutates."""
        if self.unusable_reason:
            return False
        self.counts.batches += 1
        batch = list(events)
        if self.grouped is not None or any(
            event.group_idx for event in batch if not isinstance(event, AllBlocksCleared)
        ):
            self._learn_groups(batch)
        cleared = stored_since = False
        for event in batch:
            if self.unusable_reason:
                break
            if isinstance(event, AllBlocksCleared):
                self.counts.resets += 1
                # The engine resets its caches between two steps, and its own cache reports first. So a second reset after new
                # blocks of its own cache is the reset of an offloading connector's cache (SimpleCPUOffloadConnector).
                if stored_since:
                    self._forget_offloaded()
                else:
                    self._forget()
                cleared = True
                continue
            if self.grouped is not None:
                self._apply_to_group(event, self.grouped)
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)
            stored_since = stored_since or (cleared and isinstance(event, BlockStored) and _in_own_cache(event))
        if self.unusable_reason:
            self._forget()
        self._departed.clear()
        return self._emit()

    def clear(self) -> bool:
        """Remove all blocks, for example after a gap that no replay could fill. Return whether the set changed. Mutates."""
        self._forget()
        return self._emit()

    def restore(self, blocks: Iterable[tuple[BlockHash, Block]]) -> None:
        """Fill empty cached blocks without emitting deltas: routers start from a snapshot or from `latest_seq`. Mutates."""
        assert not self.blocks
        for name, block in blocks:
            self.blocks[name] = block
            refs, block.refs = block.refs, {}
            for place, count in refs.items():
                self._hold([block], place, count)
            if not self.extra_keys_seen and all(tier_of(place) is not Tier.DEVICE for place in refs):
                self._assumed.add(name)
        for tier in Tier:
            self._added[tier].clear()

    def restore_grouped(self, groups: Mapping[int, Group], nodes: Iterable[SavedNode]) -> None:
        """Fill empty cached blocks of an engine with several KV cache groups, as `restore` does. Mutates."""
        assert not self.blocks
        self.grouped = self._group()
        self.grouped.set_groups(groups)
        self.grouped.restore(nodes)
        for tier in Tier:
            self._added[tier].clear()

    def check(self) -> None:
        """Assert that the incremental state equals the state computed from all blocks. For tests; O(cached blocks)."""
        expected: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        device_refs = 0
        for block in self.blocks.values():
            assert block.refs
            assert all(count > 0 for count in block.refs.values())
            for place, count in block.refs.items():
                tier = tier_of(place)
                device_refs += count if tier is Tier.DEVICE else 0
                for key in block.keys:
                    expected[tier][key] = expected[tier].get(key, 0) + 1
        if self.grouped is not None:
            assert not self.blocks
            for key in self.grouped.check():
                expected[Tier.DEVICE][key] = expected[Tier.DEVICE].get(key, 0) + 1
        assert expected == self._keys
        assert device_refs == self._device_refs
        digest = 0
        for tier in Tier:
            digest ^= digest_of(tier, self._keys[tier])
        assert digest == self.digest

    # -- events --------------------------------------------------------------------------------------------------

    def _group(self) -> GroupedBlocks:
        return GroupedBlocks(self.model, partial(self._gain, Tier.DEVICE), partial(self._lose, Tier.DEVICE))

    def _learn_groups(self, batch: Sequence[Event]) -> None:
        """Learn the groups of a batch's events before any is applied: an engine stores blocks of all groups in the same batch."""
        if self.speculative:
            self.unusable_reason = "the model has several KV cache groups, and the engine decodes speculatively"
            return
        stored = [event for event in batch if isinstance(event, BlockStored) and _in_own_cache(event)]
        grouped = self.grouped or self._group()
        try:
            if grouped.learn_groups(stored):
                self._forget()
                self.grouped = grouped
        except Unsupported as error:
            self.unusable_reason = str(error)

    def _apply_to_group(self, event: BlockStored | BlockRemoved, grouped: GroupedBlocks) -> None:
        count, own = len(event.block_hashes), _in_own_cache(event)
        if isinstance(event, BlockStored):
            self.counts.stored += count
            if not own:
                return
            try:
                self.counts.orphans += grouped.store(event)
            except OverflowError:
                self.counts.malformed += count
            if 0 < self.capacity_blocks < grouped.references:
                self._refcounts_unsure = True
            return
        self.counts.removed += count
        for name in event.block_hashes if own else ():
            if not grouped.remove(name, event.group_idx or 0, everything=self._refcounts_unsure):
                self.counts.unknown_removed += 1

    def _store(self, event: BlockStored) -> None:
        place = location_of(event)
        own = tier_of(place) is Tier.DEVICE
        hashes = event.block_hashes
        if event.kv_cache_spec_kind not in _CHAINED_KINDS:
            if own:
                self.unusable_reason = f"attention of kind {event.kv_cache_spec_kind} has no chained prefix"
                return
            # A block of one of several KV cache groups. The groups are learned from events of the engine's own cache.
            self.counts.stored += len(hashes)
            self.counts.orphans += len(hashes)
            return
        self.counts.stored += len(hashes)
        if not event.token_ids:
            self._store_named(hashes, place, is_chunk=event.block_size == 0)
            return
        if own and self._assumed:
            self._confirm(event)
        self.extra_keys_seen = self.extra_keys_seen or has_extra_keys(event)
        fresh = next((at for at, name in enumerate(hashes) if self._known(name) is None), len(hashes))
        if fresh:
            self._hold([self._revived(name) for name in hashes[:fresh]], place)
        if fresh == len(hashes):
            return
        assumed = not own and event.extra_keys is None
        if assumed and self.extra_keys_seen:
            # The prompt may have had a cache salt or images.
            self.counts.orphans += len(hashes) - fresh
            return
        size = event.block_size
        if size <= 0 or size % KEY_TOKENS or len(event.token_ids) != size * len(hashes):
            self.counts.malformed += len(hashes) - fresh
            return
        parent = self._parent_key(event, fresh)
        if parent is None:
            self.counts.orphans += len(hashes) - fresh
            return
        before = hashes[fresh - 1] if fresh else event.parent_block_hash
        depth = self._depth_after(before)
        per_block = size // KEY_TOKENS
        try:
            keys = block_keys(parent, event, fresh)
        except OverflowError:
            self.counts.malformed += len(hashes) - fresh
            return
        stored = []
        for at, name in enumerate(hashes[fresh:]):
            if self._known(name) is None:
                self.blocks[name] = Block(tuple(keys[at * per_block : (at + 1) * per_block]), {}, before, depth)
                if assumed:
                    self._assumed.add(name)
            stored.append(self._revived(name))
            before, depth = name, depth + 1 if depth else 0
        self._hold(stored, place)

    def _store_named(self, hashes: Sequence[BlockHash], place: BlockLocation, *, is_chunk: bool) -> None:
        """Apply an event without tokens. `is_chunk`: an offloading connector's placeholder, which names a chunk's last block."""
        for name in hashes:
            block = self._known(name)
            if block is None:
                self.counts.orphans += 1
                continue
            if not is_chunk or not block.depth:
                self._hold([self._revived(name)], place)
                continue
            # Chunks begin at multiples of their length, and a prompt's first chunk is offloaded first.
            length = gcd(self.chunk_blocks, block.depth)
            if length != self.chunk_blocks:
                self._shorten_chunks(length)
            if (name, place) in self.chunks or (length == 1 and place in block.refs):
                # A chunk is stored once. The connector's cache was reset without an event.
                continue
            self._hold([self._revived(name)], place)
            if length > 1:
                self.chunks[name, place] = members = self._before(block, length - 1)
                self._hold([self._revived(member) for member in members], place)

    def _before(self, block: Block, count: int) -> tuple[BlockHash, ...]:
        """Return up to `count` blocks before `block`, from the end, as far as they are known."""
        found: list[BlockHash] = []
        while len(found) < count and block.parent is not None and (parent := self._known(block.parent)) is not None:
            found.append(block.parent)
            block = parent
        return tuple(found)

    def _shorten_chunks(self, length: int) -> None:
        self.chunk_blocks = length
        for (name, place), members in self.chunks.items():
            self._release_members(members[length - 1 :], place)
            self.chunks[name, place] = members[: length - 1]

    def _release_members(self, members: Iterable[BlockHash], place: BlockLocation) -> None:
        for member in members:
            if (block := self.blocks.get(member)) is not None and place in block.refs:
                self._release(member, block, place, everything=False)

    def _known(self, name: BlockHash) -> Block | None:
        return self.blocks.get(name) or self._departed.get(name)

    def _revived(self, name: BlockHash) -> Block:
        """Return a block that `_known` returns, and have it in `blocks` again: it gets a reference."""
        block = self.blocks.get(name)
        if block is None:
            block = self.blocks[name] = self._departed.pop(name)
        return block

    def _depth_after(self, before: BlockHash | None) -> int:
        """Return the depth of the block after `before`; 0 if it is not known."""
        if before is None:
            return 1
        block = self._known(before)
        return block.depth + 1 if block is not None and block.depth else 0

    def _confirm(self, event: BlockStored) -> None:
        """Apply an event of the engine's own cache to assumed blocks: without extra keys it confirms its blocks; the first event
        with extra keys removes all assumed blocks."""
        if not has_extra_keys(event):
            self._assumed.difference_update(event.block_hashes)
            return
        for name in self._assumed & self.blocks.keys():
            self._drop(name)
        self._assumed.clear()

    def _drop(self, name: BlockHash) -> None:
        """Remove a block from all its locations, and forget it."""
        block = self.blocks[name]
        for place in list(block.refs):
            self._release(name, block, place, everything=True)
            self._release_members(self.chunks.pop((name, place), ()), place)
        self._departed.pop(name, None)

    def _parent_key(self, event: BlockStored, fresh: int) -> int | None:
        """Return the key before block `fresh` of the event, or None if the key is not known."""
        if fresh:
            return self.blocks[event.block_hashes[fresh - 1]].keys[-1]
        if event.parent_block_hash is None:
            return root_of(event, self.model)
        parent = self._known(event.parent_block_hash)
        return parent.keys[-1] if parent is not None else None

    def _remove(self, event: BlockRemoved) -> None:
        place = location_of(event)
        self.counts.removed += len(event.block_hashes)
        for name in event.block_hashes:
            block = self.blocks.get(name)
            if block is None or place not in block.refs:
                self.counts.unknown_removed += 1
                continue
            self._release(name, block, place, everything=self._refcounts_unsure)
            if place not in block.refs:
                self._release_members(self.chunks.pop((name, place), ()), place)

    def _hold(self, blocks: Sequence[Block], place: BlockLocation, count: int = 1) -> None:
        """Add `count` references to each of the blocks, as often as it is named."""
        tier = tier_of(place)
        gained: list[int] = []
        for block in blocks:
            held = block.refs.get(place, 0)
            block.refs[place] = held + count
            if not held:
                gained += block.keys
        if tier is Tier.DEVICE:
            self._device_refs += count * len(blocks)
            if 0 < self.capacity_blocks < self._device_refs:
                self._refcounts_unsure = True
        self._gain(tier, gained)

    def _gain(self, tier: Tier, keys: Sequence[int]) -> None:
        counts, removed = self._keys[tier], self._removed[tier]
        new = []
        for key in keys:
            counts[key] = holders = counts.get(key, 0) + 1
            if holders == 1:
                new.append(key)
        self.digest ^= digest_of(tier, new)
        back = removed.intersection(new)
        removed -= back
        self._added[tier].update(set(new) - back)

    def _release(self, name: BlockHash, block: Block, place: BlockLocation, *, everything: bool) -> None:
        tier = tier_of(place)
        count = block.refs[place]
        gone = count if everything else 1
        if tier is Tier.DEVICE:
            self._device_refs -= gone
        if count > gone:
            block.refs[place] = count - gone
            return
        del block.refs[place]
        if not block.refs:
            self._departed[name] = self.blocks.pop(name)
            self._assumed.discard(name)
        self._lose(tier, block.keys)

    def _lose(self, tier: Tier, keys: Sequence[int]) -> None:
        counts, added, removed = self._keys[tier], self._added[tier], self._removed[tier]
        factor = 2 * tier + 1
        for key in keys:
            holders = counts[key]
            if holders > 1:
                counts[key] = holders - 1
                continue
            del counts[key]
            self.digest ^= key * factor & _MASK
            if key in added:
                added.discard(key)
            else:
                removed.add(key)

    def _forget(self) -> None:
        """Remove all blocks of all tiers. An engine's reset names no medium, and a missing key is better than a wrong one."""
        self._refcounts_unsure = False
        # Number of keys before this batch: undo its additions and removals. A clear of an empty set is no change.
        before = self.key_count - sum(map(len, self._added.values())) + sum(map(len, self._removed.values()))
        self._cleared = self._cleared or before > 0
        self.blocks = {}
        if self.grouped is not None:
            self.grouped.forget()
        self.chunks = {}
        self._departed.clear()
        self._assumed.clear()
        self.digest = 0
        self._device_refs = 0
        for tier in Tier:
            self._keys[tier] = {}
            self._added[tier].clear()
            self._removed[tier].clear()

    def _forget_offloaded(self) -> None:
        """Remove all blocks of the tiers other than the engine's own cache."""
        self.chunks = {}
        for name, block in list(self.blocks.items()):
            for place in [location for location in block.refs if tier_of(location) is not Tier.DEVICE]:
                self._release(name, block, place, everything=True)
        self._departed.clear()

    def _emit(self) -> bool:
        changed = False
        for tier in Tier:
            added, removed = self._added[tier], self._removed[tier]
            if added or removed:
                self._push(tier, tuple(added), tuple(removed))
                added.clear()
                removed.clear()
                changed = True
        if self._cleared:
            self._push(Tier.DEVICE, (), ())
            changed = True
        return changed

    def _push(self, tier: Tier, added: Sequence[int], removed: Sequence[int]) -> None:
        self.latest_seq += 1
        self._ring.append(Delta(self.latest_seq, tier, tuple(added), tuple(removed), self._cleared))
        self._cleared = False
