"""Placed requests, from their first step to their end: what each step reserves, and what follows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances.circuit_breaker import CircuitSettings
from pointsman.router.core.instances.instance_registry import InstanceRecord, InstanceRegistry
from pointsman.router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman.router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman.router.core.load.reservations import Reservation, Reservations
from pointsman.router.core.requests.place_or_hold import not_serving
from pointsman.router.core.requests.recent_decisions import RecentDecisions
from pointsman.router.core.types import Decision, Step, StepKind

# The reason of the one SERVE that replaces what is left of a plan, and the longest account of the failure, in characters.
COLOCATED_AFTER_FAILURE = "colocated_after_failure"
SERVED_ALONE = "next_step_came_too_late"
MAX_NOTE = 100
# Steps of a plan that was made elsewhere. Gateways tell their numbers, and a plan is as long as they say.
MAX_STEPS = 10_000


class Plans:
    """The plans of open and lately ended requests (`decisions`), carried on as their steps end."""

    def __init__(
        self,
        instances: InstanceRegistry,
        prefix_knowledge: PrefixKnowledge,
        reservations: Reservations,
        prefill_observer: PrefillObserver,
        decisions: RecentDecisions,
        circuit: CircuitSettings,
    ) -> None:
        self.decisions = decisions
        self._instances = instances
        self._prefix_knowledge = prefix_knowledge
        self._reservations = reservations
        self._prefill_observer = prefill_observer
        self._circuit = circuit

    def decision_of(self, reservation: Reservation) -> Decision | None:
        """The decision of which a reservation is a step; None where an earlier owner, or its gateway alone, has placed it."""
        decision = self.decisions.get(reservation.request_id)
        if decision is None or decision.decision_id != reservation.decision_id:
            return None
        return decision if reservation.step_index < len(decision.result.steps) else None

    def reserve(
        self,
        decision: Decision,
        index: int,
        gateway_id: str,
        lease_until: float | None,
        keys: Sequence[int],
        now: float,
    ) -> list[ev.Effect]:
        """Reserve what step `index` of a plan takes; `keys` are the prompt's. Mutates."""
        step = decision.result.steps[index]
        candidate = decision.view.find(step.instance_id)
        # A decision of an earlier owner has no view; what was cached there is what it had said.
        cached = candidate.cached_tokens if candidate else decision.cached_tokens
        tokens = min(step.prefix_tokens, decision.request.input_tokens) or decision.request.input_tokens
        # After a PREFILL elsewhere its KV arrives by transfer: nothing is left to compute.
        new_tokens = 0 if step.kind is StepKind.SERVE and step.kv_source else max(tokens - cached, 0)
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
        )
        record = self.put(reservation, now)
        self._prefill_observer.opened(reservation, record.info if record else None, now)
        self._prefix_knowledge.opened(reservation, keys, tokens, now)
        return [ev.Reserved(reservation)]

    def placed_effect(self, decision: Decision, index: int, gateway_id: str) -> ev.Placed:
        """Step `index`, as the gateway is told of it."""
        steps = decision.result.steps
        last = index == len(steps) - 1 and steps[index].kind is StepKind.SERVE
        return ev.Placed(decision.request.request_id, decision, index, steps[index], last, gateway_id)

    def first_token(self, event: ev.FirstToken, now: float) -> list[ev.Effect]:
        """An answer began. Mutates."""
        self._prefilled(event.request_id, now)
        self._prefix_knowledge.first_token(event.request_id, now)
        moved = self._reservations.first_token(event.request_id)
        if moved is None:
            return []
        blamed = (effect for name in event.refused_by for effect in self._blame(name, now))
        return [ev.Reserved(moved), *self._judge_circuit(moved, "OK", now), *blamed]

    def step_done(self, event: ev.StepDone, now: float) -> list[ev.Effect]:
        """A step ended: the next one follows, or, where it failed, what still can. Mutates."""
        reservation = self._reservations.get(event.request_id)
        decision = self.decision_of(reservation) if reservation else None
        if reservation is None or decision is None or reservation.step_index != event.step_index:
            return []
        if not event.ok:
            return self._colocate(reservation, decision, event, now)
        self._prefilled(event.request_id, now)
        self._prefix_knowledge.step_done(event.request_id, now)
        closed = self._judge_circuit(reservation, "OK", now)
        if event.step_index + 1 >= len(decision.result.steps):
            # It keeps its place there, with nothing left to compute, until the rest is placed.
            self._reservations.prefilled(event.request_id, reservation.new_tokens)
            return closed
        keys = self._prefix_knowledge.keys_of(event.request_id)
        effects = self.reserve(
            decision, event.step_index + 1, reservation.gateway_id, reservation.lease_until, keys, now
        )
        return [*closed, *effects, self.placed_effect(decision, event.step_index + 1, reservation.gateway_id)]

    def _colocate(
        self, reservation: Reservation, decision: Decision, event: ev.StepDone, now: float
    ) -> list[ev.Effect]:
        """A step failed: the rest of the plan is one SERVE where the answer was to come from, without anybody's KV."""
        index, steps = event.step_index, decision.result.steps
        if steps[index].kind is StepKind.SERVE and not steps[index].kv_source:
            return []  # Nothing simpler is left; its gateway ends this attempt.
        judged = self._judge_circuit(reservation, "FAILED" if event.instance_failed else "", now)
        note = f"{steps[index].kind.lower()}_failed: {event.error[:MAX_NOTE]}"
        return [*judged, *self._serve_there(reservation, decision, index, note, now)]

    def unfinished_plan(self, event: ev.StepDone) -> Decision | None:
        """The decision of an open request whose rest is to be placed now that this step, its plan's last so far, is done."""
        reservation = self._reservations.get(event.request_id)
        decision = self.decision_of(reservation) if reservation else None
        if reservation is None or decision is None or reservation.step_index != event.step_index or not event.ok:
            return None
        step = decision.result.steps[-1]
        return (
            decision if step.kind is StepKind.PREFILL and event.step_index + 1 == len(decision.result.steps) else None
        )

    def serve_there(self, request_id: str, note: str, now: float) -> list[ev.Effect]:
        """What is left of a plan that has begun becomes one SERVE where it was. Mutates."""
        reservation = self._reservations.get(request_id)
        decision = self.decision_of(reservation) if reservation else None
        if reservation is None or decision is None:
            return []
        return self._serve_there(reservation, decision, reservation.step_index, note, now)

    def _serve_there(
        self, reservation: Reservation, decision: Decision, index: int, note: str, now: float
    ) -> list[ev.Effect]:
        if self._instances.leaves_answers_to_others(decision.instance_id, decision.pool, decision.request.model):
            why = "the plan's instance only produces KV, and others answer by now"
            refused = not_serving(reservation.request_id, reservation.pool, why)
            return [replace(refused, gateway_id=reservation.gateway_id)]
        plan = (
            *decision.result.steps[: index + 1],
            Step(StepKind.SERVE, decision.instance_id, COLOCATED_AFTER_FAILURE),
        )
        result = replace(decision.result, steps=plan)
        decision = replace(decision, result=result, notes=(*decision.notes, note))
        self.decisions.put(decision)
        keys = self._prefix_knowledge.keys_of(reservation.request_id)
        effects = self.reserve(decision, index + 1, reservation.gateway_id, reservation.lease_until, keys, now)
        noted = ev.DecisionNoted(decision.decision_id, note)
        return [noted, *effects, self.placed_effect(decision, index + 1, reservation.gateway_id)]

    def served_alone(self, reservation: Reservation, instance_id: str) -> tuple[int, list[ev.Effect]]:
        """The gateway waited in vain for the next step, and has the request answered by `instance_id`: as which step. Mutates."""
        decision, index = self.decision_of(reservation), reservation.step_index
        if decision is None:
            return min(index + 1, MAX_STEPS), []
        steps, notes = decision.result.steps, decision.notes
        noted: list[ev.Effect] = []
        if steps[index].reason != SERVED_ALONE:  # otherwise it tells so again, perhaps of another instance
            index += 1
            notes = (*notes, SERVED_ALONE)
            noted.append(ev.DecisionNoted(decision.decision_id, SERVED_ALONE))
        plan = (*steps[:index], Step(StepKind.SERVE, instance_id, SERVED_ALONE))
        self.decisions.put(replace(decision, result=replace(decision.result, steps=plan), notes=notes))
        return index, noted

    def _prefilled(self, request_id: str, now: float) -> None:
        reservation, prompt = (
            self._reservations.get(request_id),
            self._prefix_knowledge.prefill_progress.get(request_id),
        )
        if reservation is not None:
            record = self._instances.get(reservation.instance_id)
            doubtful = prompt is None or prompt.evicted
            self._prefill_observer.done(reservation, record.info if record else None, now, doubtful=doubtful)

    def put(self, reservation: Reservation, now: float) -> InstanceRecord | None:
        """A request is open on an instance, and no longer where it was, if anywhere; returns the instance's record. Mutates."""
        if (before := self._reservations.get(reservation.request_id)) is not None:
            self._leave(before, now)
        self._reservations.put(reservation)
        record = self._instances.get(reservation.instance_id)
        # Of an engine that has come back with another model, a request of the one before shows nothing.
        if record is not None and record.info.model == reservation.pool:
            record.circuit.placed(reservation.request_id, now)
        return record

    def forget(self, reservation: Reservation, now: float) -> None:
        """Another router answers for an open request from now on. Mutates."""
        self._leave(reservation, now)
        self._reservations.release(reservation.request_id)
        self._prefix_knowledge.prefill_progress.close(reservation.request_id)

    def _leave(self, reservation: Reservation, now: float) -> None:
        self._prefill_observer.gone(reservation, now)
        # By its id: its instance may be in another pool by now.
        if (record := self._instances.get(reservation.instance_id)) is not None:
            record.circuit.left(reservation.request_id)

    def finished(self, finished: ev.Finished, now: float) -> list[ev.Effect]:
        """A request ended; no effects where it was not open. Mutates."""
        reservation = self._reservations.get(finished.request_id)
        if reservation is None:
            return []
        self._prefill_observer.gone(reservation, now)
        self._reservations.release(finished.request_id)
        judged = self._prefix_knowledge.finished(finished, self.decisions.get(finished.request_id), now)
        if finished.outcome == "CANCELLED":
            # Its placement may have been given back, or lost on the way: when the gateway asks again, it is decided again.
            self.decisions.drop(finished.request_id)
        else:
            self.decisions.trim(finished.request_id)
        return [
            *self._judge_circuit(reservation, "REFUSED" if finished.refused else finished.outcome, now),
            *(effect for name in finished.refused_by for effect in self._blame(name, now)),
            ev.Released(finished.request_id, reservation.pool),
            ev.DecisionClosed(reservation.decision_id, finished),
            *judged,
        ]

    def _blame(self, instance_id: str, now: float) -> list[ev.Effect]:
        """An instance refused what another one answered."""
        record = self._instances.get(instance_id)
        if record is None or record.circuit.opened:  # or it was judged as a trial
            return []
        record.candidate_snapshot = None
        return self._circuit_changed(record) if record.circuit.failed("", now, self._circuit) else []

    def _judge_circuit(self, reservation: Reservation, outcome: str, now: float) -> list[ev.Effect]:
        """What the end of a request, or of its step, tells of its instance. REFUSED: it answered 5xx, which may be the request's
        own fault."""
        record = self._instances.get(reservation.instance_id)
        if record is None:
            return []
        if outcome == "FAILED":
            changed = record.circuit.failed(reservation.request_id, now, self._circuit)
        elif outcome == "REFUSED":
            changed = record.circuit.refused(reservation.request_id, now, self._circuit)
        elif outcome in ("OK", "REJECTED"):
            changed = record.circuit.answered()
        else:
            changed = False
            record.circuit.left(reservation.request_id)
        record.candidate_snapshot = None
        return self._circuit_changed(record) if changed else []

    def _circuit_changed(self, record: InstanceRecord) -> list[ev.Effect]:
        self._instances.refresh(record)
        return [ev.FleetChanged()]
