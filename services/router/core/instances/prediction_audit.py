"""Whether what the router predicts for an instance is what its engine then reports. Pure; `now` in s.

One shortfall is chance (a block evicted between placement and prefill); most of the last few are an index that is wrong. Of an
engine whose agent has fallen silent no shortfall counts: what it evicted meanwhile has not been told yet.
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
    used again; what was placed before `since` is no evidence, and before `suspended_until` the approximate index counts as empty.

    Answers are observed, and judged later: once their instance's agent has spoken again.
    """

    failures: int = 0
    reason: str = ""
    events_rejected: bool = False
    since: float = 0.0
    suspended_until: float = 0.0
    _short: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _unjudged: deque[tuple[bool, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _failed_at: float | None = None

    def observe(self, predicted: int, reported: int, block_size: int) -> None:
        """Note one answer's cached tokens beside its prediction. Mutates.

        Only predictions that could have fallen short count. A shortfall is more than 2 of the engine's blocks and more than 10 %
        of the prediction.
        """
        if predicted > SLACK_BLOCKS * block_size:
            short = predicted - reported > max(SLACK_BLOCKS * block_size, SLACK_SHARE * predicted)
            self._unjudged.append((short, predicted, reported))

    def judge(self, now: float) -> bool:
        """Count what was observed since the last call; whether the instance fails the audit because of it: 5 shortfalls in the
        last 8 answers are persistent. Mutates."""
        if not self._unjudged:
            return False
        while self._unjudged and sum(self._short) < SHORTFALLS:
            short, predicted, reported = self._unjudged.popleft()
            self._short.append(short)
        if sum(self._short) < SHORTFALLS:
            return False
        self._unjudged.clear()
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

    def ignore_before(self, now: float) -> None:
        """What was placed before `now` is no evidence, nor what was observed of it. Mutates."""
        self.since = now
        self._unjudged.clear()

    def reset(self, now: float) -> None:
        """A new complete snapshot is there: what was placed before `now` is no evidence against it. Mutates."""
        self.ignore_before(now)
        self.reason = ""
        self._short.clear()
