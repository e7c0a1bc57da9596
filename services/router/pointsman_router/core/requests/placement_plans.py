"""Carries out the plans of placed requests, from the decision to the end: what each step reserves, and what follows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.kv_load import NO_LOAD
from pointsman_router.core.learning.output_times import OutputTimes
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.load.recent_migrations import Migrations
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Candidate, Decision, PlacementRequest, Step, StepKind
from pointsman_router.core.requests.decider import Decider
from pointsman_router.core.requests.life_evidence import LifeEvidence
from pointsman_router.core.requests.recovered_placement import recovered_decision
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.core.requests.request_state import RequestState, Stage
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.requests.retry_after import RetryAfter
from pointsman_router.core.turn import Turn

# Reason of the one SERVE that replaces the rest of a plan.
COLOCATED_AFTER_FAILURE = "colocated_after_failure"
# Reason of the SERVE that a gateway started without the router.
SERVED_ALONE = "next_step_came_too_late"
# Maximum length of an error in a decision's note, characters.
MAX_NOTE = 100
# Maximum number of steps of a plan that another router made. Step numbers come from gateways, and such a plan is as long as they
# say.
MAX_STEPS = 10_000


# Expected time of an answer without a limit of tokens that is not streamed, s.
UNBOUNDED_S = 200.0


class PlacementPlans:
    """Carries out decisions, step by step. `place_lease_s`: lease of a placement of the unary form, which no gateway follows,
    s."""

    def __init__(
        self,
        requests: RequestTable,
        decider: Decider,
        instances: InstanceRegistry,
        prefill_observer: PrefillObserver,
        affinity: Affinity,
        migrations: Migrations,
        retry_after: RetryAfter,
        evidence: LifeEvidence,
        place_lease_s: float,
        turn: Turn,
    ) -> None:
        self._requests = requests
        self._decider = decider
        self._instances = instances
        self._prefill_observer = prefill_observer
        self._affinity = affinity
        self._migrations = migrations
        self._retry_after = retry_after
        self._evidence = evidence
        self._place_lease_s = place_lease_s
        self._turn = turn
        self._output_times = OutputTimes()

    def forget_pool(self, pool: str) -> None:
        """Drop what was learned of a pool that is gone. Mutates."""
        self._output_times.forget_pool(pool)

    # ---- steps ----

    def commit(self, decision: Decision, gateway_id: str, now: float) -> list[ev.Effect]:
        """Carry out a decision: reserve its first step, or the next step of the plan that it continues. The last of the returned
        effects is the answer to the gateway. Mutates."""
        request = decision.request
        self._decider.made(decision)
        # The keys are not needed any more. Keeping them would use megabytes for each remembered decision.
        decision = replace(decision, request=replace(request, keys=()))
        lease_until = None if gateway_id else now + self._place_lease_s
        effects: list[ev.Effect] = [ev.DecisionMade(decision)]
        index, step = 0, decision.result.steps[0]
        first = decision.view.find(step.instance_id)
        assert first is not None
        new = request.input_tokens - step.prefix_tokens if step.fetches else first.new_tokens
        known = self._requests.placed(request.request_id)
        if decision.previous_id and known is not None and (before := known.decision) is not None:
            # The decision continues a plan, whose steps are numbered from its beginning.
            steps = (*before.result.steps, *decision.result.steps)
            index = len(before.result.steps)
            decision = replace(decision, result=replace(decision.result, steps=steps))
        else:
            if decision.held_s > 0:
                self._retry_after.waited(decision.pool, request.priority, decision.held_s, now)
            # An engine refuses what its context does not hold. One such estimate of millions of tokens would outweigh hundreds
            # of requests in the mean.
            fits = first.traits is UNSET or first.traits.holds(request.context_tokens, 0)
            cached, length = request.input_tokens - new, request.sequence_length
            if fits and (mean_work := self._prefill_observer.count_request(decision.pool, new, cached, length)):
                effects.append(ev.MeanWorkSet(mean_work, decision.pool))
        effects += self._reserve(decision, index, first, gateway_id, lease_until, request.keys, now)
        self._requests.count(decision, new, request.keys, now)
        session = request.session
        # Most sessions have one request only, and their owner need not be stored: the store gets the sessions that come back.
        asked_at = now - decision.held_s - request.parked_s
        if session and self._affinity.assign(decision.pool, session, decision.next_owner, now, asked_at):
            effects.append(ev.SessionOwnerSet(session, decision.next_owner, decision.pool))
        if decision.mode == "OFFLOAD":
            self._migrations.record(decision.instance_id, now)
            self._instances.forget_snapshot(decision.instance_id)
        self._requests.remember(request.request_id, decision)
        return [*effects, placed_effect(decision, index, gateway_id)]

    def _reserve(
        self,
        decision: Decision,
        index: int,
        candidate: Candidate | None,
        gateway_id: str,
        lease_until: float | None,
        keys: Sequence[int],
        now: float,
    ) -> list[ev.Effect]:
        """Open the reservation of step `index` of a plan. `candidate`: the step's instance in the decision's view. `keys` are the
        prompt's."""
        step = decision.result.steps[index]
        # A decision of an earlier owner has no view, but records the cached tokens.
        cached = candidate.cached_tokens if candidate else decision.cached_tokens
        tokens = min(step.prefix_tokens, decision.request.input_tokens) or decision.request.input_tokens
        # KV from another instance arrives by transfer, so nothing is left to compute.
        new_tokens = 0 if step.kv_source else max(tokens - cached, 0)
        reservation = Reservation(
            request_id=decision.request.request_id,
            gateway_id=gateway_id,
            instance_id=step.instance_id,
            decision_id=decision.decision_id,
            input_tokens=decision.request.input_tokens,
            new_tokens=new_tokens,
            step_index=index,
            lease_until=lease_until,
            pool=decision.pool,
            cached_tokens=tokens - new_tokens,
            kv_load=candidate.kv_load if candidate is not None and new_tokens else NO_LOAD,
            # An offload's PREFILL, and a slice, run one sequence of one token.
            sequences=decision.request.sequences if step.kind is StepKind.SERVE else 1,
            sequence_tokens=decision.request.sequence_tokens if step.kind is StepKind.SERVE else 0,
            fetching=step.fetches,
        )
        self._requests.place(reservation, keys, tokens, now, self._output_s(decision, step))
        if step.fetches:
            sent = max(tokens - (candidate.device_tokens if candidate else cached), 0)
            predicted_s = decision.result.figures.get("fetch_s", 0.0)
            self._requests.fetch(reservation, step.kv_source, keys, sent, predicted_s, now)
        return [ev.Reserved(reservation)]

    def first_token(self, event: ev.FirstToken, now: float) -> list[ev.Effect]:
        """Apply a request's first token. Mutates."""
        state = self._requests.placed(event.request_id)
        if state is None or state.stage is not Stage.PREFILLING:
            return []
        # Of an answer that is not streamed it is told only if others refused the request, when the answer has come.
        streamed = state.decision is not None and state.decision.request.streamed
        moved = self._requests.first_token(state, now, with_answer=bool(event.refused_by) and not streamed)
        self._evidence.began(moved, now)
        for refusing in event.refused_by:
            self._evidence.blamed(refusing, now)
        return [ev.Reserved(moved)]

    def step_done(self, state: RequestState, event: ev.StepDone, now: float) -> list[ev.Effect]:
        """Apply the end of a plan's current step: start the next step, or, if the step failed, a SERVE without KV transfer.
        Mutates."""
        reservation, decision = state.reservation, state.plan
        if reservation is None or decision is None or reservation.step_index != event.step_index:
            return []
        if not event.ok:
            self._requests.fetch_failed(state.request_id, now, at_target=event.instance_failed)
            return self._colocate(state, reservation, decision, event, now)
        self._requests.computed(state, now)
        self._evidence.began(reservation, now)
        index = event.step_index + 1
        if index >= len(decision.result.steps):
            return []  # The rest of the request must be placed first.
        candidate = decision.view.find(decision.result.steps[index].instance_id)
        effects = self._reserve(
            decision, index, candidate, reservation.gateway_id, reservation.lease_until, state.keys, now
        )
        return [*effects, placed_effect(decision, index, reservation.gateway_id)]

    def _colocate(
        self, state: RequestState, reservation: Reservation, decision: Decision, event: ev.StepDone, now: float
    ) -> list[ev.Effect]:
        """Replace the rest of a plan whose step failed by one SERVE on the answering instance, without KV from another one."""
        index, steps = event.step_index, decision.result.steps
        if steps[index].kind is StepKind.SERVE and not steps[index].kv_source:
            return []  # There is no simpler plan; the gateway ends this attempt.
        if event.instance_failed:
            self._evidence.failed(reservation, now)
        note = f"{steps[index].kind.lower()}_failed: {event.error[:MAX_NOTE]}"
        return self._serve_there(state, reservation, decision, note, now)

    def serve_there(self, request_id: str, note: str, now: float) -> list[ev.Effect]:
        """Replace the rest of a plan that has begun by one SERVE on the plan's last instance. No effects without a plan.
        Mutates."""
        state = self._requests.placed(request_id)
        if state is None or (reservation := state.reservation) is None or (decision := state.plan) is None:
            return []
        return self._serve_there(state, reservation, decision, note, now)

    def _serve_there(
        self, state: RequestState, reservation: Reservation, decision: Decision, note: str, now: float
    ) -> list[ev.Effect]:
        gateway_id, index = reservation.gateway_id, reservation.step_index + 1
        if self._instances.leaves_answers_to_others(decision.instance_id, decision.pool, decision.request.model):
            why = "the plan's instance only produces KV, and other instances answer now"
            return [not_serving(state.request_id, reservation.pool, why, gateway_id)]
        steps = (*decision.result.steps[:index], Step(StepKind.SERVE, decision.instance_id, COLOCATED_AFTER_FAILURE))
        decision = _with_steps(decision, steps, note)
        self._requests.remember(state.request_id, decision)
        candidate = decision.view.find(decision.instance_id)
        effects = self._reserve(decision, index, candidate, gateway_id, reservation.lease_until, state.keys, now)
        return [
            ev.DecisionNoted(decision, note),
            *effects,
            placed_effect(decision, index, gateway_id),
        ]

    def served_alone(self, request_id: str, instance_id: str) -> tuple[int, list[ev.Effect]]:
        """Record that a gateway got no next step in time and has the request answered by `instance_id`. Return the number of this
        step, and the effects. Mutates."""
        state = self._requests.placed(request_id)
        if state is None or (reservation := state.reservation) is None:
            return 0, []
        decision, index = state.plan, reservation.step_index
        if decision is None:
            return min(index + 1, MAX_STEPS), []
        steps = decision.result.steps
        if steps[index].reason == SERVED_ALONE:  # the gateway reports this again, perhaps with another instance
            notes: tuple[str, ...] = ()
        else:
            index, notes = index + 1, (SERVED_ALONE,)
        plan = (*steps[:index], Step(StepKind.SERVE, instance_id, SERVED_ALONE))
        self._requests.remember(request_id, _with_steps(decision, plan, *notes))
        return index, [ev.DecisionNoted(decision, note) for note in notes]

    def recovered(self, reservation: Reservation, request: PlacementRequest, gateway_id: str) -> ev.Placed:
        """Replace the rest of a plan that an earlier owner of the pool made by one SERVE on its instance. Mutates."""
        steps_done = min(reservation.step_index, MAX_STEPS)
        decision = recovered_decision(reservation, request, self._decider.policy.ref(), steps_done)
        self._requests.remember(reservation.request_id, decision)
        return placed_effect(decision, steps_done, gateway_id)

    # ---- ends ----

    def finished(self, finished: ev.Finished, now: float) -> list[ev.Effect]:
        """Apply the end of a request; no effects if it was not placed. Mutates."""
        if (state := self._requests.opened(finished.request_id)) is None:
            return []
        if (reservation := state.reservation) is None:
            self._requests.leave_queue(finished.request_id)
            return []
        self._evidence.finished(reservation, finished, now)
        self._learn_output(reservation, finished)
        decision = state.plan
        judged = self._requests.end(state, finished, now)
        return [
            ev.Released(finished.request_id, reservation.pool),
            ev.DecisionClosed(reservation.decision_id, finished, decision),
            *judged,
        ]

    def cancelled(self, request_id: str, why: str, now: float) -> list[ev.Effect]:
        """End a placed request whose end nobody reported, as `finished`. Mutates."""
        return self.finished(ev.Finished(request_id, "CANCELLED", error=why, inferred=True), now)

    # ---- times of answers ----

    def _output_s(self, decision: Decision, step: Step) -> float | None:
        """Return how long after its first token a step's first byte comes, s: 0 if answers are streamed; None if nothing is known
        of it, since it waits for another instance's KV. An answer that is not streamed, or of which the gateway does not say
        whether it is, comes with its last token."""
        request = decision.request
        if step.kv_source:
            return None
        if request.streamed or step.kind is StepKind.PREFILL:
            return 0.0
        if not request.max_output_tokens:
            return UNBOUNDED_S
        return request.max_output_tokens * self._output_times.token_s(decision.pool, self._hardware(step.instance_id))

    def _learn_output(self, reservation: Reservation, finished: ev.Finished) -> None:
        timings, tokens = finished.timings_ms or {}, finished.output_tokens or 0
        if finished.outcome == "OK" and reservation.sequences == 1 and (first_ms := timings.get("first_token")):
            seconds = (timings.get("done", 0.0) - first_ms) / 1e3
            hardware = self._hardware(reservation.instance_id)
            self._output_times.answered(reservation.pool, hardware, seconds, tokens - 1)

    def _hardware(self, instance_id: str) -> str:
        record = self._instances.get(instance_id)
        return record.info.hardware if record is not None else ""


def placed_effect(decision: Decision, index: int, gateway_id: str) -> ev.Placed:
    """Return the effect that sends step `index` of a decision to the gateway."""
    steps = decision.result.steps
    last = index == len(steps) - 1 and steps[index].kind is StepKind.SERVE
    return ev.Placed(decision.request.request_id, decision, index, steps[index], last, gateway_id)


def kv_target(steps: Sequence[Step], index: int) -> str:
    """Return the instance whose next step uses the KV of step `index` of a plan; empty if no other instance does."""
    follows = steps[index + 1] if index + 1 < len(steps) else None
    return follows.instance_id if follows is not None and follows.kv_source == steps[index].instance_id else ""


def _with_steps(decision: Decision, steps: tuple[Step, ...], *notes: str) -> Decision:
    return replace(decision, result=replace(decision.result, steps=steps), notes=(*decision.notes, *notes))
