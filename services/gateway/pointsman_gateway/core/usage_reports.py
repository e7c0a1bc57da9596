"""One process's reports on its API keys' usage to the router that accounts for limits: messages of a bounded number of keys, and
what is reported again if a stream ends. Pure; times in monotonic s."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.rate_limits import RateLimiter

# Maximum number of keys of a message: some ms of work for the gateway and for the router.
MAX_KEYS = 250


class UsageReports:
    """The reports on the keys of a RateLimiter, over one stream after another.

    A round is a report on all keys that were used, in as many messages as it takes. The first round of a stream is a full report.
    """

    def __init__(self, limiter: RateLimiter, gateway: str) -> None:
        """`gateway`: the name that all processes of a gateway share."""
        self._limiter = limiter
        self._gateway = gateway
        # The messages that are not answered, oldest first, by the times at which they were made.
        self._unanswered: deque[tuple[float, placement_pb2.UsageReport]] = deque()
        self._last_answer = 0
        self._full_begins = True  # the next message that names keys begins a full report
        self._full = True  # the next round ends a full report
        self._round: deque[bytes] | None = None
        self._round_is_full = False

    @property
    def unanswered(self) -> int:
        """Number of messages that are not answered."""
        return len(self._unanswered)

    @property
    def waiting_since(self) -> float | None:
        """When the oldest message that is not answered was made; None if all are answered."""
        return self._unanswered[0][0] if self._unanswered else None

    def stream_began(self, now: float) -> None:
        """Record that the next messages go to another stream. Earlier ones that are not answered may be lost. Mutates."""
        for _, message in self._unanswered:
            self._limiter.lost(message.keys, now)
        self._unanswered.clear()
        self._last_answer = 0
        self._tell_all()

    def begin_round(self) -> bool:
        """Begin to report all keys that were used; return whether there are any, or a full report is due. Mutates."""
        self._round_is_full, self._full = self._full, False
        if self._round_is_full:
            self._limiter.touch_open()
        names = self._limiter.touched()
        self._round = deque(names) if names or self._round_is_full else None
        return self._round is not None

    def next_message(self, now: float) -> placement_pb2.UsageReport | None:
        """Return the round's next message; None if the round has ended, or if it was given up for a full report. Mutates."""
        if self._round is None:
            return None
        names = [self._round.popleft() for _ in range(min(len(self._round), MAX_KEYS))]
        ends = not self._round
        if ends:
            self._round = None
        return self._message(names, now, asked=False, full_ends=ends and self._round_is_full)

    def asking(self, names: Sequence[bytes], now: float) -> placement_pb2.UsageReport:
        """Return a message that requests more of these keys, MAX_KEYS at most. Mutates."""
        return self._message(names, now, asked=True, full_ends=False)

    def without_keys(self, now: float) -> placement_pb2.UsageReport:
        """Return a message that names no key. Mutates."""
        return self._sent(placement_pb2.UsageReport(gateway=self._gateway, last_answer=self._last_answer), now)

    def answered(self, answer: placement_pb2.UsageAnswer, now: float) -> None:
        """Apply the answer to the oldest message that is not answered. Mutates."""
        reported_at = self._unanswered.popleft()[0] if self._unanswered else now
        self._last_answer = answer.number
        self._limiter.count_gateways(answer.gateways, now)
        self._limiter.granted(answer.keys, now, reported_at)
        if answer.tell_all:
            self._tell_all()

    def _tell_all(self) -> None:
        self._full_begins, self._full, self._round = True, True, None

    def _message(
        self, names: Sequence[bytes], now: float, *, asked: bool, full_ends: bool
    ) -> placement_pb2.UsageReport:
        message = placement_pb2.UsageReport(
            gateway=self._gateway,
            full=self._full_begins,
            full_ends=full_ends,
            last_answer=self._last_answer,
            keys=self._limiter.reports(names, now, asked=asked),
        )
        self._full_begins = False
        return self._sent(message, now)

    def _sent(self, message: placement_pb2.UsageReport, now: float) -> placement_pb2.UsageReport:
        self._unanswered.append((now, message))
        return message
