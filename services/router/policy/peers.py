"""Other routers' scores over our view, to be compared with: `dynamo_kv`, `sglang_cache_aware`, `llmd_default`, `aibrix_prefix`,
`preble`. Not their code and not their knowledge: they get our exact prefixes and load, so they are at least as good as at home.

Higher-is-better scores are negated; ties go at random (through `rng`). Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from services.router.domain import Candidate, FleetView, PlacementRequest, Ruling
from services.router.policy.base import Policy, mean, offload, serve, setting, switch

DYNAMO_BLOCK_TOKENS = 16


def _lowest(candidates: Sequence[Candidate], scores: Mapping[str, float], rng: random.Random) -> Candidate:
    low = min(scores[one.instance_id] for one in candidates)
    return rng.choice([one for one in candidates if scores[one.instance_id] == low])


def _requests(candidates: Sequence[Candidate]) -> dict[str, float]:
    return {one.instance_id: float(one.num_requests) for one in candidates}


def _missed(candidates: Sequence[Candidate], request: PlacementRequest) -> dict[str, float]:
    # The negated share of the prompt that is cached.
    return {one.instance_id: -one.cached_tokens / max(request.input_tokens, 1) for one in candidates}


@dataclass(frozen=True)
class DynamoKv(Policy):
    """Peer: NVIDIA Dynamo's KV router.

    cost = prefill_load_scale * max(active_prefill + incoming - overlap, 0) + decode_blocks, in blocks of 16 tokens: the prompts
    still to be prefilled, this one, what of it is cached, and the streams past their first token. argmin, random ties
    (reason `kv_cost`); with `temperature` t > 0 a draw with weights exp(-cost / ((max - min) * t)) (reason `kv_softmax`).
    With `disaggregate` the prefill goes to the other instance with the least active prefill (reason `remote_prefill`) unless
    uncached < local_tokens and uncached / prompt < local_ratio, or that instance has more than `busy_blocks` of prefill.
    Source: Dynamo 1.6.1, its KV scheduler and conditional disaggregation.
    """

    name: ClassVar[str] = "dynamo_kv"

    prefill_load_scale: float = setting(1.0, 0.0, 1e6, "weight of a block to prefill against a block in decode")
    temperature: float = setting(0.0, 0.0, 1e3, "0 takes the least cost; higher draws more evenly")
    disaggregate: bool = switch(False, "prefill elsewhere when it is worth it")
    local_tokens: float = setting(2_048.0, 0.0, 1e9, "fewer uncached tokens than this stay (disaggregate)")
    local_ratio: float = setting(0.7, 0.0, 1.0, "while they are less than this share of the prompt (disaggregate)")
    busy_blocks: float = setting(0.0, 0.0, 1e9, "an instance with more blocks to prefill takes none up (disaggregate)")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        scores = {
            one.instance_id: (
                self.prefill_load_scale * max(one.pending_prefill_tokens + request.input_tokens - one.cached_tokens, 0)
                + one.ongoing_decode_tokens
            )
            / DYNAMO_BLOCK_TOKENS
            for one in eligible
        }
        if self.temperature > 0:
            chosen, reason = self._draw(eligible, scores, rng), "kv_softmax"
        else:
            chosen, reason = _lowest(eligible, scores, rng), "kv_cost"
        stays = chosen.new_tokens < self.local_tokens and chosen.new_tokens < self.local_ratio * request.input_tokens
        others = [one for one in eligible if one.can_give_kv_to(chosen)]
        if not self.disaggregate or stays or not others or not request.input_tokens:
            return serve(chosen, reason, scores)
        prefill = _lowest(others, {one.instance_id: float(one.pending_prefill_tokens) for one in others}, rng)
        if prefill.pending_prefill_tokens > self.busy_blocks * DYNAMO_BLOCK_TOKENS:
            return serve(chosen, reason, scores)
        return offload(request, prefill, chosen, "offload", "remote_prefill", scores=scores)

    def _draw(self, eligible: Sequence[Candidate], scores: Mapping[str, float], rng: random.Random) -> Candidate:
        low, high = min(scores.values()), max(scores.values())
        spread = (high - low) or 1.0
        weights = [math.exp(-(scores[one.instance_id] - low) / spread / self.temperature) for one in eligible]
        return rng.choices(eligible, weights)[0]


@dataclass(frozen=True)
class SglangCacheAware(Policy):
    """Peer: sglang's cache-aware router.

    If max - min > balance_abs and max > balance_rel * min (num_requests): least requests (reason `imbalanced`). Else if the
    best match exceeds cache_threshold of the prompt: the best match (`prefix_match`). Else least requests (`least_requests`;
    older versions: the smallest tree). Source: sglang-router 0.3.2, cache_aware.
    """

    name: ClassVar[str] = "sglang_cache_aware"

    balance_abs: float = setting(64.0, 0.0, 1e6, "difference of requests that counts as imbalance ...")
    balance_rel: float = setting(1.5, 1.0, 1e6, "... when it is also this multiple of the least")
    cache_threshold: float = setting(0.3, 0.0, 1.0, "share of the prompt that a match must exceed")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        loads, missed = _requests(eligible), _missed(eligible, request)
        low, high = min(loads.values()), max(loads.values())
        if high - low > self.balance_abs and high > self.balance_rel * low:
            return serve(_lowest(eligible, loads, rng), "imbalanced", loads)
        if -min(missed.values()) > self.cache_threshold:
            return serve(_lowest(eligible, missed, rng), "prefix_match", missed)
        return serve(_lowest(eligible, loads, rng), "least_requests", loads)


@dataclass(frozen=True)
class LlmdDefault(Policy):
    """Peer: llm-d's default scorers.

    Greatest queue_weight * queue + kv_weight * (1 - kv_usage) + prefix_weight * cached / prompt, negated in the scores; queue =
    (max - q) / (max - min) over the reported waiting requests, 1 when all are equal. Random ties (reason `weighted_score`).
    With `pd_threshold_tokens` > 0 a request with at least so many uncached tokens prefills on the best of the others (reason
    `pd_threshold`). Source: llm-d-router's default scorer weights.
    """

    name: ClassVar[str] = "llmd_default"

    queue_weight: float = setting(2.0, 0.0, 1e6, "weight of the short queue")
    kv_weight: float = setting(2.0, 0.0, 1e6, "weight of the free KV cache")
    prefix_weight: float = setting(3.0, 0.0, 1e6, "weight of the cached share of the prompt")
    pd_threshold_tokens: float = setting(0.0, 0.0, 1e9, "uncached tokens from which prefill goes elsewhere; 0: never")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        missed = _missed(eligible, request)
        low, high = min(one.waiting for one in eligible), max(one.waiting for one in eligible)
        scores = {
            one.instance_id: self.prefix_weight * missed[one.instance_id]
            - self.kv_weight * (1.0 - one.kv_usage)
            - self.queue_weight * ((high - one.waiting) / (high - low) if high > low else 1.0)
            for one in eligible
        }
        chosen = _lowest(eligible, scores, rng)
        others = [one for one in eligible if one.can_give_kv_to(chosen)]
        if others and 0 < self.pd_threshold_tokens <= chosen.new_tokens:
            prefill = _lowest(others, scores, rng)
            return offload(request, prefill, chosen, "offload", "pd_threshold", scores=scores)
        return serve(chosen, "weighted_score", scores)


@dataclass(frozen=True)
class AibrixPrefix(Policy):
    """Peer: AIBrix's prefix-cache routing.

    If max - min > imbalance (num_requests): least requests (reason `imbalanced`). Else, among the instances with a match and
    num_requests <= mean + sigmas * standard deviation (of all): the longest match, ties by num_requests (`prefix_match`). Else
    least requests (`least_requests`). Source: AIBrix, its description of prefix-cache routing.
    """

    name: ClassVar[str] = "aibrix_prefix"

    imbalance: float = setting(8.0, 0.0, 1e6, "difference of requests that counts as imbalance")
    sigmas: float = setting(1.0, 0.0, 1e3, "standard deviations above the mean that a match may have")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        loads = _requests(eligible)
        if max(loads.values()) - min(loads.values()) > self.imbalance:
            return serve(_lowest(eligible, loads, rng), "imbalanced", loads)
        average = mean(loads.values())
        limit = average + self.sigmas * math.sqrt(mean((load - average) ** 2 for load in loads.values()))
        matches = [one for one in eligible if one.cached_tokens > 0 and one.num_requests <= limit]
        if not matches:
            return serve(_lowest(eligible, loads, rng), "least_requests", loads)
        missed = _missed(matches, request)
        longest = max(one.cached_tokens for one in matches)
        best = _lowest([one for one in matches if one.cached_tokens == longest], loads, rng)
        return serve(best, "prefix_match", missed)


@dataclass(frozen=True)
class Preble(Policy):
    """Peer: Preble's E2 (exploit or explore).

    work = pending_prefill + decode_weight * ongoing_decode, in tokens. Exploit: the best match, random ties, serves if it saves
    more than `exploit_ratio` of the prompt and its work <= overload_factor * mean work (reason `exploit`). Explore: argmin
    work + new + eviction_weight * max(new - free KV tokens, 0), random ties (reason `explore`); free = (1 - kv_usage) *
    capacity, and no eviction is counted where the capacity is unknown.
    Source: Preble (E2), without its rebalancing. It weighs evicted tokens by their hit rate and work over a time window, neither
    of which the view has: eviction_weight and the open requests stand for them.
    """

    name: ClassVar[str] = "preble"

    exploit_ratio: float = setting(0.5, 0.0, 1.0, "share of the prompt that a match must exceed")
    overload_factor: float = setting(2.0, 0.0, 1e6, "a match serves up to this multiple of the mean work")
    decode_weight: float = setting(0.01, 0.0, 1e6, "weight of a running decode's context token against a prefill token")
    eviction_weight: float = setting(1.0, 0.0, 1e6, "weight of an evicted token against a prefill token")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        work = {
            one.instance_id: one.pending_prefill_tokens + self.decode_weight * one.ongoing_decode_tokens
            for one in eligible
        }
        scores = {one.instance_id: work[one.instance_id] + one.new_tokens + self._eviction(one) for one in eligible}
        best = _lowest(eligible, _missed(eligible, request), rng)
        if best.cached_tokens > self.exploit_ratio * request.input_tokens and work[
            best.instance_id
        ] <= self.overload_factor * mean(work.values()):
            return serve(best, "exploit", scores)
        return serve(_lowest(eligible, scores, rng), "explore", scores)

    def _eviction(self, candidate: Candidate) -> float:
        if not candidate.kv_capacity_tokens:
            return 0.0
        free = (1.0 - candidate.kv_usage) * candidate.kv_capacity_tokens
        return self.eviction_weight * max(candidate.new_tokens - free, 0.0)
