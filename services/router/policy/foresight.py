"""`foresight`: predicted seconds instead of tokens, heavy prompts in slices, small ones at once, the rest in order. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from services.router.curve import DEFAULT_CURVE, CostCurve
from services.router.domain import Candidate, FleetView, PlacementRequest, Prefilling, Ruling
from services.router.policy.base import Policy, hold, in_turn, serve, setting, slice_of


@dataclass(frozen=True)
class Foresight(Policy):
    """Least predicted seconds until the first token; heavy prompts in slices, one after another, light ones at once.

    C_i = the curve's seconds for the tokens that are new on i; wait_i = those of the prefills open there, u = those that a
    request usually takes. score_i = wait_i + C_i + leave * (C_i - min C) + harm * C_i * decodes_i + overflow_u * u where i's KV
    would not hold all open prompts. The least score is where a request goes. A light one (min C <= light_u * u): when wait_i <=
    express_u * u, or under half of what is open there (reason `express`). A heavy one: when what is open there takes at most
    start_u * u, while no more than heavy_share of the instances have a prompt of more than heavy_u * u. Until then it is held
    (`held`), those with the least min C / ageing - age first. Of a heavy prompt only the next slice_u * u seconds are placed
    (`slice`), then the rest is decided anew (`serve`: its last part). Engines that cut long prompts themselves get them whole; a
    prompt of n tokens waits there, for each prompt before it, min(what is left of it, ceil(n / limit) chunks of it).
    """

    name: ClassVar[str] = "foresight"

    slice_u: float = setting(2.0, 0.0, 1e6, "a slice takes so many u (0: no slices)")
    slice_min: float = setting(4096.0, 1.0, 1e9, "and at least so many tokens")
    light_u: float = setting(1.5, 0.0, 1e6, "a request of at most so many u is light")
    express_u: float = setting(0.7, 0.0, 1e6, "a light one goes where it waits at most so many u")
    start_u: float = setting(0.35, 0.0, 1e6, "a heavy one goes where the backlog is at most so many u")
    ageing: float = setting(0.1, 1e-3, 1e6, "seconds of cost that a second of waiting makes up for")
    heavy_u: float = setting(3.0, 0.0, 1e6, "a prompt of more u counts as heavy for the cap")
    heavy_share: float = setting(0.5, 0.0, 1.0, "share of instances that may have one")
    leave: float = setting(0.3, 0.0, 1e6, "price of leaving a cache")
    harm: float = setting(0.05, 0.0, 1e6, "price of disturbing one decode, for each second of prefill")
    overflow_u: float = setting(1.0, 0.0, 1e6, "price of more than the KV cache holds")

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = in_turn(view.eligible(), view.turn)
        curves = view.curves
        u = self._unit(view)
        costs, waits, backlogs = [], [], []
        for one in eligible:
            curve = curves.get(one.prefilling.hardware, DEFAULT_CURVE)
            backlog, wait = _ahead(one.prefilling, curve, one.new_tokens, view.now)
            costs.append(curve.cost_s(one.new_tokens, one.cached_tokens))
            backlogs.append(backlog)
            waits.append(wait)
        least = min(costs)
        scores = {}
        fits = []
        for one, cost, wait in zip(eligible, costs, waits, strict=True):
            score = wait + cost + self.leave * (cost - least)
            if decodes := one.num_requests - len(one.prefilling.queue):
                score += self.harm * cost * max(decodes, 0)
            over = one.kv_capacity_tokens and one.ongoing_tokens + request.input_tokens > one.kv_capacity_tokens
            if over:
                score += self.overflow_u * u
            fits.append(not over or not one.num_requests)
            scores[one.instance_id] = score
        handicap = least / self.ageing
        order = sorted(range(len(eligible)), key=lambda at: scores[eligible[at].instance_id])
        at = next((at for at in order if fits[at]), order[0])
        best = eligible[at]
        if not u:
            return serve(best, "express", scores)
        if least <= self.light_u * u:
            if waits[at] <= self.express_u * u or waits[at] < 0.5 * backlogs[at]:
                return serve(best, "express", scores)
            return hold("held", scores=scores, handicap_s=handicap)
        heavy = sum(
            any(
                curves.get(one.prefilling.hardware, DEFAULT_CURVE).cost_s(*item) > self.heavy_u * u
                for item in one.prefilling.queue
            )
            for one in eligible
        )
        capped = least > self.heavy_u * u and heavy >= max(1, self.heavy_share * len(eligible))
        if capped or backlogs[at] > self.start_u * u:
            return hold("held", scores=scores, handicap_s=handicap)
        prefix = self._slice(request, best, curves.get(best.prefilling.hardware, DEFAULT_CURVE), u)
        ruling = slice_of(best, prefix, "slice", scores) if prefix else serve(best, "serve", scores)
        return replace(ruling, handicap_s=handicap)

    def _unit(self, view: FleetView) -> float:
        curves = list(view.curves.values()) or [DEFAULT_CURVE]
        return sum(curve.work_s(view.usual) for curve in curves) / len(curves) if view.usual.tokens else 0.0

    def _slice(self, request: PlacementRequest, one: Candidate, curve: CostCurve, u: float) -> int:
        if not (request.sliceable and self.slice_u) or one.prefilling.chunk_limit:
            return 0
        tokens = max(curve.tokens_in(self.slice_u * u, one.cached_tokens), self.slice_min)
        block = one.prefilling.block_size
        end = one.cached_tokens + int(tokens) // block * block
        # The last part is the answer's: not worth another round when it is small.
        if end + tokens * 0.25 >= request.input_tokens:
            return 0
        return end


def _ahead(work: Prefilling, curve: CostCurve, new: int, now: float) -> tuple[float, float]:
    """Seconds of prefill open on an instance, and how many of them a prompt of `new` tokens waits for."""
    if not work.queue:
        return 0.0, 0.0
    costs = [curve.cost_s(left, there) for left, there in work.queue]
    # What the first has done since it was last seen to move; it may be slower than predicted, but it is not done.
    costs[0] -= min(max(now - work.moved_at, 0.0), 0.9 * costs[0])
    total = sum(costs)
    if not work.chunk_limit:
        return total, total
    limit = work.chunk_limit
    rounds = math.ceil(new / limit)
    wait = 0.0
    for cost, (left, there) in zip(costs, work.queue, strict=True):
        wait += min(cost, rounds * curve.cost_s(min(limit, left), there))
    return total, wait
