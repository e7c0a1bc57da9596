"""The idle sessions of a pool whose owner is gone, as far as its next owner needs them: sizes by kind and idle time. Pure.

A new owner knows the open requests, and which instance has each session, but not how large an idle session is, nor since when it
is idle. Counting none of them, it would let in new sessions in their place, and they would return to a pool without room. So an
owner stores the sums of its ledger, not the sessions: KINDS x BINS numbers, whatever the number of sessions. The next owner lets
the sums age: of the sessions of a kind and an idle time the expected part has returned, and is counted with its requests.
"""

from __future__ import annotations

import msgspec

from pointsman_router.core.admission.return_chances import ReturnChances
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, IdleSessions, bin_of

# Tokens below which an inherited sum is dropped.
LEAST_TOKENS = 1.0


class _Part(msgspec.Struct, gc=False):
    """Sessions of one kind that were idle for about the same time."""

    kind: AnswerKind
    idle_s: float
    tokens: float


class InheritedSessions:
    """The idle sessions of a pool's earlier owners; none at first. Memory and time of each call: KINDS x BINS at most."""

    def __init__(self, chances: ReturnChances) -> None:
        self._chances = chances
        self._parts: list[_Part] = []
        self._now = 0.0

    def take_over(self, idle: IdleSessions, age_s: float, now: float) -> None:
        """Begin with what the last owner stored `age_s` ago, and with what it had learned. Mutates."""
        self._chances.restore(idle.returns, idle.exposure_s)
        self._now = now - max(age_s, 0.0)
        self._parts = [
            _Part(kind, (EDGES_S[bin_] + EDGES_S[bin_ + 1]) / 2, tokens)
            for kind in KINDS
            for bin_, tokens in enumerate(idle.tokens[kind])
            if tokens >= LEAST_TOKENS
        ]
        self.advance(now)

    def advance(self, now: float) -> None:
        """Let time pass: drop the part that has returned, as expected, and what is idle for longer than the last bin. Mutates."""
        passed_s, self._now = max(now - self._now, 0.0), now
        if not self._parts or not passed_s:
            return
        for part in self._parts:
            until_s = part.idle_s + passed_s
            part.tokens *= self._chances.stays_idle(part.kind, part.idle_s, until_s)
            part.idle_s = until_s
        self._parts = [part for part in self._parts if part.tokens >= LEAST_TOKENS and part.idle_s < EDGES_S[-1]]

    def weighted(self) -> float:
        """Return their sizes, each by the chance that it returns soon, in tokens, as of the last `advance`."""
        return sum(part.tokens * self._chances.chance(part.kind, bin_of(part.idle_s)) for part in self._parts)

    def tokens(self) -> list[list[float]]:
        """Return their sizes by kind and bin, in tokens, as of the last `advance`."""
        found = [[0.0] * BINS for _ in KINDS]
        for part in self._parts:
            found[part.kind][bin_of(part.idle_s)] += part.tokens
        return found
