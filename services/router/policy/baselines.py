"""Baselines that every other policy must beat. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from services.router.domain import FleetView, PlacementRequest, Ruling
from services.router.policy.base import Policy, lowest, serve


@dataclass(frozen=True)
class Random(Policy):
    """Uniformly random."""

    name: ClassVar[str] = "random"

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        return serve(rng.choice(view.eligible()), "random")


@dataclass(frozen=True)
class RoundRobin(Policy):
    """Each instance in turn."""

    name: ClassVar[str] = "round_robin"

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        return serve(eligible[view.turn % len(eligible)], "round_robin")


@dataclass(frozen=True)
class LeastRequests(Policy):
    """argmin num_requests; ties in turn."""

    name: ClassVar[str] = "least_requests"

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        eligible = view.eligible()
        scores = {candidate.instance_id: float(candidate.num_requests) for candidate in eligible}
        return serve(lowest(eligible, scores, view.turn), "least_requests", scores)


@dataclass(frozen=True)
class Sticky(Policy):
    """The session's owner while it lives; otherwise argmin num_requests, ties in turn."""

    name: ClassVar[str] = "sticky"

    def rule(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> Ruling:
        for candidate in view.eligible():
            if candidate.instance_id == view.session_owner:
                return serve(candidate, "affinity")
        return LeastRequests().rule(request, view, rng)
