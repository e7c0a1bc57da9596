"""State of a sender: the prompts that it computes for other engines, and the receivers that wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferMetadata,
    TransferRegion,
)

from pointsman_connector.layerwise.progress import ComputedBlocks, Delivery


@dataclass
class Receiver:
    """A worker of another engine that waits for a prompt's KV, with its description of its memory."""

    delivery: Delivery
    request_id: str
    meta: MooncakeXferMetadata
    blocks: list[int]
    local_regions: list[TransferRegion]
    remote_regions: list[TransferRegion]
    last_write: asyncio.TimerHandle
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session(self) -> str:
        """The receiver's address for the transfer engine."""
        return session_of(self.meta)


@dataclass
class Transfer:
    """A prompt that this engine computes for other engines.

    A transfer that is delivered or aborted is kept for the other side: for the scheduler, which does not know the end yet, or for
    a late receiver.
    """

    transfer_id: str
    request_id: str = ""
    computed: ComputedBlocks | None = None  # None until its first chunk
    receivers: dict[tuple[str, str], Receiver] = field(default_factory=dict)
    announced: bool = False
    delivered: bool = False  # all receivers have the prompt
    aborted_at: float | None = None  # since when it will never be complete, monotonic s
    # Set when the scheduler has confirmed that it keeps the prompt's blocks until they are sent, or when the prompt is aborted.
    scheduler_confirmed: asyncio.Event = field(default_factory=asyncio.Event)
    summing: bool = False  # whether checksums of this prompt's blocks are under way
    # Those that are there: ((place, block), value), see Chunk.check.
    sums: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    summed: asyncio.Event = field(default_factory=asyncio.Event)


def session_of(meta: MooncakeXferMetadata) -> str:
    """Return a receiver's address for the transfer engine."""
    return f"{meta.remote_hostname}:{meta.remote_port}"
