"""Whether an engine lives, by what its requests show: a machine that turns evidence into a state. Pure; times in s on one clock.

An engine is *in*: it gets requests; or *out*: it gets none for a while, from any gateway, and then one at a time, on trial. The
pattern is the circuit breaker of Nygard, Release It!. An answer puts the engine in again. Failed trials double the pause.

- A failure is what only the engine can have caused: no connection, a lost request, an error for a request that another engine
  answers. `LifeSettings.failures` of them in a row put the engine out.
- An error (an answer 4xx or 5xx, or a connection that broke under a request) may be the fault of the request. As long as
  another engine has not answered the same request, errors in a row are compared with what the pool's other engines answer
  meanwhile (`_unlikely`). An error that a second engine repeats, which works otherwise, is the request's own fault.
- A stream that breaks after its first token is a failure and an error. First tokens, of it or of others, end no series of such
  breaks, nor of the other failures among them: only an answer that ended well does, or a request on trial whose answer has gone
  on for `PROGRESS_S`. Breaks are also compared by themselves with those of others, so that requests which every engine rejects do
  not hide them.
- An answer that has begun and stands still counts as a break, too. An engine that meanwhile sends nothing else, and by its own
  count generates nothing, is out at once. Words that parsers hold back stand still at all engines of the pool.
- An engine that answers nothing, silent or not reached, gets one request at a time even where no other engine is left: a trial
  may begin `first_open_s` after the last one failed. The router refuses the others at once, instead of letting each wait.
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

# Why an engine that is out gets no request. What is excluded as NOT_ANSWERING gets none even if no other instance is there.
CIRCUIT_OPEN, NOT_ANSWERING = "circuit_open", "not_answering"
# How long after the predicted first byte a request is overdue, s.
OVERDUE_S = 10.0
# A request that leaves without a byte after LOST_SHARE times the predicted time, and at least LOST_S after it, is lost.
LOST_SHARE, LOST_S = 3.0, 2.0
# How long an answer or another byte shows that an engine lives whose agent calls it unhealthy, or is gone, s.
SIGN_S = 10.0
# How long nothing has come from an engine whose begun answers stand still, s.
STALLED_S = 10.0
# How long after its first token a request on trial shows that the engine's answers go on, s.
PROGRESS_S = 10.0
# Within what time routers are told of a prefill's progress, s.
TOLD_WITHIN_S = 3.0
# Probability, under the error rate of the pool's other engines, below which errors in a row are the engine's own.
UNLIKELY = 1e-6
_LOG_UNLIKELY = log(UNLIKELY)
# Causes for which an engine is out, or would be if it were not for its answers.
FAILURES, ERRORS, SILENCE, UNREACHED = "failures", "errors", "silence", "unreached"


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """After `failures` failed requests in a row (0: never out) an engine gets no requests for `first_open_s`, then one request on
    trial. Each failed trial doubles the time, up to `max_open_s`. Times in s."""

    failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class PoolAnswers:
    """How many answers and errors the engines of a pool have sent, all together. An answer counts once, as an error does: else
    errors would seem rarer than they are, and those of clients unlikely."""

    answers: int = 0
    errors: int = 0
    breaks: int = 0  # those of the errors that are streams which broke after their first token


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

    pool: PoolAnswers = field(default_factory=PoolAnswers)  # shared by all engines of the pool
    answers: int = 0  # since the start of the incarnation, at this router
    answered_at: float = -inf  # when the last one began or ended
    sign_at: float = -inf  # when the last byte came, or the last progress of a prefill
    failures: int = 0  # in a row
    lost: int = 0  # those of the failures that are no streams which broke after their first token
    errors: int = 0  # in a row, of which no other engine has shown whose fault they were
    breaks: int = 0  # those of the errors that are streams which broke after their first token
    status: int = 0  # HTTP status of the last error; 0: a broken connection
    opened: int = 0  # how many times in a row the engine was put out; 0: in
    out_since: float = 0.0  # when it went from in to out, s; failed trials do not change it
    put_out_at: float = 0.0  # when a failure, that of a trial included, put it out last
    until: float = 0.0  # when the next trial may begin
    alone_until: float = 0.0  # when it may begin if no other instance of the pool gets requests
    trial: str = ""  # id of the request on trial, which shows whether the engine has recovered
    trial_began: float = inf  # when the first token of the request on trial came
    cause: str = ""  # FAILURES, ERRORS, SILENCE or UNREACHED, of the last time
    # The requests without a byte by id, in order of placement: those with streamed answers, and all others.
    streams: OrderedDict[str, Wait] = field(default_factory=OrderedDict)
    wholes: OrderedDict[str, Wait] = field(default_factory=OrderedDict)  # answers not streamed, or not said to be
    standing: set[str] = field(default_factory=set)  # the open requests whose answers have stood still
    # The pool's answers, errors and breaks when this engine last answered.
    _answers_before: int = 0
    _errors_before: int = 0
    _breaks_before: int = 0

    def __post_init__(self) -> None:
        self._begins_series()

    # ---- placements ----

    def open(self, now: float) -> bool:
        """Return whether the engine must get no request at `now`: its pause has not ended, or a request is on trial."""
        return bool(self.opened) and (bool(self.trial) or now < self.until)

    def excluded(self, now: float, *, agent_gone: bool) -> str:
        """Return why the engine gets no request at `now`; empty if it gets one."""
        if not self.open(now):
            return ""
        if self.trial_began < inf and self.trial:
            return (
                CIRCUIT_OPEN  # The answer on trial has begun: the others may go there if they have nowhere else to go.
            )
        if agent_gone and (self.sign_at <= self.put_out_at or self._is_silent(now)):
            return NOT_ANSWERING  # With both witnesses against it, it is probably gone itself.
        return NOT_ANSWERING if self.answers_nothing(now) and (self.trial or now < self.alone_until) else CIRCUIT_OPEN

    def answers_nothing(self, now: float) -> bool:
        """Return whether the engine is out since it sends no answers at all, not even errors or the rest of older answers."""
        if not self.opened or self.cause not in (SILENCE, UNREACHED):
            return False
        return self._is_silent(now)

    def _is_silent(self, now: float) -> bool:
        """Return whether nothing came lately of what the engine has sent since it is out."""
        return self.sign_at <= self.out_since + TOLD_WITHIN_S or now > self.sign_at + SIGN_S

    def placed(self, request_id: str, now: float) -> None:
        """Record that a request goes to the engine. If the pause has ended, the request is on trial."""
        begins = self.alone_until if self.answers_nothing(now) else self.until
        if self.opened and not self.trial and now >= begins:
            self.trial, self.trial_began = request_id, inf

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

    def sign(self, at: float, now: float) -> bool:
        """Record that a byte of any answer came `at`, or that a prefill had progressed by then. It ends a silence before it."""
        self.sign_at = max(self.sign_at, at)
        if self.trial and at - self.trial_began >= PROGRESS_S:
            return self.answered(self.trial, now)
        silent = self.cause == SILENCE and self.opened and not self.breaks
        return self._closed() if silent and at > self.put_out_at else False

    def began(self, request_id: str, now: float) -> bool:
        """Record a first token, or a done step."""
        if not self.breaks:
            return self.answered(request_id, now)
        self.served(request_id)
        # Own answers are not those of others, with which breaks are compared.
        self.pool.answers += 1
        self._answers_before += 1
        self._errors_before += self.errors - self.breaks
        self.answers += 1
        self.answered_at = self.sign_at = now
        self.failures, self.errors = self.lost, self.breaks
        if self.opened and self.trial == request_id:
            self.trial_began = now
        return False

    def answered(self, request_id: str, now: float, *, again: bool = False) -> bool:
        """Record a complete answer. `again`: its first token is recorded already."""
        self.served(request_id)
        self.pool.answers += not again
        self.answers += 1
        self.answered_at = self.sign_at = now
        self.failures = self.lost = self.errors = self.breaks = 0
        self._begins_series()
        return self._closed() if self.opened else False

    def failed(self, request_id: str, now: float, settings: LifeSettings, cause: str = FAILURES) -> bool:
        """Record a failure."""
        self.lost += 1
        return self._failed(request_id, now, settings, cause)

    def _failed(self, request_id: str, now: float, settings: LifeSettings, cause: str) -> bool:
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
        self.put_out_at = now
        self.alone_until = now + settings.first_open_s
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
        if self._errs(request_id):
            return self._put_out(request_id, now, settings, ERRORS)
        return False

    def broke_off(self, request_id: str, now: float, settings: LifeSettings) -> bool:
        """Record that a stream broke after its first token: as a failure, and as an error in place of an answer."""
        if request_id not in self.standing:
            self._broke()
        if self._errs(request_id):
            return self._put_out(request_id, now, settings, ERRORS)
        return self._failed(request_id, now, settings, FAILURES)

    def excused(self, settings: LifeSettings, *, broke: bool, witness: bool) -> bool:
        """Take back the last error, or failure (`broke`), since another engine repeated it with the same request. `witness`:
        whether that engine works otherwise; if not, it counts as an error that no other engine has explained."""
        if broke and self.breaks:
            self.breaks -= 1
            self.failures = max(self.failures - 1, 0)
            self.errors -= witness
        elif broke and self.failures:
            self.failures -= 1
            if not witness:
                self.errors += 1
                self.pool.errors += 1
        elif not broke and witness and self.errors:
            self.errors -= 1
        self.lost = min(self.lost, self.failures)
        if (
            self.opened == 1
            and self.cause in (FAILURES, UNREACHED)
            and not self.trial
            and self.failures < settings.failures
        ):
            return self._closed()
        return False

    def silent(self, now: float, settings: LifeSettings) -> bool:
        """Record that a request is overdue while the engine sent nothing: it is out at once."""
        return self._put_out(self.trial, now, settings, SILENCE)

    def stalled(self, request_id: str, now: float, settings: LifeSettings, *, idle: bool) -> bool:
        """Record that an answer has begun and stands still; more than one record of an answer counts once. `idle`: the engine
        generates nothing. If it has sent nothing else meanwhile either, it is out at once."""
        if request_id not in self.standing:
            self.standing.add(request_id)
            self._broke()
            if self._errs(request_id):
                return self._put_out(request_id, now, settings, ERRORS)
        if not idle or self.opened or now - self.sign_at < STALLED_S:
            return False
        return self._put_out(request_id, now, settings, SILENCE)

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
        self.standing.discard(request_id)
        if self.trial == request_id:
            self.trial = ""

    def overdue(self, now: float) -> bool:
        """Return whether a first byte is overdue and the engine has sent nothing meanwhile. Of an engine that is out only the
        request on trial counts. O(1): the first to be placed is looked at, of streamed answers and of others."""
        if not self.streams and not self.wholes:  # of most engines in each tick
            return False
        if self.opened:
            wait = self.streams.get(self.trial) or self.wholes.get(self.trial) if self.trial else None
            return wait is not None and self._is_overdue(wait, now)
        return any(waits and self._is_overdue(next(iter(waits.values())), now) for waits in (self.streams, self.wholes))

    def _is_overdue(self, wait: Wait, now: float) -> bool:
        # After each sign the first of those that wait has its own time again.
        by = max(wait.placed_at + wait.predicted_s, self.sign_at + wait.alone_s)
        return now >= by + OVERDUE_S

    def _errs(self, request_id: str) -> bool:
        """Return whether the last error, of this request, puts the engine out."""
        return self.trial == request_id or (not self.opened and self._unlikely())

    def _put_out(self, request_id: str, now: float, settings: LifeSettings, cause: str) -> bool:
        """Record a failure that is enough by itself."""
        self.failures = max(self.failures, settings.failures - 1)
        return self._failed(request_id, now, settings, cause)

    def _begins_series(self) -> None:
        pool = self.pool
        self._answers_before, self._errors_before, self._breaks_before = pool.answers, pool.errors, pool.breaks

    def _broke(self) -> None:
        """Count an error in place of an answer that had begun."""
        self.breaks += 1
        self.errors += 1
        self.pool.breaks += 1
        self.pool.errors += 1
        self.pool.answers -= 1
        self._answers_before -= 1
        self.status = 0

    def _unlikely(self) -> bool:
        """Return whether the errors in a row would be most unlikely if the engine answered as the pool's others do; or its breaks
        alone, if others' streams did not break: what engines reject before a first token makes no break likelier."""
        answers = self.pool.answers - self._answers_before
        errors = self.pool.errors - self._errors_before - self.errors
        breaks = self.pool.breaks - self._breaks_before - self.breaks
        return _are_unlikely(self.errors, errors, answers) or _are_unlikely(self.breaks, breaks, answers)

    def _closed(self) -> bool:
        self.failures = self.lost = self.errors = self.breaks = self.opened = 0
        self.trial = self.cause = ""
        return True

    # ---- display ----

    def why(self) -> str:
        """Return what put the engine out, for people; empty while it is in."""
        if not self.opened:
            return ""
        if self.cause == SILENCE and self.breaks:
            return "its answers stand still, and it computes nothing"
        if self.cause == SILENCE:
            return "it sent nothing, long after a first token was due"
        if self.cause == ERRORS:
            what = f"with status {self.status}" if self.status else "by breaking the connection"
            others = "others answer" if self.pool.answers > self._answers_before else "no other engine has answered"
            return f"it answered {self.errors} requests in a row {what}, and {others}"
        if self.cause == UNREACHED:
            return f"{self.failures} requests in a row failed on it, the last without any answer"
        return f"{self.failures} requests in a row failed on it"


def _are_unlikely(errors: int, of_others: int, answers: int) -> bool:
    """Return whether `errors` in a row are most unlikely beside other engines' errors and answers."""
    of_others, answers = max(of_others, 0), max(answers, 0)
    # Laplace's estimate of the others' error rate: near 1 as long as they have answered nothing either.
    return errors * log((of_others + 1) / (answers + of_others + 2)) < _LOG_UNLIKELY
