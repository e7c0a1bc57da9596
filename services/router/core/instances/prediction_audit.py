"""Whether what the router predicts for an instance is what its engine then reports. Pure; `now` in s.

One shortfall is chance (a block evicted between placement and prefill); most of the last few are an index that is wrong.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 8
SHORTFALLS = 5
SLACK_BLOCKS = 2
SLACK_SHARE = 0.1
AGAIN_S = 60.0


@dataclass(slots=True)
class PredictionAudit:
    """One incarnation's record. `failures` counts; `events_rejected`: events were wrong twice within `AGAIN_S` and are not
    used again; before `since` nothing counts as evidence, and before `suspended_until` the approximate index counts as empty."""

    failures: int = 0
    reason: str = ""
    events_rejected: bool = False
    since: float = 0.0
    suspended_until: float = 0.0
    _short: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _failed_at: float | None = None

    def observe(self, predicted: int, reported: int, block_size: int, now: float) -> bool:
        """Count one answer's cached tokens beside its prediction; whether the instance fails the audit because of it. Mutates.

        Only predictions that could have fallen short count. A shortfall is more than 2 of the engine's blocks and more than 10 %
        of the prediction; 5 in the last 8 are persistent.
        """
        if predicted <= SLACK_BLOCKS * block_size:
            return False
        self._short.append(predicted - reported > max(SLACK_BLOCKS * block_size, SLACK_SHARE * predicted))
        if sum(self._short) < SHORTFALLS:
            return False
        self.reason = (
            f"{sum(self._short)} of the last {len(self._short)} answers had fewer cached tokens than predicted, "
            f"the last {reported} instead of {predicted}"
        )
        if self._failed_at is not None and now - self._failed_at <= AGAIN_S:
            self.events_rejected = True
        self.failures += 1
        self._failed_at = now
        self._short.clear()
        return True

    def suspend(self, now: float) -> None:
        """The approximate index was wrong as well: it starts anew and counts as empty for `AGAIN_S`. Mutates."""
        self.suspended_until = now + AGAIN_S
        self.since = now

    def reset(self, now: float) -> None:
        """A new complete snapshot is there: what was placed before `now` is no evidence against it. Mutates."""
        self.since = now
        self.reason = ""
        self._short.clear()
