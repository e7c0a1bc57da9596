"""Decides on requests under the policy in force: on new requests, on held requests that are retried, and for `explain`. Pure."""

from __future__ import annotations

import msgspec

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.instances.saturation import SATURATED
from pointsman_router.core.placement_types import Decision, FleetView, PlacementRequest
from pointsman_router.core.policy.base import Policy, decide
from pointsman_router.core.policy.decision_rng import rng_of


class AllSaturated(msgspec.Struct, frozen=True, gc=False):
    """All instances of `pool` that could serve a request are saturated."""

    pool: str
    view: FleetView


DecideResult = Decision | ev.Refused | AllSaturated


class Decider:
    """Applies the policy in force, and numbers the decisions. `id_prefix`: the beginning of every decision's id. A decision's
    randomness follows from its id, so that the decision can be made again. `degraded`: whether the shared store is
    unreachable."""

    def __init__(
        self, policy: Policy, instances: InstanceRegistry, views: FleetViewBuilder, retry_after_s: float, id_prefix: str
    ) -> None:
        self.policy = policy
        self.degraded = False
        self._instances = instances
        self._views = views
        self._retry_after_s = retry_after_s
        self._id_prefix = id_prefix
        self._made = 0
        # Pool -> number of its next decision, for policies that use the instances in turn.
        self._numbers: dict[str, int] = {}

    def decide(self, request: PlacementRequest, now: float, policy: Policy | None = None) -> DecideResult:
        """Return the decision on a request at `now` (s) under `policy` (None: the one in force), a refusal, or AllSaturated.
        Changes nothing."""
        pool = self._instances.pool_of(request.model)
        if not pool:
            return ev.Refused(request.request_id, "NOT_FOUND", f"no instance serves a model {request.model!r}")
        policy = policy or self.policy
        view = self._views.view(request, pool, self._numbers.get(pool, 0), now, shortlisted=policy.uses_shortlist)
        if not view.any_eligible():
            if any(candidate.excluded == SATURATED and not candidate.produces_only for candidate in view.candidates):
                return AllSaturated(pool, view)
            why = f"no instance of {pool!r} can take the request now"
            return ev.Refused(request.request_id, "UNAVAILABLE", why, self._retry_after_s, pool=pool)
        decision_id = f"{self._id_prefix}-{self._made + 1}"
        return decide(policy, request, pool, view, rng_of(decision_id), decision_id, degraded=self.degraded)

    def made(self, decision: Decision) -> None:
        """Record that a decision is carried out: the next decision has another id, and the pool's next one another number.
        Mutates."""
        self._made += 1
        self._numbers[decision.pool] = decision.view.decision_number + 1

    def forget_pool(self, pool: str) -> None:
        """Remove the pool's decision number; called when the pool has had no instance for long. Mutates."""
        self._numbers.pop(pool, None)
