"""`migrate`: prefills where the session's cache is, and decodes on a less loaded instance. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from pointsman_router.core.placement_types import LIGHT_NEW_TOKENS, Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import choice, least, offload, setting, switch
from pointsman_router.core.policy.unified import Unified


@dataclass(frozen=True)
class Migrate(Unified):
    """The prefill runs on the host, the instance that `unified` chooses; the decode may then move to another instance.

    Terms, loads in requests:
        host.load = num_requests
        target.load = num_requests + recent_migrations (answers that will move to it)
    The decode moves iff all hold:
        host.new >= min_new_tokens, in tokens
        host.ongoing_decode >= min_prefill_decode_busy, in tokens; else the prefill disturbs no decode there
        a target is under the ceiling and can receive the host's KV, target.load <= target_load_ratio * host.load, and host.load -
            target.load >= min_load_gap
    Picker `rotation` uses the targets in turn, without regard to caches. `cache_rich` ("Mechanism B") picks the most cached
    tokens; ties by load, then in turn. Plan: PREFILL on the host, SERVE on the target. The host's load does not include
    recent_migrations, so that decodes that moved to it lately do not move others away. With rotate_affinity the session belongs
    to the target afterwards, else to the host. Scores are `unified`'s; figures are host_load and target_load. It sees all of a
    large pool, since the instances with the fewest requests may all be waiting for decodes that move to them.

    Reasons: `migrate`, `below_threshold`, `host_idle`, `no_lighter_instance`. If the decode stays, the reason of the step is one
    of `unified`'s.
    Source: the reference system's migrate v3, which states no defaults.
    """

    name: ClassVar[str] = "migrate"  # as registered, and as decisions record it
    uses_shortlist: ClassVar[bool] = False  # a target may be an instance that a shortlist leaves out

    # rotation ignores caches, cache_rich takes the most cached tokens
    picker: str = choice("rotation", ("rotation", "cache_rich"), "how a target is picked")
    # tokens; below it the reason is below_threshold
    min_new_tokens: float = setting(LIGHT_NEW_TOKENS, 1.0, 1e9, "new tokens on the host from which a decode may move")
    # tokens, the host's ongoing_decode_tokens; below it the reason is host_idle
    min_prefill_decode_busy: float = setting(
        1.0, 0.0, 1e9, "context tokens in decode on the host from which a decode may move"
    )
    # of requests; the target's recent migrations count, the host's do not
    target_load_ratio: float = setting(0.7, 0.0, 1.0, "maximum load of a target, as a share of the host's requests")
    # requests; counted as for target_load_ratio
    min_load_gap: float = setting(2.0, 0.0, 1e6, "minimum number of requests that a target has fewer than the host")
    # if not, the session stays with the host, which has its prompt
    rotate_affinity: bool = switch(False, "the session belongs to the target afterwards")

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        colocated = super().choose(request, view, rng)
        below = self.below_ceiling(view.eligible(), view.unseen)
        host = next(candidate for candidate in below if candidate.instance_id == colocated.steps[0].instance_id)
        if host.new_tokens < self.min_new_tokens:
            return replace(colocated, reason="below_threshold")
        if host.ongoing_decode_tokens < self.min_prefill_decode_busy:
            return replace(colocated, reason="host_idle")
        targets = tuple(
            candidate
            for candidate in view.targets_of(host)
            if candidate in below
            and effective_load(candidate) <= self.target_load_ratio * host.num_requests
            and host.num_requests - effective_load(candidate) >= self.min_load_gap
        )
        if not targets:
            return replace(colocated, reason="no_lighter_instance", figures={"host_load": host.num_requests})
        target = self._pick(targets, view.decision_number)
        return offload(
            request,
            host,
            target,
            "migrate",
            "migrate",
            scores=colocated.scores,
            figures={"host_load": host.num_requests, "target_load": effective_load(target)},
            owner=target.instance_id if self.rotate_affinity else host.instance_id,
        )

    def _pick(self, targets: tuple[Candidate, ...], decision_number: int) -> Candidate:
        if self.picker == "rotation":
            return targets[decision_number % len(targets)]
        return least(targets, decision_number, lambda candidate: (-candidate.cached_tokens, effective_load(candidate)))


def effective_load(candidate: Candidate) -> int:
    """Return a target's load: its open requests, and the answers that will move to it."""
    return candidate.num_requests + candidate.recent_migrations
