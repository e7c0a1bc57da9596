"""Engines with several KV cache groups: the reported keys against vLLM's rules of a hit, computed from all blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pointsman_agent.io.state_file import restore_cached_blocks, to_saved_state
from pointsman_common.core.block_keys import KEY_TOKENS, prompt_keys
from pointsman_common.core.key_report_types import Tier
from pointsman_router.core.prefix.exact_index import PrefixIndex

MODEL = "tiny"
Path = tuple[int, ...]
# (kind, size in blocks of the chain, window in tokens)
Shape = tuple[str, int, int | None]
FULL: Shape = ("full_attention", 1, None)
DEPTH = 8


class Engine:
    """The blocks of an engine's groups, and the events that it sends. A path has one letter for each block of the chain."""

    def __init__(self, size: int, shapes: list[Shape]) -> None:
        self.size = size
        self.shapes = shapes
        self.held: list[Counter[Path]] = [Counter() for _ in shapes]

    def tokens(self, path: Path) -> list[int]:
        return [letter * 1000 + at for letter in path for at in range(self.size)]

    def store(self, path: Path, skipped: Collection[tuple[int, int]] = ()) -> list[Event]:
        """Store the blocks of all groups that have none; of (group, block) in `skipped` nothing is stored. As vLLM, it stores
        only whole multiples of all groups' blocks."""
        path = path[: len(path) - len(path) % lcm(*(step for _, step, _ in self.shapes))]
        events: list[Event] = []
        for index, (kind, step, window) in enumerate(self.shapes):
            blocks = [path[: (at + 1) * step] for at in range(len(path) // step)]
            first = next((at for at, block in enumerate(blocks) if not self.held[index][block]), len(blocks))
            if kind == "full_attention":
                stored = blocks[first:]
            else:
                stored = [block for at, block in enumerate(blocks[first:], first) if (index, at) not in skipped]
            if first == len(blocks):
                continue
            self.held[index].update(stored)
            events.append(
                BlockStored(
                    block_hashes=[hash(block) for block in stored],
                    parent_block_hash=hash(blocks[first - 1]) if first else None,
                    token_ids=self.tokens(path[first * step : len(blocks) * step]),
                    block_size=self.size * step,
                    medium="GPU",
                    group_idx=index,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                )
            )
        return events

    def evict(self, index: int, path: Path) -> list[Event]:
        if not self.held[index][path]:
            return []
        self.held[index] -= Counter([path])
        return [BlockRemoved(block_hashes=[hash(path)], medium="GPU", group_idx=index)]

    def hit(self, path: Path) -> int:
        """Length in tokens of the longest prefix of `path` that is a hit."""
        for length in range(len(path), 0, -1):
            if all(self._holds(index, path[:length]) for index in range(len(self.shapes))):
                return length * self.size
        return 0

    def _holds(self, index: int, prefix: Path) -> bool:
        kind, step, window = self.shapes[index]
        if len(prefix) % step:
            return False
        blocks = [prefix[: (at + 1) * step] for at in range(len(prefix) // step)]
        if kind == "mamba":
            blocks = blocks[-1:]
        elif window is not None:
            # The tokens that the next one sees, besides itself.
            first = max(0, len(prefix) * self.size - (window - 1)) // (self.size * step)
            blocks = blocks[min(first, len(blocks) - 1) :]
        return all(self.held[index][block] for block in blocks)


class Copy:
    """A router's copy of the keys, built from deltas."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.set_sparse("a", True)
        self.seq = 0

    def follow(self, cached_blocks: CachedBlocks) -> None:
        while self.seq < cached_blocks.latest_seq:
            self.seq += 1
            delta = cached_blocks.delta(self.seq)
            if delta.cleared:
                self.index.drop("a")
            assert self.index.remove("a", delta.removed) == len(delta.removed)
            assert self.index.add("a", delta.added) == len(delta.added)

    def hit(self, tokens: list[int], block_size: int) -> int:
        found = self.index.leading_blocks(prompt_keys(tokens, MODEL), ["a"])["a"] * KEY_TOKENS
        return found - found % block_size


SHAPES = st.lists(
    st.one_of(
        st.tuples(st.just("full_attention"), st.sampled_from([1, 2]), st.none()),
        st.tuples(
            st.just("sliding_window"), st.sampled_from([1, 1, 2, 3]), st.integers(1, 130) | st.integers(1, 9_000)
        ),
        st.tuples(st.just("mamba"), st.sampled_from([1, 2]), st.none()),
    ),
    min_size=1,
    max_size=3,
)
PATHS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=DEPTH).map(tuple)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"), PATHS, st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, DEPTH)), max_size=6)
        ),
        st.tuples(st.just("evict"), PATHS, st.integers(0, 3)),
        st.tuples(st.just("evict"), PATHS, st.integers(0, 3)),
        st.tuples(st.just("sweep"), st.integers(0, 3), st.integers(0, DEPTH)),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    min_size=1,
    max_size=20,
)


@given(
    # The larger ones have several blocks for an anchor, or one, or several anchors in a block.
    size=st.sampled_from([16, 32, 400, 1_040, 2_048]),
    others=SHAPES,
    place=st.integers(0, 3),
    operations=OPERATIONS,
    prompts=st.lists(PATHS, min_size=4, max_size=8),
    restart=st.integers(0, 20),
)
def test_predicted_hits_are_those_of_the_rules(
    size: int,
    others: list[Shape],
    place: int,
    operations: list[tuple[str, Any, Any]],
    prompts: list[Path],
    restart: int,
) -> None:
    shapes = [*others[:place], FULL, *others[place:]]
    engine, cached_blocks, copy = Engine(size, shapes), CachedBlocks(MODEL), Copy()
    for number, (kind, one, other) in enumerate(operations):
        events: list[Event] = []
        if kind == "store":
            events = engine.store(one, other)
            prompts = [*prompts, one]
        elif kind == "evict" and other < len(shapes):
            events = engine.evict(other, one)
        elif kind == "sweep" and one < len(shapes):
            # What a window has passed: the first blocks of all chains.
            for path in [path for path in engine.held[one] if len(path) <= other]:
                events += engine.evict(one, path)
        elif kind == "clear":
            engine.held = [Counter() for _ in shapes]
            events = [AllBlocksCleared()]
        cached_blocks.apply(events)
        cached_blocks.check()
        copy.follow(cached_blocks)
        for prompt in prompts:
            assert copy.hit(engine.tokens(prompt), size) == engine.hit(prompt), prompt
        if number == restart:
            before = {tier: set(cached_blocks.keys(tier)) for tier in Tier}
            state = to_saved_state(cached_blocks, clean=True, process="", incarnation="", applied=0, applied_digest=0)
            cached_blocks = restore_cached_blocks(state, capacity_blocks=0)
            cached_blocks.check()
            assert {tier: set(cached_blocks.keys(tier)) for tier in Tier} == before
    assert not cached_blocks.unusable_reason
    assert not cached_blocks.counts.unknown_removed


def pair(*shapes: Shape, size: int = 16) -> tuple[Engine, CachedBlocks]:
    return Engine(size, list(shapes)), CachedBlocks(MODEL)


def test_without_gaps_the_keys_are_those_of_a_single_group() -> None:
    engine, cached_blocks = pair(FULL, ("sliding_window", 1, 64), size=32)
    cached_blocks.apply(engine.store((1, 2, 3, 4)))
    assert set(cached_blocks.keys(Tier.DEVICE)) == set(prompt_keys(engine.tokens((1, 2, 3, 4)), MODEL))


def test_behind_a_gap_only_the_end_of_a_hit_has_a_key() -> None:
    """Other keys of the block would make a prompt that leaves the prefix inside it a hit of the block before."""
    engine, cached_blocks = pair(FULL, ("sliding_window", 1, 33), size=32)
    cached_blocks.apply(engine.store((1, 2, 3, 4)) + engine.evict(1, (1,)) + engine.evict(1, (1, 2)))
    keys = prompt_keys(engine.tokens((1, 2, 3, 4)), MODEL)
    assert set(cached_blocks.keys(Tier.DEVICE)) == {keys[5], keys[6], keys[7]}


def test_a_window_is_found_before_the_chain_names_its_tokens() -> None:
    engine, cached_blocks = pair(("sliding_window", 1, 64), FULL)
    cached_blocks.apply(engine.store((1, 2, 3, 4, 5, 6), {(0, 0), (0, 1)}))
    assert engine.hit((1, 2, 3, 4, 5, 6)) == 96
    keys = prompt_keys(engine.tokens((1, 2, 3, 4, 5, 6)), MODEL)
    assert set(cached_blocks.keys(Tier.DEVICE)) == {keys[5]}


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([FULL, ("chunked_local_attention", 1, None)], "chunked_local_attention"),
        ([FULL, ("sliding_window", 1, None)], "sliding_window"),
        ([("sliding_window", 1, 64), ("mamba", 1, None)], "no full attention"),
        ([("full_attention", 2, None), ("sliding_window", 1, 64)], "smaller than full attention's"),
    ],
)
def test_groups_whose_hits_are_not_known_end_the_keys(shapes: list[Shape], reason: str) -> None:
    engine, cached_blocks = pair(*shapes)
    cached_blocks.apply(engine.store((1, 2)))
    assert reason in cached_blocks.unusable_reason
    assert cached_blocks.key_count == 0


def test_speculative_decoding_ends_the_keys_of_several_groups_only() -> None:
    engine, _ = pair(FULL, ("mamba", 1, None))
    cached_blocks = CachedBlocks(MODEL, speculative=True)
    events = engine.store((1, 2))
    cached_blocks.apply(events[:1])
    assert cached_blocks.key_count == 2
    cached_blocks.apply(events[1:])
    assert "speculatively" in cached_blocks.unusable_reason
    assert cached_blocks.key_count == 0


def test_blocks_of_other_tiers_are_ignored() -> None:
    engine, cached_blocks = pair(FULL, ("mamba", 1, None))
    cached_blocks.apply(engine.store((1, 2)))
    before = cached_blocks.latest_seq
    offloaded = BlockStored(block_hashes=[hash((1,))], medium="CPU", group_idx=1)
    assert not cached_blocks.apply([offloaded, BlockRemoved(block_hashes=[hash((1,))], medium="CPU", group_idx=1)])
    assert (cached_blocks.latest_seq, cached_blocks.unusable_reason) == (before, "")


def test_an_offloaded_block_that_comes_before_all_others_ends_no_keys() -> None:
    engine, cached_blocks = pair(FULL, ("sliding_window", 1, 32))
    cached_blocks.apply(
        [BlockStored(block_hashes=[hash((1,))], medium="CPU", group_idx=1, kv_cache_spec_kind="sliding_window")]
    )
    cached_blocks.apply(engine.store((1, 2)))
    assert cached_blocks.unusable_reason == ""
    assert cached_blocks.key_count == 2


def test_the_reset_of_a_connectors_cache_leaves_blocks_that_were_computed_since() -> None:
    engine, cached_blocks = pair(FULL, ("mamba", 1, None))
    events = engine.store((1, 2))
    cached_blocks.apply(events)
    cached_blocks.apply([AllBlocksCleared(), *events, AllBlocksCleared()])
    cached_blocks.check()
    assert cached_blocks.key_count == 2
    cached_blocks.apply([AllBlocksCleared()])
    assert cached_blocks.empty
    assert cached_blocks.key_count == 0


def test_blocks_without_a_key_are_not_empty() -> None:
    engine, cached_blocks = pair(FULL, ("mamba", 1, None))
    cached_blocks.apply(engine.store((1, 2)))
    cached_blocks.apply([AllBlocksCleared()])
    cached_blocks.apply([event for event in engine.store((3,)) if isinstance(event, BlockStored) and event.group_idx])
    assert cached_blocks.key_count == 0
    assert not cached_blocks.empty
    cached_blocks.clear()
    assert cached_blocks.empty


def test_more_references_than_blocks_drop_all_references_of_a_block() -> None:
    engine = Engine(16, [FULL, ("mamba", 1, None)])
    cached_blocks = CachedBlocks(MODEL, capacity_blocks=5)
    events = engine.store((1, 2))
    cached_blocks.apply(events + events)
    assert cached_blocks.refcounts_unsure
    cached_blocks.apply([BlockRemoved(block_hashes=[hash((1, 2))], medium="GPU", group_idx=1)])
    assert cached_blocks.key_count == 1
    cached_blocks.check()
