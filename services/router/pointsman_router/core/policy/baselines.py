"""Baseline policies, which every other policy must beat. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, lowest, serve


@dataclass(frozen=True)
class Random(Policy):
    """Uniformly random.

    Reasons: `random`.
    Source: the usual baseline of load balancers.
    """

    name: ClassVar[str] = "random"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        return serve(rng.choice(view.eligible()), "random")


@dataclass(frozen=True)
class RoundRobin(Policy):
    """Each instance in turn.

    The eligible instance whose number is decision_number modulo their count.

    Reasons: `round_robin`.
    Source: nginx's default.
    """

    name: ClassVar[str] = "round_robin"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        return serve(eligible[view.decision_number % len(eligible)], "round_robin")


@dataclass(frozen=True)
class LeastRequests(Policy):
    """Fewest open requests.

    argmin num_requests, in requests; ties in turn.

    Reasons: `least_requests`.
    Source: nginx's least_conn.
    """

    name: ClassVar[str] = "least_requests"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores = {candidate.instance_id: float(candidate.num_requests) for candidate in eligible}
        return serve(lowest(eligible, scores, view.decision_number), "least_requests", scores)


@dataclass(frozen=True)
class Sticky(Policy):
    """The session's owner while it can be placed on; otherwise the fewest open requests.

    Rule:
        1. owner, if eligible
        2. else argmin num_requests, in requests; ties in turn

    Reasons: `session_affinity` (1), `least_requests` (2).
    Source: the sticky sessions of load balancers.
    """

    name: ClassVar[str] = "sticky"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        for candidate in view.eligible():
            if candidate.instance_id == view.session_owner:
                return serve(candidate, "session_affinity")
        return LeastRequests().choose(request, view, rng)
