"""Block keys: a chain over 16-token blocks that names a prefix and the conditions under which it was computed."""

from __future__ import annotations

import random
import struct
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pointsman_common.core.block_keys import KEY_SCHEME, KEY_TOKENS, digest_of, extend_keys, prompt_keys, root_key
from tests.support.repository import REPOSITORY

TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=100)
BLOCKS = st.lists(st.lists(TOKEN, min_size=KEY_TOKENS, max_size=KEY_TOKENS), max_size=6)
KEY = st.integers(0, 2**64 - 1)
KEYS = st.sets(KEY, max_size=20)
TIER = st.integers(1, 3)


def test_keys_are_as_the_scheme_says() -> None:
    tokens = list(range(1000, 1032))
    root = xxh3_64_intdigest(b"xxh3-64/16/1\x1fmodel\x1f\x1f")
    first = xxh3_64_intdigest(struct.pack("<16I", *tokens[:16]), root)
    second = xxh3_64_intdigest(struct.pack("<16I", *tokens[16:]), first)
    assert prompt_keys(tokens, "model") == [first, second]


def test_keys_stay_what_they_were() -> None:
    """Agents, routers and gateways of different builds must agree on keys. A change of these values needs a new KEY_SCHEME."""
    assert root_key("m", "l", "s") == 0xDDF6_49AF_6A20_B168
    assert prompt_keys(range(16), "m") == [18_076_687_531_197_960_048]


@given(TOKENS)
def test_one_key_for_each_full_block(tokens: list[int]) -> None:
    assert len(prompt_keys(tokens, "m")) == len(tokens) // KEY_TOKENS


@given(TOKENS, TOKENS)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], more: list[int]) -> None:
    keys = prompt_keys(tokens, "m")
    assert prompt_keys(tokens + more, "m")[: len(keys)] == keys


@given(BLOCKS, TOKENS, KEY, st.binary(max_size=4))
def test_a_chain_may_be_made_in_pieces(blocks: list[list[int]], rest: list[int], parent: int, extra: bytes) -> None:
    head = [token for block in blocks for token in block]
    keys = extend_keys(parent, head, extra)
    # `extra` is said once: what follows inherits it through the chain.
    joined = keys + (extend_keys(keys[-1], rest) if keys else extend_keys(parent, rest, extra))
    assert extend_keys(parent, head + rest, extra) == joined


@given(BLOCKS.filter(bool), st.data())
def test_a_changed_token_changes_its_key_and_all_that_follow(blocks: list[list[int]], data: st.DataObject) -> None:
    tokens = [token for block in blocks for token in block]
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], data.draw(TOKEN.filter(lambda token: token != tokens[at])), *tokens[at + 1 :]]
    before, after = prompt_keys(tokens, "m"), prompt_keys(changed, "m")
    block = at // KEY_TOKENS
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"lora": "x"},
        {"cache_salt": "x"},
        {"lora": "y"},
        {"model": "mx"},
        {"lora": "x", "cache_salt": "x"},
    ],
)
def test_conditions_change_every_key(other: dict[str, str]) -> None:
    tokens = list(range(64))
    ours, theirs = prompt_keys(tokens, "m"), prompt_keys(tokens, **{"model": "m", **other})
    assert not set(ours) & set(theirs)


def test_lora_and_salt_do_not_stand_for_each_other() -> None:
    assert root_key("m", "x", "") != root_key("m", "", "x")


@given(st.binary(min_size=1, max_size=16), st.binary(min_size=1, max_size=16))
def test_extra_changes_keys(one: bytes, other: bytes) -> None:
    tokens = list(range(32))
    plain, first, second = (set(extend_keys(7, tokens, extra)) for extra in (b"", one, other))
    assert not plain & first
    assert (first == second) == (one == other)


def test_the_recipe_in_the_protos_has_the_right_example() -> None:
    keys = prompt_keys(list(range(32)), "m")
    recipe = " ".join((REPOSITORY / "protos/pointsman/router/v1/placement.proto").read_text().replace("//", "").split())
    assert f"keys are {keys[0]:#x} and {keys[1]:#x}." in recipe
    assert f'"{KEY_SCHEME}"' in recipe


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_outside_u32_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        extend_keys(0, [token] * KEY_TOKENS)


@given(TIER, KEYS, KEYS)
def test_digests_of_disjoint_sets_xor(tier: int, ours: set[int], theirs: set[int]) -> None:
    theirs -= ours
    assert digest_of(tier, ours | theirs) == digest_of(tier, ours) ^ digest_of(tier, theirs)


@given(TIER, st.lists(KEY, unique=True, max_size=20), st.randoms(use_true_random=False))
def test_digest_has_no_order_and_is_undone_by_itself(tier: int, keys: list[int], rng: random.Random) -> None:
    shuffled = list(keys)
    rng.shuffle(shuffled)
    assert digest_of(tier, shuffled) == digest_of(tier, keys)
    one_by_one = reduce(lambda digest, key: digest ^ digest_of(tier, [key]), keys, digest_of(tier, keys))
    assert one_by_one == 0


@given(TIER, KEYS)
def test_digest_fits_64_bits_and_follows_the_proto(tier: int, keys: set[int]) -> None:
    digest = digest_of(tier, keys)
    assert 0 <= digest < 2**64
    assert digest == reduce(lambda d, key: d ^ (key * (2 * tier + 1) % 2**64), keys, 0)


@given(TIER, st.sampled_from([127, 128, 129, 255, 256, 257, 700]), st.randoms(use_true_random=False))
def test_many_keys_have_the_digest_that_they_have_one_by_one(tier: int, count: int, rng: random.Random) -> None:
    keys = [rng.choice((2**64 - 1, rng.getrandbits(64))) for _ in range(count)]
    assert digest_of(tier, keys) == reduce(lambda digest, key: digest ^ digest_of(tier, [key]), keys, 0)


# Multiples of 2^62, four keys, are left out: for them some of the factors 3, 5 and 7 give equal products modulo 2^64.
@given(KEY.filter(lambda key: key % 2**62))
def test_digest_tells_tiers_apart(key: int) -> None:
    assert len({digest_of(tier, [key]) for tier in (1, 2, 3)}) == 3
