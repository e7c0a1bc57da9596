"""The policies `linear` and `additive`, which add load and cache: the reference system's early policies. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, lowest, serve, setting


@dataclass(frozen=True)
class Linear(Policy):
    """Least input tokens of open requests, less cached tokens.

    argmin score = load_weight * ongoing_tokens - cache_weight * cached_tokens, in tokens; ties in turn. It sees all of a large
    pool, since an instance with the fewest input tokens may have many requests.

    Reasons: `linear`.
    Source: the reference system's first baseline (w1 and w2; its values are not known, both are 1 here).
    """

    name: ClassVar[str] = "linear"

    load_weight: float = setting(1.0, 0.0, 1e6, "weight of an input token of an open request (w1)")
    cache_weight: float = setting(1.0, 0.0, 1e6, "weight of a cached token of this prompt (w2)")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores = {
            candidate.instance_id: self.load_weight * candidate.ongoing_tokens
            - self.cache_weight * candidate.cached_tokens
            for candidate in eligible
        }
        return serve(lowest(eligible, scores, view.decision_number), "linear", scores)


@dataclass(frozen=True)
class Additive(Policy):
    """The session's owner below two limits of load and cost, else the least sum of estimated seconds.

    Score, in s:
        cost = num_requests * decode_iteration_s + (pending_prefill + new) / throughput; throughput in tokens/s
    Rule:
        1. owner: ongoing_tokens <= overload_factor * mean(ongoing_tokens), and cost <= overload_factor * least cost
        2. else argmin cost; ties in turn

    Reasons: `session_affinity` (1), `least_cost` (2).
    Source: the reference system's historical additive policy. The defaults are its figures: 7 ms per decode step, and 7,000
    prefilled tokens per second (32k in 4.4 s).
    """

    name: ClassVar[str] = "additive"  # as registered, and as decisions record it
    uses_shortlist: ClassVar[bool] = True  # the mean needs only sums of the instances left out

    # one factor for both limits of rule 1; rule 2 has none
    overload_factor: float = setting(
        2.0, 0.0, 1e6, "maximum load and cost of the owner, in multiples of the mean load and the least cost"
    )
    # s per open request, whether it decodes or not
    decode_iteration_s: float = setting(0.007, 0.0, 10.0, "seconds that an open request adds")
    # tokens/s, of all instances alike; not the learned curve
    throughput: float = setting(7_000.0, 1.0, 1e9, "prefilled tokens per second")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores = {
            candidate.instance_id: candidate.num_requests * self.decode_iteration_s
            + (candidate.pending_prefill_tokens + candidate.new_tokens) / self.throughput
            for candidate in eligible
        }
        best = lowest(eligible, scores, view.decision_number)
        tokens = sum([candidate.ongoing_tokens for candidate in eligible]) + view.unseen.ongoing_tokens
        limit = tokens / (len(eligible) + view.unseen.instances) * self.overload_factor
        for candidate in eligible:
            if (
                candidate.instance_id == view.session_owner
                and candidate.ongoing_tokens <= limit
                and scores[candidate.instance_id] <= scores[best.instance_id] * self.overload_factor
            ):
                return serve(candidate, "session_affinity", scores)
        return serve(best, "least_cost", scores)
