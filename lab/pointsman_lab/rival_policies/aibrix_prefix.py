"""`aibrix_prefix`: the score of AIBrix's prefix-cache routing, computed on Pointsman's view. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random, negated_hit_ratios, open_requests
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, mean, serve, setting


@dataclass(frozen=True)
class AibrixPrefix(Policy):
    """AIBrix's prefix-cache routing: the longest match among instances that are not far busier than the mean.

    Rule, in requests:
        1. max(num_requests) - min(num_requests) > imbalance: argmin num_requests
        2. else the longest match of those with num_requests <= mean + sigmas * standard deviation; ties by num_requests
        3. else (no such match) argmin num_requests
    Ties at random.

    Reasons: `imbalanced` (1), `prefix_match` (2), `least_requests` (3).
    Source: AIBrix's description of its prefix-cache routing. A reading of what is published: not compared with the program.
    """

    name: ClassVar[str] = "aibrix_prefix"

    imbalance: float = setting(8.0, 0.0, 1e6, "difference of requests that counts as imbalance")
    sigmas: float = setting(1.0, 0.0, 1e3, "maximum requests of a match, in standard deviations above the mean")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        loads = open_requests(eligible)
        if max(loads.values()) - min(loads.values()) > self.imbalance:
            return serve(lowest_at_random(eligible, loads, rng), "imbalanced", loads)
        average = mean(loads.values())
        limit = average + self.sigmas * math.sqrt(mean((load - average) ** 2 for load in loads.values()))
        matches = [
            candidate for candidate in eligible if candidate.cached_tokens > 0 and candidate.num_requests <= limit
        ]
        if not matches:
            return serve(lowest_at_random(eligible, loads, rng), "least_requests", loads)
        missed = negated_hit_ratios(matches, request)
        longest = max(candidate.cached_tokens for candidate in matches)
        best = lowest_at_random([candidate for candidate in matches if candidate.cached_tokens == longest], loads, rng)
        return serve(best, "prefix_match", missed)
