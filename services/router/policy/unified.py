"""`unified`, the default: stay with the session's owner while that is cheap, else least (work x requests). Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from services.router.domain import FleetView, PlacementRequest, Ruling
from services.router.policy.base import Policy, rotated, serve, setting


@dataclass(frozen=True)
class Unified(Policy):
    """Affinity gate, then LMetric with decode weight.

    1. The session's owner serves if it has cached more than `affinity_ratio` of the input and
       num_requests <= mean(num_requests) * overload_factor (reason `affinity`).
    2. Otherwise argmin of (pending_prefill + new + decode_weight * ongoing_decode) * max(num_requests, 1), in tokens;
       ties by new tokens, then num_requests, then round robin (reason `lmetric_fallback`).
    Source: the reference system's unified policy with its revisions A (factor 1.3) and B' (weight 0.01 and the max).
    """

    name: ClassVar[str] = "unified"

    overload_factor: float = setting(1.3, 0.0, 1e6, "owner keeps its session up to this multiple of the mean requests")
    decode_weight: float = setting(0.01, 0.0, 1e6, "weight of a running decode's context token against a prefill token")
    affinity_ratio: float = setting(0.5, 0.0, 1.0, "share of the input that the owner must have cached")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        mean = sum(candidate.num_requests for candidate in eligible) / len(eligible)
        scores = {
            candidate.instance_id: (
                candidate.pending_prefill_tokens
                + candidate.new_tokens
                + self.decode_weight * candidate.ongoing_decode_tokens
            )
            * max(candidate.num_requests, 1)
            for candidate in eligible
        }
        for candidate in eligible:
            if (
                candidate.instance_id == view.session_owner
                and candidate.cached_tokens > self.affinity_ratio * request.input_tokens
                and candidate.num_requests <= mean * self.overload_factor
            ):
                return serve(candidate, "affinity", scores)
        _, best = min(
            rotated(eligible, view.turn),
            key=lambda turned: (
                scores[turned[1].instance_id],
                turned[1].new_tokens,
                turned[1].num_requests,
                turned[0],
            ),
        )
        return serve(best, "lmetric_fallback", scores)
