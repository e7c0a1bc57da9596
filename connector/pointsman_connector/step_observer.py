"""Observation of an engine's steps: tokens and time of each step, and what is left of the prompts in the batch. Pure.

It reads vLLM's scheduler and its outputs, which are the arguments `scheduler` and `output`. The cost of a step is proportional to
the number of prompts that it computes, not to the number of requests that it decodes for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from pointsman_connector.step_load import StepTotals

# Maximum number of steps that are scheduled and not computed. vLLM has two (async scheduling), or one for each pipeline stage.
MAX_STEPS_AHEAD = 64
# What is called or read of a vLLM scheduler.
_READ = ("schedule", "update_from_output", "get_request_counts", "requests")


def missing_parts(scheduler: object) -> list[str]:
    """Return the names of what an observer needs and `scheduler` does not have."""
    missing = [name for name in _READ if not hasattr(scheduler, name)]
    if not hasattr(scheduler, "get_kv_cache_usage") and not hasattr(
        getattr(scheduler, "kv_cache_manager", None), "usage"
    ):
        missing.append("get_kv_cache_usage")
    return missing


def kv_usage(scheduler: Any) -> float:
    """Return the used share of the scheduler's KV cache. vLLM 0.22 and 0.26 have it at the manager of its blocks only."""
    asked = getattr(scheduler, "get_kv_cache_usage", None)
    return float(asked() if asked is not None else scheduler.kv_cache_manager.usage)


@dataclass(slots=True)
class _Step:
    """A step from its schedule on."""

    output: Any  # identifies it
    began: float  # s
    decode_tokens: int  # scheduled, of requests whose prompts are complete
    prefill_tokens: int  # to compute, of all its prompts; after a preemption answers so far count as prompt
    prefill_pairs: int  # as in StepTotals
    prefills: int  # number of prompts that it completes


class StepObserver:
    """Observes the steps of one scheduler. Times in s on one clock."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.prefill_tokens_left = 0
        # Request id -> number of tokens that its prefill computes in the end. Prompts of the batch only.
        self._prompts: dict[str, int] = {}
        self._ahead: deque[_Step] = deque(maxlen=MAX_STEPS_AHEAD)
        self._ended = float("-inf")

    def scheduled(self, scheduler: Any, output: Any, began: float) -> bool:
        """Record a step that `scheduler` has just scheduled, from `began` on. Return whether it computes a prompt. Mutates."""
        requests, prompts = scheduler.requests, self._prompts
        for request_id in output.finished_req_ids:
            prompts.pop(request_id, None)
        for request_id in output.preempted_req_ids or ():
            prompts.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompts[new.req_id] = requests[new.req_id].num_tokens
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            prompts[request_id] = requests[request_id].num_tokens
        tokens = pairs = prefills = left = 0
        if prompts:
            amounts = output.num_scheduled_tokens
            for request_id, end in list(prompts.items()):
                request = requests.get(request_id)
                if request is None:
                    del prompts[request_id]
                    continue
                # The scheduler has already added this step's tokens.
                after = min(request.num_computed_tokens, end)
                if amount := amounts.get(request_id, 0):
                    before = max(request.num_computed_tokens - amount, 0)
                    new_tokens = max(after - before, 0)
                    tokens += new_tokens
                    pairs += new_tokens * (2 * before + new_tokens)
                if after >= end:
                    del prompts[request_id]
                    prefills += 1
                left += end - after
        self.prefill_tokens_left = left
        self._ahead.append(_Step(output, began, output.total_num_scheduled_tokens - tokens, tokens, pairs, prefills))
        return tokens > 0

    def computed(self, output: Any, ended: float) -> bool:
        """Add the step that was scheduled as `output` to the totals. Return whether it had any tokens. Mutates.

        A step that was scheduled while the one before was computed began when that one ended."""
        ahead, step = self._ahead, None
        while ahead and step is None:
            oldest = ahead.popleft()
            if oldest.output is output:
                step = oldest
        if step is None:
            return False
        seconds = max(ended - max(step.began, self._ended), 0.0)
        self._ended = ended
        if not step.prefill_tokens and not step.decode_tokens:
            return False
        totals = self.totals
        totals.steps += 1
        totals.seconds += seconds
        totals.decode_tokens += step.decode_tokens
        if step.prefill_tokens:
            totals.prefill_tokens += step.prefill_tokens
            totals.prefill_pairs += step.prefill_pairs
            totals.prefills += step.prefills
            totals.prefill_seconds += seconds
        return True
