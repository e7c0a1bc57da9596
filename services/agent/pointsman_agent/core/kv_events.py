"""vLLM's KV-event wire format: ZMQ frames to typed events. Pure.

A message has the frames `[topic, sequence, payload]`. The payload is msgpack: `[ts, [event, ...], data_parallel_rank]`, or, in
builds between two releases, a map with these names. An event has one of two forms (vllm/distributed/kv_events.py):

- **Array**, vLLM 0.22 and 0.23, and everything before vLLM's change #42892: the type, then the fields in the order in which the
  engine's class declares them. Later versions only appended: BlockStored `[type, block_hashes, parent_block_hash, token_ids,
  block_size, lora_id, medium, lora_name, extra_keys, group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window]`, BlockRemoved
  `[type, block_hashes, medium, group_idx]`, AllBlocksCleared `[type]`. An array may end early.
- **Map** tagged `type`, from 0.24 on; seen on the wire with 0.32, which has the fields of `BlockStored` below up to `session_id`.
  0.33 adds `lookahead_token_ids`, if blocks are hashed with the tokens after them (EAGLE-type speculation without a KV
  connector).

Fields that a version omits have defaults. Event types and fields that are not known are skipped, and named by `DecodedBatch`
and `unknown_fields`, so that they can be logged.

The sequence frame has 8 bytes, big endian, from 0. vLLM's change #57789 (open) puts the 16 bytes of the publisher's lifetime id
before them; its idle heartbeats are taken to be messages without a payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

# An engine hash: an int (vLLM's default) or the raw digest (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
BlockHash = int | bytes

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQ_BYTES, _LIFETIME_BYTES = 8, 16


# The order of the fields of these two is that of vLLM's classes, because it is that of the array form.


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Full blocks that follow `parent_block_hash`.

    A placeholder (no token_ids, block_size 0) names blocks that an offloading connector moved, only by their hashes. In groups
    other than full attention, blocks that the engine does not cache are left out of `block_hashes` and `extra_keys`, but their
    tokens are in `token_ids`.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []  # block_size ids for each block
    block_size: int = 0  # tokens per block; 0: a placeholder
    lora_id: int | None = None  # the adapter's number in the engine; deprecated by vLLM, not read here
    medium: str | None = None  # such as "GPU" or "CPU", in any case; None: the engine's own cache
    lora_name: str | None = None  # the adapter of the prompt; None: the base model
    # One entry per block: LoRA name, multimodal (id, offset) pairs, cache salt and embedding digests, in this order, or None.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None  # KV cache group of the blocks; None counts as 0
    kv_cache_spec_kind: str | None = None  # attention of the group, such as "sliding_window" or "mamba"; None: not sent
    kv_cache_spec_sliding_window: int | None = None  # in tokens
    locality: str | None = None  # "LOCAL" or "REMOTE", as seen from the publisher; None: not sent
    ownership: str | None = None  # secondary offloading tier that holds the blocks; None: none is named
    session_id: str | None = None  # of the request that stored or reused the blocks; not read here
    lookahead_token_ids: Any = None  # the tokens after a block that its hash covers, too


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that left `medium`."""

    block_hashes: list[BlockHash]  # each loses one of its references at this location
    medium: str | None = None
    group_idx: int | None = None  # as in BlockStored
    locality: str | None = None  # as in BlockStored
    ownership: str | None = None  # as in BlockStored


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The engine's own prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(BlockStored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _Mixed(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _MixedMap(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Changes of one engine step. `ts` is the engine's wall clock, in seconds. `unknown`: types of events that were skipped."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None
    unknown: tuple[str, ...] = ()


_maps = msgspec.msgpack.Decoder(_Maps)
_arrays = msgspec.msgpack.Decoder(_Arrays)
_mixed = msgspec.msgpack.Decoder(_Mixed)
_mixed_map = msgspec.msgpack.Decoder(_MixedMap)
_map_event = msgspec.msgpack.Decoder(Event)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_KNOWN = {kind.__name__: msgspec.structs.fields(kind) for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def decode_batch(payload: bytes) -> DecodedBatch:
    """Decode one payload frame. Events of unknown types are skipped. Raises msgspec.MsgspecError if it is no batch, or has an
    event of a known type in another form, and UnicodeDecodeError or RecursionError for a value that cannot be decoded."""
    for decoder in (_maps, _arrays):
        try:
            batch = decoder.decode(payload)
            return DecodedBatch(batch.ts, batch.events, batch.data_parallel_rank)
        except msgspec.ValidationError:
            pass  # another form, or an unknown type
    mixed = _mixed_batch(payload)
    events: list[Event] = []
    unknown: list[str] = []
    for raw in mixed.events:
        plain = msgspec.msgpack.decode(raw)
        kind = _type_of(plain)
        if kind not in _KNOWN:
            unknown.append(kind)
            continue
        events.append((_map_event if isinstance(plain, dict) else _array_event).decode(raw))
    return DecodedBatch(mixed.ts, events, mixed.data_parallel_rank, tuple(unknown))


def unknown_fields(payload: bytes) -> set[str]:
    """Return the fields of a decodable batch's events that are not known: TYPE.FIELD, or TYPE.NUMBER in the array form. Slow.

    Raises as `decode_batch` does, also for the values of these fields.
    """
    found: set[str] = set()
    for raw in _mixed_batch(payload).events:
        plain = msgspec.msgpack.decode(raw)
        kind = _type_of(plain)
        if (known := _KNOWN.get(kind)) is None:
            continue
        if isinstance(plain, dict):
            found |= {f"{kind}.{name}" for name in plain.keys() - {field.name for field in known} - {"type"}}
        else:
            found |= {f"{kind}.{number}" for number in range(len(known) + 1, len(plain))}
    return found


def decode_seq(frame: bytes) -> int:
    """Return the sequence number in a frame; -1 ends a replay. Raises ValueError for a frame of an unknown length."""
    if len(frame) not in (_SEQ_BYTES, _LIFETIME_BYTES + _SEQ_BYTES):
        raise ValueError(f"a sequence frame of {len(frame)} bytes")
    return int.from_bytes(frame[-_SEQ_BYTES:], "big", signed=True)


def lifetime_of(frame: bytes) -> bytes:
    """Return the publisher's lifetime id in a sequence frame; empty if the frame has none."""
    return frame[:-_SEQ_BYTES]


def encode_seq(seq: int) -> bytes:
    """Return the frame for `seq`."""
    return seq.to_bytes(_SEQ_BYTES, "big", signed=True)


def _mixed_batch(payload: bytes) -> _Mixed | _MixedMap:
    try:
        return _mixed.decode(payload)
    except msgspec.ValidationError:
        return _mixed_map.decode(payload)


def _type_of(event: object) -> str:
    """Return an event's type; raises msgspec.ValidationError if it has none."""
    kind = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    if not isinstance(kind, str):
        raise msgspec.ValidationError("an event without a type")
    return kind
