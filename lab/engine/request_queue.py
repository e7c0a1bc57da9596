"""Requests inside an engine model, and how they wait: by arrival or priority, as vllm/v1/core/sched/request_queue.py. Pure."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from pointsman.lab.engine.block_cache import HeldBlocks
from pointsman.lab.engine.interface import EngineRequest
from pointsman.lab.engine.prompt_content import NamedContent, TokenContent


@dataclass(eq=False, slots=True)
class EngineSequence:
    """A request inside the engine model: its tokens so far are `length`, the prompt's first `prompt_length` among them, of which
    the KV of `computed` is there.

    `waits_for_remote_kv`: it holds blocks for KV that another instance has not delivered yet.
    """

    request: EngineRequest
    content: TokenContent | NamedContent
    length: int
    prompt_length: int
    end: int
    natural_end: int | None
    submitted_at: float
    held: HeldBlocks = field(default_factory=HeldBlocks)
    computed: int = 0
    # Of the prompt, when it was first admitted; None before.
    cached: int | None = None
    remote: int = 0
    waits_for_remote_kv: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it has begun to answer and only its last token is left to compute."""
        return self.length - self.computed == 1 and self.length > self.prompt_length

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller goes first, greater is preempted first."""
        return self.request.priority, self.submitted_at

    @property
    def queue_key(self) -> tuple[int, float, str]:
        """Its place in a queue by priority: rank, then the id, as vLLM's Request compares."""
        return self.request.priority, self.submitted_at, self.request.request_id


class ArrivalQueue(deque[EngineSequence]):
    """First come, first served; what is put back goes before all others."""

    add = deque[EngineSequence].append
    put_back = deque[EngineSequence].appendleft
    take = deque[EngineSequence].popleft


class PriorityQueue(list[EngineSequence]):
    """Ordered by queue_key; what is put back goes where it belongs."""

    def add(self, sequence: EngineSequence) -> None:
        """Insert. Mutates."""
        insort(self, sequence, key=attrgetter("queue_key"))

    put_back = add

    def take(self) -> EngineSequence:
        """Remove the first. Mutates."""
        return self.pop(0)


Queue = ArrivalQueue | PriorityQueue
