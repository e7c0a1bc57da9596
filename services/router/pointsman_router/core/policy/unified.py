"""`unified`: the session's owner while that is cheap, else the least work x requests. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from pointsman_router.core.placement_types import (
    NOTHING_UNSEEN,
    Candidate,
    FleetView,
    PlacementRequest,
    PolicyResult,
    Unseen,
)
from pointsman_router.core.policy.base import Policy, lowest, serve, setting

_WORK = attrgetter("new_tokens", "num_requests")


@dataclass(frozen=True)
class Unified(Policy):
    """The session's owner while it is not overloaded, else least work times requests; overloaded instances are skipped.

    Rule, by instance:
        1. owner: cached > affinity_ratio * input, in tokens, and num_requests <= overload_factor * mean(num_requests)
        2. else argmin score = (pending_prefill + new + decode_weight * ongoing_decode) * max(num_requests, 1), in tokens x
            requests; ties by new tokens, then num_requests, then in turn
        ceiling, in 1 and 2: skipped if num_requests > max(ceiling_min, ceiling_factor * mean(num_requests of the others))

    new: tokens of the prompt that are not cached there; pending_prefill: tokens placed there and not computed yet;
    ongoing_decode: input tokens of answers past their first token. An overloaded owner with the whole prompt cached and
    nothing pending has a score of about 0, however many requests multiply it. Without the ceiling such an owner would fail rule
    1 and be chosen again by rule 2. The ceiling's mean excludes the instance itself, since otherwise neither of two instances
    could ever be over twice the mean. With a factor of at least 1 the least loaded instance is never skipped, unless the sums of
    instances left out skip all: then they do not count.

    Reasons: `session_affinity` (1), `least_load_x_work` (2), `ceiling_changed_choice` (2, and the ceiling changed the choice).
    Source: the reference system's unified policy with its revisions A (factor 1.3) and B' (weight 0.01 and the max). The
    ceiling solves a problem that the reference leaves open, with the reference's first overload factor (2.0).
    """

    name: ClassVar[str] = "unified"  # as registered, and as decisions record it
    uses_shortlist: ClassVar[bool] = True  # means and ceiling need only sums of the instances left out

    # rule 1; the mean includes the owner and the instances left out
    overload_factor: float = setting(
        1.3, 0.0, 1e6, "maximum requests of the owner for affinity, as a multiple of the mean"
    )
    # of ongoing_decode_tokens, in tokens to compute
    decode_weight: float = setting(0.01, 0.0, 1e6, "weight of a running decode's context token against a prefill token")
    # rule 1; the owner's cached tokens / the request's input tokens
    affinity_ratio: float = setting(0.5, 0.0, 1.0, "share of the input that the owner must exceed in cached tokens")
    # the mean excludes the instance itself
    ceiling_factor: float = setting(
        2.0, 1.0, 1e6, "maximum requests of an instance, as a multiple of the mean of the others; else it is skipped"
    )
    # requests; the ceiling is never lower
    ceiling_min: float = setting(16.0, 0.0, 1e6, "number of requests up to which no instance is skipped")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        below = self.below_ceiling(eligible, view.unseen)
        weight = self.decode_weight
        scores = {
            candidate.instance_id: (
                candidate.pending_prefill_tokens + candidate.new_tokens + weight * candidate.ongoing_decode_tokens
            )
            * (candidate.num_requests or 1)
            for candidate in eligible
        }
        if view.session_owner:
            requests = sum([candidate.num_requests for candidate in eligible]) + view.unseen.num_requests
            limit = requests / (len(eligible) + view.unseen.instances) * self.overload_factor
            for candidate in below:
                if (
                    candidate.instance_id == view.session_owner
                    and candidate.cached_tokens > self.affinity_ratio * request.input_tokens
                    and candidate.num_requests <= limit
                ):
                    return serve(candidate, "session_affinity", scores)

        best = lowest(below, scores, view.decision_number, _WORK)
        changed = len(below) < len(eligible) and lowest(eligible, scores, view.decision_number, _WORK) not in below
        return serve(best, "ceiling_changed_choice" if changed else "least_load_x_work", scores)

    def below_ceiling(self, eligible: tuple[Candidate, ...], unseen: Unseen = NOTHING_UNSEEN) -> tuple[Candidate, ...]:
        """Return the candidates that the ceiling does not skip; never empty unless `eligible` is.

        Instances left out may be idle because they get no requests (they failed, say). If their sums put all candidates above the
        ceiling, only the candidates are compared with each other."""
        requests = [candidate.num_requests for candidate in eligible]
        total, others = sum(requests) + unseen.num_requests, len(eligible) + unseen.instances - 1
        if not others or max(requests) <= self.ceiling_min:
            return eligible
        below = tuple(
            candidate
            for candidate in eligible
            if candidate.num_requests
            <= max(self.ceiling_min, self.ceiling_factor * (total - candidate.num_requests) / others)
        )
        return below or self.below_ceiling(eligible)
