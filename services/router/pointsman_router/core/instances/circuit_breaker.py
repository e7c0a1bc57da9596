"""Circuit breaker: an instance that fails several requests in a row gets no requests for a while, from any gateway. Pure.

The pattern is that of Nygard, Release It!: after several failures in a row the circuit opens and nothing is sent. Then one
request at a time is sent on trial. Its answer closes the circuit, its failure opens the circuit for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

CIRCUIT_OPEN = "circuit_open"
# Number of refusals (5xx) in a row, in multiples of `failures`, that count as the instance's fault even if no other instance
# answers such a request. If several instances are broken in the same way, none of them can show the fault of another.
REFUSALS = 5


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """After `failures` failed requests in a row (0: never) an instance gets no requests for `first_open_s`, then one request on
    trial. Each failed trial doubles the time, up to `max_open_s`. Times in s."""

    failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class Circuit:
    """The circuit of one incarnation. Requests that fail by their own fault are not counted: they end as REJECTED."""

    failures: int = 0  # in a row
    refusals: int = 0  # requests answered 5xx in a row; the requests themselves may have caused this
    opened: int = 0  # how many times in a row the circuit opened; 0: closed
    until: float = 0.0  # when the next trial may begin, s
    trial: str = ""  # id of the request on trial, which shows whether the instance has recovered

    def open(self, now: float) -> bool:
        """Return whether the instance must get no request at `now` (s): its open time has not ended, or a request is on trial."""
        return bool(self.opened) and (bool(self.trial) or now < self.until)

    def placed(self, request_id: str, now: float) -> None:
        """Record that a request goes to the instance. If the open time has ended, the request is on trial. Mutates."""
        if self.opened and not self.trial and now >= self.until:
            self.trial = request_id

    def answered(self) -> bool:
        """Record a first token, a done step or a complete answer of the instance; return whether this closed the circuit.
        Mutates."""
        closed = bool(self.opened)
        self.failures, self.refusals, self.opened, self.trial = 0, 0, 0, ""
        return closed

    def failed(self, request_id: str, now: float, settings: CircuitSettings) -> bool:
        """Record a failed request; return whether this opened the circuit, or opened it again. Mutates."""
        self.failures += 1
        if not settings.failures or self.failures < settings.failures:
            return False
        if self.opened and self.trial != request_id:
            return False  # The request was open before the circuit opened, and shows nothing new.
        self.until = now + min(settings.first_open_s * 2.0**self.opened, settings.max_open_s)
        self.opened = min(self.opened + 1, 30)
        self.trial = ""
        return True

    def refused(self, request_id: str, now: float, settings: CircuitSettings) -> bool:
        """Record a 5xx answer; return whether this opened the circuit. It counts as a failure if the request is on trial, or
        after too many in a row (REFUSALS). Mutates."""
        self.refusals += 1
        if self.trial == request_id or self.refusals >= REFUSALS * settings.failures:
            self.failures = max(self.failures, settings.failures - 1)
            return self.failed(request_id, now, settings)
        return False

    def left(self, request_id: str) -> None:
        """Record the end of a request without evidence, for example because its client left. Another request may then be on
        trial. Mutates."""
        if self.trial == request_id:
            self.trial = ""
