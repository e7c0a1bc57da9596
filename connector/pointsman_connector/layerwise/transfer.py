"""What a sender keeps of the prompts that it computes for others, and of those who wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferMetadata,
    TransferRegion,
)

from pointsman_connector.layerwise.fence import Fence
from pointsman_connector.layerwise.progress import ComputedBlocks, Delivery


@dataclass
class Receiver:
    """An engine's worker that waits for a prompt's KV, and what it said of its memory."""

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
        """Its address for the transfer engine."""
        return session_of(self.meta)


@dataclass
class Transfer:
    """A prompt that is computed here for others. `computed` is None until its first chunk.

    `delivered` is set when all receivers have it, `aborted` when it will never be complete; both wait here for the other side:
    the scheduler that has not heard of the end, or a receiver that comes late.
    """

    transfer_id: str
    request_id: str = ""
    computed: ComputedBlocks | None = None
    receivers: dict[tuple[str, str], Receiver] = field(default_factory=dict)
    fence: Fence | None = None
    announced: bool = False
    delivered: bool = False
    aborted_at: float | None = None
    # The scheduler's word is here: the prompt's blocks are kept until it is sent, or it is given up.
    scheduler_confirmed: asyncio.Event = field(default_factory=asyncio.Event)


def session_of(meta: MooncakeXferMetadata) -> str:
    """A receiver's address for the transfer engine."""
    return f"{meta.remote_hostname}:{meta.remote_port}"
