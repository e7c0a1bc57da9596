"""Cached blocks of offloading connectors: chunks that are named by their last block, and events without extra keys."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman_agent.io.state_file import restore_cached_blocks, to_saved_state
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.key_report_types import Tier
from tests.support.kv_events import MODEL, hash_of, store, tokens_of

Path = tuple[int, ...]


def placeholder(path: Path, medium: str = "CPU") -> BlockStored:
    """As OffloadingConnector reports a chunk without self_describing_kv_events."""
    return BlockStored(block_hashes=[hash_of(path)], medium=medium, group_idx=0)


def gone(*paths: Path, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=[hash_of(path) for path in paths], medium=medium, group_idx=0)


def prefixes(path: Path) -> list[Path]:
    return [path[: at + 1] for at in range(len(path))]


def keys_of(*paths: Path, salt: str = "") -> set[int]:
    return {key for path in paths for key in prompt_keys(tokens_of(path), MODEL, cache_salt=salt)}


@pytest.fixture
def cached_blocks() -> CachedBlocks:
    return CachedBlocks(MODEL)


def host(cached_blocks: CachedBlocks) -> set[int]:
    cached_blocks.check()
    return set(cached_blocks.keys(Tier.HOST))


def test_a_chunk_that_is_named_by_its_last_block_has_all_its_blocks(cached_blocks: CachedBlocks) -> None:
    path = (1, 2, 3, 4, 5)
    cached_blocks.apply([store(path), placeholder(path[:2]), placeholder(path[:4])])
    assert cached_blocks.chunk_blocks == 2
    assert host(cached_blocks) == keys_of(path[:4])
    cached_blocks.apply([gone(*prefixes(path))])
    assert not cached_blocks.keys(Tier.DEVICE)
    assert host(cached_blocks) == keys_of(path[:4]), "the chunks outlive the engine's own blocks"
    cached_blocks.apply([gone(path[:4], medium="CPU")])
    assert host(cached_blocks) == keys_of(path[:2])
    cached_blocks.apply([gone(path[:2], medium="CPU")])
    assert not cached_blocks.blocks
    assert not cached_blocks.chunks


def test_chunks_that_part_share_blocks(cached_blocks: CachedBlocks) -> None:
    one, other = (1, 2), (1, 3)
    cached_blocks.apply([store(one), store(other, first=1), placeholder(one), placeholder(other)])
    assert host(cached_blocks) == keys_of(one, other)
    cached_blocks.apply([gone(other, medium="CPU")])
    assert host(cached_blocks) == keys_of(one)


def test_the_length_of_chunks_is_corrected(cached_blocks: CachedBlocks) -> None:
    """A second chunk that is seen first looks like one of twice the length."""
    path = (1, 2, 3, 4)
    cached_blocks.apply([store(path), placeholder(path)])
    assert host(cached_blocks) == keys_of(path)
    cached_blocks.apply([placeholder(path[:2])])
    assert host(cached_blocks) == keys_of(path)
    cached_blocks.apply([gone(path[:2], medium="CPU")])
    assert host(cached_blocks) == keys_of(path) - keys_of(path[:2])


def test_a_chunk_that_is_stored_as_its_blocks_are_evicted_is_known(cached_blocks: CachedBlocks) -> None:
    """The events of the engine's own cache precede the connector's in a batch."""
    path = (1, 2)
    cached_blocks.apply([store(path)])
    cached_blocks.apply([gone(*prefixes(path)), placeholder(path)])
    assert host(cached_blocks) == keys_of(path)
    cached_blocks.apply([gone(path, medium="CPU")])
    assert not cached_blocks.apply([placeholder(path)]), "what has left in an earlier batch is not known"
    assert cached_blocks.counts.orphans == 1


@pytest.mark.parametrize("length", [1, 2])
def test_a_chunk_that_is_stored_again_is_stored_once(cached_blocks: CachedBlocks, length: int) -> None:
    """While requests run, reset_prefix_cache?reset_external=true clears the connector's cache alone, which no event reports."""
    path = (1, 2)[:length]
    cached_blocks.apply([store(path), placeholder(path)])
    cached_blocks.apply([placeholder(path)])
    assert host(cached_blocks) == keys_of(path)
    cached_blocks.apply([gone(path, medium="CPU")])
    assert not host(cached_blocks)


def test_a_single_block_without_tokens_is_no_chunk(cached_blocks: CachedBlocks) -> None:
    """SimpleCPUOffloadConnector and Mooncake's store name each block and its size."""
    path = (1, 2)
    event = placeholder(path)
    event.block_size = 32
    cached_blocks.apply([store(path), event])
    assert host(cached_blocks) == keys_of(path) - keys_of(path[:1])


