"""Publishes KV events as vLLM 0.32 does (vllm/distributed/kv_events.py): msgpack over ZMQ PUB, with a ROUTER socket for replay.

Frames are (topic, sequence number as 8 bytes big endian from 0, payload). The payload is the array [ts, events, dp_rank];
each event is a map with its type under "type".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pointsman_common.core.addresses import in_brackets
from pointsman_common.io.listen_errors import CannotListen, reason_of
from pointsman_lab.engine.block_cache import AllCleared, BlocksRemoved
from pointsman_lab.engine.block_cache import BlocksStored as Stored
from pointsman_lab.engine.host_tier import OffloadedRemoved, OffloadedStored

# Sequence number that ends a replay.
END_SEQ = (-1).to_bytes(8, "big", signed=True)
# Number of batches that are kept for replay.
BUFFER_STEPS = 10_000
# Maximum number of queued messages of the PUB socket for each subscriber.
HIGH_WATER_MARK = 100_000


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, tag_field="type"):
    """Blocks that became cached. Field names and defaults are vLLM's."""

    block_hashes: list[int]  # in the order of the prompt
    parent_block_hash: int | None  # of the block before the first one; None: the prompt begins with the first one
    token_ids: list[int]  # of all these blocks, in order
    block_size: int  # tokens per block
    lora_id: int | None  # always None: there are no LoRA adapters
    medium: str | None  # GPU, CPU or STORAGE
    lora_name: str | None  # always None
    # By block, what its hash includes beside tokens and parent (the cache salt, in a prompt's first block); None: not reported.
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None  # number of the KV cache group; always 0, there is only one
    kv_cache_spec_kind: str | None = None  # always full_attention
    session_id: str | None = None  # of the request whose blocks they are; None: none, or they are in a tier below


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, tag_field="type"):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, tag_field="type"):
    """The whole cache was reset."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """All events of one engine step."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def to_wire(events: Sequence[object], block_size: int) -> list[WireEvent]:
    """Return the block events among `events`, in vLLM's form."""
    wire: list[WireEvent] = []
    for event in events:
        if isinstance(event, Stored):
            extra: list[tuple[Any, ...] | None] = [None] * len(event.hashes)
            if event.parent is None and event.cache_salt:
                extra[0] = (event.cache_salt,)
            wire.append(
                BlockStored(
                    block_hashes=list(event.hashes),
                    parent_block_hash=event.parent,
                    token_ids=list(event.token_ids),
                    block_size=block_size,
                    lora_id=None,
                    medium="GPU",
                    lora_name=None,
                    extra_keys=extra,
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                    session_id=event.session_id or None,
                )
            )
        elif isinstance(event, BlocksRemoved):
            # vLLM reports each eviction in its own event.
            wire += [BlockRemoved(block_hashes=[value], medium="GPU", group_idx=0) for value in event.hashes]
        elif isinstance(event, OffloadedStored):
            wire += _offloaded(event, block_size)
        elif isinstance(event, OffloadedRemoved):
            wire.append(BlockRemoved(block_hashes=list(event.hashes), medium=event.medium, group_idx=0))
        elif isinstance(event, AllCleared):
            wire.append(AllBlocksCleared())
    return wire


def _offloaded(event: OffloadedStored, block_size: int) -> list[WireEvent]:
    """Return one event for each block, as OffloadingConnector reports them with self_describing_kv_events: without extra keys."""
    return [
        BlockStored(
            block_hashes=[value],
            parent_block_hash=parent,
            token_ids=list(event.token_ids[index * block_size : (index + 1) * block_size]),
            block_size=block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        for index, (value, parent) in enumerate(zip(event.hashes, event.parents, strict=True))
    ]


class KVEventPublisher:
    """The PUB and ROUTER sockets of one engine; port 0 selects a free port. Must be closed with stop()."""

    def __init__(self, host: str, port: int, replay_port: int) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        try:
            self.endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._replay, host, replay_port)
        except CannotListen:
            self._close()
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._next_seq = 0
        self._task = asyncio.get_running_loop().create_task(self._serve_replay())

    def publish(self, ts: float, events: list[WireEvent]) -> None:
        """Send one batch. `ts` is the wall clock in s, as in vLLM."""
        payload = self._encoder.encode(KVEventBatch(ts=ts, events=events, data_parallel_rank=0))
        self._pub.send_multipart((b"", self._next_seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._buffer.append((self._next_seq, payload))
        self._next_seq += 1

    def source(self) -> dict[str, Any]:
        """Return this publisher's part of the answer to GET /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFER_STEPS,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": 100_000,
            "topic": "",
        }

    async def stop(self) -> None:
        """Close the sockets. Events that are published and not yet sent are lost, as with an engine that dies."""
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:
            self._close()

    def _close(self) -> None:
        # The replay socket belongs to its shadow context, so destroy() does not close it.
        self._replay.close(linger=0)
        self._context.destroy(linger=0)

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue  # vLLM drops such requests, too.
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for seq, payload in list(self._buffer):
                if seq >= first:
                    await self._replay.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", END_SEQ, b""))


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    """Bind and return the endpoint as vLLM reports it: the selected port with its address, "*" as the address of all
    interfaces. Raises CannotListen."""
    # vLLM's "*" is IPv4 alone.
    address = "*" if host == "0.0.0.0" else in_brackets(host)
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        reason = reason_of(OSError(error.errno, error.strerror))
        raise CannotListen(f"KV events at tcp://{address}:{port}: {reason}") from None
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"tcp://{address}:{bound.rpartition(':')[2]}"
