"""vLLM's KV-event wire format: ZMQ frames to typed events. Pure.

A message has the frames `[topic, seq (8 bytes, big endian, from 0), payload]`. The payload is msgpack `[ts, [event, ...],
dp_rank]` with events as maps tagged `type` (vllm/distributed/kv_events.py, seen with 0.32). Fields that later versions add
are ignored. Fields that they omit have defaults.
"""

from __future__ import annotations

from typing import Any

import msgspec

# An engine hash: an int (vLLM's default) or the raw digest (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
BlockHash = int | bytes

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Full blocks that follow `parent_block_hash`.

    A placeholder (no token_ids, block_size 0) names blocks that an offloading connector moved, only by their hashes. In groups
    other than full attention, blocks that the engine does not cache are left out of `block_hashes` and `extra_keys`, but their
    tokens are in `token_ids`.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []  # block_size ids for each block
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    # One entry per block: LoRA name, multimodal (id, offset) pairs, cache salt and embedding digests, in this order, or None.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None  # in tokens
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that left `medium`."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The engine's own prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Changes of one engine step. `ts` is the engine's wall clock, in seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload frame. Raises msgspec.MsgspecError if it is not a batch of known events."""
    return _decoder.decode(payload)


def decode_seq(frame: bytes) -> int:
    """Return the sequence number in a frame of 8 bytes; -1 ends a replay."""
    return int.from_bytes(frame, "big", signed=True)


def encode_seq(seq: int) -> bytes:
    """Return the frame for `seq`."""
    return seq.to_bytes(8, "big", signed=True)
