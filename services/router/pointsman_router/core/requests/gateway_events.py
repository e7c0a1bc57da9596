"""Handles the events of gateways: which of them may change a request, and with which effects. Pure. Only RouterState calls it.

A gateway may report on its own requests, on those of the unary form, and on those of a gateway without a stream. No request gets
two different placements: a request that comes again gets its first answer again, and the id of an ended request cannot be reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.ownership import OwnedPools
from pointsman_router.core.placement_types import Decision, PlacementRequest, StepKind
from pointsman_router.core.requests.parked_requests import ParkedRequests
from pointsman_router.core.requests.place_or_hold import HeldRequests
from pointsman_router.core.requests.placement_plans import MAX_STEPS, PlacementPlans, placed_effect
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.core.requests.request_state import RequestState, Stage
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.requests.unfinished_work import WorkSteps
from pointsman_router.core.startup_gate import StartupGate
from pointsman_router.core.turn import Turn


@dataclass(frozen=True, slots=True)
class GatewayEvents:
    """Applies the events of gateways to the router's state."""

    requests: RequestTable  # all that are held or placed, and the last ones that ended
    held_requests: HeldRequests  # places or holds the rest of a prompt, and what `parked_requests` passes on
    parked_requests: ParkedRequests  # first stage of each new request
    plans: PlacementPlans  # ends of steps, and requests that an earlier owner placed
    instances: InstanceRegistry  # to find the pool of a model, and which instances answer
    prefix_knowledge: PrefixKnowledge  # expired before each placement, so that the view is current
    views: FleetViewBuilder  # to see whether what a step computed is still cached
    owned: OwnedPools  # requests of other pools are refused, and not kept if announced
    startup_gate: StartupGate  # told of the instances that gateways remember; until it opens, requests are refused
    turn: Turn  # told that the fleet has changed, when the start-up gate waits for further instances
    gateway_lease_s: float  # how long the requests of a gateway without a stream stay open, s

    # ---- streams ----

    def hello(self, hello: ev.GatewayHello, now: float) -> WorkSteps:
        """Apply a gateway's hello: its stream began, or it learned that this replica owns other pools. Each step of the iterator
        ends or takes over one request. Mutates."""
        announced = {stream.request.request_id: stream for stream in hello.open_streams}
        room = self.requests.room
        between = {name for name in announced if (held := room.held.get(name)) is not None and held.previous_id}
        room.drop_gateway(hello.gateway_id, keep=hello.waiting | between)
        if self.startup_gate.expect(
            {*hello.known, *(stream.instance_id for stream in hello.open_streams)}, self.instances, now
        ):
            self.turn.fleet_changed = True
        for reservation in self.requests.reservations_of(hello.gateway_id):
            if reservation.request_id in announced:
                continue
            if reservation.request_id in hello.waiting:
                self.requests.keep(reservation.request_id)
                yield []
            else:
                yield self.plans.cancelled(reservation.request_id, "no gateway claims it", now)
        for request_id, stream in announced.items():
            if self.is_anothers(request_id, hello.gateway_id):
                yield [ev.ReportIgnored(request_id, hello.gateway_id)]
                continue
            if request_id in between:
                # The request is held between two steps, and its gateway is connected again.
                self.requests.keep(request_id)
                yield []
                continue
            known = _reservation(self.requests.placed(request_id))
            done = known.prefilled_tokens if known and known.instance_id == stream.instance_id else 0
            yield self._announced(hello.gateway_id, stream, known.step_index if known else 0, done, now)

    def lost(self, gateway_id: str, now: float) -> None:
        """Apply the end of a gateway's stream: lease its reservations and drop its held requests. Mutates."""
        self.requests.lease(gateway_id, now + self.gateway_lease_s)
        self.requests.room.drop_gateway(gateway_id)

    def is_anothers(self, request_id: str, gateway_id: str) -> bool:
        """Return whether a request belongs to another gateway whose stream is open. Gateway ids are unique, and requests do not
        move between gateways. A reservation with a lease belongs to a gateway whose stream has ended, or that has sent no hello
        since this router took the pool."""
        if (state := self.requests.get(request_id)) is None:
            return False
        if state.held is not None and state.held.gateway_id not in ("", gateway_id):
            return True
        reservation = state.reservation
        if reservation is None or reservation.lease_until is not None:
            return False
        return reservation.gateway_id not in ("", gateway_id)

    def stream_opened(self, event: ev.StreamOpened, now: float) -> list[ev.Effect]:
        """Apply a gateway's report that it continued a request without the router. Mutates."""
        request_id = event.stream.request.request_id
        if self.is_anothers(request_id, event.gateway_id):
            return [ev.ReportIgnored(request_id, event.gateway_id)]
        index, noted = self.plans.served_alone(request_id, event.stream.instance_id)
        return [*noted, *self._announced(event.gateway_id, event.stream, index, 0, now)]

    def _announced(
        self, gateway_id: str, stream: ev.OpenStream, step_index: int, prefilled_tokens: int, now: float
    ) -> list[ev.Effect]:
        """Record that a gateway runs a request on `stream.instance_id`, whatever was known of the request before."""
        request_id = stream.request.request_id
        known = _reservation(self.requests.placed(request_id))
        # Before its pool's agents are back a request has no pool. It is announced again once its gateway learns of the pool.
        pool = (known.pool if known else "") or self.instances.pool_of(stream.request.model)
        # The request runs, even if its model has no instance any more. A placement from the queue would be a second answer.
        self.requests.leave_queue(request_id)
        if not self.owned.owns(pool):
            return []
        new_tokens = max(stream.request.input_tokens - stream.cached_tokens, 0)
        reservation = Reservation(
            request_id=request_id,
            gateway_id=gateway_id,
            instance_id=stream.instance_id,
            decision_id=known.decision_id if known else "",
            input_tokens=stream.request.input_tokens,
            new_tokens=new_tokens,
            step_index=step_index,
            phase=stream.phase,
            prefilled_tokens=min(prefilled_tokens, new_tokens),
            pool=pool,
            cached_tokens=stream.request.input_tokens - new_tokens,
            sequences=stream.request.sequences,
            sequence_tokens=stream.request.sequence_tokens,
        )
        self.requests.announce(reservation, now, stream.request)
        if pool:
            self.requests.count_announced(stream.request, pool, now)
        return [ev.Reserved(reservation)]

    # ---- placements ----

    def place(self, event: ev.PlaceRequested, now: float) -> list[ev.Effect]:
        """Answer a gateway that asks for a request's first step, or hold the request (no answer yet). Mutates."""
        request = event.request
        if self.is_anothers(request.request_id, event.gateway_id):
            why = f"another gateway has a request {request.request_id!r} open"
            return [ev.Refused(request.request_id, "ALREADY_EXISTS", why, gateway_id=event.gateway_id)]
        if (refused := self._not_serving(request, now)) is not None:
            # If the request was held, this refusal is its answer; a later placement would be a second one.
            self.requests.leave_queue(request.request_id)
            return [replace(refused, gateway_id=event.gateway_id)]
        state = self.requests.get(request.request_id)
        if (refused := self._no_second_answer(request, state)) is not None:
            return [replace(refused, gateway_id=event.gateway_id)]
        ended: list[ev.Effect] = []
        if state is not None and (reservation := state.reservation) is not None:
            again = self._placed_again(state, reservation, request, event.gateway_id)
            if not self._would_answer_by_a_producer(again):
                return [again]
            # The request's plan was lost with an earlier owner of the pool; another instance was to answer. Nobody waits for the
            # plan's next step any more, so the request is placed anew.
            ended = self.plans.cancelled(request.request_id, "its instance only produces KV", now)
        if not event.gateway_id:
            # A caller of the unary form reports no steps, so it gets a plan of one SERVE.
            request = replace(request, single_instance=True, sliceable_tokens=0)
        self.prefix_knowledge.expire(now)
        return [*ended, *self.parked_requests.place(request, event.gateway_id, now)]

    def _not_serving(self, request: PlacementRequest, now: float) -> ev.Refused | None:
        if (refused := self.not_owned(request)) is not None:
            return refused
        pool = self.instances.pool_of(request.model)
        if self.startup_gate.starting(pool, self.instances, now):
            why = "this router has just started and does not know the fleet yet"
            return not_serving(request.request_id, pool, why)
        return None

    def not_owned(self, request: PlacementRequest) -> ev.Refused | None:
        """Return the refusal of a request whose pool another router owns; None if this router owns the pool, or it is unknown."""
        pool = self.instances.pool_of(request.model)
        if pool and not self.owned.owns(pool):
            return not_serving(request.request_id, pool, f"this router does not own {pool!r}")
        return None

    def _placed_again(
        self, state: RequestState, reservation: Reservation, request: PlacementRequest, gateway_id: str
    ) -> ev.Placed:
        """Return the placement that a request got before."""
        if (decision := state.plan) is not None:
            return placed_effect(decision, reservation.step_index, gateway_id)
        # An earlier owner placed the request, and its answer may not have arrived. Return the same instance, never a second one.
        return self.plans.recovered(reservation, replace(request, keys=()), gateway_id)

    def _would_answer_by_a_producer(self, placed: ev.Placed) -> bool:
        """Return whether the step is a SERVE on an instance that only produces KV while other instances of its pool answer."""
        step, decision = placed.step, placed.decision
        return step.kind is StepKind.SERVE and self.instances.leaves_answers_to_others(
            step.instance_id, decision.pool, decision.request.model
        )

    def _no_second_answer(self, request: PlacementRequest, state: RequestState | None) -> ev.Refused | None:
        """Return the refusal of a request that must not be placed: its id is that of another request or of an ended one, or its
        deadline has passed. None for a new request, and for an open or held one, whose answer may be sent again."""
        request_id = request.request_id
        if state is not None:
            if self._is_another(request, state):
                why = f"{request_id!r} is the id of a request for another model"
                return ev.Refused(request_id, "INVALID_ARGUMENT", why, asked_model=request.model)
            if state.stage is not Stage.ENDED:
                return None
            # Its placement reserves nothing any more. A new placement would be a second answer to one request.
            why = f"the request {request_id!r} has ended; a new request needs a new id"
            return ev.Refused(request_id, "ABORTED", why, pool=state.pool)
        if request.deadline_s is not None and request.deadline_s <= 0:
            why, pool = "its gateway's deadline for the first step has passed", self.instances.pool_of(request.model)
            return ev.Refused(request_id, "DEADLINE_EXCEEDED", why, pool=pool)
        return None

    def _is_another(self, request: PlacementRequest, state: RequestState) -> bool:
        """Return whether the id of `request` is that of an earlier request for another model. Of a request that an earlier owner
        placed only the pool is known. A model name may have moved to another pool since."""
        asked_before = state.held or state.decision
        first = asked_before.request if asked_before is not None else None
        if first is not None and first.model == request.model:
            return False
        where = state.held or state.decision or state.reservation
        if where is None:
            return False
        asked = self.instances.pool_of(request.model)
        if asked != where.pool:
            return bool(asked) or first is not None
        record = self.instances.get(state.reservation.instance_id) if state.reservation is not None else None
        # The instance may serve another model now.
        if record is None or record.info.model != asked:
            return False
        return not self.instances.answers(record.info.instance_id, request.model)

    # ---- steps ----

    def step_done(self, event: ev.StepDone, now: float) -> list[ev.Effect]:
        """Apply the end of a step, and start the next step of the plan, deciding on it first if the plan ends here. Mutates."""
        state = self.requests.placed(event.request_id)
        reservation = _reservation(state)
        if state is None or reservation is None or not self.owned.owns(reservation.pool):
            return []
        if state.stage is not Stage.PREFILLING:
            return []  # The first token has come already, or the request is held until its next step.
        plan = state.plan
        if plan is None:
            return self._recovered_step_done(reservation, event, now)
        effects = self.plans.step_done(state, event, now)
        if not event.ok or event.step_index != reservation.step_index or not _is_unfinished(plan, event.step_index):
            return effects
        return [*effects, *self._place_rest(state, reservation, plan, event, now)]

    def _recovered_step_done(self, reservation: Reservation, event: ev.StepDone, now: float) -> list[ev.Effect]:
        """Apply the end of a step of an earlier owner's plan. The rest of the plan is lost; what the step computed is cached."""
        pool = reservation.pool
        if event.ok or self.instances.leaves_answers_to_others(reservation.instance_id, pool, pool):
            why = "an earlier owner of the pool had planned this request"
            return [not_serving(event.request_id, pool, why, reservation.gateway_id)]
        if event.step_index >= MAX_STEPS:
            return []
        request = PlacementRequest(
            event.request_id,
            pool,
            reservation.input_tokens,
            sequences=reservation.sequences,
            sequence_tokens=reservation.sequence_tokens,
        )
        moved = replace(reservation, step_index=event.step_index + 1)
        self.requests.announce(moved, now)
        return [ev.Reserved(moved), self.plans.recovered(moved, request, moved.gateway_id)]

    def _place_rest(
        self, state: RequestState, reservation: Reservation, plan: Decision, event: ev.StepDone, now: float
    ) -> list[ev.Effect]:
        """Decide on the rest of a prompt of which a part is computed, now or when something frees."""
        request = plan.request
        rest = replace(
            request,
            keys=state.keys,
            age_s=request.age_s + max(now - plan.view.now, 0.0),
            deadline_s=event.deadline_s,
        )
        if self.instances.pool_of(rest.model) != plan.pool:
            # The model name belongs to another pool now, which another router may own.
            return self.held_requests.serve_there(state.request_id, now)
        self.prefix_knowledge.expire(now)
        there = reservation.instance_id
        before, seen = plan.view.find(there), self.views.view(rest, plan.pool, 0, now, only=there).find(there)
        if before is None or seen is None or seen.cached_tokens <= before.cached_tokens:
            # What was computed is not known to be cached there. Without this, the same slice would be placed again and again.
            rest = replace(rest, sliceable_tokens=0)
        return self.held_requests.place(rest, reservation.gateway_id, now, plan.decision_id)


def _reservation(state: RequestState | None) -> Reservation | None:
    return state.reservation if state is not None else None


def _is_unfinished(plan: Decision, step_index: int) -> bool:
    """Return whether a further part of the request must be placed after this step: the plan ends with it, and it is a PREFILL."""
    steps = plan.result.steps
    return steps[-1].kind is StepKind.PREFILL and step_index + 1 == len(steps)
