"""`foresight`: predicted seconds instead of tokens, heavy prompts in slices, small ones at once, the rest in order. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from services.router.curve import DEFAULT_CURVE, CostCurve
from services.router.domain import Candidate, FleetView, PlacementRequest, Prefilling, Ruling
from services.router.policy.base import Policy, hold, in_turn, serve, setting, slice_of

EXPRESS, SLICE, LAST, HELD = "express", "slice", "serve", "held"
# Of what a prefill is predicted to take, it may have done so much when nothing was heard of it for long: it is not over.
MOST_DONE = 0.9
# A rest of less than this share of a slice goes with the slice before it.
CRUMB = 0.25
EAGER_U = 1e6


@dataclass(frozen=True)
class Foresight(Policy):
    """Least predicted seconds until the first token; heavy prompts in slices, one after another, light ones at once.

    C_i = the curve's seconds for the tokens that are new on i; wait_i = those of the prefills open there, rest_i = those of
    what is to follow the slices that are computed there, u = those that a request usually takes; idle = the share of instances
    without prefills. score_i = wait_i + C_i + leave * (C_i - min C) + beside * idle * rest_i + (harm + crowd * (1 - idle)) *
    C_i * decodes_i + overflow_u * u where i's KV would not hold all open prompts. The least score is where a request goes. A
    light one (min C <= light_u * u): when wait_i <= express_u * u, or under half of what is open there (reason `express`). A
    heavy one: when what goes before it there takes at most start_u * u, which is what is open, and the rests of heavy prompts
    that have less left than itself. Until then it is held (`held`), those with the least min C / ageing - age first. Of a heavy
    prompt only the next slice_u * u seconds are placed (`slice`), then the rest is decided anew (`serve`: its last part). So an
    instance has one heavy prompt at a time, that with the least left, and light ones go between its slices. Engines that cut
    long prompts themselves are no exception: a lone prompt has their whole step, which may take seconds. A prompt of n tokens
    waits there, for each prompt before it, min(what is left of it, ceil(n / limit) chunks of it); a light one of more than a
    chunk starts as heavy ones do, and goes whole. Scores are seconds; figures tell u, and wait and C where it goes.
    Source: a study of Pointsman's own, of which docs/findings.md tells.
    """

    name: ClassVar[str] = "foresight"

    slice_u: float = setting(0.3, 0.0, 1e6, "a slice takes so many u; 0: no slices")
    slice_min_tokens: float = setting(1024.0, 16.0, 1e9, "and it has at least so many tokens")
    light_u: float = setting(2.0, 0.0, 1e6, "a request of at most so many u is light")
    express_u: float = setting(1.5, 0.0, 1e6, "a light one goes where it waits at most so many u")
    start_u: float = setting(0.2, 0.0, 1e6, "a heavy one goes where at most so many u go before it")
    ageing: float = setting(0.1, 1e-3, 1e6, "seconds of cost that a second of waiting makes up for")
    leave: float = setting(0.3, 0.0, 1e6, "price of leaving a cache: its owner's return")
    beside: float = setting(
        0.3, 0.0, 1e6, "price of answering beside what is left of a heavy prompt: slices slow answers"
    )
    harm: float = setting(0.05, 0.0, 1e6, "price of a second of prefill beside a running decode")
    crowd: float = setting(
        0.3, 0.0, 1e6, "what is added to it where every instance has prefills: slow answers fill the KV"
    )
    overflow_u: float = setting(1.0, 0.0, 1e6, "price in u of more open prompts than the KV cache holds")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = in_turn(view.eligible(), view.turn)
        curves, now = view.curves, view.now
        unit = _usual_s(view)
        own = [
            curves.get(one.prefilling.hardware, DEFAULT_CURVE).cost_s(one.new_tokens, one.cached_tokens)
            for one in eligible
        ]
        least = min(own)
        idle = sum([not one.prefilling.requests for one in eligible]) / len(eligible)
        scores: dict[str, float] = {}
        best, best_score, best_cost, second = eligible[0], math.inf, own[0], math.inf
        # The cheapest first: where the own cost alone is more than the second least score, nothing can be the best or next to it.
        for at in sorted(range(len(own)), key=own.__getitem__):
            one, cost = eligible[at], own[at]
            score = cost + self.leave * (cost - least)
            if score > second:
                break
            if one.num_requests:
                curve = curves.get(one.prefilling.hardware, DEFAULT_CURVE)
                score += self._load(request, one, cost, curve, now, idle)
                if 0 < one.kv_capacity_tokens < _open_tokens(request, one):
                    score += self.overflow_u * unit
            scores[one.instance_id] = score
            if score < best_score:
                best, best_score, best_cost, second = one, score, cost, best_score
            elif score < second:
                second = score
        curve = curves.get(best.prefilling.hardware, DEFAULT_CURVE)
        backlog, wait = _ahead(best.prefilling, curve, best.new_tokens, now)
        figures = {"usual_s": unit, "wait_s": wait, "prefill_s": best_cost}
        light = least <= self.light_u * unit
        # Where an engine cuts, what takes several chunks slows all that is computed beside it, and is slowed by it.
        passes = light and not 0 < best.prefilling.chunk_limit < best.new_tokens
        if not unit or (passes and (wait <= self.express_u * unit or wait < 0.5 * backlog)):
            return structs.replace(serve(best, EXPRESS, scores), figures=figures)
        handicap = least / self.ageing
        if passes or backlog + _less_left(request, best, best_cost, curve) > self.start_u * unit:
            return structs.replace(hold(HELD, scores=scores, handicap_s=handicap), figures=figures)
        prefix = 0 if light else self._slice(request, best, curve, unit)
        ruling = slice_of(best, prefix, SLICE, scores) if prefix else serve(best, LAST, scores)
        return structs.replace(ruling, figures=figures, handicap_s=handicap)

    def eager(self) -> Policy:
        """The same, holding nobody."""
        return replace(self, express_u=EAGER_U, start_u=EAGER_U)

    def _load(
        self, request: PlacementRequest, one: Candidate, cost: float, curve: CostCurve, now: float, idle: float
    ) -> float:
        """What a busy instance's other requests add to its score, in s."""
        work = one.prefilling
        harm = self.harm + self.crowd * (1.0 - idle)
        added = harm * cost * max(one.num_requests - work.requests, 0)
        if work.queue:
            added += _ahead(work, curve, one.new_tokens, now)[1]
        if work.rests and idle:
            rests = [curve.cost_s(left, there) for who, left, there in work.rests if who != request.request_id]
            added += self.beside * idle * sum(rests)
        return added

    def _slice(self, request: PlacementRequest, one: Candidate, curve: CostCurve, unit: float) -> int:
        """How many tokens of the prompt are to be there after the next slice; 0: all that is left goes at once."""
        if not self.slice_u:
            return 0
        tokens = max(curve.tokens_in(self.slice_u * unit, one.cached_tokens), self.slice_min_tokens)
        tokens = min(tokens, request.sliceable_tokens - one.cached_tokens)
        if tokens < self.slice_min_tokens or tokens * (1 + CRUMB) >= one.new_tokens:
            return 0
        block = one.prefilling.block_size
        end = one.cached_tokens + max(int(tokens) // block, 1) * block
        return end if end <= request.sliceable_tokens and end < request.input_tokens else 0


def _less_left(request: PlacementRequest, one: Candidate, cost: float, curve: CostCurve) -> float:
    """Seconds of the rests of other prompts there that have less left than this one, which takes `cost` s there.

    Prompts that took turns, slice by slice, would all end when the last one does. Of two one is always first: both are compared
    by what was left when they were there last, lest each give way to the other because its own part was evicted meanwhile.
    """
    rests = {who: curve.cost_s(left, there) for who, left, there in one.prefilling.rests}
    cost = min(cost, rests.pop(request.request_id, cost))
    return sum([rest for rest in rests.values() if rest < cost])


def _open_tokens(request: PlacementRequest, one: Candidate) -> int:
    """Prompt tokens of all that would be open on an instance, this request counted once."""
    there = any(who == request.request_id for who, *_ in one.prefilling.rests)
    return one.ongoing_tokens + (0 if there else request.input_tokens)


def _usual_s(view: FleetView) -> float:
    """Seconds that a request usually takes, in the mean over the kinds of hardware; 0 before the first."""
    if not view.usual.tokens:
        return 0.0
    curves = view.curves.values() or (DEFAULT_CURVE,)
    return sum(curve.work_s(view.usual) for curve in curves) / len(curves)


def _backlog(work: Prefilling, curve: CostCurve, now: float) -> float:
    """Seconds of prefill open on an instance."""
    if not work.queue:
        return 0.0
    done = min(max(now - work.moved_at, 0.0), MOST_DONE * curve.cost_s(*work.queue[0]))
    return curve.total_s(work.queue) - done


def _ahead(work: Prefilling, curve: CostCurve, new: int, now: float) -> tuple[float, float]:
    """Seconds of prefill open on an instance, and how many of them a prompt of `new` tokens waits for."""
    backlog = _backlog(work, curve, now)
    if not (limit := work.chunk_limit) or not backlog:
        return backlog, backlog
    costs = [curve.cost_s(left, there) for left, there in work.queue]
    costs[0] -= min(max(now - work.moved_at, 0.0), MOST_DONE * costs[0])
    rounds = -(-new // limit)
    return backlog, sum(
        min(cost, rounds * curve.cost_s(min(limit, left), there))
        for cost, (left, there) in zip(costs, work.queue, strict=True)
    )
