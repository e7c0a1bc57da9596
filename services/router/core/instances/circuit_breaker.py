"""An instance that fails its requests one after another is left alone for a while, whichever gateway saw it. Pure.

What a circuit breaker is (Nygard, Release It!): after failures in a row nothing is sent; then one request on trial at a time; its
answer closes the circuit, its failure opens it for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

CIRCUIT_OPEN = "circuit_open"
# So many times as many refusals in a row, with nothing answered in between, are the instance's fault whoever else refuses the
# same: where several instances are broken alike, none of them ever bears witness against another.
REFUSALS = 5


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """After `failures` failed requests in a row (0: never) an instance gets nothing for `first_open_s`, then one request on
    trial; each failed trial doubles the time, up to `max_open_s`. Times in s."""

    failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class Circuit:
    """One incarnation's failures in a row. Requests that failed by their own fault do not belong here: they end as rejected."""

    failures: int = 0
    refusals: int = 0  # requests answered 5xx in a row, which may have been those requests' fault
    opened: int = 0  # times in a row that it opened
    until: float = 0.0
    trial: str = ""  # the request that is out to show whether the instance has recovered

    def open(self, now: float) -> bool:
        """Whether the instance is to be left alone at `now` (s): its time is not over, or a request is on trial there."""
        return bool(self.opened) and (bool(self.trial) or now < self.until)

    def placed(self, request_id: str, now: float) -> None:
        """A request goes to the instance: where the time is over, it is the one on trial. Mutates."""
        if self.opened and not self.trial and now >= self.until:
            self.trial = request_id

    def answered(self) -> bool:
        """The instance gave a first token, or a whole answer. Returns whether this closed the circuit. Mutates."""
        closed = bool(self.opened)
        self.failures, self.refusals, self.opened, self.trial = 0, 0, 0, ""
        return closed

    def failed(self, request_id: str, now: float, settings: CircuitSettings) -> bool:
        """The instance failed a request. Returns whether this opened the circuit, or opened it again. Mutates."""
        self.failures += 1
        if not settings.failures or self.failures < settings.failures:
            return False
        if self.opened and self.trial != request_id:
            return False  # It was under way when the circuit opened, and tells nothing new.
        self.until = now + min(settings.first_open_s * 2.0**self.opened, settings.max_open_s)
        self.opened = min(self.opened + 1, 30)
        self.trial = ""
        return True

    def refused(self, request_id: str, now: float, settings: CircuitSettings) -> bool:
        """The instance answered a request with a 5xx. Counts as failed on trial, and when it does so too often in a row. Returns
        whether this opened the circuit. Mutates."""
        self.refusals += 1
        if self.trial == request_id or self.refusals >= REFUSALS * settings.failures:
            self.failures = max(self.failures, settings.failures - 1)
            return self.failed(request_id, now, settings)
        return False

    def left(self, request_id: str) -> None:
        """A request ended that tells nothing, as when its client left: another one may be on trial. Mutates."""
        if self.trial == request_id:
            self.trial = ""
