"""CachedBlocks against a model that keeps every physical block in a list and recomputes everything."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode_batch
from pointsman_common.core.block_keys import digest_of, extend_keys, prompt_keys, root_key
from pointsman_common.core.key_report_types import Delta, Tier
from tests.support.kv_events import BLOCK, MODEL, PER_BLOCK, hash_of, pairs_of, store, tokens_of


class Replica:
    """A router's copy of the keys, built from deltas; it asserts that each delta is exact."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()
        self.seq = 0

    def take(self, delta: Delta) -> None:
        assert delta.seq == self.seq + 1
        self.seq = delta.seq
        if delta.cleared:
            assert self.pairs, "a clear that clears nothing"
            self.pairs.clear()
        for key in delta.added:
            assert (delta.tier, key) not in self.pairs
            self.pairs.add((delta.tier, key))
        for key in delta.removed:
            self.pairs.remove((delta.tier, key))
        assert delta.cleared or delta.added or delta.removed

    def follow(self, cached_blocks: CachedBlocks) -> None:
        while self.seq < cached_blocks.latest_seq:
            self.take(cached_blocks.delta(self.seq + 1))


PATHS = st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple)
# (medium, ownership): two owners in one tier hold the same keys apart from each other.
PLACES = st.sampled_from([("GPU", None), (None, None), ("CPU", None), ("cpu", "a"), ("STORAGE", "a"), ("STORAGE", "b")])
TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "STORAGE": Tier.STORAGE}
BlockLocation = tuple[str | None, str | None]


def held_at(path: tuple[int, ...], place: BlockLocation) -> tuple[tuple[int, ...], str, str | None]:
    return path, (place[0] or "GPU").upper(), place[1]


# Clears are rare: with frequent clears, hardly any block would be held twice.
KINDS = st.sampled_from(["store"] * 8 + ["remove"] * 6 + ["placeholder"] * 2 + ["clear"])
OPERATIONS = st.lists(st.tuples(KINDS, PATHS, st.integers(0, 3), PLACES), min_size=1, max_size=6)


