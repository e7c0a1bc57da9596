"""`llmd_default`: the score of llm-d's default scorers, computed on Pointsman's view. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random, negated_hit_ratios, reported
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, offload, serve, setting


@dataclass(frozen=True)
class LlmdDefault(Policy):
    """llm-d's default scorers: the greatest weighted sum of short queue, free KV and cached share.

    Score, without a unit; the greatest sum wins, so decisions record it negated:
        queue_weight * queue + kv_weight * (1 - kv_usage) + prefix_weight * cached / prompt
        queue = (max - q) / (max - min), q: the reported waiting requests; 1 if all are equal
        kv_usage: the reported share, 0 to 1; a stale report counts as the greatest of the fresh ones
    Rule: ties at random. With pd_threshold_tokens > 0 a request with at least this many uncached tokens prefills on the best of
    the other instances.

    Reasons: `weighted_score`, `pd_threshold`.
    Source: llm-d-router's default scorer weights. A reading of what is published: not compared with the program.
    """

    name: ClassVar[str] = "llmd_default"  # as settings and decisions name it

    # Multiplies 0 (the longest queue of those available) to 1 (the shortest).
    queue_weight: float = setting(2.0, 0.0, 1e6, "weight of a short queue")
    # Multiplies 0 (a full KV cache) to 1 (an empty one).
    kv_weight: float = setting(2.0, 0.0, 1e6, "weight of the free share of the KV cache")
    # Multiplies 0 (nothing cached) to 1 (the whole prompt).
    prefix_weight: float = setting(3.0, 0.0, 1e6, "weight of the cached share of the prompt")
    # Of the chosen instance.
    pd_threshold_tokens: float = setting(
        0.0, 0.0, 1e9, "uncached tokens from which another instance prefills; 0: never"
    )

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        available = view.available()
        missed = negated_hit_ratios(available, request)
        waiting = reported(available, lambda candidate: candidate.waiting)
        kv_usage = reported(available, lambda candidate: candidate.kv_usage)
        low, high = min(waiting.values()), max(waiting.values())
        scores = {
            candidate.instance_id: self.prefix_weight * missed[candidate.instance_id]
            - self.kv_weight * (1.0 - kv_usage[candidate.instance_id])
            - self.queue_weight * ((high - waiting[candidate.instance_id]) / (high - low) if high > low else 1.0)
            for candidate in available
        }
        eligible = view.eligible()
        chosen = lowest_at_random(eligible, scores, rng)
        others = view.sources_of(chosen)
        eligible_scores = {candidate.instance_id: scores[candidate.instance_id] for candidate in eligible}
        if others and 0 < self.pd_threshold_tokens <= chosen.new_tokens:
            prefill = lowest_at_random(others, scores, rng)
            return offload(request, prefill, chosen, "offload", "pd_threshold", scores=eligible_scores)
        return serve(chosen, "weighted_score", eligible_scores)
