"""One request's way through its plan: a state machine that is told what happened and says what to do next. Pure.

A plan unfolds: PREFILL steps, each answered by the next step, then one SERVE. A SERVE may answer from the KV that another
instance has prefilled: the request brings it along, or, where it cannot (`direct`), a request of its own pulls it before. Where
both instances want it, that request is sent at once with the PREFILL (`ahead`): its instance waits for the KV as it comes, and
whatever fails then ends both.
Every wait has a deadline. A PREFILL or a transfer that fails is told to the router, and from then on only a plain SERVE follows;
a plain SERVE that fails before its first byte is tried again elsewhere (a new attempt with its own id, the failed instance
excluded). Where the router is lost after a part of the prompt is computed, a new attempt asks the next one, which finds that part
cached; where none comes, one SERVE follows at its instance. Every attempt that the router may have placed ends in exactly one
Finished, however the request ends.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from services.gateway.moves import (
    FAILED,
    NOT_FOUND,
    TIMED_OUT,
    UNAVAILABLE,
    Abort,
    AnswerBegan,
    AnswerEnded,
    AnswerRejected,
    Ask,
    AskLocally,
    AwaitNext,
    BreakStream,
    ClientGone,
    Effect,
    Event,
    Fail,
    Finished,
    FirstToken,
    Limits,
    Outcome,
    Prefill,
    PrefillEnded,
    Pull,
    PullEnded,
    Refused,
    RouterLost,
    Serve,
    StepGiven,
    StepOver,
    TakeUp,
    Target,
    Tick,
    UpstreamFailed,
)


class Phase(enum.Enum):
    """Where a request is."""

    ASKING = "asking"  # for its first step
    PREFILLING = "prefilling"
    ASKING_NEXT = "asking_next"  # for the step after one that is done, or failed
    PULLING = "pulling"  # KV from another instance
    SERVING = "serving"  # sent, no byte of the answer yet
    STREAMING = "streaming"
    DONE = "done"


class Choreography:
    """The machine. `handle` is its only mutator; events that belong to an earlier attempt or phase change nothing.

    `direct`: the request can bring another instance's KV along, and its first byte tells that it came.
    """

    def __init__(self, request_id: str, limits: Limits, *, direct: bool = True) -> None:
        self._request_id = request_id
        self._limits = limits
        self._direct = direct
        self._plain = False  # a step of this attempt failed: only a SERVE without anybody's KV may follow
        self._ahead: StepGiven | None = None  # the step after the PREFILL, sent already
        self._early: UpstreamFailed | PullEnded | None = None  # how that one failed, while the router was asked for it
        self._begun_at: Target | None = None  # where an attempt that lost its router has computed a part of the prompt
        self._exclude: list[str] = []
        self._attempts = 0
        self._local = False
        self._deadline = 0.0
        self._open = False  # the attempt is (perhaps) placed and not finished
        self.attempt_id = request_id
        self.phase = Phase.ASKING
        self.step: StepGiven | None = None

    @property
    def deadline(self) -> float | None:
        """When a Tick is due, on the clock of `now`; None while streaming and when done."""
        return None if self.phase in (Phase.STREAMING, Phase.DONE) else self._deadline

    def start(self, now: float) -> list[Effect]:
        """The first effects. Mutates."""
        return self._ask(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`. Mutates."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case ClientGone():
                return self._end(Outcome.CANCELLED, "client left")
            case Tick():
                return self._late(now) if self.deadline is not None and now >= self._deadline else []
            case StepGiven():
                return self._given(event, now)
            case Refused():
                return self._refused(event)
            case RouterLost():
                return self._router_lost(event, now)
            case PrefillEnded():
                return (
                    self._step_ended(event.error, now, event.instance_failed) if self.phase is Phase.PREFILLING else []
                )
            case PullEnded():
                return self._pulled(event, now)
            case AnswerBegan():
                return self._began()
            case AnswerRejected():
                if self._ahead is not None:
                    return self._failed(UpstreamFailed(f"status {event.status}", event.status), now)
                return self._end(Outcome.REJECTED, "rejected", event.status) if self.phase is Phase.SERVING else []
            case AnswerEnded():
                outcome = Outcome.FAILED if event.error else Outcome.OK
                return self._end(outcome, event.error) if self.phase is Phase.STREAMING else []
            case UpstreamFailed():
                return self._failed(event, now)

    def _ask(self, now: float) -> list[Effect]:
        self.attempt_id = f"{self._request_id}.{self._attempts}" if self._attempts else self._request_id
        self.phase, self.step, self._open, self._plain = Phase.ASKING, None, True, False
        self._ahead = self._early = None
        self._deadline = now + self._limits.place_s
        exclude = tuple(self._exclude)
        return [AskLocally(self.attempt_id, exclude) if self._local else Ask(self.attempt_id, exclude)]

    def _given(self, step: StepGiven, now: float) -> list[Effect]:
        if step.attempt_id != self.attempt_id or self.phase not in (Phase.ASKING, Phase.ASKING_NEXT):
            return []
        if self._plain:
            step = replace(step, prefill_tokens=0, kv_target=None, kv_source=None)
        if self._ahead is not None:
            return self._take_up(self._ahead, step, now)
        if step.prefill_tokens:
            effects = self._begin(Phase.PREFILLING, step, Prefill(step), self._limits.prefill_s, now)
            if step.kv_target is not None and step.target.decode_first and step.kv_target.decode_first:
                ahead = replace(
                    step,
                    target=step.kv_target,
                    index=step.index + 1,
                    prefill_tokens=0,
                    cached_tokens=0,
                    deadline_s=0.0,
                    kv_target=None,
                    kv_source=step.target,
                )
                self._ahead = ahead
                effects.append(Serve(ahead, ahead=True) if self._direct else Pull(ahead, ahead=True))
            return effects
        if step.kv_source is None:
            return self._begin(Phase.SERVING, step, Serve(step), self._limits.first_byte_s, now)
        if self._direct:
            return self._begin(Phase.SERVING, step, Serve(step), self._limits.transfer_s, now)
        return self._begin(Phase.PULLING, step, Pull(step), self._limits.transfer_s, now)

    def _begin(self, phase: Phase, step: StepGiven, effect: Effect, own_s: float, now: float) -> list[Effect]:
        self.phase, self.step = phase, step
        self._deadline = now + (min(own_s, step.deadline_s) if step.deadline_s > 0 else own_s)
        return [effect]

    def _take_up(self, ahead: StepGiven, step: StepGiven, now: float) -> list[Effect]:
        """The step that the router gives after the PREFILL: the one that was sent ahead, or another one after all."""
        early, self._ahead, self._early = self._early, None, None
        if step.prefill_tokens or (step.target, step.kv_source) != (ahead.target, ahead.kv_source):
            return [Abort(), *self._given(step, now)]
        phase = Phase.SERVING if self._direct else Phase.PULLING
        effects = self._begin(phase, step, TakeUp(step), self._limits.transfer_s, now)
        return effects if early is None else [*effects, *self.handle(early, now)]

    def _overtake(self) -> list[Effect]:
        """The KV is where it was to go, so the PREFILL is over, whether that has been said or not."""
        if self._ahead is None:
            return []
        assert self.step is not None
        over: list[Effect] = [StepOver(self.attempt_id, self.step.index)] if self.phase is Phase.PREFILLING else []
        self.step, self._ahead = self._ahead, None
        return [*over, TakeUp(self.step)]

    def _refused(self, refused: Refused) -> list[Effect]:
        if refused.attempt_id != self.attempt_id or self.phase not in (Phase.ASKING, Phase.ASKING_NEXT):
            return []
        abort: list[Effect] = [Abort()] if self._ahead is not None else []
        self._open = False
        self.phase = Phase.DONE
        if refused.code == NOT_FOUND:
            # Nobody asks for a model that the fleet never had: the router has lost sight of its instances.
            refused = replace(refused, code=UNAVAILABLE, message="No instance is ready for this model.")
        if self._exclude and refused.code == UNAVAILABLE:
            return [*abort, Fail(FAILED, "The instance failed and no other is ready.", refused.retry_after_s)]
        return [*abort, Fail(refused.code, refused.message, refused.retry_after_s)]

    def _router_lost(self, lost: RouterLost, now: float) -> list[Effect]:
        if lost.attempt_id != self.attempt_id:
            return []
        if self.phase is Phase.ASKING:
            # Not finished by report: a router that returns is told which requests are open, and drops the rest.
            if self._begun_at is not None:
                return self._given(StepGiven(self.attempt_id, self._begun_at, degraded=True), now)
            self._local = True
            return self._ask(now)
        if self.phase is not Phase.ASKING_NEXT:
            return []
        return self._ask_anew(now) if self._is_between_parts() else self._fall_back(now)

    def _is_between_parts(self) -> bool:
        """Whether a part of the prompt is computed for the same instance's own use, and nothing else is under way."""
        assert self.step is not None
        between = not self._plain and self._ahead is None and self.step.kv_target is None
        return between and self._attempts < self._limits.retries

    def _ask_anew(self, now: float) -> list[Effect]:
        """The plan went with its router: the next one is to make another, from what is computed."""
        assert self.step is not None
        self._begun_at = self.step.target
        ended = self._end(Outcome.CANCELLED, "its router was lost between two steps")
        self._attempts += 1
        return [*(effect for effect in ended if not isinstance(effect, Abort)), *self._ask(now)]

    def _fall_back(self, now: float) -> list[Effect]:
        """No next step came: the one SERVE goes where the prefix is, or where it was to be used."""
        assert self.step is not None
        if self._ahead is not None:
            return self._given(replace(self._ahead, degraded=True), now)
        target = (self.step.kv_target if self._plain else None) or self.step.target
        return self._given(StepGiven(self.attempt_id, target, self.step.index + 1, degraded=True), now)

    def _step_ended(self, error: str, now: float, instance_failed: bool = False) -> list[Effect]:
        assert self.step is not None
        self.phase = Phase.ASKING_NEXT
        abort: list[Effect] = []
        if error:
            abort = [Abort()] if self._ahead is not None else []
            self._plain, self._ahead = True, None
        self._deadline = now + self._limits.place_s
        return [*abort, AwaitNext(self.attempt_id, self.step.index, error, instance_failed)]

    def _pulled(self, pulled: PullEnded, now: float) -> list[Effect]:
        if self._ahead is None and self.phase is not Phase.PULLING:
            return []
        if pulled.error:
            return self._step_ended(pulled.error, now) if self._ahead is None else self._failed_ahead(pulled, now)
        effects = self._overtake()
        assert self.step is not None
        step = replace(self.step, kv_source=None)
        return [*effects, *self._begin(Phase.SERVING, step, Serve(step), self._limits.first_byte_s, now)]

    def _began(self) -> list[Effect]:
        if self._ahead is None and self.phase is not Phase.SERVING:
            return []
        effects = self._overtake()
        self.phase = Phase.STREAMING
        return [*effects, FirstToken(self.attempt_id)]

    def _failed_ahead(self, failed: UpstreamFailed | PullEnded, now: float) -> list[Effect]:
        """What was sent ahead failed: a PREFILL is of no use then; one that is done is told before."""
        if self.phase is Phase.PREFILLING:
            return self._step_ended(f"the other instance: {failed.error}", now)
        self._early = failed
        return []

    def _late(self, now: float) -> list[Effect]:
        transferring = self.step is not None and self.step.kv_source is not None
        if self.phase in (Phase.PREFILLING, Phase.PULLING) or (self.phase is Phase.SERVING and transferring):
            # Who is to blame for a transfer that does not end, nobody can tell.
            self._ahead = None
            return [Abort(), *self._step_ended("deadline", now, self.phase is Phase.PREFILLING)]
        if self.phase is Phase.ASKING_NEXT:
            return self._fall_back(now)
        if self.phase is Phase.SERVING:
            return self._failed(UpstreamFailed("no first byte in time"), now)
        return [*self._end(Outcome.FAILED, "no step in time"), Fail(TIMED_OUT, "No placement was found in time.", 1.0)]

    def _failed(self, failed: UpstreamFailed, now: float) -> list[Effect]:
        if self._ahead is not None:
            return self._failed_ahead(failed, now)
        if self.phase is Phase.STREAMING:
            return [*self._end(Outcome.FAILED, failed.error, failed.status), BreakStream()]
        if self.phase is not Phase.SERVING:
            return []
        assert self.step is not None
        if self.step.kv_source is not None and failed.status:
            # It answers, so it can serve; that it does not, with KV from elsewhere, may be the other side's fault.
            return [Abort(), *self._step_ended(failed.error, now)]
        self._exclude.append(self.step.target.instance_id)
        self._begun_at = None
        effects = self._end(Outcome.FAILED, failed.error, failed.status)
        if self._attempts >= self._limits.retries:
            return [*effects, Fail(FAILED, "The request failed on every instance that was tried.")]
        self._attempts += 1
        self._local = False
        return [*effects, *self._ask(now)]

    def _end(self, outcome: Outcome, error: str = "", status: int = 0) -> list[Effect]:
        """Close the attempt: upstream first, so that nothing runs that the router no longer counts."""
        abort: list[Effect] = [] if outcome in (Outcome.OK, Outcome.REJECTED) else [Abort()]
        report: list[Effect] = [Finished(self.attempt_id, outcome, error, status)] if self._open else []
        self.phase, self._open, self._ahead = Phase.DONE, False, None
        return [*abort, *report]
