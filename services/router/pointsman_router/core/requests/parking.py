"""Parks requests of new sessions for which the caches have no room, lets them in, or refuses them after a bound. Pure.

A parked request reserves nothing and is not held for an instance: it comes to HeldRequests only when its session is admitted. It
waits for at most the bound of its class, or until its client's deadline. Then it is refused with its place in the queue. If the
client asks again within KEEP_AGE_S, the session keeps its age, and so its turn. Parked requests exist only here: when the pool's
owner or the request's gateway is lost, the gateway or the client asks again.

The order is that of fair_order.py, with a session's size as the cost: by class, then the tenant whose sessions have the least
weighted size for its weight, then the least SIZE_WEIGHT x size / prefill rate - age.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import SessionAdmission
from pointsman_router.core.admission_rule import (
    AdmissionOutcome,
    AdmissionRecord,
    AdmissionView,
    decide_admission,
)
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.requests.held_requests import HeldRequests
from pointsman_router.core.requests.hold_queue import HeldRequest, QueueSettings
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.requests.retry_after import RetryAfter

# Limits of a pool's parked requests: their number, one tenant's share of it, and the block keys of all their prompts (8 bytes
# each).
PARKED = QueueSettings(size=16_384, tenant_share=0.25, keys=16_000_000)
PARKED_REASON = "session_parked"
# How many times as long as its prefill a session takes KV from others, in the order of parked requests. With 1, the order is
# nearly that of arrival; with 20, a burst of coding agents had a third fewer sessions refused (docs/findings.md).
SIZE_WEIGHT = 20.0
# How long a session that was not let in keeps its age, s, and the maximum number of such sessions.
KEEP_AGE_S, MAX_AGES = 600.0, 50_000
# LET_IN_AT_ONCE: maximum number of sessions that one turn lets in; a placement takes up to 150 us. LET_IN_PAUSE_S: pause before
# the others, s. REFUSED_AT_ONCE: maximum number of requests that one turn refuses.
LET_IN_AT_ONCE, LET_IN_PAUSE_S, REFUSED_AT_ONCE = 32, 0.02, 500


class Parking:
    """The parked requests of a RouterState. `admission` describes admissions, `held_requests` places what is let in."""

    def __init__(
        self,
        requests: RequestTable,
        admission: SessionAdmission,
        held_requests: HeldRequests,
        instances: InstanceRegistry,
        retry_after_s: float,
    ) -> None:
        self.queue = requests.parked
        self._requests = requests
        self._admission = admission
        self._held_requests = held_requests
        self._instances = instances
        self._retry_after = RetryAfter(retry_after_s)
        # (pool, session) -> when it first came, and when this is forgotten; the oldest entry first.
        self._ages: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self._due = inf

    @property
    def retry_at(self) -> float:
        """When to call `retry_due`, in s; inf: not needed."""
        return min(self._due, self.queue.next_end)

    def place(self, request: PlacementRequest, gateway_id: str, now: float) -> list[ev.Effect]:
        """Admit a new request, and place or hold it; or park it, or refuse it. Mutates."""
        if (waiting := self.queue.get(request.request_id)) is not None:
            # The gateway asks again. The last one to ask gets the answer.
            self._requests.change_hold(replace(waiting, gateway_id=gateway_id))
            return [self._parked(waiting, now)]
        pool = self._instances.pool_of(request.model)
        held = self._held_requests.queue.get(request.request_id) is not None
        if not pool or held or not self._admission.applies(pool, now):
            return self._held_requests.place(request, gateway_id, now)
        if request.parked_s > 0:
            self._admission.was_parked(pool, now)
        bound_s = self._bound_s(request)
        view = self._admission.view(request, pool, self.queue.count(pool), request.parked_s, bound_s, now)
        if view is None:
            return self._held_requests.place(request, gateway_id, now)
        verdict = decide_admission(view)
        record = AdmissionRecord(view, verdict)
        if verdict.outcome is AdmissionOutcome.ADMIT:
            return self._held_requests.place(replace(request, admitted=record), gateway_id, now)
        if verdict.outcome is AdmissionOutcome.REFUSE:
            return [self._refusal(request, pool, gateway_id, 0, record, now)]
        return self._park(request, gateway_id, pool, view, now)

    def explain(self, request: PlacementRequest, now: float) -> AdmissionRecord | None:
        """Return the admission of a new request as it would be decided now; None if its pool admits everything. Changes
        nothing."""
        pool = self._instances.pool_of(request.model)
        if not pool or not self._admission.applies(pool, now):
            return None
        before, bound_s = self.queue.count(pool), self._bound_s(request)
        view = self._admission.view(request, pool, before, request.parked_s, bound_s, now, dry=True)
        return None if view is None else AdmissionRecord(view, decide_admission(view))

    def let_in(self, pools: Iterable[str], now: float) -> list[ev.Effect]:
        """Place the parked requests of these pools whose sessions fit, in their order. Mutates."""
        effects: list[ev.Effect] = []
        left = LET_IN_AT_ONCE
        for pool in pools:
            while (head := next(self.queue.order(pool), None)) is not None:
                if not left:
                    self._due = now + LET_IN_PAUSE_S
                    return effects
                request = _asked(head, now)
                view = self._admission.view(request, pool, 0, request.parked_s, self._bound_s(request), now)
                if view is not None:
                    verdict = decide_admission(view)
                    if verdict.outcome is not AdmissionOutcome.ADMIT:
                        break
                    request = replace(request, admitted=AdmissionRecord(view, verdict))
                left -= 1
                self._requests.let_in(request.request_id)
                self._ages.pop((pool, request.session), None)
                self._retry_after.waited(pool, request.priority, request.parked_s, now)
                effects += self._held_requests.place(request, head.gateway_id, now)
        return effects

    def retry_due(self, now: float) -> list[ev.Effect]:
        """Let in what fits, and refuse the requests whose time has passed. Mutates."""
        if self._due <= now:
            self._due = inf
            return [*self.let_in(self.queue.pools(), now), *self.refuse_expired(now)]
        return self.refuse_expired(now)

    def refuse_expired(self, now: float) -> list[ev.Effect]:
        """Refuse the requests whose time has passed, as many as one turn may. Mutates."""
        expired = self.queue.expired(now, REFUSED_AT_ONCE)
        places: dict[str, int] = {}
        for pool in {held.pool for held in expired}:
            # One walk over the queue gives the places of all.
            places |= {held.request.request_id: place for place, held in enumerate(self.queue.order(pool), 1)}
        return [self._refused(held, places[held.request.request_id], now) for held in expired]

    def expire(self, now: float) -> None:
        """Drop old ages and waiting times. Mutates."""
        self._retry_after.expire(now)
        while self._ages and next(iter(self._ages.values()))[1] <= now:
            self._ages.popitem(last=False)

    def drop_gateway(self, gateway_id: str, keep: frozenset[str] = frozenset()) -> None:
        """Drop a gateway's parked requests, except `keep`, because its stream ended or began anew. Mutates."""
        for held in list(self.queue):
            if held.gateway_id == gateway_id and held.request.request_id not in keep:
                self._requests.leave_queue(held.request.request_id)

    def drop_pool(self, pool: str, why: str) -> list[ev.Effect]:
        """Refuse the parked requests of a pool that another router owns now, so that their gateways ask there. Mutates."""
        dropped = [held for held in self.queue if held.pool == pool]
        for held in dropped:
            self._requests.leave_queue(held.request.request_id)
        return [not_serving(held.request.request_id, pool, why, held.gateway_id) for held in dropped]

    # ---- one request ----

    def _bound_s(self, request: PlacementRequest) -> float:
        bound_s = self._admission.settings.bound_s(request.priority)
        if request.ttft_deadline_s is not None:
            bound_s = min(bound_s, request.parked_s + request.ttft_deadline_s)
        if not request.parkable and request.deadline_s is not None:
            # Its caller does not wait longer because it is told so. Half of the time is left for the placement.
            bound_s = min(bound_s, request.parked_s + request.deadline_s / 2)
        return bound_s

    def _park(
        self, request: PlacementRequest, gateway_id: str, pool: str, view: AdmissionView, now: float
    ) -> list[ev.Effect]:
        key = pool, request.session
        asked = now - request.parked_s
        answer_by = asked + view.bound_s
        since, _ = self._ages.get(key, (asked, 0.0)) if request.session else (asked, 0.0)
        state = self._admission.pools[pool]
        held = HeldRequest(
            # An array has 8 bytes per key; many requests of 130k tokens may wait.
            request=replace(request, keys=array("Q", request.keys)),
            gateway_id=gateway_id,
            pool=pool,
            since=min(since, asked),
            answer_by=answer_by,
            reason=PARKED_REASON,
            new_tokens=view.size,
            for_room=False,
            queue_penalty_s=SIZE_WEIGHT * view.size / state.prefill_rate,
            asked_at=asked,
            parked=True,
            tenant_load=state.ledger.of_tenant(request.tenant) / request.weight,
        )
        effects: list[ev.Effect] = []
        if (displaced := self._requests.make_room(held)) is not None:
            effects.append(
                self._refusal(displaced.request, pool, displaced.gateway_id, self.queue.count(pool), None, now)
            )
        if self._requests.hold(held, now):
            return [*effects, self._refusal(request, pool, gateway_id, self.queue.count(pool) + 1, None, now)]
        if request.session:
            self._ages[key] = held.since, answer_by + KEEP_AGE_S
            self._ages.move_to_end(key)
            while len(self._ages) > MAX_AGES:
                self._ages.popitem(last=False)
        return [*effects, self._parked(held, now), *self.let_in((pool,), now)]

    def _parked(self, held: HeldRequest, now: float) -> ev.Parked:
        request = held.request
        ahead = sum(
            self.queue.count(held.pool, priority)
            for priority in type(request.priority)
            if priority.level >= request.priority.level
        )
        return ev.Parked(request.request_id, held.gateway_id, held.pool, max(ahead, 1), max(held.answer_by - now, 0.0))

    def _refused(self, held: HeldRequest, place: int, now: float) -> ev.Refused:
        """Refuse a request whose time has passed, and remove it from the queue."""
        self._requests.leave_queue(held.request.request_id)
        waited_s = now - held.asked_at
        self._retry_after.waited(held.pool, held.request.priority, waited_s, now)
        state = self._admission.pools.get(held.pool)
        record = None
        if state is not None:
            view = AdmissionView(
                size=held.new_tokens,
                weighted=state.ledger.weighted(),
                capacity=state.capacity.tokens,
                largest=state.capacity.largest,
                armed=state.armed,
                before=place - 1,
                waited_s=waited_s,
                bound_s=held.answer_by - held.asked_at,
            )
            record = AdmissionRecord(view, decide_admission(view))
        return self._refusal(held.request, held.pool, held.gateway_id, place, record, now)

    def _refusal(
        self,
        request: PlacementRequest,
        pool: str,
        gateway_id: str,
        place: int,
        record: AdmissionRecord | None,
        now: float,
    ) -> ev.Refused:
        retry_after_s = self._retry_after.seconds(pool, request.priority)
        where = f" It was number {place} of those that wait." if place else ""
        message = f"the caches of {pool!r} have no room for another session.{where} A retry keeps its turn."
        return ev.Refused(
            request.request_id,
            "RESOURCE_EXHAUSTED",
            message,
            retry_after_s,
            gateway_id,
            pool=pool,
            place=place,
            admission=record,
        )


def _asked(held: HeldRequest, now: float) -> PlacementRequest:
    """Return a parked request as it is placed: its time in the queue of held requests begins now."""
    request, waited_s = held.request, now - held.asked_at
    left = request.ttft_deadline_s
    if left is not None:
        left -= waited_s - request.parked_s
    return replace(request, parked_s=waited_s, ttft_deadline_s=left)
