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

    delivery: Delivery  # which blocks it has
    request_id: str  # the receiving engine's own id
    meta: MooncakeXferMetadata  # its message, as received
    blocks: list[int]  # ids of its blocks for the prompt's last blocks, in their order
    local_regions: list[TransferRegion]  # of this engine's memory, in the order of the delivery's regions
    remote_regions: list[TransferRegion]  # of the receiver's memory, in the same order
    last_write: asyncio.TimerHandle  # gives up the delivery; no write may start after its time
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no write to it is in progress

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

    transfer_id: str  # from the requests' kv_transfer_params; both engines have it
    request_id: str = ""  # this engine's own id; empty until the first chunk
    computed: ComputedBlocks | None = None  # None until its first chunk
    receivers: dict[tuple[str, str], Receiver] = field(default_factory=dict)  # by the receiver's address and request id
    announced: bool = False  # whether upstream may serve the receivers: all is computed, or the scheduler said so
    delivered: bool = False  # all receivers have the prompt
    aborted_at: float | None = None  # since when it will never be complete, monotonic s
    # Set when the scheduler has confirmed that it keeps the prompt's blocks until they are sent, or when the prompt is aborted.
    scheduler_confirmed: asyncio.Event = field(default_factory=asyncio.Event)
    summing: bool = False  # whether checksums of this prompt's blocks are under way
    # Those that are there: ((place, block), value), see Chunk.check.
    sums: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    summed: asyncio.Event = field(default_factory=asyncio.Event)  # set when `sums` is complete or cannot be computed


def session_of(meta: MooncakeXferMetadata) -> str:
    """Return a receiver's address for the transfer engine."""
    return f"{meta.remote_hostname}:{meta.remote_port}"
