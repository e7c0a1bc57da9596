"""The scheduler's side: computes which blocks of which prompts a step computes. Does not import vLLM."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from pointsman_connector.layerwise.kv_checks import CheckSettings
from pointsman_connector.layerwise.progress import blocks_of


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt that one step computes, if the prompt's KV is for another engine."""

    transfer_id: str  # from the request's kv_transfer_params; both engines have it
    request_id: str  # this engine's own id
    # Ids of the engine's blocks that the prompt got since its last chunk, or all of its blocks if it `restarted`.
    new_blocks: tuple[int, ...]
    up_to: int  # number of leading blocks that may be sent when a layer is computed
    total: int  # number of the prompt's blocks
    restarted: bool  # whether the prompt was preempted since its last chunk, and starts over in new blocks
    # The blocks to check, in the last chunk only: (position, id), the position counted from the prompt's end (1: the last block).
    check: tuple[tuple[int, int], ...] = ()


class Request(Protocol):
    """The attributes of vLLM's Request that this module reads."""

    request_id: str  # this engine's own id
    num_prompt_tokens: int  # without generated tokens
    num_computed_tokens: int  # with KV, cached ones included; those of a step count once it is scheduled
    num_preemptions: int  # so far; each takes all blocks
    max_tokens: int  # limit of the answer; with 1 the prompt's last block stays as computed


class BlockTable(Protocol):
    """The methods of vLLM's KVConnectorBlockState that this module calls."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return the request's blocks, one list for each KV cache group."""


class SchedulerOutput(Protocol):
    """The attributes of vLLM's SchedulerOutput that this module reads."""

    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: BlockTable | None
    preempted_req_ids: Collection[str] | None


@dataclass
class _Followed:
    transfer_id: str  # from the request's kv_transfer_params
    request: Request  # vLLM's own object, which changes with each step
    known_blocks: int = 0  # number of the prompt's present blocks that chunks have named
    preemptions: int = 0  # the request's number at the last chunk, or when tracking began
    ended: bool = False  # whether the last chunk has computed the prompt's end


class ChunkTracker:
    """Tracks the prompts that are computed for other engines, from their first chunk to their last."""

    def __init__(self, block_size: int, group: int, checks: CheckSettings, rng: random.Random) -> None:
        """`block_size`: tokens per block. `group`: index of the KV cache group that is transferred."""
        self._block_size = block_size
        self._group = group
        self._checks = checks
        self._rng = rng
        self._followed: dict[str, _Followed] = {}

    def follow(self, request: Request, transfer_id: str) -> None:
        """Start to track `request`, which got its first blocks, or its first ones after a preemption. Mutates."""
        if request.request_id not in self._followed:
            self._followed[request.request_id] = _Followed(transfer_id, request, preemptions=request.num_preemptions)

    def forget(self, request_id: str) -> None:
        """Stop tracking a request. Mutates."""
        self._followed.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._followed)

    def preempted(self, output: SchedulerOutput) -> frozenset[str]:
        """Return the ids of the transfers whose prompts were preempted before the step that `output` describes. The step may
        overwrite their blocks."""
        lost = output.preempted_req_ids or ()
        return frozenset(self._followed[request_id].transfer_id for request_id in lost if request_id in self._followed)

    def step(self, output: SchedulerOutput) -> Iterator[Chunk]:
        """Yield the chunks of the step that `output` describes. Must be called before the scheduler counts the step's tokens as
        computed. Mutates."""
        if not self._followed or output.kv_connector_block_state is None:
            return
        for request_id, followed in self._followed.items():
            tokens = output.num_scheduled_tokens.get(request_id, 0)
            groups = output.kv_connector_block_state.get_block_ids(request_id) if tokens else None
            restarted = followed.request.num_preemptions != followed.preemptions
            if not groups or (followed.ended and not restarted):
                continue
            prompt = followed.request.num_prompt_tokens
            total = -(-prompt // self._block_size)
            blocks = groups[self._group][:total]
            known = 0 if restarted else followed.known_blocks
            done = followed.request.num_computed_tokens + tokens
            followed.known_blocks, followed.preemptions, followed.ended = (
                len(blocks),
                followed.request.num_preemptions,
                done >= prompt,
            )
            # Where the sender's own request generates, its tokens' KV fills up the prompt's last block after it was summed.
            fixed = prompt % self._block_size == 0 or followed.request.max_tokens == 1
            check = self._checks.positions(total, self._rng, last_is_fixed=fixed) if followed.ended else ()
            yield Chunk(
                transfer_id=followed.transfer_id,
                request_id=request_id,
                new_blocks=tuple(blocks[known:]),
                up_to=blocks_of(done, prompt, self._block_size),
                total=total,
                restarted=restarted,
                check=tuple((position, blocks[total - position]) for position in check),
            )