class ShadowMachine(RuleBasedStateMachine):
    """Random events in batches of one to many; after every batch everything must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.cached_blocks = CachedBlocks(MODEL, ring=1000)
        self.replica = Replica()
        self.held: Counter[tuple[tuple[int, ...], str, str | None]] = Counter()
        self.departed: set[tuple[int, ...]] = set()
        self.cleared = self.stored_since = False

    def knows(self, path: tuple[int, ...]) -> bool:
        return path in self.departed or any(held == path for held, _, _ in +self.held)

    @rule(operations=OPERATIONS)
    def batch(self, operations: list[tuple[str, tuple[int, ...], int, BlockLocation]]) -> None:
        self.departed.clear()
        self.cleared = self.stored_since = False
        events = [
            getattr(self, kind)(path, min(first, len(path) - 1), place) for kind, path, first, place in operations
        ]
        changed = self.cached_blocks.apply(events)
        assert changed == (self.replica.seq < self.cached_blocks.latest_seq)

    def store(self, path: tuple[int, ...], first: int, place: BlockLocation) -> Event:
        known = first == 0 or self.knows(path[:first])
        for at in range(first, len(path)):
            known = known or self.knows(path[: at + 1])
            if known:
                self.held[held_at(path[: at + 1], place)] += 1
        self.stored_since = self.stored_since or (self.cleared and place[0] in ("GPU", None))
        return store(path, first, place[0], ownership=place[1])

    def placeholder(self, path: tuple[int, ...], first: int, place: BlockLocation) -> Event:
        if self.knows(path):
            self.held[held_at(path, place)] += 1
        self.stored_since = self.stored_since or (self.cleared and place[0] in ("GPU", None))
        return BlockStored(block_hashes=[hash_of(path)], block_size=BLOCK, medium=place[0], ownership=place[1])

    def remove(self, path: tuple[int, ...], first: int, place: BlockLocation) -> Event:
        if self.held[held_at(path, place)]:
            self.held[held_at(path, place)] -= 1
            if not self.knows(path):
                self.departed.add(path)
        return BlockRemoved(block_hashes=[hash_of(path)], medium=place[0], ownership=place[1])

    def clear(self, path: tuple[int, ...], first: int, place: BlockLocation) -> Event:
        for held in list(self.held):
            if not self.stored_since or held[1] != "GPU":
                del self.held[held]
        self.departed.clear()
        self.cleared = True
        return AllBlocksCleared()

    @rule(seldom=st.integers(0, 7))
    def gap(self, seldom: int) -> None:
        if not seldom:
            self.cached_blocks.clear()
            self.held.clear()

    @invariant()
    def agrees(self) -> None:
        self.replica.follow(self.cached_blocks)
        expected = {
            (TIERS[medium], key)
            for path, medium, _ in +self.held
            for key in prompt_keys(tokens_of(path), MODEL)[-PER_BLOCK:]
        }
        assert pairs_of(self.cached_blocks) == expected
        assert self.replica.pairs == expected
        assert self.cached_blocks.key_count == len(expected)
        digest = 0
        for tier, key in expected:
            digest ^= digest_of(tier, [key])
        assert self.cached_blocks.digest == digest
        self.cached_blocks.check()


ShadowMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20)
TestShadowMachine = ShadowMachine.TestCase


@pytest.fixture
def cached_blocks() -> CachedBlocks:
    return CachedBlocks(MODEL)


def test_the_first_delta_has_number_one_and_one_batch_makes_one_delta_per_tier(cached_blocks: CachedBlocks) -> None:
    assert (cached_blocks.oldest_seq, cached_blocks.latest_seq) == (1, 0)
    cached_blocks.apply([store((1, 2)), store((3,)), store((1,), medium="CPU")])
    assert [(cached_blocks.delta(seq).tier, len(cached_blocks.delta(seq).added)) for seq in (1, 2)] == [
        (Tier.DEVICE, 3 * PER_BLOCK),
        (Tier.HOST, PER_BLOCK),
    ]
    assert cached_blocks.latest_seq == 2


def test_a_block_stored_and_removed_in_one_batch_says_nothing(cached_blocks: CachedBlocks) -> None:
    assert not cached_blocks.apply([store((1,)), BlockRemoved(block_hashes=[hash_of((1,))], medium="GPU")])
    assert cached_blocks.latest_seq == 0


def test_two_physical_blocks_need_two_removals(cached_blocks: CachedBlocks) -> None:
    gone = BlockRemoved(block_hashes=[hash_of((1,))], medium="GPU")
    cached_blocks.apply([store((1,)), store((1,))])
    assert not cached_blocks.apply([gone])
    assert cached_blocks.apply([gone])
    assert cached_blocks.key_count == 0


def test_more_references_than_blocks_make_the_first_removal_win() -> None:
    cached_blocks = CachedBlocks(MODEL, capacity_blocks=2)
    cached_blocks.apply([store((1,)), store((1,)), store((1,))])
    assert cached_blocks.refcounts_unsure
    cached_blocks.apply([BlockRemoved(block_hashes=[hash_of((1,))], medium="GPU")])
    assert cached_blocks.key_count == 0
    cached_blocks.check()


def test_an_unknown_parent_and_all_below_it_are_left_out(cached_blocks: CachedBlocks) -> None:
    assert not cached_blocks.apply([store((1, 2, 3), first=1), store((1, 2, 3, 4), first=3)])
    assert cached_blocks.counts.orphans == 3
    assert cached_blocks.blocks == {}


def test_removing_what_is_unknown_is_counted_and_nothing_else(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([store((1,))])
    assert not cached_blocks.apply(
        [BlockRemoved(block_hashes=[5], medium="GPU"), BlockRemoved(block_hashes=[hash_of((1,))], medium="CPU")]
    )
    assert cached_blocks.counts.unknown_removed == 2


def test_groups_of_unknown_kinds_end_the_keys(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([store((1,))])
    assert cached_blocks.apply([store((2,), group_idx=1), store((3,))])
    assert "several KV cache groups" in cached_blocks.unusable_reason
    assert cached_blocks.key_count == 0
    assert cached_blocks.delta(2).cleared
    assert not cached_blocks.apply([store((1,))])


def test_a_sliding_window_ends_the_keys(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([store((1,), kv_cache_spec_kind="sliding_window")])
    assert "sliding_window" in cached_blocks.unusable_reason


def test_salt_and_adapter_enter_the_root(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply(
        [
            store((1, 2), extra_keys=[["salt"], None]),
            store((3,), lora_name="sql", extra_keys=[["sql"]]),
            store((4, 5), lora_name="sql", extra_keys=[["sql", "salt"], ["sql"]]),
        ]
    )
    expected = (
        set(prompt_keys(tokens_of((1, 2)), MODEL, cache_salt="salt"))
        | set(prompt_keys(tokens_of((3,)), MODEL, lora="sql"))
        | set(prompt_keys(tokens_of((4, 5)), MODEL, "sql", "salt"))
    )
    assert set(cached_blocks.keys(Tier.DEVICE)) == expected


def test_images_make_other_keys_from_their_block_on(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([store((1, 2, 3), extra_keys=[["salt"], [["image", 4]], None])])
    first = extend_keys(root_key(MODEL, "", "salt"), tokens_of((1,)))
    second = extend_keys(first[-1], tokens_of((2,)), msgspec.msgpack.encode([["image", 4]]))
    third = extend_keys(second[-1], tokens_of((3,)))
    assert set(cached_blocks.keys(Tier.DEVICE)) == {*first, *second, *third}


@pytest.mark.parametrize("size", [0, 8, 24])
def test_blocks_that_are_no_multiple_of_a_key_are_left_out(cached_blocks: CachedBlocks, size: int) -> None:
    cached_blocks.apply([BlockStored(block_hashes=[1], token_ids=list(range(max(size, 1))), block_size=size)])
    assert cached_blocks.key_count == 0
    assert cached_blocks.counts.malformed == 1


def test_masked_blocks_are_left_out(cached_blocks: CachedBlocks) -> None:
    """With sliding windows vLLM sends fewer hashes than the tokens have blocks, so hashes cannot be assigned to blocks."""
    event = store((1, 2, 3))
    event.block_hashes.pop(1)
    cached_blocks.apply([event])
    assert cached_blocks.counts.malformed == 2


def test_token_ids_that_no_u32_holds_are_left_out(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([BlockStored(block_hashes=[1], token_ids=[-1] * BLOCK, block_size=BLOCK)])
    assert cached_blocks.counts.malformed == 1
    cached_blocks.check()


def test_the_ring_is_bounded(cached_blocks: CachedBlocks) -> None:
    cached_blocks = CachedBlocks(MODEL, ring=3)
    for letter in range(1, 6):
        cached_blocks.apply([store((letter,))])
    assert (cached_blocks.oldest_seq, cached_blocks.latest_seq) == (3, 5)
    with pytest.raises(LookupError):
        cached_blocks.delta(2)
    with pytest.raises(LookupError):
        cached_blocks.delta(6)


def test_the_wire_format_is_vllms() -> None:
    """As vllm 0.32 encodes it: maps tagged `type`, without default values; unknown fields are ignored."""
    payload = msgspec.msgpack.encode(
        [
            1.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [2**64 - 1, b"raw"],
                    "parent_block_hash": None,
                    "token_ids": list(range(64)),
                    "block_size": 32,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                    "session_id": "s",
                    "tomorrow": 1,
                },
                {"type": "BlockRemoved", "block_hashes": [b"raw"], "medium": "GPU", "group_idx": 0},
                {"type": "AllBlocksCleared"},
            ],
            0,
        ]
    )
    batch = decode_batch(payload)
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
    cached_blocks = CachedBlocks(MODEL)
    cached_blocks.apply(batch.events[:2])
    assert list(cached_blocks.keys(Tier.DEVICE)) == prompt_keys(list(range(32)), MODEL)
