"""What the peers' policies share. They are other routers' scores over our view, to be compared with: not their code and not their
knowledge. They get our exact prefixes and load, so they are at least as good as at home.

Higher-is-better scores are negated; ties are broken at random (through `rng`). Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from pointsman.router.core.types import Candidate, PlacementRequest


def lowest_at_random(candidates: Sequence[Candidate], scores: Mapping[str, float], rng: random.Random) -> Candidate:
    """The candidate with the lowest score; ties at random."""
    low = min(scores[one.instance_id] for one in candidates)
    return rng.choice([one for one in candidates if scores[one.instance_id] == low])


def open_requests(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Open requests by instance."""
    return {one.instance_id: float(one.num_requests) for one in candidates}


def reported(candidates: Sequence[Candidate], figure: Callable[[Candidate], float]) -> dict[str, float]:
    """A figure of the engines' reports, by instance. What is stale says nothing: it counts as the greatest of the fresh ones,
    lest an instance whose agent fell silent while it was idle draws everything; 0 everywhere when none is fresh."""
    greatest = max((figure(one) for one in candidates if not one.stale), default=0.0)
    return {one.instance_id: greatest if one.stale else figure(one) for one in candidates}


def negated_hit_ratios(candidates: Sequence[Candidate], request: PlacementRequest) -> dict[str, float]:
    """The negated share of the prompt that is cached, by instance."""
    return {one.instance_id: -one.cached_tokens / max(request.input_tokens, 1) for one in candidates}
