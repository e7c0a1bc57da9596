"""The state machine of one request: it is told what happened and says what to do next.

A plan unfolds: PREFILL steps, each answered by the next step, then one SERVE. A SERVE may answer from the KV that another
instance has prefilled: the request brings it along, or, else (`inline_kv_transfer`), a request of its own pulls it before. Where
both instances want it, that request is sent at once with the PREFILL (`early`): its instance waits for the KV as it comes, and
whatever fails then ends both.
Every wait has a deadline. A PREFILL or a transfer that fails is told to the router, and from then on only a plain SERVE follows;
a plain SERVE that fails before its first byte is tried again elsewhere (a new attempt with its own id, the failed instance
excluded). What two instances answer with the same 5xx is the request's own fault: the client gets that answer, and nobody is
blamed. Where the router is lost after a part of the prompt is computed, a new attempt asks the next one, which finds that part
cached; where none comes, one SERVE follows at its instance. Every attempt that the router may have placed ends in exactly one
Finished, however the request ends.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from pointsman.gateway.core.request.request_events import (
    INTERNAL,
    NOT_FOUND,
    PLACEMENT_TIMEOUT,
    UNAVAILABLE,
    AbortUpstream,
    AdoptEarlyStep,
    AskNextStep,
    AskRouter,
    ClientDisconnected,
    Effect,
    EndStreamWithError,
    Event,
    FailRequest,
    Outcome,
    PlaceLocally,
    PlacementRefused,
    Prefill,
    PrefillEnded,
    PullEnded,
    PullKv,
    ReportFinished,
    ReportFirstToken,
    ReportServedAlone,
    ReportStepDone,
    RequestTimeouts,
    ResponseEnded,
    ResponseRejected,
    ResponseStarted,
    RouterLost,
    Serve,
    StepAssigned,
    Target,
    Tick,
    UpstreamFailed,
)


class Phase(enum.Enum):
    """Where a request is."""

    PLACING = "placing"  # for its first step
    PREFILLING = "prefilling"
    AWAITING_NEXT_STEP = "awaiting_next_step"  # for the step after one that is done, or failed
    PULLING = "pulling"  # KV from another instance
    SERVING = "serving"  # sent, no byte of the answer yet
    STREAMING = "streaming"
    DONE = "done"


class RequestStateMachine:
    """The machine. `handle` is its only mutator; events that belong to an earlier attempt or phase change nothing.

    `inline_kv_transfer`: the request can bring another instance's KV along, and its first byte tells that it came.
    """

    def __init__(self, request_id: str, timeouts: RequestTimeouts, *, inline_kv_transfer: bool = True) -> None:
        self._request_id = request_id
        self._timeouts = timeouts
        self._inline_kv_transfer = inline_kv_transfer
        self._serve_only = False  # a step of this attempt failed: only a SERVE without anybody's KV may follow
        self._early_step: StepAssigned | None = None  # the step after the PREFILL, sent already
        self._early_failure: UpstreamFailed | PullEnded | None = (
            None  # how that one failed, while the router was asked for it
        )
        self._partial_prefill_target: Target | None = (
            None  # where an attempt that lost its router has computed a part of the prompt
        )
        self._exclude: list[str] = []
        self._refused_by: list[str] = []  # instances that answered 5xx to this request, or to a part of it
        self._refusals: dict[int, str] = {}  # the status of a 5xx to the whole request -> who answered so
        self._attempts = 0
        self._place_locally = False
        self._deadline = 0.0
        self._attempt_open = False  # the attempt is (perhaps) placed and not finished
        self.attempt_id = request_id
        self.phase = Phase.PLACING
        self.step: StepAssigned | None = None

    @property
    def deadline(self) -> float | None:
        """When a Tick is due, on the clock of `now`; None while streaming and when done."""
        return None if self.phase in (Phase.STREAMING, Phase.DONE) else self._deadline

    def start(self, now: float) -> list[Effect]:
        """The first effects. Mutates."""
        return self._start_attempt(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`. Mutates."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case ClientDisconnected():
                return self._end(Outcome.CANCELLED, "client left")
            case Tick():
                return self._deadline_passed(now) if self.deadline is not None and now >= self._deadline else []
            case StepAssigned():
                return self._step_assigned(event, now)
            case PlacementRefused():
                return self._placement_refused(event)
            case RouterLost():
                return self._router_lost(event, now)
            case PrefillEnded():
                if self.phase is not Phase.PREFILLING:
                    return []
                if event.refused and self.step is not None:
                    # No witness that the request is at fault: a transfer can fail by itself.
                    self._refused_by.append(self.step.target.instance_id)
                return self._step_ended(event.error, now, event.instance_failed)
            case PullEnded():
                return self._pull_ended(event, now)
            case ResponseStarted():
                return self._response_started()
            case ResponseRejected():
                if self._early_step is not None:
                    return self._upstream_failed(UpstreamFailed(f"status {event.status}", event.status), now)
                return self._end(Outcome.REJECTED, "rejected", event.status) if self.phase is Phase.SERVING else []
            case ResponseEnded():
                outcome = Outcome.FAILED if event.error else Outcome.OK
                return self._end(outcome, event.error) if self.phase is Phase.STREAMING else []
            case UpstreamFailed():
                return self._upstream_failed(event, now)

    def _start_attempt(self, now: float) -> list[Effect]:
        self.attempt_id = f"{self._request_id}.{self._attempts}" if self._attempts else self._request_id
        self.phase, self.step, self._attempt_open, self._serve_only = Phase.PLACING, None, True, False
        self._early_step = self._early_failure = None
        self._deadline = now + self._timeouts.placement_s
        exclude = tuple(self._exclude)
        return [PlaceLocally(self.attempt_id, exclude) if self._place_locally else AskRouter(self.attempt_id, exclude)]

    def _step_assigned(self, step: StepAssigned, now: float) -> list[Effect]:
        if step.attempt_id != self.attempt_id or self.phase not in (Phase.PLACING, Phase.AWAITING_NEXT_STEP):
            return []
        if self._serve_only:
            step = replace(step, prefill_tokens=0, kv_target=None, kv_source=None)
        if self._early_step is not None:
            return self._adopt_early_step(self._early_step, step, now)
        if step.prefill_tokens:
            effects = self._begin(Phase.PREFILLING, step, Prefill(step), self._timeouts.prefill_s, now)
            if step.kv_target is not None and step.target.layerwise and step.kv_target.layerwise:
                early = replace(
                    step,
                    target=step.kv_target,
                    index=step.index + 1,
                    prefill_tokens=0,
                    cached_tokens=0,
                    kv_target=None,
                    kv_source=step.target,
                )
                self._early_step = early
                effects.append(Serve(early, early=True) if self._inline_kv_transfer else PullKv(early, early=True))
            return effects
        if step.kv_source is None:
            return self._begin(Phase.SERVING, step, Serve(step), self._timeouts.first_byte_s, now)
        if self._inline_kv_transfer:
            return self._begin(Phase.SERVING, step, Serve(step), self._timeouts.transfer_s, now)
        return self._begin(Phase.PULLING, step, PullKv(step), self._timeouts.transfer_s, now)

    def _begin(self, phase: Phase, step: StepAssigned, effect: Effect, timeout_s: float, now: float) -> list[Effect]:
        self.phase, self.step = phase, step
        self._deadline = now + timeout_s
        return [effect]

    def _adopt_early_step(self, early: StepAssigned, step: StepAssigned, now: float) -> list[Effect]:
        """The step that the router gives after the PREFILL: the one that was sent ahead, or another one after all."""
        early_failure, self._early_step, self._early_failure = self._early_failure, None, None
        if step.prefill_tokens or (step.target, step.kv_source) != (early.target, early.kv_source):
            return [AbortUpstream(), *self._step_assigned(step, now)]
        phase = Phase.SERVING if self._inline_kv_transfer else Phase.PULLING
        effects = self._begin(phase, step, AdoptEarlyStep(step), self._timeouts.transfer_s, now)
        return effects if early_failure is None else [*effects, *self.handle(early_failure, now)]

    def _promote_early_step(self) -> list[Effect]:
        """The KV is where it was to go, so the PREFILL is over, whether that has been said or not."""
        if self._early_step is None:
            return []
        assert self.step is not None
        over: list[Effect] = (
            [ReportStepDone(self.attempt_id, self.step.index)] if self.phase is Phase.PREFILLING else []
        )
        self.step, self._early_step = self._early_step, None
        return [*over, AdoptEarlyStep(self.step)]

    def _placement_refused(self, refused: PlacementRefused) -> list[Effect]:
        if refused.attempt_id != self.attempt_id or self.phase not in (Phase.PLACING, Phase.AWAITING_NEXT_STEP):
            return []
        abort: list[Effect] = [AbortUpstream()] if self._early_step is not None else []
        self._attempt_open = False
        self.phase = Phase.DONE
        if refused.code == NOT_FOUND:
            # Nobody asks for a model that the fleet never had: the router has lost sight of its instances.
            refused = replace(refused, code=UNAVAILABLE, message="No instance is ready for this model.")
        if self._exclude and refused.code == UNAVAILABLE:
            return [*abort, FailRequest(INTERNAL, "The instance failed and no other is ready.", refused.retry_after_s)]
        return [*abort, FailRequest(refused.code, refused.message, refused.retry_after_s)]

    def _router_lost(self, lost: RouterLost, now: float) -> list[Effect]:
        if lost.attempt_id != self.attempt_id:
            return []
        if self.phase is Phase.PLACING:
            # Not finished by report: a router that returns is told which requests are open, and drops the rest.
            if self._partial_prefill_target is not None:
                return self._step_assigned(
                    StepAssigned(self.attempt_id, self._partial_prefill_target, degraded=True), now
                )
            self._place_locally = True
            return self._start_attempt(now)
        if self.phase is not Phase.AWAITING_NEXT_STEP:
            return []
        return self._retry_placement(now) if self._is_between_prefill_parts() else self._fall_back_to_serve(now)

    def _is_between_prefill_parts(self) -> bool:
        """Whether a part of the prompt is computed for the same instance's own use, and nothing else is under way."""
        assert self.step is not None
        between = not self._serve_only and self._early_step is None and self.step.kv_target is None
        return between and self._attempts < self._timeouts.max_retries

    def _retry_placement(self, now: float) -> list[Effect]:
        """The plan went with its router: the next one is to make another, from what is computed."""
        assert self.step is not None
        self._partial_prefill_target = self.step.target
        ended = self._end(Outcome.CANCELLED, "its router was lost between two steps")
        self._attempts += 1
        return [*(effect for effect in ended if not isinstance(effect, AbortUpstream)), *self._start_attempt(now)]

    def _fall_back_to_serve(self, now: float) -> list[Effect]:
        """No next step came: the one SERVE goes where the prefix is, or where it was to be used."""
        assert self.step is not None
        if self._early_step is not None:
            # The step that the plan has next: its router counts it where it runs.
            return self._step_assigned(replace(self._early_step, degraded=True), now)
        target = (self.step.kv_target if self._serve_only else None) or self.step.target
        computed = 0 if self._serve_only else self.step.prefill_tokens
        alone = StepAssigned(self.attempt_id, target, self.step.index + 1, cached_tokens=computed, degraded=True)
        return [*self._step_assigned(alone, now), ReportServedAlone(self.attempt_id)]

    def _step_ended(self, error: str, now: float, instance_failed: bool = False) -> list[Effect]:
        assert self.step is not None
        self.phase = Phase.AWAITING_NEXT_STEP
        abort: list[Effect] = []
        if error:
            abort = [AbortUpstream()] if self._early_step is not None else []
            self._serve_only, self._early_step = True, None
        self._deadline = now + self._timeouts.placement_s
        return [*abort, AskNextStep(self.attempt_id, self.step.index, error, instance_failed)]

    def _pull_ended(self, pulled: PullEnded, now: float) -> list[Effect]:
        if self._early_step is None and self.phase is not Phase.PULLING:
            return []
        if pulled.error:
            return (
                self._step_ended(pulled.error, now)
                if self._early_step is None
                else self._early_step_failed(pulled, now)
            )
        effects = self._promote_early_step()
        assert self.step is not None
        step = replace(self.step, kv_source=None)
        return [*effects, *self._begin(Phase.SERVING, step, Serve(step), self._timeouts.first_byte_s, now)]

    def _response_started(self) -> list[Effect]:
        if self._early_step is None and self.phase is not Phase.SERVING:
            return []
        effects = self._promote_early_step()
        self.phase = Phase.STREAMING
        return [*effects, ReportFirstToken(self.attempt_id, self._take_refused_by())]

    def _early_step_failed(self, failed: UpstreamFailed | PullEnded, now: float) -> list[Effect]:
        """What was sent ahead failed: a PREFILL is of no use then; one that is done is told before."""
        if self.phase is Phase.PREFILLING:
            return self._step_ended(f"the other instance: {failed.error}", now)
        self._early_failure = failed
        return []

    def _deadline_passed(self, now: float) -> list[Effect]:
        transferring = self.step is not None and self.step.kv_source is not None
        if self.phase in (Phase.PREFILLING, Phase.PULLING) or (self.phase is Phase.SERVING and transferring):
            # Who is to blame for a transfer that does not end, nobody can tell.
            self._early_step = None
            return [AbortUpstream(), *self._step_ended("deadline", now, self.phase is Phase.PREFILLING)]
        if self.phase is Phase.AWAITING_NEXT_STEP:
            return self._fall_back_to_serve(now)
        if self.phase is Phase.SERVING:
            return self._upstream_failed(UpstreamFailed("no first byte in time"), now)
        return [
            *self._end(Outcome.FAILED, "no step in time"),
            FailRequest(PLACEMENT_TIMEOUT, "No placement was found in time.", 1.0),
        ]

    def _upstream_failed(self, failed: UpstreamFailed, now: float) -> list[Effect]:
        if self._early_step is not None:
            return self._early_step_failed(failed, now)
        if self.phase is Phase.STREAMING:
            return [*self._end(Outcome.FAILED, failed.error, failed.status), EndStreamWithError()]
        if self.phase is not Phase.SERVING:
            return []
        assert self.step is not None
        if self.step.kv_source is not None and failed.status:
            # It answers, so it can serve; that it does not, with KV from elsewhere, may be the other side's fault.
            return [AbortUpstream(), *self._step_ended(failed.error, now)]
        instance_id = self.step.target.instance_id
        if failed.refused:
            if self._refusals.setdefault(failed.status, instance_id) != instance_id:
                return self._end(Outcome.REJECTED, failed.error, failed.status, refused=True)
            self._refused_by.append(instance_id)
        self._exclude.append(instance_id)
        self._partial_prefill_target = None
        effects = self._end(Outcome.FAILED, failed.error, failed.status, refused=failed.refused)
        if self._attempts >= self._timeouts.max_retries:
            return [*effects, FailRequest(INTERNAL, "The request failed on every instance that was tried.")]
        self._attempts += 1
        self._place_locally = False
        return [*effects, *self._start_attempt(now)]

    def _end(self, outcome: Outcome, error: str = "", status: int = 0, *, refused: bool = False) -> list[Effect]:
        """Close the attempt: upstream first, so that nothing runs that the router no longer counts."""
        abort: list[Effect] = [] if outcome in (Outcome.OK, Outcome.REJECTED) else [AbortUpstream()]
        # Who says what is wrong with a request clears the request, as who answers it does at the first byte.
        refused_by = self._take_refused_by() if outcome is Outcome.REJECTED and not refused else ()
        finished = ReportFinished(self.attempt_id, outcome, error, status, refused, refused_by)
        report: list[Effect] = [finished] if self._attempt_open else []
        self.phase, self._attempt_open, self._early_step = Phase.DONE, False, None
        return [*abort, *report]

    def _take_refused_by(self) -> tuple[str, ...]:
        """Who refused what another instance has answered now, each told of once. Mutates."""
        refused_by, self._refused_by = tuple(dict.fromkeys(self._refused_by)), []
        return refused_by
