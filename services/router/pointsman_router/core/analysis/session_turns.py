"""Counts turns, tokens and cached tokens of sessions from recent decisions. Pure.

Up to a million sessions have an owner, so nothing is counted for each of them in advance. The sessions that a caller asks about
are counted from the decisions in the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pointsman_router.core.events_and_effects import Finished
from pointsman_router.core.placement_types import Decision, StepKind


@dataclass(slots=True)
class Turns:
    """Counts of a session's requests: their number, their input and cached tokens, and the input tokens of the newest one."""

    turns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    last_input_tokens: int = 0


class SessionTurns:
    """The turns of chosen sessions, named by pool and session, counted from decisions that come newest first."""

    def __init__(self, chosen: Iterable[tuple[str, str]]) -> None:
        self._turns = {name: Turns() for name in chosen}

    def of(self, pool: str, session: str) -> Turns:
        """Return the counts of one of the chosen sessions."""
        return self._turns[pool, session]

    def add(self, decision: Decision, finished: Finished | None) -> None:
        """Count one decision, with its gateway's report of the request's end (None: not yet). Mutates.

        A request counts once, by the first part of its plan; placements after a failure do not count. The cached tokens are the
        engine's figure without what the plan itself has computed, or those predicted where that is not known.
        """
        request = decision.request
        if decision.previous_id or request.exclude or not (turns := self._turns.get((decision.pool, request.session))):
            return
        whole = decision.mode == "COLOCATED" and decision.result.steps[-1].kind is StepKind.SERVE
        reported = finished.cache_hits(one_step=whole) if finished is not None else None
        turns.turns += 1
        turns.input_tokens += request.input_tokens
        turns.cached_tokens += decision.cached_tokens if reported is None else min(reported, request.input_tokens)
        if turns.turns == 1:
            turns.last_input_tokens = request.input_tokens
