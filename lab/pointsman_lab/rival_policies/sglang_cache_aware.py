"""`sglang_cache_aware`: the score of sglang's cache-aware router, computed on Pointsman's view. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random, negated_hit_ratios, open_requests
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, serve, setting


@dataclass(frozen=True)
class SglangCacheAware(Policy):
    """sglang's cache-aware router: the best match if it is long and requests are balanced, else the fewest requests.

    Rule, in requests and shares of the prompt:
        1. max - min > balance_abs and max > balance_rel * min (num_requests): argmin num_requests
        2. else the best match, if its cached / prompt > cache_threshold
        3. else argmin num_requests (older versions: the smallest tree)
    Ties at random.

    Reasons: `imbalanced` (1), `prefix_match` (2), `least_requests` (3).
    Source: sglang-router 0.3.2, cache_aware; `python -m studies.rival_rules` compares the rule with this program.
    """

    name: ClassVar[str] = "sglang_cache_aware"

    balance_abs: float = setting(64.0, 0.0, 1e6, "difference of requests above which instances are imbalanced")
    balance_rel: float = setting(1.5, 1.0, 1e6, "ratio of most to fewest requests that imbalance must exceed, too")
    cache_threshold: float = setting(0.3, 0.0, 1.0, "share of the prompt that a match must exceed")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        loads, missed = open_requests(eligible), negated_hit_ratios(eligible, request)
        low, high = min(loads.values()), max(loads.values())
        if high - low > self.balance_abs and high > self.balance_rel * low:
            return serve(lowest_at_random(eligible, loads, rng), "imbalanced", loads)
        if -min(missed.values()) > self.cache_threshold:
            return serve(lowest_at_random(eligible, missed, rng), "prefix_match", missed)
        return serve(lowest_at_random(eligible, loads, rng), "least_requests", loads)
