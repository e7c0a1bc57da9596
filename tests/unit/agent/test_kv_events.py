"""KV events in the forms of vLLM's versions, and sequence frames, by example."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pointsman_agent.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_seq,
    encode_seq,
    lifetime_of,
    unknown_fields,
)
from tests.support.repository import REPOSITORY

TOKENS = list(range(32))
RECORDED: dict[str, str] = json.loads((REPOSITORY / "tests/data/kv_events.json").read_text())
STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": 6,
    "token_ids": TOKENS,
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["adapter"]],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
STORED_ARRAY = ["BlockStored", [7], 6, TOKENS, 32, None, "GPU", "adapter", [["adapter"]], 0, "full_attention"]


def pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


@pytest.mark.parametrize("stored", [STORED_MAP, STORED_ARRAY])
def test_both_forms_give_the_same_event(stored: object) -> None:
    batch = decode_batch(pack(stored))
    [event] = batch.events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([7], 6, TOKENS)
    assert (event.block_size, event.medium, event.lora_name, event.extra_keys) == (32, "GPU", "adapter", [["adapter"]])
    assert (event.group_idx, event.kv_cache_spec_kind, batch.ts, batch.data_parallel_rank) == (
        0,
        "full_attention",
        1.5,
        0,
    )


def test_array_events_of_all_types_may_end_early_or_go_on() -> None:
    batch = decode_batch(
        pack(
            ["BlockStored", [b"x"], None, TOKENS, 32, None],
            ["BlockRemoved", [7], "GPU", 0, None, None, "later"],
            ["AllBlocksCleared"],
        )
    )
    stored, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_hashes) == (None, [b"x"])
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [7]
    assert isinstance(cleared, AllBlocksCleared)


def test_a_batch_that_is_a_map_itself_is_read() -> None:
    payload = msgspec.msgpack.encode({"ts": 1.0, "events": [STORED_MAP], "data_parallel_rank": 3})
    batch = decode_batch(payload)
    assert (len(batch.events), batch.data_parallel_rank) == (1, 3)


@pytest.mark.parametrize("form", ["map", "array"])
def test_unknown_types_and_fields_are_skipped_and_named(form: str) -> None:
    if form == "map":
        payload = pack({"type": "BlockMigrated", "to": 1}, {**STORED_MAP, "new_field": 3})
        names = {"BlockStored.new_field"}
    else:
        payload = pack(["BlockMigrated", 1], [*STORED_ARRAY, None, None, None, None, None, "new"])
        names = {"BlockStored.16"}
    batch = decode_batch(payload)
    assert (len(batch.events), batch.unknown) == (1, ("BlockMigrated",))
    assert unknown_fields(payload) == names
    assert unknown_fields(pack(STORED_MAP, STORED_ARRAY)) == set()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode(3),
        pack(3),
        pack([]),
        pack({}),
        pack(["BlockStored", "no list"]),
        pack({"type": "BlockStored"}),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(payload)


def test_look_ahead_tokens_are_read() -> None:
    [event] = decode_batch(pack({**STORED_MAP, "lookahead_token_ids": [5]})).events
    assert isinstance(event, BlockStored)
    assert event.lookahead_token_ids == [5]


def test_a_sequence_frame_may_begin_with_the_publishers_lifetime() -> None:
    lifetime = bytes(range(16))
    assert (decode_seq(encode_seq(5)), lifetime_of(encode_seq(5))) == (5, b"")
    assert (decode_seq(lifetime + encode_seq(5)), lifetime_of(lifetime + encode_seq(5))) == (5, lifetime)
    assert decode_seq(lifetime + encode_seq(-1)) == -1
    for length in (0, 7, 9, 16, 32):
        with pytest.raises(ValueError, match=f"{length} bytes"):
            decode_seq(bytes(length))


@pytest.mark.parametrize("version", RECORDED)
def test_what_each_version_encodes_is_read(version: str) -> None:
    """Recorded with the classes of vLLM's own wheels (tests/support/engines/record_kv_events.py): arrays in 0.22 and 0.23."""
    payload = bytes.fromhex(RECORDED[version])
    assert isinstance(msgspec.msgpack.decode(payload)[1][0], list) is (version < "0.24")
    batch = decode_batch(payload)
    assert (batch.ts, batch.data_parallel_rank, batch.unknown, unknown_fields(payload)) == (1.5, 1, (), set())
    whole, short, removed, cleared = batch.events
    assert isinstance(whole, BlockStored)
    assert (whole.block_hashes, whole.parent_block_hash, whole.token_ids) == ([7, 8], 6, TOKENS)
    assert (whole.block_size, whole.lora_id, whole.lora_name, whole.medium) == (16, 3, "red", "GPU")
    assert (whole.extra_keys, whole.group_idx) == ([["red"], None], 0)
    assert (whole.kv_cache_spec_kind, whole.kv_cache_spec_sliding_window) == ("full_attention", 128)
    assert (whole.locality, whole.ownership, whole.session_id) == (
        "LOCAL" if version >= "0.26" else None,
        "tier" if version >= "0.29" else None,
        "s1" if version >= "0.31" else None,
    )
    assert whole.lookahead_token_ids == ([[16], [32]] if version >= "0.33" else None)
    assert isinstance(short, BlockStored)
    assert (short.token_ids, short.extra_keys, short.group_idx, short.lookahead_token_ids) == (TOKENS, None, None, None)
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([7, 8], "GPU", 0)
    assert isinstance(cleared, AllBlocksCleared)
