"""Whether an engine lives, by its answers to GET /health and its other signs of life. Pure; times in s on one clock.

The load that an engine reports, or fails to report, is no evidence: a slow or broken /metrics says nothing of answers to
requests.
"""

from __future__ import annotations

# Number of consecutive failed probes after which an engine is unhealthy. One can fail because the engine is busy.
UNHEALTHY_AFTER = 2
# Time after a sign of life during which a probe without an answer does not count: the engine's HTTP server is busy.
ALIVE_AFTER_SIGN_S = 2.0
# Time without any sign of life after which an engine is gone.
GONE_AFTER_S = 60.0


class EngineLife:
    """The life of one engine. A sign of life is an HTTP answer on any path, a pushed step load, or a KV event."""

    def __init__(self, now: float) -> None:
        self.problem = ""
        """Why the last probe failed; empty if it did not."""
        self._sign_at = now
        self._failures = 0
        self._says_dead = False

    @property
    def healthy(self) -> bool:
        """Whether the engine answers, and does not say that it is dead."""
        return self._failures < UNHEALTHY_AFTER

    def gone(self, now: float) -> bool:
        """Return whether nothing has answered for GONE_AFTER_S."""
        return now - self._sign_at > GONE_AFTER_S

    def sign(self, at: float) -> None:
        """Record a sign of life other than a probe, unless a later one is known. It outweighs probes without an answer, and not
        an answer that the engine is dead: an HTTP server can outlive its engine. Mutates."""
        if at <= self._sign_at:
            return
        self._sign_at = at
        if not self._says_dead:
            self._failures, self.problem = 0, ""

    def probed(self, now: float) -> None:
        """Record that a probe was answered: the engine is alive. Mutates."""
        self._sign_at, self._failures, self._says_dead, self.problem = now, 0, False, ""

    def said_dead(self, reason: str, now: float) -> None:
        """Record that a probe was answered: the engine is dead. Mutates."""
        self._sign_at, self._says_dead, self.problem = now, True, reason
        self._failures += 1

    def silent(self, reason: str, now: float, *, refused: bool = False) -> None:
        """Record a probe without an answer. `refused`: nothing listens there, whatever was seen before. Mutates."""
        if not refused and now - self._sign_at < ALIVE_AFTER_SIGN_S:
            return
        self._says_dead, self.problem = False, reason
        self._failures += 1
