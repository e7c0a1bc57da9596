"""Requests in an engine model and their queues, by arrival or priority, as in vllm/v1/core/sched/request_queue.py. Pure."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from pointsman_lab.engine.block_cache import HeldBlocks
from pointsman_lab.engine.interface import EngineRequest
from pointsman_lab.engine.prompt_content import NamedContent, TokenContent


@dataclass(eq=False, slots=True)
class EngineSequence:
    """A request in the engine model."""

    request: EngineRequest  # as submitted
    content: TokenContent | NamedContent  # token ids or block names of prompt and answer
    length: int  # number of its tokens so far, including `prompt_length` prompt tokens
    prompt_length: int  # tokens, those of an answer that another engine has begun included
    end: int  # length at which the answer is cut, by max_tokens or max_model_len
    natural_end: int | None  # length at which it stops by itself, with an end-of-sequence token; None: it does not
    submitted_at: float  # s, on the clock of EngineModel.step(); a preemption does not change it
    held: HeldBlocks = field(default_factory=HeldBlocks)  # none until some are allocated, and after a preemption
    computed: int = 0  # the KV of so many first tokens is in the cache
    cached: int | None = None  # cached tokens of the prompt when it was first admitted; None before
    remote: int = 0  # prompt tokens that came then from another instance
    from_host: int = 0  # the same, from host memory
    from_storage: int = 0  # the same, from storage
    # It holds blocks for KV that another instance, or a tier below, has not delivered yet.
    waits_for_remote_kv: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the answer has begun and only the last token is left to compute."""
        return self.length - self.computed == 1 and self.length > self.prompt_length

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key of urgency: the smallest is served first, the greatest is preempted first."""
        return self.request.priority, self.submitted_at

    @property
    def queue_key(self) -> tuple[int, float, str]:
        """Sort key in a priority queue: rank, then the id, as vLLM's Request compares."""
        return self.request.priority, self.submitted_at, self.request.request_id


class ArrivalQueue(deque[EngineSequence]):
    """First come, first served; a sequence that is put back is first in the queue."""

    add = deque[EngineSequence].append
    put_back = deque[EngineSequence].appendleft
    take = deque[EngineSequence].popleft


class PriorityQueue(list[EngineSequence]):
    """Ordered by queue_key, also for sequences that are put back."""

    def add(self, sequence: EngineSequence) -> None:
        """Insert a sequence in order. Mutates."""
        insort(self, sequence, key=attrgetter("queue_key"))

    put_back = add

    def take(self) -> EngineSequence:
        """Remove and return the first sequence. Mutates."""
        return self.pop(0)


Queue = ArrivalQueue | PriorityQueue