def test_chunks_are_kept_over_a_restart_of_the_agent(cached_blocks: CachedBlocks) -> None:
    path = (1, 2, 3, 4)
    cached_blocks.apply([store(path), placeholder(path[:2])])
    state = to_saved_state(cached_blocks, clean=True, process="p", incarnation="i", applied=0, applied_digest=0)
    again = restore_cached_blocks(state, capacity_blocks=0)
    assert (again.chunks, again.chunk_blocks, again.blocks) == (cached_blocks.chunks, 2, cached_blocks.blocks)
    again.apply([placeholder(path)])
    assert host(again) == keys_of(path)
    again.apply([gone(path[:2], medium="CPU"), gone(path, medium="CPU")])
    assert not host(again)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_random_chunks(seed: int, length: int) -> None:
    """Against a list of the chunks; a chunk is stored only after those before it, as vLLM does."""
    draw, cached_blocks = random.Random(seed), CachedBlocks(MODEL)
    device: Counter[Path] = Counter()
    chunks: set[Path] = set()
    for _ in range(60):
        path = tuple(draw.choice((1, 2)) for _ in range(draw.randint(1, 8)))
        events: list[BlockStored | BlockRemoved] = []
        if draw.random() < 0.5:
            missing = next((at for at, prefix in enumerate(prefixes(path)) if not device[prefix]), len(path))
            if missing < len(path):
                events.append(store(path, first=missing))
                device.update(prefixes(path)[missing:])
            for end in range(length, len(path) + 1, length):
                if path[:end] not in chunks:
                    chunks.add(path[:end])
                    events.append(placeholder(path[:end]))
        else:
            for prefix in [prefix for prefix in device if prefix[: len(path)] == path and device[prefix]]:
                device[prefix] = 0
                events.append(gone(prefix))
            for cached_chunk in [
                cached_chunk for cached_chunk in chunks if cached_chunk[: len(path)] == path and draw.random() < 0.5
            ]:
                chunks.discard(cached_chunk)
                events.append(gone(cached_chunk, medium="CPU"))
        cached_blocks.apply(events)
        held = {part for chunk in chunks for part in prefixes(chunk)[len(chunk) - length :]}
        assert host(cached_blocks) == {key for part in held for key in prompt_keys(tokens_of(part), MODEL)[-2:]}
        assert set(cached_blocks.keys(Tier.DEVICE)) == {
            key for part in +device for key in prompt_keys(tokens_of(part), MODEL)[-2:]
        }


def self_describing(path: Path) -> BlockStored:
    """As OffloadingConnector reports a chunk with self_describing_kv_events: with tokens, and without extra keys."""
    return store(path, medium="CPU")


def salted(path: Path) -> BlockStored:
    return store(path, extra_keys=[["salt"], *[None] * (len(path) - 1)])


def test_a_salted_prompt_that_was_offloaded_is_salted(cached_blocks: CachedBlocks) -> None:
    path = (1, 2)
    cached_blocks.apply([salted(path), self_describing(path)])
    cached_blocks.apply([gone(*prefixes(path))])
    assert host(cached_blocks) == keys_of(path, salt="salt")


def test_a_salted_prompt_whose_own_blocks_were_not_seen_is_left_out(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([salted((9,))])
    assert not cached_blocks.apply([self_describing((1, 2))])
    assert cached_blocks.counts.orphans == 2
    assert not host(cached_blocks)


def test_without_extra_keys_an_offloaded_prompt_is_known_by_its_tokens(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([self_describing((1, 2)), self_describing((3,))])
    assert host(cached_blocks) == keys_of((1, 2), (3,))


def test_the_first_extra_keys_remove_what_was_assumed(cached_blocks: CachedBlocks) -> None:
    """The prompt (1, 2) was salted, which its offloaded chunk does not tell."""
    cached_blocks.apply([self_describing((1, 2)), self_describing((3,)), store((3,))])
    cached_blocks.apply([salted((1, 2))])
    assert set(cached_blocks.keys(Tier.DEVICE)) == keys_of((3,)) | keys_of((1, 2), salt="salt")
    assert host(cached_blocks) == keys_of((3,)), "confirmed by the engine's own cache"
    cached_blocks.apply([self_describing((1, 2))])
    assert host(cached_blocks) == keys_of((3,)) | keys_of((1, 2), salt="salt")


def test_an_adapters_name_is_no_extra_key(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([store((1,), lora_name="sql", extra_keys=[["sql"]])])
    assert not cached_blocks.extra_keys_seen


def test_a_restarted_agent_does_not_trust_what_it_cannot_confirm(cached_blocks: CachedBlocks) -> None:
    cached_blocks.apply([self_describing((1,)), store((2,)), self_describing((2,))])
    state = to_saved_state(cached_blocks, clean=True, process="p", incarnation="i", applied=0, applied_digest=0)
    again = restore_cached_blocks(state, capacity_blocks=0)
    assert host(again) == keys_of((1,), (2,))
    again.apply([salted((1,))])
    assert host(again) == keys_of((2,))


def test_the_reset_of_a_connectors_cache_keeps_what_was_computed_since(cached_blocks: CachedBlocks) -> None:
    """SimpleCPUOffloadConnector reports its own reset, too, after the new blocks of the engine's own cache."""
    cached_blocks.apply([store((1, 2)), store((1, 2), medium="CPU")])
    cached_blocks.apply([AllBlocksCleared(), store((3, 4)), AllBlocksCleared(), store((3,), medium="CPU")])
    assert set(cached_blocks.keys(Tier.DEVICE)) == keys_of((3, 4))
    assert host(cached_blocks) == keys_of((3,))
    cached_blocks.apply([AllBlocksCleared(), AllBlocksCleared()])
    assert cached_blocks.key_count == 0
