"""What the index keeps, and the work of one call, at sizes that the Hypothesis machine does not reach."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_common.core.block_keys import ANCHOR_KEYS, anchor_of
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.prefix import exact_index
from pointsman_router.core.prefix.exact_index import SHARDS, SWEEP_AFTER, IndexFull, PrefixIndex
from tests.support.interpreter_steps import Steps
from tests.support.router_values import join, state

KEYS = 40_000
EACH = KEYS // SWEEP_AFTER


def full(sweep_keys: int = 2_000) -> PrefixIndex:
    """A full index: SWEEP_AFTER owners, whose drop starts a sweep, and one more that stays. No two owners share a key."""
    index, rng = PrefixIndex(max_keys=KEYS + EACH, sweep_keys=sweep_keys), random.Random(1)
    for number in range(SWEEP_AFTER + 1):
        index.add(f"i{number}", [rng.getrandbits(64) for _ in range(EACH)])
    return index


def test_what_many_owners_held_is_freed_a_part_at_a_time() -> None:
    index = full()
    for number in range(SWEEP_AFTER):
        index.drop(f"i{number}")
    assert len(index) == KEYS + EACH, "dropping frees nothing yet"
    turns = []
    while len(index) > EACH:
        before = len(index)
        index.sweep()
        turns.append(before - len(index))
        index.check_invariants()
        # A sweep visits whole dicts, so a turn may exceed `sweep_keys` by the keys of one dict.
        assert 0 < turns[-1] <= 2_000 + 2 * (KEYS + EACH) // SHARDS
    assert len(turns) > 10
    assert index.count(f"i{SWEEP_AFTER}") == len(index.keys_of(f"i{SWEEP_AFTER}")) == EACH


def test_room_is_made_at_once_where_it_is_needed_but_not_by_a_pass_over_all() -> None:
    index, keys = full(), list(range(EACH))
    index.drop("i0")
    before = len(index)
    with pytest.raises(IndexFull):
        index.add("new", keys)
    assert 0 < before - len(index) < EACH, "a pass over all keys would have made room"
    while not index.has_room(EACH):
        index.sweep()
    assert index.add("new", keys) == EACH
    index.check_invariants()


def test_what_is_swept_to_make_room_is_not_counted_as_there() -> None:
    index = PrefixIndex(max_keys=1_000)
    index.add("a", range(500))
    index.add("b", range(500, 1_000))
    index.drop("a")
    assert index.add("c", [*range(400), *range(2_000, 2_100)]) == 500
    index.check_invariants()
    with pytest.raises(IndexFull):
        index.add("c", [*range(400), 3_000])
    index.check_invariants()


def test_masks_that_were_in_use_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_index, "MAX_SHARED", 500)
    index, rng = PrefixIndex(), random.Random(2)
    keys = range(100)
    for _ in range(3_000):
        owner = f"i{rng.randrange(40)}"
        some = rng.sample(keys, 5)
        (index.add if rng.random() < 0.5 else index.remove)(owner, some)
    assert len(index._shared) <= 500 + len(keys)
    index.check_invariants()


def test_the_router_sweeps_as_time_passes() -> None:
    router = state()
    for life in range(SWEEP_AFTER + 1):
        join(router, "a", life, list(range(life * 100, life * 100 + 100)), incarnation=str(life))
    assert len(router.index) > 100
    router.handle(ev.Tick(), 1.0)
    assert len(router.index) == 100
    router.check_invariants()


class Counted(Sequence[int]):
    """Keys that count how often one of them is looked at."""

    def __init__(self, count: int) -> None:
        self.keys, self.reads = range(1, count + 1), 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return self.keys[at]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["add", "drop", "sweep", "look"]))), st.integers(0, 8)
)
def test_a_mask_follows_the_changes_of_owners(calls: list[tuple[str, str]], kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_index, "MAX_CHANGES", kept)
        index, generation, mask = PrefixIndex(), -1, 0
        for owner, call in calls:
            if call == "add":
                index.add(owner, [ord(owner)])
            elif call == "drop":
                index.drop(owner)
            elif call == "sweep":
                index._sweep_on()
            else:
                generation, mask = index.generation, index.mask_since(generation, mask, "abcd")
                assert mask == index.mask("abcd")
            index.check_invariants()


def test_an_owner_that_comes_again_costs_the_same_however_many_there_are() -> None:
    """A thousand engines may restart at once, and each is in several indexes."""
    steps = []
    for owners in (20, 500):
        index = PrefixIndex()
        for number in range(owners):
            index.add(f"i{number}", [number])
        generation, mask, names = index.generation, index.mask(index.bits()), set(index.bits())
        with Steps() as taken:
            index.drop("i7")
            index.add("i7", [7])
            assert index.mask_since(generation, mask, names).bit_count() == owners
        steps.append(taken.count)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("held", [0, 1, 2, 5, 63, 64, 65, 8_124, 8_125])
@pytest.mark.parametrize("start", [0, 1, 60])
def test_where_a_run_ends_is_found_by_a_few_look_ups(held: int, start: int) -> None:
    index, keys = PrefixIndex(), Counted(8_125)
    index.add("a", keys.keys[:held])
    index.add("b", keys.keys)
    assert index.run_end("a", keys, start, 8_125) == max(start, held)
    assert keys.reads <= 2 * max(held - start, 1).bit_length() + 1
    assert index.run_end("a", keys, start, min(held, start + 3)) == max(start, min(held, start + 3))
    assert index.run_end("nobody", keys, start, 8_125) == start


KEPT = st.lists(st.tuples(st.integers(0, 299), st.integers(0, 300)), min_size=1, max_size=12)


@given(KEPT)
def test_a_sparse_owner_is_searched_from_its_first_missing_anchor(held: list[tuple[int, int]]) -> None:
    """Each owner has all blocks of the prompt up to some length by the chain, and one hit at most, which is shorter."""
    index, keys = PrefixIndex(), [key << 20 for key in range(1, 301)]
    for number, (hit, length) in enumerate(held):
        anchors = [anchor_of(key) for key in keys[ANCHOR_KEYS - 1 : length : ANCHOR_KEYS]]
        index.add(str(number), [*anchors, *keys[hit : hit + 1][: length > hit]])
        index.set_sparse(str(number), True)
    expected = {str(number): hit + 1 if length > hit else 0 for number, (hit, length) in enumerate(held)}
    assert index.leading_blocks(keys, expected) == expected
    counts = [count for count, _ in index.runs(keys, index.mask(expected))]
    assert counts == sorted(counts, reverse=True)


def test_sparse_owners_cost_few_look_ups_where_they_have_nothing() -> None:
    index, keys = PrefixIndex(), Counted(8_125)
    for number in range(100):
        index.set_sparse(str(number), True)
        index.add(str(number), [1_000_000 + number, *map(anchor_of, keys.keys[63:200:64])])
    assert index.leading_blocks(keys, map(str, range(100))) == {str(number): 0 for number in range(100)}
    assert keys.reads <= 8_125 // ANCHOR_KEYS + 4 * ANCHOR_KEYS


TURN = st.tuples(
    st.lists(st.integers(0, 60), min_size=12, max_size=12),  # how many of the prompt's keys each owner has
    st.integers(0, 60),  # length of the prompt
    st.integers(0, 60),  # how many of its keys are those of the turn before
)


@given(st.lists(TURN, min_size=2, max_size=6), st.booleans())
def test_the_next_prompt_of_a_session_is_found_as_any_other(
    turns: list[tuple[list[int], int, int]], sparse: bool
) -> None:
    index, owners, keys, new = PrefixIndex(), [f"i{number}" for number in range(12)], list(range(1, 61)), 100
    index.set_sparse("i0", sparse)
    for held, length, common in turns:
        keys = [*keys[:common], *range(new, new + 60 - common)]
        new += 60
        for owner, count in zip(owners, held, strict=True):
            index.drop(owner)
            index.add(owner, [*keys[:count], *map(anchor_of, keys[ANCHOR_KEYS - 1 : count : ANCHOR_KEYS])])
        expected = {owner: min(count, length) for owner, count in zip(owners, held, strict=True)}
        assert index.leading_blocks(keys[:length], owners, session="s") == expected
        some = {owner: expected[owner] for owner in owners[::3]}
        assert index.leading_blocks(keys[:length], owners, some, session="s") == expected


def test_the_next_prompt_of_a_session_takes_two_look_ups_for_each_end() -> None:
    index, keys = PrefixIndex(), Counted(8_125)
    owners = {f"i{number}": 100 * number + 1 for number in range(64)}
    for owner, count in owners.items():
        index.add(owner, keys.keys[:count])
    for most in (1_000, 2 * len(owners) + 1):
        keys.reads = 0
        assert index.leading_blocks(keys, owners, session="s") == owners
        assert keys.reads <= most


def test_the_ends_of_few_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_index, "MAX_RECENT", 5)
    index, keys = PrefixIndex(), range(1, 101)
    owners = {f"i{number}": 3 * number + 1 for number in range(20)}
    for owner, count in owners.items():
        index.add(owner, keys[:count])
    for number in range(10):
        index.leading_blocks(keys, owners, session=f"s{number}")
        index.leading_blocks(keys[:10], list(owners)[:2], session=f"few{number}")
        index.leading_blocks(keys, owners, session="s1")
    assert list(index._recent) == ["s6", "s7", "s8", "s9", "s1"]
