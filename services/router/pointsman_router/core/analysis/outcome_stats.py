"""Statistics of how decisions ended, by class, mode and reason. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pointsman_router.core.events_and_effects import Finished
from pointsman_router.core.placement_types import Decision

# Prefixes of the notes on plans that failed and ended as one SERVE without another instance's KV (placement_plans.py).
FAILED_STEPS = ("prefill_failed:", "serve_failed:")


@dataclass(slots=True)
class OutcomeGroup:
    """The decisions of one class, mode and reason."""

    route_class: str  # LIGHT, MEDIUM or HEAVY, as decided; empty in the total
    mode: str  # COLOCATED or OFFLOAD; empty in the total
    reason: str  # that of the result, not of a step; empty in the total
    decided: int = 0  # number of decisions
    outcomes: Counter[str] = field(default_factory=Counter)  # number of decisions by how the requests ended
    # Number of decisions of which a step failed, and one SERVE without another instance's KV answered instead.
    fell_back: int = 0
    held: int = 0  # number of decisions whose request was held first
    input_tokens: int = 0  # of all prompts
    reported: int = 0  # number of requests for which the engine reported its cached tokens
    reported_input_tokens: int = 0  # of these requests only
    predicted_cached_tokens: int = 0  # of these requests only
    reported_cached_tokens: int = 0  # of these requests only
    first_tokens_s: list[float] = field(default_factory=list)  # times to the first byte of the answers

    def add(self, decision: Decision, outcome: str, finished: Finished | None) -> None:
        """Count one decision. Mutates."""
        self.decided += 1
        self.outcomes[outcome] += 1
        self.fell_back += any(note.startswith(FAILED_STEPS) for note in decision.notes)
        self.held += decision.held_s > 0
        self.input_tokens += decision.request.input_tokens
        if finished is None:
            return
        # Of later parts of a plan the prediction has what earlier parts computed.
        hits = None if decision.previous_id else finished.cache_hits(one_step=decision.in_one_step)
        if hits is not None:
            self.reported += 1
            self.reported_input_tokens += decision.request.input_tokens
            self.predicted_cached_tokens += decision.present_tokens
            self.reported_cached_tokens += hits
        if first_ms := (finished.timings_ms or {}).get("first_token"):
            self.first_tokens_s.append(first_ms / 1e3)


class OutcomeStats:
    """The OutcomeGroups of all decisions that were added, and their total."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str], OutcomeGroup] = {}
        self.total = OutcomeGroup("", "", "")  # of all groups

    def add(self, decision: Decision, outcome: str, finished: Finished | None) -> None:
        """Count a decision, and how its request ended (`finished` None: not yet). Mutates."""
        key = (decision.route_class, decision.mode, decision.result.reason)
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = OutcomeGroup(*key)
        group.add(decision, outcome, finished)
        self.total.add(decision, outcome, finished)

    def groups(self) -> list[OutcomeGroup]:
        """Return the groups, largest first."""
        return sorted(
            self._groups.values(), key=lambda group: (-group.decided, group.route_class, group.mode, group.reason)
        )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of `values` that at least `share` (0 to 1] of them do not exceed; None if there are no values."""
    if not values:
        return None
    rank = -(-len(values) * share // 1)
    return sorted(values)[max(int(rank) - 1, 0)]
