"""`llmd_affinity`: the rule that llm-d's guides configure, "sticky until saturated", computed on Pointsman's view. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random, negated_hit_ratios
from pointsman_router.core.placement_types import Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, serve, setting
from pointsman_router.core.prefill_curve import PrefillCurve

# Length of the chunk whose throughput calibrates the gate: vLLM's max_num_batched_tokens.
CHUNK_TOKENS = 8_192


@dataclass(frozen=True)
class LlmdAffinity(Policy):
    """llm-d's guides, "sticky until saturated": instances that have most of the prompt, until their load is far above others'.

    Score, in tokens:
        load = pending + new
        pending: prompt tokens placed and not yet computed; new: those of this prompt that are not cached
    Rule:
        1. sticky: the instances with cached / prompt >= affinity_threshold; all, if there are none
        2. all again if min(pending of the sticky) - min(pending of the others) > max_penalty_s * peak_tokens_per_s
        3. argmin load of those that are left, ties at random
    With peak_tokens_per_s 0 it is calibrated as llm-d's README asks: the throughput of one prefill of 8,192 tokens on an idle
    engine, here by the learned curve. llm-d's own default, 15,928, is that of one model and GPU.

    Reasons: `prefix_match` (of the sticky ones), `lpwl` (of all).
    Source: llm-d-router at ebab6879: prefix-cache-affinity-filter, token-load-scorer, max-score-picker, as llm-d's guide
    "optimized baseline" configures them since July 2026 (llm-d #2071); without a configuration the program still has the scores
    of `llmd_default`. A reading of the source: not compared with the program.
    """

    name: ClassVar[str] = "llmd_affinity"  # as settings and decisions name it

    affinity_threshold: float = setting(0.8, 0.0, 1.0, "cached share of the prompt from which an instance is sticky")
    max_penalty_s: float = setting(18.0, 0.0, 1e6, "seconds of load over that of others up to which it stays so")
    peak_tokens_per_s: float = setting(0.0, 0.0, 1e9, "prefill throughput of an idle engine; 0: by the learned curve")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        missed = negated_hit_ratios(eligible, request)
        sticky = [candidate for candidate in eligible if -missed[candidate.instance_id] >= self.affinity_threshold > 0]
        others = [candidate for candidate in eligible if candidate not in sticky]
        left, reason = (sticky, "prefix_match") if sticky else (eligible, "lpwl")
        if sticky and others and self.max_penalty_s > 0:
            least = min(sticky, key=lambda candidate: candidate.pending_prefill_tokens)
            other = min(candidate.pending_prefill_tokens for candidate in others)
            most = self.max_penalty_s * (self.peak_tokens_per_s or _calibrated(least, view))
            if least.pending_prefill_tokens - other > most:
                left, reason = eligible, "lpwl"
        scores = {
            candidate.instance_id: float(candidate.pending_prefill_tokens + candidate.new_tokens)
            for candidate in eligible
        }
        return serve(lowest_at_random(left, scores, rng), reason, scores)


def _calibrated(candidate: Candidate, view: FleetView) -> float:
    """Return the tokens per second of one prefill of CHUNK_TOKENS on an idle engine."""
    curve = view.curves.get(candidate.prefill_backlog.hardware) or PrefillCurve()
    return CHUNK_TOKENS / curve.cost_s(CHUNK_TOKENS, 0)
