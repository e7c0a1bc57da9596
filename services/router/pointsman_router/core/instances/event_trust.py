"""Whether an instance's KV events agree with its answers, so that its copy of keys may count as exact. Pure; times in s.

After an answer's first token, the engine has every whole block of its prompt, found or computed. So the copy must have them, too,
as soon as the events had time to arrive. An idle engine, and a prompt that is known in full, prove nothing against the events.
Blocks that the copy has and the engine has not are found by the prediction audit (prediction_audit.py), from what answers or,
without usage details, the engine's counters say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.instances.prediction_audit import SLACK_BLOCKS, SLACK_SHARE

# Time after an answer's first token within which its blocks must be in the copy, s.
SETTLE_S = 2.0
# Number of answers that are considered, and number of contradictions among them that end the trust.
WINDOW = 8
CONTRADICTIONS = 4
# Number of answers in a row that must agree before the events are trusted: first, after a loss of trust, and at most. It doubles
# with each loss.
FIRST_AGREEMENTS, AGREEMENTS_AFTER_LOSS, MAX_AGREEMENTS = 1, 16, 128
# Number of a prompt's keys that are looked up.
SAMPLES = 8
# Number of answers without usage details that are compared with the engine's counters at once, and the least share of the
# predicted tokens that the counters must show.
COUNTED_ANSWERS = 8
LEAST_SHARE = 0.5

UNPROVEN = "no answer has confirmed its KV events yet"


@dataclass(slots=True)
class EventTrust:
    """The evidence about the events of one incarnation.

    `proven`: the copy counts as exact; while it is `doubted`, the approximate keys count beside it. `credible`: answers have not
    contradicted the events since they were last proven, or ever, so the copy counts beside the approximate keys.
    """

    proven: bool = False
    credible: bool = True
    reason: str = UNPROVEN  # why the events are not trusted; empty while they are
    needed: int = FIRST_AGREEMENTS  # answers in a row that must agree before trust; grows with each loss
    agreed: int = 0  # answers in a row that agreed; not counted during trust
    losses: int = 0  # how often trust was lost, a first contradiction before any trust included
    is_logged: bool = False  # whether the loss of trust, or that there never was any, is logged
    # Answers that wait for their events: when they are due, and samples of their keys, the last first; none if the copy had them.
    _pending: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)
    _missing: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # Answers that are due by then waited already when the events were trusted last, and are yet to be compared; -inf: none.
    _unsettled_until: float = -inf

    @property
    def doubted(self) -> bool:
        """Whether any of the last answers computed blocks that the events did not report, or waited for its events when these
        were trusted: its keys are then neither in the copy nor provisional."""
        return any(self._missing) or self._unsettled_until > -inf

    @property
    def waits(self) -> bool:
        """Whether an answer waits for its events."""
        return bool(self._pending)

    def computed(
        self, keys: Sequence[int], block_size: int, holds: Callable[[int], bool], now: float, *, sparse: bool
    ) -> None:
        """Record an answer's first token: the engine has the prompt's whole blocks, with these keys. Mutates.

        Prompts of a few blocks are ignored, and so are answers while enough wait. With `sparse` prefixes, the last keys are
        looked up, any of which agrees. What the copy (`holds`, as for compare()) has by now agrees, also if it is evicted next.
        """
        if len(self._pending) >= WINDOW:
            return
        tokens = len(keys) * KEY_TOKENS
        checked = int(tokens - max(SLACK_BLOCKS * block_size, SLACK_SHARE * tokens)) // KEY_TOKENS
        if checked <= 0:
            return
        if sparse:
            samples = tuple(keys[-SAMPLES:])
        else:
            samples = tuple(keys[(checked - 1) * at // (SAMPLES - 1)] for at in range(SAMPLES - 1, -1, -1))
        agrees = (any if sparse else all)(map(holds, samples))
        self._pending.append((now + SETTLE_S, () if agrees else samples))

    def compare(self, holds: Callable[[int], bool], now: float, *, sparse: bool) -> bool:
        """Compare the answers that wait with the copy (`holds`: whether it has a key); return whether `proven` has changed, or
        the reason for the first time. Mutates."""
        changed, before = False, self.proven
        agrees = any if sparse else all
        for _ in range(len(self._pending)):
            due, samples = self._pending.popleft()
            if not samples or agrees(map(holds, samples)):
                changed |= self._agree()
            elif now >= due:
                changed |= self._miss()
            else:
                self._pending.append((due, samples))
        if self.proven and not before:
            self._unsettled_until = self._pending[-1][0] if self._pending else -inf
        elif not self._pending or self._pending[0][0] > self._unsettled_until:
            self._unsettled_until = -inf
        return changed

    def short(self) -> None:
        """Record that an answer had fewer cached tokens than the copy. Mutates."""
        self.agreed = 0

    def lose(self, reason: str) -> bool:
        """Stop trusting the events. Return whether that is new. Mutates."""
        lost, self.proven, self.credible = self.proven, False, False
        self.agreed = 0
        self.reason = reason
        self._missing.clear()
        self._unsettled_until = -inf
        if lost or self.needed == FIRST_AGREEMENTS:
            self.needed = min(AGREEMENTS_AFTER_LOSS << self.losses, MAX_AGREEMENTS)
            self.losses += 1
        new, self.is_logged = lost or not self.is_logged, True
        return new

    def forget_waiting(self) -> None:
        """Drop the answers that wait: the agent was silent, or the copy is made anew. Mutates."""
        self._pending.clear()

    def _agree(self) -> bool:
        self._missing.append(False)
        if self.proven:
            return False
        self.agreed += 1
        if self.agreed < self.needed:
            return False
        self.proven = self.credible = True
        self.is_logged = False
        self.reason = ""
        return True

    def _miss(self) -> bool:
        self._missing.append(True)
        self.agreed = 0
        if (count := sum(self._missing)) < CONTRADICTIONS:
            return False
        return self.lose(
            f"{count} of the last {len(self._missing)} answers computed blocks that its KV events did not report"
        )


@dataclass(slots=True)
class CountedHits:
    """Compares the predictions for answers without usage details with the engine's counters of prompt tokens looked up and found
    in its cache. They also count what others send, so they can only show that too much was predicted."""

    _since: float | None = None  # when the counters had these values, s
    _queries: int = 0
    _hits: int = 0
    _answers: list[tuple[float, int]] = field(
        default_factory=list
    )  # when they had their first token, and the prediction

    def answered(self, opened_at: float, predicted: int, now: float) -> None:
        """Record an answer, of a request that was placed at `opened_at`. Mutates."""
        if self._since is not None and opened_at >= self._since and len(self._answers) < 2 * COUNTED_ANSWERS:
            self._answers.append((now, predicted))

    def counted(self, queries: int, hits: int, sampled_at: float) -> tuple[int, int, int] | None:
        """Record the counters at `sampled_at`. If enough answers came before, return their number, and means of the tokens
        predicted and found; None also if the engine does not count. Mutates."""
        before = [predicted for at, predicted in self._answers if at <= sampled_at]
        if self._since is not None and hits >= self._hits and len(before) < COUNTED_ANSWERS:
            return None
        looked_up, found, predicted = queries - self._queries, hits - self._hits, sum(before)
        began = self._since is not None
        self._since, self._queries, self._hits, self._answers = sampled_at, queries, hits, []
        if not began or found < 0 or looked_up < predicted:
            return None
        return (
            len(before),
            predicted // len(before),
            (predicted if found >= LEAST_SHARE * predicted else found) // len(before),
        )
