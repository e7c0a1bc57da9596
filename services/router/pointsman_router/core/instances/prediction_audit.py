"""Compares the cached tokens that the router predicts for an instance with those that its engine reports. Pure; `now` in s.

A single shortfall is chance (a block evicted between placement and prefill). If most of the last answers fell short, the index is
wrong. Shortfalls of an engine whose agent is silent do not count, since its evictions have not been reported yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# Number of answers that are considered.
WINDOW = 8
# Number of shortfalls among them with which an instance fails the audit.
SHORTFALLS = 5
# Difference up to which an answer does not fall short, in blocks of the engine.
SLACK_BLOCKS = 2
# The same as a share of the prediction. The larger of the two limits applies.
SLACK_SHARE = 0.1
# How long the approximate index counts as empty after a failure, s.
AGAIN_S = 60.0


@dataclass(slots=True)
class PredictionAudit:
    """The audit of one incarnation. Times are in s.

    Answers are observed first and judged later, after the next message of their instance's agent.
    """

    failures: int = 0  # number of failed audits
    reason: str = ""  # what the last one found
    since: float = 0.0  # requests placed before it are no evidence
    suspended_until: float = 0.0  # the approximate index counts as empty until then
    _short: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _unjudged: deque[tuple[bool, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, predicted: int, reported: int, block_size: int) -> bool:
        """Record one answer's predicted and reported cached tokens; return whether it falls short. Mutates.

        Predictions too small for a shortfall are ignored. A shortfall is more than 2 of the engine's blocks and more than 10 % of
        the prediction.
        """
        if predicted <= SLACK_BLOCKS * block_size:
            return False
        short = predicted - reported > max(SLACK_BLOCKS * block_size, SLACK_SHARE * predicted)
        self._unjudged.append((short, predicted, reported))
        return short

    def judge(self) -> bool:
        """Count the answers observed since the last call; return whether the instance fails the audit, with 5 shortfalls in the
        last 8 answers. Mutates."""
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
        self.failures += 1
        self._short.clear()
        return True

    def suspend(self, now: float) -> None:
        """Let the approximate index count as empty for `AGAIN_S`, because it was wrong, too. Mutates."""
        self.suspended_until = now + AGAIN_S
        self.since = now

    def ignore_before(self, now: float) -> None:
        """Exclude requests placed before `now` as evidence, and drop the answers that are not judged yet. Mutates."""
        self.since = now
        self._unjudged.clear()

    def reset(self, now: float) -> None:
        """Start the audit of a new complete snapshot: requests placed before `now` are no evidence against it. Mutates."""
        self.ignore_before(now)
        self.reason = ""
        self._short.clear()
