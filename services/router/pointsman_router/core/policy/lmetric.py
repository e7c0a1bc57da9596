"""The policies `lmetric`, `lmetric1` and `lpwl`: least work, with or without the number of requests; no affinity. Pure."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pointsman_router.core.placement_types import Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, lowest, serve


@dataclass(frozen=True)
class _LeastWork(Policy):
    uses_shortlist: ClassVar[bool] = True

    @abstractmethod
    def score(self, candidate: Candidate) -> float:
        """Return the score to minimise, in tokens or tokens x requests."""

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        eligible = view.eligible()
        scores: Mapping[str, float] = {candidate.instance_id: float(self.score(candidate)) for candidate in eligible}
        # Idle instances all score 0 under `lmetric`, so without this tie-break it would ignore their caches.
        best = lowest(
            eligible, scores, view.decision_number, lambda candidate: (candidate.new_tokens, candidate.num_requests)
        )
        return serve(best, self.name, scores)


@dataclass(frozen=True)
class Lmetric(_LeastWork):
    """Least work times requests; an idle instance scores 0, however much it must compute.

    argmin score = (pending_prefill + new) * num_requests, in tokens x requests; ties by new tokens, then num_requests, then in
    turn.

    Reasons: `lmetric`.
    Source: the reference system's lmetric, in which idle instances score 0.
    """

    name: ClassVar[str] = "lmetric"

    def score(self, candidate: Candidate) -> float:
        return (candidate.pending_prefill_tokens + candidate.new_tokens) * candidate.num_requests


@dataclass(frozen=True)
class Lmetric1(_LeastWork):
    """Least work times the number of requests with this one included.

    argmin score = (pending_prefill + new) * (num_requests + 1), in tokens x requests; ties by new tokens, then num_requests,
    then in turn.

    Reasons: `lmetric1`.
    Source: LMetric as published: new prefill tokens times the batch size with the request included.
    """

    name: ClassVar[str] = "lmetric1"

    def score(self, candidate: Candidate) -> float:
        return (candidate.pending_prefill_tokens + candidate.new_tokens) * (candidate.num_requests + 1)


@dataclass(frozen=True)
class Lpwl(_LeastWork):
    """Least pending work.

    argmin score = pending_prefill + new, in tokens; ties by new tokens, then num_requests, then in turn.

    Reasons: `lpwl`.
    Source: the reference system's lpwl.
    """

    name: ClassVar[str] = "lpwl"

    def score(self, candidate: Candidate) -> float:
        return candidate.pending_prefill_tokens + candidate.new_tokens
