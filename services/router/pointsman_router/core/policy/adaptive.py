"""Policies by route class: `adaptive` (v1, no KV transfer) and `adaptive_offload` (v2, offloads every HEAVY request). Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_router.core.placement_types import HEAVY_NEW_TOKENS, Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, least, lowest, offload, serve, setting


def most_cached(candidates: tuple[Candidate, ...], decision_number: int) -> Candidate:
    """Return the candidate with the most cached tokens; ties by ongoing tokens, then in turn."""
    return least(candidates, decision_number, lambda candidate: (-candidate.cached_tokens, candidate.ongoing_tokens))


@dataclass(frozen=True)
class Adaptive(Policy):
    """One rule for HEAVY requests and one for the others; the class is that on the instance with the best cache hit.

    Rule, in tokens:
        HEAVY (new >= heavy_new_tokens): argmin ongoing_decode_tokens; ties by num_requests, pending_prefill, in turn
        LIGHT, MEDIUM: argmin new + load_weight * ongoing_tokens; ties in turn
    It sees all of a large pool, since an instance with the fewest tokens in decode may have many requests.

    Reasons: `least_decode` (HEAVY), `cache_and_load` (others).
    Source: the reference system's adaptive v1, which does not state a weight of load against cache.
    """

    name: ClassVar[str] = "adaptive"

    heavy_new_tokens: float = setting(HEAVY_NEW_TOKENS, 1.0, 1e9, "new tokens from which a request is HEAVY")
    load_weight: float = setting(0.1, 0.0, 1e6, "weight of an input token of an open request against a new token")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        if most_cached(eligible, view.decision_number).new_tokens >= self.heavy_new_tokens:
            decode = {candidate.instance_id: float(candidate.ongoing_decode_tokens) for candidate in eligible}
            best = lowest(
                eligible,
                decode,
                view.decision_number,
                lambda candidate: (candidate.num_requests, candidate.pending_prefill_tokens),
            )
            return serve(best, "least_decode", decode)
        scores = {
            candidate.instance_id: candidate.new_tokens + self.load_weight * candidate.ongoing_tokens
            for candidate in eligible
        }
        return serve(lowest(eligible, scores, view.decision_number), "cache_and_load", scores)


@dataclass(frozen=True)
class AdaptiveOffload(Policy):
    """Session affinity first; HEAVY requests always prefill on another instance.

    Rule, in tokens; scores are the new tokens:
        1. owner, if new < heavy_new_tokens
        2. else D = best cache hit (ties by ongoing_tokens, then in turn), if new < heavy_new_tokens
        3. else PREFILL on P, SERVE on D; D becomes the session's owner. P = argmin ongoing_tokens of those that can send KV to D;
            ties by new tokens, then in turn. If there is no such P, D does both.
    It sees all of a large pool, for P, as `elastic` does.

    Reasons: `session_affinity` (1), `best_cache_hit` (2), `heavy` and `no_other_instance` (3).
    Source: the reference system's adaptive v2, the baseline that `elastic` improves on.
    """

    name: ClassVar[str] = "adaptive_offload"

    heavy_new_tokens: float = setting(HEAVY_NEW_TOKENS, 1.0, 1e9, "new tokens from which a request is HEAVY")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores = {candidate.instance_id: float(candidate.new_tokens) for candidate in eligible}
        for candidate in eligible:
            if candidate.instance_id == view.session_owner and candidate.new_tokens < self.heavy_new_tokens:
                return serve(candidate, "session_affinity", scores)
        decode = most_cached(eligible, view.decision_number)
        if decode.new_tokens < self.heavy_new_tokens:
            return serve(decode, "best_cache_hit", scores)
        sources = view.sources_of(decode)
        if not sources:
            return serve(decode, "no_other_instance", scores)
        prefill = least(
            sources, view.decision_number, lambda candidate: (candidate.ongoing_tokens, candidate.new_tokens)
        )
        return offload(request, prefill, decode, "offload", "heavy", scores=scores)
