"""Helpers of the policies that compute other routers' scores on Pointsman's view, for comparison. Pure.

These policies contain neither the other routers' code nor their data. They use Pointsman's exact prefixes and load, so they are
at least as good as in their own routers. Scores for which higher is better are negated. Ties are broken at random (by `rng`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from pointsman_router.core.placement_types import Candidate, PlacementRequest


def lowest_at_random(candidates: Sequence[Candidate], scores: Mapping[str, float], rng: random.Random) -> Candidate:
    """Return the candidate with the lowest score; ties at random."""
    low = min(scores[candidate.instance_id] for candidate in candidates)
    return rng.choice([candidate for candidate in candidates if scores[candidate.instance_id] == low])


def open_requests(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return the number of open requests by instance."""
    return {candidate.instance_id: float(candidate.num_requests) for candidate in candidates}


def reported(candidates: Sequence[Candidate], figure: Callable[[Candidate], float | None]) -> dict[str, float]:
    """Return a figure of the engines' reports, by instance; 0 for all if no report is fresh.

    A figure that is stale, or that the engine does not report, counts as the greatest of the fresh ones. Otherwise an instance
    whose agent stopped reporting while it was idle would attract all requests.
    """
    figures = {candidate.instance_id: None if candidate.stale else figure(candidate) for candidate in candidates}
    greatest = max((known for known in figures.values() if known is not None), default=0.0)
    return {instance_id: greatest if known is None else known for instance_id, known in figures.items()}


def negated_hit_ratios(candidates: Sequence[Candidate], request: PlacementRequest) -> dict[str, float]:
    """Return the negated share of the prompt that is cached, by instance."""
    return {candidate.instance_id: -candidate.cached_tokens / max(request.input_tokens, 1) for candidate in candidates}
