"""Whether an engine lives, by what its requests show: a machine that turns evidence into a state. Pure; times in s on one clock.

An engine is *in*: it gets requests; or *out*: it gets none for a while, from any gateway, and then one at a time, on trial. The
pattern is the circuit breaker of Nygard, Release It!. An answer puts the engine in again. Failed trials double the pause.

- A failure is what only the engine can have caused: no connection, a lost request, an error for a request that another engine
  answers. `LifeSettings.failures` of them in a row put the engine out.
- An error (an answer 4xx or 5xx, or a connection that broke under a request) may be the fault of the request. As long as
  another engine has not answered the same request, errors in a row are compared with what the pool's other engines answer
  meanwhile (`_unlikely`). An error that a second engine repeats, which works otherwise, is the request's own fault.
- Silence: the first byte of a request is overdue, and the engine has sent nothing else meanwhile. One overdue request puts the
  engine out. A client that left early, but long after the predicted first byte, counts as a failure.

Reports of agents are no evidence against an engine that answers: `FleetViewBuilder` excludes an engine that its agent calls
unhealthy only if it has not answered lately and others are healthy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf, log
from typing import NamedTuple

# Reasons for which an engine that is out gets no request. With its agent gone, too, it gets none but trials even if no other one
# of its pool is better: it is probably gone.
CIRCUIT_OPEN, OUT_WITHOUT_AGENT = "circuit_open", "out_without_agent"
# How long after the predicted first byte a request is overdue, s.
OVERDUE_S = 10.0
# A request that leaves without a byte after LOST_SHARE times the predicted time, and at least LOST_S after it, is lost.
LOST_SHARE, LOST_S = 3.0, 2.0
# How long an answer or another byte shows that an engine lives whose agent calls it unhealthy, or is gone, s.
SIGN_S = 10.0
# Probability, under the error rate of the pool's other engines, below which errors in a row are the engine's own.
UNLIKELY = 1e-6
_LOG_UNLIKELY = log(UNLIKELY)
# Causes for which an engine is out, or would be if it were not for its answers.
FAILURES, ERRORS, SILENCE = "failures", "errors", "silence"


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """After `failures` failed requests in a row (0: never out) an engine gets no requests for `first_open_s`, then one request on
    trial. Each failed trial doubles the time, up to `max_open_s`. Times in s."""

    failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class PoolAnswers:
    """How many answers and errors the engines of a pool have sent, all together."""

    answers: int = 0
    errors: int = 0


class Wait(NamedTuple):
    """A request without a byte: when it was placed, s, and in what time its own first byte was predicted, alone and behind all
    that came before, s."""

    placed_at: float
    alone_s: float
    predicted_s: float


@dataclass(slots=True)
class EngineLife:
    """The evidence of one incarnation. Methods that return a bool return whether the engine was put out, or in. All mutate but
    the properties, `open`, `overdue` and `why`."""

    pool: PoolAnswers = field(default_factory=PoolAnswers)
    answers: int = 0  # since the start of the incarnation, at this router
    answered_at: float = -inf  # when the last one began or ended
    sign_at: float = -inf  # when the last byte came, or the last progress of a prefill
    failures: int = 0  # in a row
    errors: int = 0  # in a row, of which no other engine has shown whose fault they were
    status: int = 0  # HTTP status of the last error; 0: a broken connection
    opened: int = 0  # how many times in a row the engine was put out; 0: in
    out_since: float = 0.0
    until: float = 0.0  # when the next trial may begin
    trial: str = ""  # id of the request on trial, which shows whether the engine has recovered
    cause: str = ""  # FAILURES, ERRORS or SILENCE, of the last time
    # The requests without a byte, in order of placement, with streamed answers, and with answers that come as a whole.
    streams: OrderedDict[str, Wait] = field(default_factory=OrderedDict)
    wholes: OrderedDict[str, Wait] = field(default_factory=OrderedDict)
    # The pool's answers and errors when this engine last answered.
    _answers_before: int = 0
    _errors_before: int = 0

    def __post_init__(self) -> None:
        self._answers_before, self._errors_before = self.pool.answers, self.pool.errors

    # ---- placements ----

    def open(self, now: float) -> bool:
        """Return whether the engine must get no request at `now`: its pause has not ended, or a request is on trial."""
        return bool(self.opened) and (bool(self.trial) or now < self.until)

    def placed(self, request_id: str, now: float) -> None:
        """Record that a request goes to the engine. If the pause has ended, the request is on trial."""
        if self.opened and not self.trial and now >= self.until:
            self.trial = request_id

    def waits(self, request_id: str, wait: Wait, *, streamed: bool) -> None:
        """Record that a placed request waits for its first byte. `streamed`: the gateway will tell the first one."""
        (self.streams if streamed else self.wholes)[request_id] = wait

    @property
    def doubted(self) -> bool:
        """Whether the engine's last answer was an error, or none has come yet: a further error is to be compared with what
        another engine answers."""
        return self.errors > 0 or not self.answers

    @property
    def works(self) -> bool:
        """Whether the engine's last answer was no error and its last request did not fail: it can be a witness."""
        return bool(self.answers) and not self.errors and not self.failures and not self.opened

    # ---- evidence ----

    def sign(self, now: float) -> bool:
        """Record a byte of any answer, or the progress of a prefill. It ends a silence."""
        self.sign_at = now
        return self._closed() if self.cause == SILENCE and self.opened else False

    def answered(self, request_id: str, now: float) -> bool:
        """Record a first token, a done step or a complete answer."""
        self.served(request_id)
        self.pool.answers += 1
        self.answers += 1
        self.answered_at = self.sign_at = now
        self.failures = self.errors = 0
        self._answers_before, self._errors_before = self.pool.answers, self.pool.errors
        return self._closed() if self.opened else False

    def failed(self, request_id: str, now: float, settings: LifeSettings, cause: str = FAILURES) -> bool:
        """Record a failure."""
        self.failures += 1
        if not settings.failures:
            return False
        if self.opened:
            if not request_id or self.trial != request_id:
                return False  # The request was open before the engine was put out, and shows nothing new.
        elif self.failures < settings.failures:
            return False
        else:
            self.out_since = now
        self.until = now + min(settings.first_open_s * 2.0**self.opened, settings.max_open_s)
        self.opened = min(self.opened + 1, 30)
        self.trial, self.cause = "", cause
        return True

    def errored(self, request_id: str, status: int, now: float, settings: LifeSettings) -> bool:
        """Record an error (`status`: 0 for a connection that broke). A request on trial that gets one has failed."""
        self.errors += 1
        self.pool.errors += 1
        self.status = status
        self.sign_at = now if status else self.sign_at
        if self.trial == request_id or (not self.opened and self._unlikely()):
            self.failures = max(self.failures, settings.failures - 1)
            return self.failed(request_id, now, settings, ERRORS)
        return False

    def excused(self, settings: LifeSettings, *, broke: bool, witness: bool) -> bool:
        """Take back the last error, or failure (`broke`), since another engine repeated it with the same request. `witness`:
        whether that engine works otherwise; if not, it counts as an error that no other engine has explained."""
        if broke and self.failures:
            self.failures -= 1
            if not witness:
                self.errors += 1
                self.pool.errors += 1
        elif not broke and witness and self.errors:
            self.errors -= 1
        if self.opened == 1 and self.cause == FAILURES and not self.trial and self.failures < settings.failures:
            return self._closed()
        return False

    def silent(self, now: float, settings: LifeSettings) -> bool:
        """Record that a request is overdue while the engine sent nothing: it is out at once."""
        self.failures = max(self.failures, settings.failures - 1)
        return self.failed(self.trial, now, settings, SILENCE)

    def served(self, request_id: str) -> None:
        """Record that a request waits for its first byte no longer."""
        if self.streams.pop(request_id, None) is None:
            self.wholes.pop(request_id, None)

    def left(self, request_id: str, now: float, settings: LifeSettings) -> bool:
        """Record the end of a request without evidence of its own, for example because its client left. If it waited for its
        first byte for far too long, and the engine sent nothing else, it is lost, which is a failure. Else another request may be
        on trial."""
        wait = self.streams.get(request_id) or self.wholes.get(request_id)
        self.served(request_id)
        if wait is not None and self.sign_at <= wait.placed_at:
            waited = now - wait.placed_at
            if waited >= max(LOST_SHARE * wait.predicted_s, wait.predicted_s + LOST_S):
                return self.failed(request_id, now, settings, SILENCE)
        self.gone(request_id)
        return False

    def gone(self, request_id: str) -> None:
        """Record that a request is not at the engine any more, without any evidence."""
        self.served(request_id)
        if self.trial == request_id:
            self.trial = ""

    def overdue(self, now: float) -> bool:
        """Return whether a first byte is overdue and the engine has sent nothing meanwhile. Of an engine that is out only the
        request on trial counts. O(1): the first to be placed is looked at, of streamed answers and of others."""
        if self.opened:
            wait = self.streams.get(self.trial) or self.wholes.get(self.trial) if self.trial else None
            return wait is not None and self._is_overdue(wait, now)
        return any(waits and self._is_overdue(next(iter(waits.values())), now) for waits in (self.streams, self.wholes))

    def _is_overdue(self, wait: Wait, now: float) -> bool:
        # After each sign the first of those that wait has its own time again.
        by = max(wait.placed_at + wait.predicted_s, self.sign_at + wait.alone_s)
        return now >= by + OVERDUE_S

    def _unlikely(self) -> bool:
        """Return whether the errors in a row would be most unlikely if the engine answered as the pool's others do."""
        answers = self.pool.answers - self._answers_before
        errors = self.pool.errors - self._errors_before - self.errors
        # Laplace's estimate of the others' error rate: near 1 as long as they have answered nothing either.
        return self.errors * log((max(errors, 0) + 1) / (answers + max(errors, 0) + 2)) < _LOG_UNLIKELY

    def _closed(self) -> bool:
        self.failures = self.errors = self.opened = 0
        self.trial = self.cause = ""
        return True

    # ---- display ----

    def why(self) -> str:
        """Return what put the engine out, for people; empty while it is in."""
        if not self.opened:
            return ""
        if self.cause == SILENCE:
            return "it sent nothing, long after a first token was due"
        if self.cause == ERRORS:
            what = f"with status {self.status}" if self.status else "by breaking the connection"
            others = "others answer" if self.pool.answers > self._answers_before else "no other engine has answered"
            return f"it answered {self.errors} requests in a row {what}, and {others}"
        return f"{self.failures} requests in a row failed on it"
