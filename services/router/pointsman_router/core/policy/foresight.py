"""`foresight`: scores are predicted seconds; light prompts go at once, heavy ones in slices, and others are held. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import UNSET, structs

from pointsman_router.core.placement_types import (
    NO_FACTS,
    Candidate,
    FleetView,
    PlacementRequest,
    PolicyResult,
    PoolFacts,
    PrefillBacklog,
)
from pointsman_router.core.policy.base import Policy, fetch_of, hold, rotated, serve, setting, slice_of
from pointsman_router.core.policy.prefills_ahead import prefills_ahead
from pointsman_router.core.policy.ways import Ways
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurve

AT_ONCE, SLICE, LAST_PART, HELD = "at_once", "slice", "last_part", "held"
FETCH, AWAITS_KV = "fetch", "awaits_kv"
# Share of a slice: a shorter rest of the prompt is computed together with the slice before it.
SMALL_REST = 0.25
# Predicted time to the first token of a heavy prompt, as a multiple of its cost without any cache, from which on no answer delays
# it further.
MAX_STRETCH = 1.15
# A light prompt goes at once to an instance with fewer open prefills: one is computed, and the next is at hand when it ends.
# Others wait in the router, where they can still go elsewhere, as to an instance that has fetched their prefix meanwhile.
AT_HAND = 2
# Factor, in multiples of the mean request cost, that stands for no limit of a wait.
NO_WAIT_LIMIT = 1e6


@dataclass(frozen=True)
class Foresight(Policy):
    """Least predicted seconds until the first token; heavy prompts in slices, one after another, light ones at once.

    Score of instance i, in s; the request goes to the instance with the least score:
        wait_i + C_i
        + lost_cache_weight * (C_i - min C)
        + remainder_weight * idle * rest_i
        + (interference + busy_interference * (1 - idle)) * computed C_i * decodes_i, except where slices of it are computed
        + overflow_factor * u, if i's KV cache would not hold all open prompts
    Terms:
        C_i: the seconds in which i has the prompt: the curve's for the tokens that i computes, and those of loading KV from i's
            lower tiers. If that is sooner, those of fetching the prefix that another instance has cached and of computing the
            rest, or those until KV that is fetched for another request has arrived, and of the rest
        wait_i: seconds of the prefills open on i that the request waits for, and of those that are held for i: u each, and at
            most what i computes of C_i
        rest_i: seconds of the rests of other prompts of which slices are computed on i
        decodes_i: answers on i past their first token; each slows down, and is slowed down by, what i computes of C_i
        u: mean cost of a request, s; 0 before the first request, and then all requests go at once
        idle: share of instances without prefills, 0 to 1
    When the request goes, and how much of it:
        light (min C <= light_factor * u): at once iff fewer than 2 prefills are open on i, or wait_i <= light_wait_factor * u,
            or wait_i < half of what is open on i
        heavy: iff the open prefills on i, and the rests there that go before it, take at most heavy_wait_factor * u, and no new
            answer goes first. Then slice_factor * u seconds of the prompt go, and the rest is decided anew
        else held; the least min C / ageing_rate - age, in s, is first
    A heavy prompt that has begun goes on before all heavy prompts that have not; of two that have begun, the one with less left.
    An answer that began on i in the last answer_factor * u seconds goes before a slice if C_i > 2 * light_factor * u, while
    age + C_i is at most 1.15 times the cost of the prompt without any cache.
    So an instance has one heavy prompt at a time, light ones go between its slices, and short answers to these get their tokens
    before the next slice. This also holds for engines that cut long prompts into chunks themselves: a prompt that is alone there
    gets whole steps, which may take seconds. On such an engine a prompt of n tokens waits, for each prompt before it, for
    min(the rest of that prompt, ceil(n / limit) chunks of it). A light prompt longer than a chunk waits as heavy ones do, but not
    for prompts with more left, and then goes whole. When a request goes to an instance that is to fetch, the fetch goes first,
    and the rest is decided anew. The figures are u, and wait and C of the chosen instance, and how much of C is the fetch.

    Reasons: `at_once`, `held`, `slice`, `last_part`, `fetch`, `awaits_kv`.
    Source: Pointsman's own study (docs/findings.md).
    """

    name: ClassVar[str] = "foresight"  # as registered, and as decisions record it
    uses_shortlist: ClassVar[bool] = True  # the instances left out count in `idle` only

    # times u: s of prefill on the chosen instance, so tokens by its curve
    slice_factor: float = setting(
        0.3, 0.0, 1e6, "length of a slice, in multiples of the mean request cost; 0: no slices"
    )
    # s per s of the request's age, added to slice_factor * u
    slice_growth: float = setting(
        0.0, 0.0, 1e6, "seconds by which a slice is longer for each second that the request has waited"
    )
    # with less left that can be sliced, the rest goes in one piece
    slice_min_tokens: float = setting(1024.0, 16.0, 1e9, "minimum length of a slice, in tokens")
    # times u, compared with the least C over the instances
    light_factor: float = setting(
        2.0, 0.0, 1e6, "maximum cost of a light request, in multiples of the mean request cost"
    )
    # times u, compared with the wait; NO_WAIT_LIMIT once the request was held for the maximum time
    light_wait_factor: float = setting(
        0.2, 0.0, 1e6, "maximum wait of a light request, in multiples of the mean request cost"
    )
    # times u, compared with the work ahead; NO_WAIT_LIMIT as in light_wait_factor
    heavy_wait_factor: float = setting(
        0.2, 0.0, 1e6, "maximum work ahead of a heavy request, in multiples of the mean request cost"
    )
    # s per s; the queue penalty is min C / ageing_rate
    ageing_rate: float = setting(1.0, 1e-3, 1e6, "seconds of cost that a second of waiting offsets in the queue")
    # times u, since an answer began on the chosen instance
    answer_factor: float = setting(
        0.6, 0.0, 1e6, "time that a new answer has before the next slice, in multiples of the mean request cost"
    )
    # s per s of C_i - min C
    lost_cache_weight: float = setting(
        0.3, 0.0, 1e6, "penalty per second of prefill that the best cached instance would save"
    )
    # s per s of rest_i, times `idle`
    remainder_weight: float = setting(
        0.3, 0.0, 1e6, "penalty per second left of other heavy prompts there, whose slices slow the answer"
    )
    # s per s of C_i and answer past its first token there
    interference: float = setting(0.05, 0.0, 1e6, "penalty per second of prefill and running decode there")
    # added to interference in proportion to 1 - idle
    busy_interference: float = setting(
        0.3, 0.0, 1e6, "increase of interference if every instance has prefills, since slow answers fill the KV cache"
    )
    # times u, in s; only where the KV capacity is known
    overflow_factor: float = setting(
        1.0, 0.0, 1e6, "penalty for more open prompts than the KV cache holds, in multiples of the mean request cost"
    )
    # with less to send, the instance computes it itself
    fetch_min_tokens: float = setting(
        2048.0, 16.0, 1e9, "minimum length of a cached prefix that is fetched from another instance, in tokens"
    )

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = rotated(view.eligible(), view.decision_number)
        curves, now = view.curves, view.now
        unit = _mean_cost_s(view)
        ways = Ways(request, view, eligible, self.fetch_min_tokens)
        own = ways.seconds
        least = min(own)
        light = least <= self.light_factor * unit
        unseen = view.unseen
        without_prefill = sum([not candidate.prefill_backlog.requests for candidate in eligible])
        idle = (without_prefill + unseen.instances - unseen.prefilling) / (len(eligible) + unseen.instances)
        scores: dict[str, float] = {}
        best_at, best_score, second = 0, math.inf, math.inf
        # In ascending order of own cost. Once this alone exceeds the second least score, no later instance can be best or second.
        for at in sorted(range(len(own)), key=own.__getitem__):
            candidate, cost = eligible[at], own[at]
            score = cost + self.lost_cache_weight * (cost - least)
            if score > second:
                break
            computes_s, new = cost, candidate.new_tokens
            if at in ways.fetches:
                computes_s, new = ways[at].computes_s, ways[at].new_tokens
            if candidate.num_requests:
                curve = curves.get(candidate.prefill_backlog.hardware, DEFAULT_CURVE)
                score += self._load(request, candidate, computes_s, new, curve, now, idle)
                if 0 < candidate.kv_capacity_tokens < _open_tokens(request, candidate):
                    score += self.overflow_factor * unit
            if candidate.held_for is not UNSET:
                score += candidate.held_for * min(computes_s, unit)
            scores[candidate.instance_id] = score
            if score < best_score:
                best_at, best_score, second = at, score, best_score
            elif score < second:
                second = score
        best, best_way = eligible[best_at], ways[best_at]
        curve = curves.get(best.prefill_backlog.hardware, DEFAULT_CURVE)
        backlog, wait = prefills_ahead(best.prefill_backlog, curve, best_way.new_tokens, now)
        figures = {"mean_cost_s": unit, "wait_s": wait, "prefill_s": best_way.seconds}
        if best_way.prefix_tokens:
            figures["fetch_s"] = best_way.seconds - best_way.computes_s
        queue_penalty = least / self.ageing_rate
        if best_way.prefix_tokens and not best_way.source and self.light_wait_factor < NO_WAIT_LIMIT:
            held = hold(AWAITS_KV, scores=scores, queue_penalty_s=queue_penalty, waits_for=best.instance_id)
            return structs.replace(held, figures=figures)
        fetch = fetch_of(best, best_way.prefix_tokens, best_way.source, FETCH, scores) if best_way.source else None
        # On an engine that cuts prompts, a prompt of several chunks slows all prompts computed beside it, and is slowed by them.
        passes = light and not 0 < best.prefill_backlog.chunk_limit < best_way.new_tokens
        soon = wait <= self.light_wait_factor * unit or wait < 0.5 * backlog
        if not unit or (passes and (soon or len(best.prefill_backlog.queue) < AT_HAND)):
            return structs.replace(fetch or serve(best, AT_ONCE, scores), figures=figures)
        cost = best_way.computes_s
        ahead = backlog + _before_s(request, best, cost, curve, light=light)
        if passes or ahead > self.heavy_wait_factor * unit or self._answer_first(request, best, cost, curve, unit, now):
            held = hold(HELD, scores=scores, queue_penalty_s=queue_penalty, waits_for=best.instance_id)
            return structs.replace(held, figures=figures)
        prefix = 0 if fetch or light else self._slice(request, best, curve, unit)
        result = fetch or (slice_of(best, prefix, SLICE, scores) if prefix else serve(best, LAST_PART, scores))
        return structs.replace(result, figures=figures, queue_penalty_s=queue_penalty)

    def without_holds(self, facts: PoolFacts = NO_FACTS) -> Policy:
        """Return the same policy with unlimited waits, which holds no request."""
        return replace(self, light_wait_factor=NO_WAIT_LIMIT, heavy_wait_factor=NO_WAIT_LIMIT, answer_factor=0.0)

    def _load(
        self,
        request: PlacementRequest,
        candidate: Candidate,
        computes_s: float,
        new_tokens: int,
        curve: PrefillCurve,
        now: float,
        idle: float,
    ) -> float:
        """Return what an instance's other requests add to its score, s. It computes `new_tokens` in `computes_s`."""
        work, added = candidate.prefill_backlog, 0.0
        # A prompt that has begun would lose what is computed of it, and its answers there would see another prompt begin.
        if not _has_begun(request, work):
            interference = self.interference + self.busy_interference * (1.0 - idle)
            added = interference * computes_s * max(candidate.num_requests - work.requests, 0)
        if work.queue:
            added += prefills_ahead(work, curve, new_tokens, now)[1]
        if work.remainders and idle:
            added += self.remainder_weight * idle * _rests_s(request, work, curve)
        return added

    def _answer_first(
        self,
        request: PlacementRequest,
        candidate: Candidate,
        cost: float,
        curve: PrefillCurve,
        unit: float,
        now: float,
    ) -> bool:
        """Return whether a new answer of an instance goes before the prompt, which takes `cost` s there: a short one then has all
        its tokens, instead of one for each slice. `unit`: the mean cost of a request, s."""
        work = candidate.prefill_backlog
        if work.answer_began_at is UNSET or candidate.num_requests <= work.requests:
            return False
        if cost <= 2.0 * self.light_factor * unit or now - work.answer_began_at >= self.answer_factor * unit:
            return False
        return request.age_s + cost <= MAX_STRETCH * curve.cost_s(request.input_tokens, 0)

    def _slice(self, request: PlacementRequest, candidate: Candidate, curve: PrefillCurve, unit: float) -> int:
        """Return the length of the prefix that the instance has after the next slice, in tokens; 0: the whole rest goes at
        once."""
        if not self.slice_factor:
            return 0
        there = candidate.present_tokens
        seconds = self.slice_factor * unit + self.slice_growth * request.age_s
        tokens = max(curve.tokens_in(seconds, there), self.slice_min_tokens)
        tokens = min(tokens, request.sliceable_tokens - there)
        if tokens < self.slice_min_tokens or tokens * (1 + SMALL_REST) >= request.input_tokens - there:
            return 0
        block = candidate.prefill_backlog.block_size
        end = there + max(int(tokens) // block, 1) * block
        return end if end <= request.sliceable_tokens and end < request.input_tokens else 0


def _has_begun(request: PlacementRequest, work: PrefillBacklog) -> bool:
    """Return whether slices of the prompt are computed on the instance."""
    return any(who == request.request_id for who, *_ in work.remainders)


def _rests_s(request: PlacementRequest, work: PrefillBacklog, curve: PrefillCurve) -> float:
    """Return the seconds left of other prompts of which slices are computed on an instance."""
    rests = [curve.cost_s(left, there) for who, left, there in work.remainders if who != request.request_id]
    return sum(rests) + curve.sums_s(work.unlisted_remainders)


def _before_s(
    request: PlacementRequest, candidate: Candidate, cost: float, curve: PrefillCurve, *, light: bool
) -> float:
    """Return the seconds left of other prompts on the instance that go before this one, which takes `cost` s there.

    Those are all if it is a heavy one that has not begun: if it could go first since it has less left, the longest prompts would
    wait for all that come. Otherwise they are those with less left: prompts that alternated slice by slice would all end when the
    last one does. Both are compared by what was left after their last slices there: otherwise each could wait for the other
    because its own part was evicted. Prompts that are not listed all count as their mean.
    """
    work = candidate.prefill_backlog
    if not light and not _has_begun(request, work):
        return _rests_s(request, work, curve)
    rests = {who: curve.cost_s(left, there) for who, left, there in work.remainders}
    cost = min(cost, rests.pop(request.request_id, cost))
    less = sum([rest for rest in rests.values() if rest < cost])
    others = work.unlisted_remainders
    return less + curve.sums_s(others) if others.prefills and curve.cost_s(*others.mean()) < cost else less


def _open_tokens(request: PlacementRequest, candidate: Candidate) -> int:
    """Return the prompt tokens of all requests that would be open on an instance, this one counted once."""
    there = _has_begun(request, candidate.prefill_backlog)
    return candidate.ongoing_tokens + (0 if there else request.input_tokens)


def _mean_cost_s(view: FleetView) -> float:
    """Return the mean cost of a request, s, as the mean over the kinds of hardware; 0 before the first request."""
    if not view.mean_work.tokens:
        return 0.0
    curves = view.curves.values() or (DEFAULT_CURVE,)
    return sum(curve.work_s(view.mean_work) for curve in curves) / len(curves)
