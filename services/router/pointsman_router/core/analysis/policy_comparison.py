"""Compares recorded decisions with those of another policy on the same views, in sums. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from pointsman_router.core.placement_types import Decision
from pointsman_router.core.policy.prefills_ahead import prefills_ahead
from pointsman_router.core.prefill_curve import DEFAULT_CURVE

# Maximum number of differing decisions that are kept one by one.
MAX_CHANGES = 100


@dataclass(slots=True)
class ComparisonGroup:
    """The sums over the decisions of one recorded class to which the other policy would give the same `reason`. The fields are
    those of PolicyComparison."""

    route_class: str  # as recorded; the other policy may lead to another one
    reason: str
    decided: int = 0  # number of decisions
    changed: int = 0  # number of those that would use other instances
    cached_tokens_change: int = 0  # sum, tokens; positive: more would be cached
    timed: int = 0  # number of decisions in `ttft_change_s`
    ttft_change_s: float = 0.0  # sum over `timed`; negative: sooner


@dataclass(slots=True)
class PolicyComparison:
    """Sums over the decisions that were added; "would" means under the other policy."""

    decided: int = 0  # number of decisions
    # Number of those that would use other instances; a prompt in slices on the same instance is no change.
    changed: int = 0
    held: int = 0  # how many of these would be held instead of placed
    cached_tokens_change: int = 0  # cached tokens that would be, minus those recorded, over all that would be placed
    timed: int = 0  # number of decisions whose expected TTFT is known
    ttft_change_s: float = 0.0  # the expected TTFT that would be, minus that recorded, over these
    # The first changed decisions, each as recorded and as it would be.
    changes: list[tuple[Decision, Decision]] = field(default_factory=list)
    _groups: dict[tuple[str, str], ComparisonGroup] = field(default_factory=dict)

    def add(self, was: Decision, would: Decision) -> None:
        """Count a decision as it `was` recorded, and as it `would` be. Mutates."""
        changed = _places(was) != _places(would)
        ttft_s = ttft_change_s(was, would)
        tokens = would.cached_tokens - was.cached_tokens if would.result.steps else 0
        key = was.route_class, would.result.reason
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = ComparisonGroup(*key)
        for sums in (self, group):
            sums.decided += 1
            sums.changed += changed
            sums.cached_tokens_change += tokens
            sums.timed += ttft_s is not None
            sums.ttft_change_s += ttft_s or 0.0
        self.held += changed and not would.result.steps
        if changed and len(self.changes) < MAX_CHANGES:
            self.changes.append((was, would))

    def groups(self) -> list[ComparisonGroup]:
        """Return the sums by recorded class and reason under the other policy, largest first."""
        return sorted(self._groups.values(), key=lambda group: (-group.decided, group.route_class, group.reason))


def ttft_change_s(was: Decision, would: Decision) -> float | None:
    """Return by how much the expected TTFT would be longer, s: the wait for prefills before the prompt, and the prompt's own
    prefill. None if one of the two decisions did not place the request, or no curve was learned for the instance."""
    first, second = _expected_ttft_s(was), _expected_ttft_s(would)
    return None if first is None or second is None else second - first


def _expected_ttft_s(decision: Decision) -> float | None:
    steps, view = decision.result.steps, decision.view
    candidate = view.find(steps[0].instance_id) if steps else None
    if candidate is None:
        return None
    curve = view.curves.get(candidate.prefill_backlog.hardware, DEFAULT_CURVE)
    if curve == DEFAULT_CURVE:
        return None
    _, wait_s = prefills_ahead(candidate.prefill_backlog, curve, candidate.new_tokens, view.now)
    return wait_s + candidate.prefill_s(curve, decision.request.sequence_length)


def _places(decision: Decision) -> list[str]:
    return [instance_id for instance_id, _ in groupby(step.instance_id for step in decision.result.steps)]
