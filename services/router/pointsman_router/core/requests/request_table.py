"""All requests that are held or placed, and the last ones that ended. Only this module changes a request. Pure.

Each transition changes the request's RequestState and updates every index: the reservations and their sums, the queue of held
requests, the watched prompts, the prefill observer, and the requests on trial or without a byte in an instance's life. No other
code updates them for a request, so none of them can keep a request that has moved or ended. (LifeEvidence reports to an
instance's life what answers show about the instance.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import SessionAdmission
from pointsman_router.core.instances.engine_life import Wait
from pointsman_router.core.instances.instance_registry import InstanceRecord, InstanceRegistry
from pointsman_router.core.learning.fetches import Fetches
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefill_progress import OpenPrompt
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.attained_service import AttainedService
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import NO_BACKLOG, Decision, FleetView, Phase, PlacementRequest
from pointsman_router.core.prefill_curve import PrefillSums
from pointsman_router.core.requests.hold_queue import HeldRequest
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.core.requests.request_state import (
    ANNOUNCE,
    COMPUTE,
    END,
    FIRST_TOKEN,
    HOLD,
    PLACE,
    RequestState,
    Stage,
)
from pointsman_router.core.requests.waiting_room import WaitingRoom

_NOTHING_SEEN = FleetView(())
# Maximum number of ended requests that are kept, to recognise them if they are sent again.
MAX_ENDED = 20_000
# Maximum number of requests that leave the waiting room in one turn, some 10 us each.
LEAVE_AT_ONCE = 128
# Times that a prefill may take as long as the default curve predicts, while none was learned.
UNLEARNED_FACTOR = 20.0
# Number of ended requests that one step of forget_ended examines: some microseconds, most of them for freeing memory.
FORGET_AT_ONCE = 4


class RequestTable:
    """Requests by id. `room` has those that wait; code that answers one must report the outcome here. `admission` counts the
    sessions of placed requests, `attained` what their programs are served."""

    def __init__(
        self,
        room: WaitingRoom,
        admission: SessionAdmission,
        reservations: Reservations,
        instances: InstanceRegistry,
        prefix_knowledge: PrefixKnowledge,
        prefill_observer: PrefillObserver,
        fetches: Fetches,
    ) -> None:
        self.room = room
        self._admission = admission
        self._reservations = reservations
        self._instances = instances
        self._prefix_knowledge = prefix_knowledge
        self._prefill_observer = prefill_observer
        self._fetches = fetches
        self.attained = AttainedService(on=room.held.settings.fair == "program")
        self._open: dict[str, RequestState] = {}
        # Ended requests whose ids cannot be reused, oldest end first.
        self._ended: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._open.values())

    def get(self, request_id: str) -> RequestState | None:
        """Return the state of an open or recently ended request; None if unknown."""
        return self._open.get(request_id) or self._ended.get(request_id)

    def opened(self, request_id: str) -> RequestState | None:
        """Return the state of an open request, or None."""
        return self._open.get(request_id)

    def placed(self, request_id: str) -> RequestState | None:
        """Return the state of a request that has a reservation, or None."""
        state = self._open.get(request_id)
        return state if state is not None and state.reservation is not None else None

    def reservations_of(self, gateway_id: str) -> list[Reservation]:
        """Return the reservations of a gateway's requests. O(open requests)."""
        taken = [state.reservation for state in self._open.values() if state.reservation is not None]
        return [state for state in taken if state.gateway_id == gateway_id]

    def opened_at(self, request_id: str) -> float:
        """Return when the current step of an open request was reserved; inf without a step."""
        return self._open[request_id].opened_at

    def decisions(self) -> Iterator[Decision]:
        """Yield the decisions of all requests, ended ones first."""
        for states in (self._ended, self._open):
            yield from (state.decision for state in states.values() if state.decision is not None)

    # ---- waiting ----

    def hold(self, held: HeldRequest, now: float) -> None:
        """Hold or park a request, for which there is room. Mutates."""
        state = self._known(held.request.request_id)
        state.require(HOLD)
        self.room.enter(held)
        state.happened(HOLD, now, held.reason)
        state.held = held
        self._open[state.request_id] = state

    def change_hold(self, held: HeldRequest) -> None:
        """Replace the waiting request with the same id, pool and tenant. Mutates."""
        self.room.change(held)
        self._open[held.request.request_id].held = held

    def served(self, request_id: str, new_tokens: int) -> None:
        """Remove a request that was placed from the queue, and charge its tenant with a prefill of `new_tokens`. Mutates."""
        self.room.served(request_id, new_tokens)

    def let_in(self, request_id: str) -> None:
        """Remove a parked request whose session is admitted, and charge its tenant with the session's size. It is to be placed
        next. Mutates."""
        held = self.room.parked.get(request_id)
        assert held is not None
        self.room.served(request_id, held.new_tokens)
        state = self._open.pop(request_id)
        state.held = None

    def leave_queue(self, request_id: str) -> None:
        """Remove a request from its queue, if it waits: it is answered, or nobody waits for an answer any more. Mutates."""
        self.room.remove(request_id)
        if (state := self._open.get(request_id)) is not None:
            if state.held is not None:
                self.not_served(state.held)
            state.held = None
            if state.reservation is None:
                del self._open[request_id]

    def not_served(self, held: HeldRequest) -> None:
        """Record that a request which waited, or could not, was not placed. Mutates."""
        self.attained.take_back(held.pool, held.request, held.program_work, held.asked_at)

    def ask_again(self, held: HeldRequest, gateway_id: str) -> None:
        """Apply that a gateway asks again for a waiting request: the last one to ask gets the answer. Mutates."""
        self.room.stays(held.request.request_id)
        self.change_hold(replace(held, gateway_id=gateway_id))

    def leave_next(self, most: int = LEAVE_AT_ONCE) -> list[ev.Effect]:
        """Let the next requests leave that are to leave; return the answers to those whose gateways wait for one. Mutates."""
        return [effect for held, why in self.room.next_to_leave(most) for effect in self.leave(held, why)]

    def leave(self, held: HeldRequest, why: str) -> list[ev.Effect]:
        """Let a waiting request leave; return the answer if its gateway waits for one, which `why` then is for. Mutates."""
        self.leave_queue(held.request.request_id)
        return [not_serving(held.request.request_id, held.pool, why, held.gateway_id)] if why else []

    # ---- sessions ----

    def count(self, decision: Decision, new_tokens: int, keys: Sequence[int], now: float) -> None:
        """Have the session of a placed request counted, once for each request, whose first step computes `new_tokens`.
        Mutates."""
        state = self._open[decision.request.request_id]
        if not state.counted:
            state.counted = self._admission.opened(decision, new_tokens, keys, now)

    def count_announced(self, request: PlacementRequest, pool: str, now: float) -> None:
        """Have the session of an announced request counted, once for each request. Mutates."""
        state = self._open[request.request_id]
        if not state.counted:
            state.counted = self._admission.announced(request, pool, now)
            assert state.reservation is not None
            self.attained.add(pool, request, state.reservation.new_tokens, now)

    # ---- placed ----

    def place(
        self, reservation: Reservation, keys: Sequence[int], tokens: int, now: float, output_s: float | None = None
    ) -> None:
        """Open the reservation of a step. `keys` are the prompt's; `tokens` of the prompt are on the instance when the step is
        done; its first byte comes `output_s` after its first token (None: unknown). The request is no longer held, but its entry
        in the queue stays until `leave_queue` or `served`. Mutates."""
        state = self._known(reservation.request_id)
        state.require(PLACE)
        state.happened(PLACE, now, reservation.instance_id)
        state.held = None
        if state.prompt is not None:
            self._prefix_knowledge.closed(state.prompt)
        self._put(state, reservation, now)
        record = self._instances.get(reservation.instance_id)
        whole = bool(output_s)
        self._prefill_observer.opened(reservation, record.info if record else None, now, whole=whole)
        if record is not None and output_s is not None and reservation.new_tokens:
            self._wait(record, reservation, output_s, now)
        state.prompt = self._prefix_knowledge.opened(reservation, keys, tokens, now)

    def fetch(
        self, reservation: Reservation, source: str, keys: Sequence[int], tokens: int, predicted_s: float, now: float
    ) -> None:
        """Record that `source` sends `tokens` of the prompt's KV to the instance of the step that was just placed. `predicted_s`:
        in what time, by the decision; 0: not predicted. Mutates."""
        record = self._instances.get(reservation.instance_id)
        price = self._fetches.price(reservation.pool, record.info.kv_token_bytes if record is not None else 0)
        self._fetches.opened(
            reservation.request_id,
            reservation.pool,
            source,
            reservation.instance_id,
            keys,
            reservation.cached_tokens,
            tokens,
            price,
            now,
            behind=any(self._reservations.first_prefill(end) for end in (source, reservation.instance_id)),
            predicted_s=predicted_s,
        )

    def fetch_failed(self, request_id: str, now: float, *, at_target: bool) -> None:
        """Record that a request's step failed. If it was a fetch, nothing is fetched from its source and to its target for a
        while, unless the step's own instance caused the failure (`at_target`), which its life counts. Mutates."""
        if at_target:
            self._fetches.gone(request_id)
        else:
            self._fetches.failed(request_id, now)

    def announce(self, reservation: Reservation, now: float, request: PlacementRequest | None = None) -> None:
        """Open a request as its gateway, or the shared store (`request`: None), reports it, whatever was known of it before.
        Mutates."""
        state = self._known(reservation.request_id)
        state.require(ANNOUNCE)
        self._ended.pop(state.request_id, None)
        self.leave_queue(state.request_id)
        state.happened(ANNOUNCE, now, reservation.instance_id)
        if state.decision is not None and state.decision.pool != reservation.pool:
            state.decision = None  # of another request that had this id
        state.announced = request if request is not None and request.movable and state.decision is None else None
        self._put(state, reservation, now)
        if self._instances.get(reservation.instance_id) is not None:
            self._prefill_observer.announced(reservation, now)
        if state.prompt is None or state.prompt.instance_id != reservation.instance_id:
            if state.prompt is not None:
                self._prefix_knowledge.closed(state.prompt)
            state.prompt = OpenPrompt(reservation.request_id, reservation.instance_id, now)
        elif reservation.phase is Phase.DECODE:
            self._prefix_knowledge.first_token(state.prompt, now)

    def progress(self, request_id: str, tokens: int) -> None:
        """Record that `tokens` of an open request's new tokens are computed, by its instance's events. Mutates."""
        state = self._open[request_id]
        state.reservation = self._reservations.prefilled(request_id, tokens)

    def first_token(self, state: RequestState, now: float, *, with_answer: bool) -> Reservation:
        """Record a request's first token; return the changed reservation. `with_answer`: as in PrefillObserver.done. Mutates."""
        state.require(FIRST_TOKEN)
        reservation, prompt = self._prefilled(state, now, with_answer=with_answer)
        self._prefix_knowledge.first_token(prompt, now)
        state.happened(FIRST_TOKEN, now)
        moved = state.reservation = self._reservations.first_token(reservation.request_id, now)
        assert moved is not None
        return moved

    def computed(self, state: RequestState, now: float) -> None:
        """Record that a PREFILL step is done. The request keeps its reservation, with nothing left to compute, until the next
        step is placed. Mutates."""
        state.require(COMPUTE)
        reservation, prompt = self._prefilled(state, now)
        self._prefix_knowledge.step_done(prompt, now)
        self._fetches.done(state.request_id, reservation.instance_id, now)
        state.happened(COMPUTE, now)
        self.progress(state.request_id, reservation.new_tokens)

    def remember(self, request_id: str, decision: Decision) -> None:
        """Keep a placed request's decision, and of its view only the candidates of the plan's steps. The whole decision is in the
        log; it takes 250 kB with 1,000 instances. Mutates."""
        where = dict.fromkeys([step.instance_id for step in decision.result.steps])
        seen = [
            replace(found, prefill_backlog=NO_BACKLOG)
            for instance_id in where
            if (found := decision.view.find(instance_id)) is not None
        ]
        self._open[request_id].decision = replace(
            decision,
            view=replace(decision.view, candidates=tuple(seen)),
            result=replace(decision.result, scores={}, figures={}),
        )

    # ---- leases ----

    def keep(self, request_id: str) -> None:
        """Remove the lease of a request, if it is placed: its reservation is open until it ends. Mutates."""
        if (state := self.placed(request_id)) is not None:
            self._lease(state, None)

    def lease(self, gateway_id: str, until: float) -> None:
        """Give all placed requests of a gateway a lease: they end at `until` (s) unless the gateway claims them. Mutates."""
        for state in self._open.values():
            if state.reservation is not None and state.reservation.gateway_id == gateway_id:
                self._lease(state, until)

    def _lease(self, state: RequestState, until: float | None) -> None:
        state.reservation = self._reservations.lease(state.request_id, until)

    # ---- ended ----

    def end(self, state: RequestState, finished: ev.Finished, now: float) -> list[ev.Effect]:
        """End a placed request; return the effects of the prediction audit. Mutates.

        The id cannot be reused, unless the request was CANCELLED. A cancelled placement may have been returned, or lost on the
        way to the gateway; if the gateway asks again, it is decided anew.
        """
        state.require(END)
        assert state.prompt is not None
        judged = self._prefix_knowledge.finished(state.prompt, finished, state.decision, now)
        state.happened(END, now, finished.outcome)
        decision = state.decision
        self._count_end(state, now, finished)
        self.forget(state, now)
        if finished.outcome != "CANCELLED" and decision is not None:
            # The plan does not continue, so its view is not needed.
            state.decision = replace(decision, view=_NOTHING_SEEN)
            self._ended[state.request_id] = state
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        return judged

    def forget(self, state: RequestState, now: float) -> None:
        """Remove a request from all indexes, as if it had never been open. Mutates."""
        if state.held is not None:
            self.leave_queue(state.request_id)
        if state.reservation is not None:
            self._count_end(state, now)
            self._leave(state.reservation, now)
            self._reservations.release(state.request_id)
        if state.prompt is not None:
            self._prefix_knowledge.closed(state.prompt)
        state.reservation = state.prompt = state.decision = None
        self._open.pop(state.request_id, None)
        self._ended.pop(state.request_id, None)

    def forget_ended(self, pool: str) -> Iterator[None]:
        """Remove a pool's ended requests, FORGET_AT_ONCE examined per step of the iterator. Mutates."""
        for number, request_id in enumerate(list(self._ended)):
            if (state := self._ended.get(request_id)) is not None and state.pool == pool:
                del self._ended[request_id]
            if number % FORGET_AT_ONCE == FORGET_AT_ONCE - 1:
                yield

    def check_invariants(self) -> None:
        """Raise AssertionError, with the request's story, if an index contradicts the requests."""
        for name, state in self._open.items():
            try:
                self._check(name, state)
            except AssertionError as error:
                raise AssertionError(f"{name}: {state.tell()}") from error
        assert len(self._reservations) == sum(state.reservation is not None for state in self)
        assert len(self.room) == sum(state.held is not None for state in self)
        assert all(state.stage is Stage.ENDED for state in self._ended.values())
        assert len(self._ended) <= MAX_ENDED
        self._prefix_knowledge.check_invariants({name: state.prompt for name, state in self._open.items()})
        self._fetches.check_invariants(self._open)
        for record in self._instances.records():
            life = record.life
            waiting = [*life.streams, *life.wholes]
            for request_id in [life.trial, *waiting] if life.trial else waiting:
                there = self._reservations.get(request_id)
                assert there is not None, life
                assert there.instance_id == record.info.instance_id, life
                assert request_id not in waiting or there.phase is Phase.PREFILL, life

    def _check(self, name: str, state: RequestState) -> None:
        assert state.request_id == name
        assert name not in self._ended
        assert state.stage not in (Stage.NEW, Stage.ENDED)
        assert self._reservations.get(name) is state.reservation
        assert self.room.get(name) is state.held
        assert (state.prompt is None) is (state.reservation is None)
        if state.reservation is not None and state.prompt is not None:
            assert state.prompt.instance_id == state.reservation.instance_id
            assert not (state.held and state.reservation.pending_tokens), "a hold reserves nothing"

    def _count_end(self, state: RequestState, now: float, finished: ev.Finished | None = None) -> None:
        if not state.counted or state.reservation is None:
            return
        # A session goes on with one of several answers.
        output = (finished.output_tokens or 0) // state.reservation.sequences if finished is not None else 0
        reason = finished.finish_reason if finished is not None else ""
        tokens, pool = state.reservation.input_tokens, state.reservation.pool
        self._admission.closed(pool, state.counted, tokens, output, reason, now)
        state.counted = ""
        asked = state.decision.request if state.decision is not None else state.announced
        if asked is not None and finished is not None:
            self.attained.add(pool, asked, finished.output_tokens or 0, now)

    def _known(self, request_id: str) -> RequestState:
        return self.get(request_id) or RequestState(request_id)

    def _put(self, state: RequestState, reservation: Reservation, now: float) -> None:
        """Open the request on an instance, and remove it from the instance where it was before, if any."""
        if state.reservation is not None:
            self._leave(state.reservation, now)
        self._open[state.request_id] = state
        state.reservation = reservation
        self._reservations.put(reservation)
        record = self._instances.get(reservation.instance_id)
        # If the engine was restarted with another model, a request for the previous model says nothing about the instance.
        if record is not None and record.info.model == reservation.pool:
            record.life.placed(reservation.request_id, now)

    def _wait(self, record: InstanceRecord, reservation: Reservation, output_s: float, now: float) -> None:
        """Predict when a step's first byte comes, and let the instance's life wait for it."""
        counters = self._reservations.counters(reservation.instance_id)
        curve, learned = self._prefill_observer.prediction(reservation.pool, record.info.hardware)
        factor, load = 1.0 if learned else UNLEARNED_FACTOR, reservation.kv_load
        new = reservation.new_tokens - load.price_tokens
        alone_s = factor * curve.cost_s(new, reservation.cached_tokens, reservation.sequence_length)
        if counters.pending_prefills > 1:
            backlog = PrefillSums(counters.pending_prefills, counters.pending_prefill_tokens, counters.pending_pairs)
            behind_s = max(factor * curve.sums_s(backlog), alone_s)
        else:
            behind_s = alone_s
        wait = Wait(now, alone_s + load.seconds + output_s, behind_s + load.seconds + output_s)
        record.life.waits(reservation.request_id, wait, streamed=not output_s)

    def _leave(self, reservation: Reservation, now: float) -> None:
        self._prefill_observer.gone(reservation, now)
        self._fetches.gone(reservation.request_id)
        # Looked up by id, since the instance may be in another pool now.
        if (record := self._instances.get(reservation.instance_id)) is not None:
            record.life.gone(reservation.request_id)

    def _prefilled(
        self, state: RequestState, now: float, *, with_answer: bool = False
    ) -> tuple[Reservation, OpenPrompt]:
        """Report the end of a prefill to the observer; return the request's reservation, unchanged, and its prompt."""
        reservation, prompt = state.reservation, state.prompt
        assert reservation is not None
        assert prompt is not None
        record = self._instances.get(reservation.instance_id)
        # An answer to several prompts begins when the first of them is computed.
        doubtful = prompt.evicted or reservation.sequences > 1
        info = record.info if record else None
        self._prefill_observer.done(reservation, info, now, doubtful=doubtful, with_answer=with_answer)
        return reservation, prompt
