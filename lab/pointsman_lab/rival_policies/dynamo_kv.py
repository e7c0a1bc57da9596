"""`dynamo_kv`: the score of NVIDIA Dynamo's KV router, computed on Pointsman's view. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.rival_policies.scores import lowest_at_random
from pointsman_router.core.placement_types import Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, offload, serve, setting, switch

DYNAMO_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class DynamoKv(Policy):
    """NVIDIA Dynamo's KV router: fewest blocks still to prefill, with this prompt's, plus those of all open prompts.

    Score, in blocks of 16 tokens:
        cost = prefill_load_scale * max(active_prefill + incoming - overlap, 0) + decode_blocks
        active_prefill: prompts still to be prefilled; incoming: this prompt; overlap: its cached part; decode_blocks: prompts of
            all open requests, those still to be prefilled included
    Rule: argmin cost, ties at random; with `temperature` t > 0 a draw with weights exp(-cost / ((max - min) * t)). With
    `disaggregate` the prefill goes to the other instance with the least active prefill, unless uncached < local_tokens and
    uncached / prompt < local_ratio, or that instance has more than busy_blocks of prefill.

    Reasons: `kv_cost`, `kv_softmax` (temperature), `remote_prefill` (disaggregate).
    Source: Dynamo 1.6.1, its KV scheduler and conditional disaggregation. `python -m studies.rival_rules` compares the rule with
    Dynamo's own selection core. It differs where open requests of one instance share blocks: Dynamo counts these once, and the
    view does not know them.
    """

    name: ClassVar[str] = "dynamo_kv"  # as settings and decisions name it

    # Without a unit; 1: as a block in decode.
    prefill_load_scale: float = setting(1.0, 0.0, 1e6, "weight of a block to prefill against a block in decode")
    temperature: float = setting(0.0, 0.0, 1e3, "evenness of a random draw by cost; 0: always the least cost")
    disaggregate: bool = switch(False, "whether another instance may prefill")
    # Of the chosen instance.
    local_tokens: float = setting(2_048.0, 0.0, 1e9, "uncached tokens below which a prefill may stay (disaggregate)")
    # Of the chosen instance.
    local_ratio: float = setting(
        0.7, 0.0, 1.0, "uncached share of the prompt below which a prefill may stay; both must hold (disaggregate)"
    )
    # In blocks of DYNAMO_BLOCK_TOKENS; 0: the other instance must have nothing to prefill.
    busy_blocks: float = setting(0.0, 0.0, 1e9, "maximum blocks to prefill of the other instance (disaggregate)")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores = {
            candidate.instance_id: (
                self.prefill_load_scale
                * max(candidate.pending_prefill_tokens + request.input_tokens - candidate.cached_tokens, 0)
                + candidate.ongoing_tokens
            )
            / DYNAMO_BLOCK_TOKENS
            for candidate in eligible
        }
        if self.temperature > 0:
            chosen, reason = self._draw(eligible, scores, rng), "kv_softmax"
        else:
            chosen, reason = lowest_at_random(eligible, scores, rng), "kv_cost"
        stays = chosen.new_tokens < self.local_tokens and chosen.new_tokens < self.local_ratio * request.input_tokens
        others = [candidate for candidate in eligible if candidate.can_give_kv_to(chosen)]
        if not self.disaggregate or stays or not others or not request.input_tokens:
            return serve(chosen, reason, scores)
        prefill = lowest_at_random(
            others, {candidate.instance_id: float(candidate.pending_prefill_tokens) for candidate in others}, rng
        )
        if prefill.pending_prefill_tokens > self.busy_blocks * DYNAMO_BLOCK_TOKENS:
            return serve(chosen, reason, scores)
        return offload(request, prefill, chosen, "offload", "remote_prefill", scores=scores)

    def _draw(self, eligible: Sequence[Candidate], scores: Mapping[str, float], rng: random.Random) -> Candidate:
        low, high = min(scores.values()), max(scores.values())
        spread = (high - low) or 1.0
        weights = [
            math.exp(-(scores[candidate.instance_id] - low) / spread / self.temperature) for candidate in eligible
        ]
        return rng.choices(eligible, weights)[0]
