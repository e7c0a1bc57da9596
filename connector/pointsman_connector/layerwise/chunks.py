"""The scheduler's side: which blocks of which prompts does a step compute. Knows vLLM's scheduler output by its shape only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pointsman_connector.layerwise.progress import blocks_of


@dataclass(frozen=True)
class Chunk:
    """One step's work on one prompt whose KV goes to another engine.

    `new_blocks` are ids of the engine's blocks that the prompt got since its last chunk, all of them when it `restarted`;
    `up_to` is the number of leading blocks that may be sent once a layer is through, `total` the prompt's.
    """

    transfer_id: str
    request_id: str
    new_blocks: tuple[int, ...]
    up_to: int
    total: int
    restarted: bool


class Request(Protocol):
    """What of vLLM's Request is read here."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int


class BlockTable(Protocol):
    """What of vLLM's KVConnectorBlockState is read here."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """The request's blocks, a list for each KV group."""


class SchedulerOutput(Protocol):
    """What of vLLM's SchedulerOutput is read here."""

    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: BlockTable | None


@dataclass
class _Followed:
    transfer_id: str
    request: Request
    known_blocks: int = 0
    preemptions: int = 0
    ended: bool = False


class ChunkTracker:
    """Follows the prompts that are computed for other engines, from their first chunk to their last."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._followed: dict[str, _Followed] = {}

    def follow(self, request: Request, transfer_id: str) -> None:
        """`request` was given its first blocks, or its first ones after a preemption."""
        if request.request_id not in self._followed:
            self._followed[request.request_id] = _Followed(transfer_id, request, preemptions=request.num_preemptions)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._followed.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._followed)

    def step(self, output: SchedulerOutput) -> Iterator[Chunk]:
        """The chunks of the step that `output` describes. Called before the scheduler counts its tokens as computed."""
        if not self._followed or output.kv_connector_block_state is None:
            return
        for request_id, one in self._followed.items():
            tokens = output.num_scheduled_tokens.get(request_id, 0)
            groups = output.kv_connector_block_state.get_block_ids(request_id) if tokens else None
            restarted = one.request.num_preemptions != one.preemptions
            if not groups or (one.ended and not restarted):
                continue
            prompt = one.request.num_prompt_tokens
            total = -(-prompt // self._block_size)
            blocks = groups[0][:total]
            known = 0 if restarted else one.known_blocks
            done = one.request.num_computed_tokens + tokens
            one.known_blocks, one.preemptions, one.ended = len(blocks), one.request.num_preemptions, done >= prompt
            yield Chunk(
                transfer_id=one.transfer_id,
                request_id=request_id,
                new_blocks=tuple(blocks[known:]),
                up_to=blocks_of(done, prompt, self._block_size),
                total=total,
                restarted=restarted,
            )
