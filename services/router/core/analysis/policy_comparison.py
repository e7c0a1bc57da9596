"""What recorded decisions would have been under another policy, summed up. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pointsman.router.core.types import Decision


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """A decision as it `was` recorded, and as it `would` have been."""

    was: Decision
    would: Decision

    @property
    def changed(self) -> bool:
        """Whether the plan differs: what each step does and where, so that offload with the same last instance is a change."""
        return _plan(self.was) != _plan(self.would)

    @property
    def cached_tokens_change(self) -> int:
        """Would-be less recorded cached tokens; 0 where the request would have been held."""
        return self.would.cached_tokens - self.was.cached_tokens if self.would.result.steps else 0


@dataclass(frozen=True, slots=True)
class ComparisonGroup:
    """The revisions of one recorded class that would have been made for one `reason`; counts, and tokens."""

    route_class: str
    reason: str
    decided: int
    changed: int
    cached_tokens_change: int


def grouped(revisions: Iterable[PolicyComparison]) -> list[ComparisonGroup]:
    """Sums by class and would-be reason, the biggest first."""
    members: dict[tuple[str, str], list[PolicyComparison]] = {}
    for one in revisions:
        members.setdefault((one.was.route_class, one.would.result.reason), []).append(one)
    groups = [
        ComparisonGroup(
            *key, len(those), sum(one.changed for one in those), sum(one.cached_tokens_change for one in those)
        )
        for key, those in members.items()
    ]
    return sorted(groups, key=lambda group: (-group.decided, group.route_class, group.reason))


def _plan(decision: Decision) -> list[tuple[str, str]]:
    return [(step.kind, step.instance_id) for step in decision.result.steps]
