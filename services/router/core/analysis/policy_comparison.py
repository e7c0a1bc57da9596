"""What recorded decisions would have been under another policy, summed up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman.router.core.types import Decision

# So many decisions that would differ are kept one by one.
MAX_CHANGES = 100


@dataclass(slots=True)
class ComparisonGroup:
    """The decisions of one recorded class that would have been made for one `reason`; counts, and tokens."""

    route_class: str
    reason: str
    decided: int = 0
    changed: int = 0
    cached_tokens_change: int = 0


@dataclass(slots=True)
class PolicyComparison:
    """Sums over the decisions that were added. `changed`: of those the plan differs (what each step does and where, so that
    offload with the same last instance is a change); `held` of these would have been held instead of placed.
    `cached_tokens_change`: would-be less recorded, over all that would have been placed. `changes`: the first of the changed, as
    they were and as they would have been."""

    decided: int = 0
    changed: int = 0
    held: int = 0
    cached_tokens_change: int = 0
    changes: list[tuple[Decision, Decision]] = field(default_factory=list)
    _groups: dict[tuple[str, str], ComparisonGroup] = field(default_factory=dict)

    def add(self, was: Decision, would: Decision) -> None:
        """Count a decision as it `was` recorded, and as it `would` have been. Mutates."""
        changed = _plan(was) != _plan(would)
        tokens = would.cached_tokens - was.cached_tokens if would.result.steps else 0
        key = was.route_class, would.result.reason
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = ComparisonGroup(*key)
        for sums in (self, group):
            sums.decided += 1
            sums.changed += changed
            sums.cached_tokens_change += tokens
        self.held += changed and not would.result.steps
        if changed and len(self.changes) < MAX_CHANGES:
            self.changes.append((was, would))

    def groups(self) -> list[ComparisonGroup]:
        """Sums by class and would-be reason, the biggest first."""
        return sorted(self._groups.values(), key=lambda group: (-group.decided, group.route_class, group.reason))


def _plan(decision: Decision) -> list[tuple[str, str]]:
    return [(step.kind, step.instance_id) for step in decision.result.steps]
