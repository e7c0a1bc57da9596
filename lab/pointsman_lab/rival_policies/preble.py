"""`preble`: the score of Preble's E2 (exploit or explore), computed on Pointsman's view. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random, negated_hit_ratios, reported
from pointsman_router.core.placement_types import Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, mean, serve, setting


@dataclass(frozen=True)
class Preble(Policy):
    """Preble's E2: the best match (exploit) if it saves enough and is not overloaded, else the least work (explore).

    Terms, in tokens:
        work = pending_prefill + decode_weight * ongoing_decode
        evicted = max(new - (1 - kv_usage) * capacity, 0); 0 if the capacity is unknown; a stale report's kv_usage counts as the
            greatest of the fresh ones
    Rule:
        1. exploit: the best match, ties at random, if it saves more than exploit_ratio of the prompt and its work <=
            overload_factor * mean work
        2. explore: argmin score = work + new + eviction_weight * evicted, ties at random

    Reasons: `exploit` (1), `explore` (2).
    Source: Preble (E2), without its rebalancing. Preble weighs evicted tokens by their hit rate, and sums work over a time
    window. The view has neither, so eviction_weight and the open requests replace them.
    A reading of what is published: not compared with the program.
    """

    name: ClassVar[str] = "preble"  # as settings and decisions name it

    # 0 to 1, of the prompt's tokens.
    exploit_ratio: float = setting(0.5, 0.0, 1.0, "share of the prompt that a match must exceed")
    # Without a unit; the mean is over the eligible instances.
    overload_factor: float = setting(2.0, 0.0, 1e6, "maximum work of a match, as a multiple of the mean work")
    # Without a unit; 0: requests in decode do not count as work.
    decode_weight: float = setting(0.01, 0.0, 1e6, "weight of a running decode's context token against a prefill token")
    # Without a unit; 0: evictions do not count.
    eviction_weight: float = setting(1.0, 0.0, 1e6, "weight of an evicted token against a prefill token")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        work = {
            candidate.instance_id: candidate.pending_prefill_tokens
            + self.decode_weight * candidate.ongoing_decode_tokens
            for candidate in eligible
        }
        kv_usage = reported(eligible, lambda candidate: candidate.kv_usage)
        scores = {
            candidate.instance_id: work[candidate.instance_id]
            + candidate.new_tokens
            + self._eviction(candidate, kv_usage[candidate.instance_id])
            for candidate in eligible
        }
        best = lowest_at_random(eligible, negated_hit_ratios(eligible, request), rng)
        if best.cached_tokens > self.exploit_ratio * request.input_tokens and work[
            best.instance_id
        ] <= self.overload_factor * mean(work.values()):
            return serve(best, "exploit", scores)
        return serve(lowest_at_random(eligible, scores, rng), "explore", scores)

    def _eviction(self, candidate: Candidate, kv_usage: float) -> float:
        if not candidate.kv_capacity_tokens:
            return 0.0
        free = (1.0 - kv_usage) * candidate.kv_capacity_tokens
        return self.eviction_weight * max(candidate.new_tokens - free, 0.0)
