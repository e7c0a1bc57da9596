"""The state machine of one request: handles events and returns the effects to carry out.

A plan has PREFILL steps, each followed by the router's next step, and then one SERVE. A SERVE may use KV that another instance
has prefilled. With `inline_kv_transfer` the client's request carries the KV transfer parameters; otherwise a separate request
pulls the KV first. If both instances are layerwise, that request is sent together with the PREFILL (`early`). Its instance waits
for the KV while it is computed, and a failure of either request ends both. A PREFILL may also fetch its tokens from an instance
that has them cached: two requests within one step, whose failure may be that of either instance.

Every wait has a deadline. A PREFILL or a transfer that fails is reported to the router, and only a plain SERVE may follow in that
attempt. A plain SERVE that fails before its first byte is retried at another instance, in a new attempt with its own id that
excludes the failed instance. So is one that fails in the middle of its stream, if another instance can go on with it, and one
that operators have moved, which does not count as a retry. A proxy that sends the request may get its answer from another
instance than the step's: that is a new attempt, too. If two instances answer the request with the same error, or break the
connection under it, the request itself is at fault: no third one gets it, and the client gets that answer. A 4xx answer is
compared so only if the router doubts the instance. If the router is lost after a part of the prompt is computed, a new attempt
asks the next router, which finds that part cached. If no router answers, the step is one SERVE, at the instance that computed
the part. Every attempt that the router may have placed ends in exactly one Finished, however the request ends.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from math import inf
from typing import TypedDict, Unpack

from pointsman_common.core.kv_transfer_params import fetch_limit_s
from pointsman_gateway.core.request import request_events as ev

# Kind of failure, beside HTTP statuses: an instance broke the connection.
BROKE = 0

# How long after the instance of an early step has broken the connection that of the PREFILL is waited for, s: if it breaks the
# connection too, the request is at fault.
BOTH_BREAK_S = 0.25
# Maximum wait for the placement of an attempt that is to show whether a 4xx answer was right, s.
COMPARE_S = 2.0


class _How(TypedDict, total=False):
    """Fields of ReportFinished."""

    refused: bool
    continued: bool
    broke: bool
    alike: tuple[str, ...]


class Phase(enum.Enum):
    """The phase of a request."""

    PLACING = "placing"  # waits for its first step
    PREFILLING = "prefilling"
    AWAITING_NEXT_STEP = "awaiting_next_step"  # waits for the step after a step that ended or failed
    PULLING = "pulling"  # waits for KV from another instance
    SERVING = "serving"  # sent; no byte of the answer received yet
    STREAMING = "streaming"
    DONE = "done"


class RequestStateMachine:
    """The state machine. Only `start` and `handle` mutate it. Events of an earlier attempt or phase are ignored.

    `inline_kv_transfer`: the client's request can carry KV transfer parameters, and its first byte shows that the KV arrived.
    """

    def __init__(self, request_id: str, timeouts: ev.RequestTimeouts, *, inline_kv_transfer: bool = True) -> None:
        self._request_id = request_id
        self._timeouts = timeouts
        self._inline_kv_transfer = inline_kv_transfer
        self._serve_only = False  # a step of this attempt failed: only a SERVE without a KV transfer may follow
        self._early_step: ev.StepAssigned | None = None  # the step after the PREFILL, already sent
        # Failure of the early step while the router has not assigned it yet.
        self._early_failure: ev.UpstreamFailed | ev.PullEnded | None = None
        self._computed_at = ""  # instance that computed a part of the prompt in an attempt which lost its router
        self._exclude: list[str] = []
        self._refused_by: list[str] = []  # instances that answered 5xx to the request, or to a PREFILL of it
        self._rejected_by: list[str] = []  # instances that answered 4xx to the request, and are doubted
        # Status of an error to the whole request (BROKE: a broken connection) -> the instances that sent it.
        self._refusals: dict[int, list[str]] = {}
        # Instances that were left in the middle of a step, because another one's failed.
        self._left: tuple[str, ...] = ()
        self._compares = False  # the attempt is to show whether an instance that answered 4xx was right
        self._attempts = 0
        self._retries = 0  # attempts after a failure
        self._deadline = 0.0
        # The client has the beginning of an answer. A head and pings (core/streaming/pings.py) are none: another instance may
        # answer anew, and who carries out a FailRequest tells it in the form that the client can still get.
        self._begun = False
        self._attempt_open = False  # the attempt may be placed at a router and is not finished
        self.attempt_id = request_id
        self.phase = Phase.PLACING
        self.step: ev.StepAssigned | None = None

    @property
    def deadline(self) -> float | None:
        """Time at which a Tick is due, on the clock of `now`; None while streaming and when done."""
        return None if self.phase in (Phase.STREAMING, Phase.DONE) else self._deadline

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Return the effects of `event`. Mutates."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case ev.ClientDisconnected():
                return self._end(ev.Outcome.CANCELLED, "client left")
            case ev.Tick():
                return self._deadline_passed(now) if self.deadline is not None and now >= self._deadline else []
            case ev.StepAssigned():
                return self._step_assigned(event, now)
            case ev.PlacementRefused():
                return self._placement_refused(event)
            case ev.RequestParked():
                if self.phase is Phase.PLACING and event.attempt_id == self.attempt_id:
                    self._deadline = now + event.bound_s + self._timeouts.placement_s
                return []
            case ev.RouterLost():
                return self._router_lost(event, now)
            case ev.PrefillEnded():
                return self._prefill_ended(event, now) if self.phase is Phase.PREFILLING else []
            case ev.PullEnded():
                return self._pull_ended(event, now)
            case ev.ResponseStarted():
                return self._response_started()
            case ev.ResponseRejected():
                if self._early_step is not None:
                    return self._upstream_failed(ev.UpstreamFailed(f"status {event.status}", event.status), now)
                return self._response_rejected(event, now) if self.phase is Phase.SERVING else []
            case ev.ResponseEnded():
                outcome = ev.Outcome.FAILED if event.error else ev.Outcome.OK
                return self._end(outcome, event.error) if self.phase is Phase.STREAMING else []
            case ev.UpstreamFailed():
                return self._upstream_failed(event, now)
            case ev.OtherAnswered():
                return self._other_answered(event, now) if self.phase is Phase.SERVING else []

    def start(self, now: float) -> list[ev.Effect]:
        """Return the effects that begin an attempt; the caller begins the first one. Mutates."""
        self.phase, self.step, self._attempt_open, self._serve_only = Phase.PLACING, None, True, False
        self._early_step = self._early_failure = None
        self._deadline = now + min(self._timeouts.placement_s, COMPARE_S if self._compares else inf)
        return [ev.AskRouter(self.attempt_id, tuple(self._exclude), self._computed_at)]

    def _step_assigned(self, step: ev.StepAssigned, now: float) -> list[ev.Effect]:
        if step.attempt_id != self.attempt_id or self.phase not in (Phase.PLACING, Phase.AWAITING_NEXT_STEP):
            return []
        if self._serve_only:
            step = replace(step, prefill_tokens=0, kv_target=None, kv_source=None)
        if self._early_step is not None:
            return self._adopt_early_step(self._early_step, step, now)
        if step.fetches:
            limit_s = min(fetch_limit_s(step.prefill_tokens), self._timeouts.transfer_s)
            return self._begin(Phase.PREFILLING, step, ev.Prefill(step), limit_s, now)
        if step.prefill_tokens:
            effects = self._begin(Phase.PREFILLING, step, ev.Prefill(step), self._timeouts.prefill_s, now)
            if step.beside is not None:
                early = replace(
                    step,
                    target=step.beside,
                    index=step.index + 1,
                    prefill_tokens=0,
                    cached_tokens=0,
                    kv_target=None,
                    kv_source=step.target,
                )
                self._early_step = early
                effects.append(
                    ev.Serve(early, early=True) if self._inline_kv_transfer else ev.PullKv(early, early=True)
                )
            return effects
        if step.kv_source is None:
            return self._begin(Phase.SERVING, step, ev.Serve(step), self._timeouts.first_byte_s, now)
        if self._inline_kv_transfer:
            return self._begin(Phase.SERVING, step, ev.Serve(step), self._timeouts.transfer_s, now)
        return self._begin(Phase.PULLING, step, ev.PullKv(step), self._timeouts.transfer_s, now)

    def _begin(
        self, phase: Phase, step: ev.StepAssigned, effect: ev.Effect, timeout_s: float, now: float
    ) -> list[ev.Effect]:
        self.phase, self.step = phase, step
        self._deadline = now + timeout_s
        return [effect]

    def _adopt_early_step(self, early: ev.StepAssigned, step: ev.StepAssigned, now: float) -> list[ev.Effect]:
        """Handle the step that the router assigned after the PREFILL: the early step, or another one, which replaces it."""
        early_failure, self._early_step, self._early_failure = self._early_failure, None, None
        if step.prefill_tokens or (step.target, step.kv_source) != (early.target, early.kv_source):
            return [ev.AbortUpstream(), *self._step_assigned(step, now)]
        phase = Phase.SERVING if self._inline_kv_transfer else Phase.PULLING
        effects = self._begin(phase, step, ev.AdoptEarlyStep(step), self._timeouts.transfer_s, now)
        match early_failure:
            case ev.UpstreamFailed():
                effects += self._upstream_failed(early_failure, now)
            case ev.PullEnded():
                effects += self._pull_ended(early_failure, now)
        return effects

    def _promote_early_step(self) -> list[ev.Effect]:
        """Make the early step the current one. Its KV has arrived, so the PREFILL ended, whether its answer has arrived or
        not."""
        if self._early_step is None:
            return []
        assert self.step is not None
        over: list[ev.Effect] = (
            [ev.ReportStepDone(self.attempt_id, self.step.index)] if self.phase is Phase.PREFILLING else []
        )
        self.step, self._early_step = self._early_step, None
        return [*over, ev.AdoptEarlyStep(self.step)]

    def _placement_refused(self, refused: ev.PlacementRefused) -> list[ev.Effect]:
        if refused.attempt_id != self.attempt_id or self.phase not in (Phase.PLACING, Phase.AWAITING_NEXT_STEP):
            return []
        abort: list[ev.Effect] = [ev.AbortUpstream()] if self._early_step is not None else []
        self._attempt_open = False
        self.phase = Phase.DONE
        if refused.code == ev.NOT_FOUND:
            # The gateway sends only requests for models of the fleet, so the router has lost the model's instances.
            refused = replace(refused, code=ev.UNAVAILABLE, message="No instance is ready for this model.")
        if self._compares or (self._exclude and refused.code == ev.UNAVAILABLE):
            refused = replace(refused, code=ev.INTERNAL, message="The instance failed and no other is ready.", place=0)
        return [*abort, self._failure(refused.code, refused.message, refused.retry_after_s, refused.place)]

    def _router_lost(self, lost: ev.RouterLost, now: float) -> list[ev.Effect]:
        if lost.attempt_id != self.attempt_id or self.phase is not Phase.AWAITING_NEXT_STEP:
            return []
        assert self.step is not None
        # The last step computed a part of the prompt for its own instance, and no other step is under way.
        between = not self._serve_only and self._early_step is None and self.step.kv_target is None
        if not between or self._retries >= self._timeouts.max_retries:
            return self._fall_back_to_serve(now)
        # The plan was lost with its router. The next router plans from what is computed.
        self._computed_at = self.step.target.instance_id
        ended = self._report_end(ev.Outcome.CANCELLED, "its router was lost between two steps")
        return [*ended, *self._retry(now)]

    def _fall_back_to_serve(self, now: float) -> list[ev.Effect]:
        """Serve without a next step from the router: at the instance that has the prefix, or that was to use it if a step
        failed."""
        assert self.step is not None
        if self._early_step is not None:
            # The early step is the plan's next step, so the router counts the request at the instance where it runs.
            return self._step_assigned(replace(self._early_step, degraded=True), now)
        target = (self.step.kv_target if self._serve_only else None) or self.step.target
        computed = 0 if self._serve_only else self.step.prefill_tokens
        alone = ev.StepAssigned(self.attempt_id, target, self.step.index + 1, cached_tokens=computed, degraded=True)
        return [*self._step_assigned(alone, now), ev.ReportServedAlone(self.attempt_id)]

    def _prefill_ended(self, ended: ev.PrefillEnded, now: float) -> list[ev.Effect]:
        assert self.step is not None
        own = self.step.target.instance_id
        instance_id = ended.instance_id or own
        at_source = instance_id != own
        at_fault = ended.refused
        if self.step.fetches:
            # An instance may refuse what it is to fetch because of the source. Of a source that failed nothing else is reported.
            at_fault = at_source and (ended.refused or ended.instance_failed)
        if at_fault:
            # Not counted in _refusals: a transfer can fail although the request is valid.
            self._refused_by.append(instance_id)
        if ended.broke and (alike := self._alike(BROKE, instance_id)):
            return self._request_at_fault(ended.error, alike)
        return self._step_ended(ended.error, now, ended.instance_failed and not at_source)

    def _step_ended(self, error: str, now: float, instance_failed: bool = False) -> list[ev.Effect]:
        assert self.step is not None
        self.phase = Phase.AWAITING_NEXT_STEP
        abort: list[ev.Effect] = []
        if error:
            if self._early_step is not None:
                abort = [ev.AbortUpstream()]
            if self.step.beside is not None:
                self._left += (self.step.target.instance_id, self.step.beside.instance_id)
            self._serve_only, self._early_step, self._early_failure = True, None, None
        self._deadline = now + self._timeouts.placement_s
        return [*abort, ev.AskNextStep(self.attempt_id, self.step.index, error, instance_failed)]

    def _pull_ended(self, pulled: ev.PullEnded, now: float) -> list[ev.Effect]:
        if self._early_step is None and self.phase is not Phase.PULLING:
            return []
        if pulled.error:
            early = self._early_step is not None
            return self._early_step_failed(pulled, now) if early else self._step_ended(pulled.error, now)
        effects = self._promote_early_step()
        assert self.step is not None
        step = replace(self.step, kv_source=None)
        return [*effects, *self._begin(Phase.SERVING, step, ev.Serve(step), self._timeouts.first_byte_s, now)]

    def _response_started(self) -> list[ev.Effect]:
        if self._early_step is None and self.phase is not Phase.SERVING:
            return []
        effects = self._promote_early_step()
        self.phase, self._begun = Phase.STREAMING, True
        self._refused_by += self._rejected_by
        self._rejected_by = []
        return [*effects, ev.ReportFirstToken(self.attempt_id, self._take_refused_by())]

    def _response_rejected(self, rejected: ev.ResponseRejected, now: float) -> list[ev.Effect]:
        """Pass on a 4xx answer, unless the instance is doubted, and another one has not been asked yet."""
        assert self.step is not None
        if rejected.own:  # The instance has answered.
            return self._end(ev.Outcome.REJECTED, "rejected")
        alike = self._alike(rejected.status, self.step.target.instance_id)
        if alike or not self.step.doubted or self.step.kv_source or self._retries >= self._timeouts.max_retries:
            return self._end(ev.Outcome.REJECTED, "rejected", rejected.status, alike=alike)
        self._rejected_by.append(self.step.target.instance_id)
        self._exclude.append(self.step.target.instance_id)
        ended = self._end(ev.Outcome.FAILED, f"status {rejected.status}", rejected.status, refused=True)
        return [*ended, *self._retry(now, compares=True)]

    def _alike(self, status: int, instance_id: str) -> tuple[str, ...]:
        """Return the other instances that failed with the same `status`, and add this one to them. Mutates."""
        known = self._refusals.setdefault(status, [])
        alike = tuple(other for other in known if other != instance_id)
        if instance_id not in known:
            known.append(instance_id)
        return alike

    def _request_at_fault(self, error: str, alike: tuple[str, ...], kind: int = BROKE) -> list[ev.Effect]:
        """End the request, which several instances have refused with the status `kind`. If they broke the connection there is no
        answer for the client."""
        broke = kind == BROKE
        abort: list[ev.Effect] = [ev.AbortUpstream()] if broke else []
        ended = self._end(ev.Outcome.REJECTED, error, kind, refused=not broke, broke=broke, alike=alike)
        why = f"{len(alike) + 1} instances broke the connection while they had this request. It is sent to no other."
        failure = [self._failure(ev.BREAKS_INSTANCES, why)] if broke and not self._begun else []
        return [*abort, *ended, *failure]

    def _early_step_failed(self, failed: ev.UpstreamFailed | ev.PullEnded, now: float) -> list[ev.Effect]:
        """Handle the failure of the early step. It fails a PREFILL that still runs; after the PREFILL it is kept until the router
        assigns the step."""
        if isinstance(failed, ev.UpstreamFailed) and failed.broke:
            assert self._early_step is not None
            if alike := self._alike(BROKE, self._early_step.target.instance_id):
                return self._request_at_fault(failed.error, alike)
            if self.phase is Phase.PREFILLING:
                self._deadline = min(self._deadline, now + BOTH_BREAK_S)
        elif self.phase is Phase.PREFILLING:
            return self._step_ended(f"the other instance: {failed.error}", now)
        self._early_failure = failed
        return []

    def _deadline_passed(self, now: float) -> list[ev.Effect]:
        transferring = self.step is not None and self.step.kv_source is not None
        if self.phase is Phase.PREFILLING and self._early_failure is not None:
            return self._step_ended(f"the other instance: {self._early_failure.error}", now)
        if self.phase in (Phase.PREFILLING, Phase.PULLING) or (self.phase is Phase.SERVING and transferring):
            # A transfer that does not end may be the fault of either instance: only one that computes is reported as failed.
            computes = self.phase is Phase.PREFILLING and not transferring
            self._early_step = None
            return [ev.AbortUpstream(), *self._step_ended("deadline", now, computes)]
        if self.phase is Phase.AWAITING_NEXT_STEP:
            return self._fall_back_to_serve(now)
        if self.phase is Phase.SERVING:
            return self._upstream_failed(ev.UpstreamFailed("no first byte in time"), now)
        code = ev.INTERNAL if self._compares else ev.PLACEMENT_TIMEOUT
        return [
            *self._end(ev.Outcome.FAILED, "no step in time"),
            self._failure(code, "No placement was found in time.", 1.0),
        ]

    def _upstream_failed(self, failed: ev.UpstreamFailed, now: float) -> list[ev.Effect]:
        if self._early_step is not None:
            return self._early_step_failed(failed, now)
        if self.phase is Phase.STREAMING:
            assert self.step is not None
            if failed.broke:
                if failed.progressed:
                    self._refusals.pop(BROKE, None)  # What broke the earlier one is past.
                if alike := self._alike(BROKE, self.step.target.instance_id):
                    return self._request_at_fault(failed.error, alike)
            if failed.continuable and (failed.moved or self._retries < self._timeouts.max_retries):
                return self._retry_elsewhere(failed, now, continued=True)
            return [*self._end(ev.Outcome.FAILED, failed.error, failed.status), ev.EndStreamWithError()]
        if self.phase is not Phase.SERVING:
            return []
        assert self.step is not None
        instance_id = self.step.target.instance_id
        # One that was left and is not there any more may have died of the request, as the one whose step failed.
        died = failed.broke or (failed.unreached and instance_id in self._left)
        if died and (alike := self._alike(BROKE, instance_id)):
            return self._request_at_fault(failed.error, alike)
        if self.step.kv_source is not None and failed.status:
            # The instance answers, so it can serve. That it fails with KV of another instance may be the fault of that instance.
            return [ev.AbortUpstream(), *self._step_ended(failed.error, now)]
        if failed.refused:
            if alike := self._alike(failed.status, instance_id):
                return self._request_at_fault(failed.error, alike, failed.status)
            self._refused_by.append(instance_id)
        how = _How(refused=failed.refused, broke=failed.broke and not failed.refused)
        if not failed.moved and self._retries >= self._timeouts.max_retries:
            ended = self._end(_outcome(failed), failed.error, failed.status, **how)
            return [*ended, self._failure(ev.INTERNAL, "The request failed on every instance that was tried.")]
        return self._retry_elsewhere(failed, now, **how)

    def _retry_elsewhere(self, failed: ev.UpstreamFailed, now: float, **how: Unpack[_How]) -> list[ev.Effect]:
        assert self.step is not None
        if not failed.moved:
            self._exclude.append(self.step.target.instance_id)
        self._computed_at = ""
        ended = self._end(_outcome(failed), failed.error, failed.status, **how)
        return [*ended, *self._retry(now, counts=not failed.moved)]

    def _other_answered(self, answered: ev.OtherAnswered, now: float) -> list[ev.Effect]:
        """End the attempt as failed; a new one, which no router has placed, has the answer. A proxy may have left an instance
        because of its 5xx, of which the request may be the cause: the end of the new attempt decides whose fault it was."""
        assert self.step is not None
        self._refused_by.append(self.step.target.instance_id)
        # The proxy's connection is not closed: it has the answer.
        why = "it did not answer, and the proxy asked another instance"
        ended = self._report_end(ev.Outcome.FAILED, why, refused=True)
        self._next_attempt_id()
        self._attempt_open = True
        step = ev.StepAssigned(self.attempt_id, answered.target, degraded=True)
        serve = self._begin(Phase.SERVING, step, ev.Serve(step), self._timeouts.first_byte_s, now)
        return [*ended, ev.AdoptInstance(step), *serve, ev.ReportServedAlone(self.attempt_id)]

    def _retry(self, now: float, *, counts: bool = True, compares: bool = False) -> list[ev.Effect]:
        self._next_attempt_id()
        self._compares = compares
        self._retries += counts
        return self.start(now)

    def _next_attempt_id(self) -> None:
        self._attempts += 1
        self.attempt_id = f"{self._request_id}.{self._attempts}"

    def _end(self, outcome: ev.Outcome, error: str = "", status: int = 0, **how: Unpack[_How]) -> list[ev.Effect]:
        """End the attempt. Upstream connections are closed first, so that nothing runs that the router no longer counts."""
        abort: list[ev.Effect] = [] if outcome in (ev.Outcome.OK, ev.Outcome.REJECTED) else [ev.AbortUpstream()]
        ended = self._report_end(outcome, error, status, **how)
        # The client of a begun stream cannot get the error answer that rejects its request.
        stream: list[ev.Effect] = [ev.EndStreamWithError()] if outcome is ev.Outcome.REJECTED and self._begun else []
        return [*abort, *ended, *stream]

    def _report_end(
        self, outcome: ev.Outcome, error: str = "", status: int = 0, **how: Unpack[_How]
    ) -> list[ev.Effect]:
        """End the attempt, of which nothing runs at an instance, or whose connection goes on."""
        # A 4xx answer shows, as a first byte does, that the earlier 5xx answers were the fault of their instances.
        shows = outcome is ev.Outcome.REJECTED and not how.get("refused") and not how.get("broke")
        refused_by = self._take_refused_by() if shows else ()
        finished = ev.ReportFinished(self.attempt_id, outcome, error, status, refused_by=refused_by, **how)
        report: list[ev.Effect] = [finished] if self._attempt_open else []
        self.phase, self._attempt_open, self._early_step = Phase.DONE, False, None
        return report

    def _failure(self, code: int, message: str, retry_after_s: float | None = None, place: int = 0) -> ev.Effect:
        """Return what tells the client that its request failed: an error answer, or the end of a begun stream."""
        return ev.EndStreamWithError() if self._begun else ev.FailRequest(code, message, retry_after_s, place)

    def _take_refused_by(self) -> tuple[str, ...]:
        """Remove and return the instances that answered 5xx to the request, each once. Mutates."""
        refused_by, self._refused_by = tuple(dict.fromkeys(self._refused_by)), []
        return refused_by


def _outcome(failed: ev.UpstreamFailed) -> ev.Outcome:
    return ev.Outcome.CANCELLED if failed.innocent or failed.moved else ev.Outcome.FAILED
