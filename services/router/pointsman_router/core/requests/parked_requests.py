"""Parks requests of new sessions for which the caches have no room, lets them in, or refuses them after a bound. Pure.

A request of a session under way waits with them if the caches have lost the session's context: it is a pause between two turns.
What has to be computed again anyway can wait until sessions whose contexts are there have ended.

A parked request reserves nothing and is not held for an instance: it comes to HeldRequests only when its session is admitted. It
waits for at most the bound of its class, or until its client's deadline. Then it is refused with its place in the queue, or
placed if its session is under way. If the client of a refused one asks again within KEEP_AGE_S, the session keeps its age, and so
its turn. Parked requests exist only here: when the pool's owner or the request's gateway is lost, the gateway or the client asks
again.

The order is that of fair_order.py, with a session's size as the cost: by class, then the tenant whose sessions have the least
weighted size for its weight, then the least SIZE_WEIGHT x prefill time - age. The prefill time is that of what no cache has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import Newness, SessionAdmission
from pointsman_router.core.admission_rule import (
    AdmissionOutcome,
    AdmissionRecord,
    AdmissionView,
    decide_admission,
)
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.priority import PRIORITIES
from pointsman_router.core.requests.fair_order import QueueKey
from pointsman_router.core.requests.hold_queue import HeldRequest, QueueSettings, with_compact_keys
from pointsman_router.core.requests.place_or_hold import HeldRequests
from pointsman_router.core.requests.refusals import Refusals
from pointsman_router.core.requests.request_table import RequestTable

# Limits of a pool's parked requests: their number, and one tenant's share of it while others want to wait.
PARKED = QueueSettings(size=16_384, tenant_share=0.25)
PARKED_REASON = "session_parked"
# How much longer a session waits for others for each second of its prefill, in the order of parked requests, s. With 1, the order
# is nearly that of arrival.
SIZE_WEIGHT = 100.0
# How long a session that was not let in keeps its age, s, and the maximum number of such sessions.
KEEP_AGE_S, MAX_AGES = 600.0, 50_000
# How long what the first parked request would add is not computed again, s.
REVIEW_S = 1.0
# LET_IN_AT_ONCE: maximum number of sessions that one turn lets in; a placement takes up to 150 us. A prompt counts once more for
# each KEYS_OF_ONE block keys, since an admission takes up to 100 ns for each key. LET_IN_PAUSE_S: pause before the others, s.
# REFUSED_AT_ONCE: maximum number of requests that one turn refuses.
LET_IN_AT_ONCE, KEYS_OF_ONE, LET_IN_PAUSE_S, REFUSED_AT_ONCE = 32, 2_048, 0.02, 500


class _Review(NamedTuple):
    """What the first parked request of a pool would add."""

    request_id: str
    newness: Newness
    until: float  # when it is computed again, s


class ParkedRequests:
    """The parked requests of a RouterState. `admission` describes admissions, `held_requests` places what is let in."""

    def __init__(
        self,
        requests: RequestTable,
        admission: SessionAdmission,
        held_requests: HeldRequests,
        instances: InstanceRegistry,
        refusals: Refusals,
    ) -> None:
        self.queue = requests.room.parked
        self._room = requests.room
        self._requests = requests
        self._admission = admission
        self._held_requests = held_requests
        self._instances = instances
        self._refusals = refusals
        # Pool -> the last review of its first request.
        self._reviewed: dict[str, _Review] = {}
        # (pool, session) -> when it first came, and when this is forgotten; the oldest entry first.
        self._ages: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self._due = inf
        self._let_in_at: dict[str, float] = {}  # pool -> when a session was let in last

    @property
    def retry_at(self) -> float:
        """When to call `retry_due`, in s; inf: not needed."""
        return min(self._due, self.queue.next_end)

    def place(self, request: PlacementRequest, gateway_id: str, now: float) -> list[ev.Effect]:
        """Admit a new request, and place or hold it; or park it, or refuse it. Mutates."""
        if (waiting := self.queue.get(request.request_id)) is not None:
            self._requests.ask_again(waiting, gateway_id)
            return [self._parked(replace(waiting, gateway_id=gateway_id), now)]
        pool = self._instances.pool_of(request.model)
        held = self._held_requests.queue.get(request.request_id) is not None
        if not pool or held:
            return self._held_requests.place(request, gateway_id, now)
        self._admission.asked(request, pool)
        if served := self._requests.attained.tokens(pool, request, now):
            request = replace(request, program_tokens=served)
        if request.parked_s > 0 and self._admission.applies(pool, now):
            self._admission.was_parked(pool, now)
        record = self._admitted(request, pool, now)
        if record is None:
            return self._held_requests.place(request, gateway_id, now)
        if record.verdict.outcome is AdmissionOutcome.ADMIT:
            return self._held_requests.place(replace(request, admitted=record), gateway_id, now)
        if record.verdict.outcome is AdmissionOutcome.REFUSE:
            return [self._refusals.not_admitted(request, pool, gateway_id, 0, record)]
        return self._park(request, gateway_id, pool, record.view, now)

    def explain(self, request: PlacementRequest, now: float) -> AdmissionRecord | None:
        """Return the admission of a new request as it would be decided now; None if its pool admits everything. Changes
        nothing."""
        pool = self._instances.pool_of(request.model)
        return self._admitted(request, pool, now, dry=True) if pool else None

    def _admitted(
        self, request: PlacementRequest, pool: str, now: float, *, dry: bool = False
    ) -> AdmissionRecord | None:
        """Return the admission of a new request; None if its pool admits everything. `dry`: as in SessionAdmission.newness."""
        before = self.queue.count(pool)
        if not before and not self._admission.armed(pool, now):
            return None
        newness = self._admission.newness(request, pool, now, dry=dry)
        bound_s = self._bound_s(request)
        view = self._view(pool, newness, now, before=before, waited_s=request.parked_s, bound_s=bound_s)
        return AdmissionRecord(view, decide_admission(view))

    def let_in(self, pools: Iterable[str], now: float) -> list[ev.Effect]:
        """Place the parked requests of these pools whose sessions fit, in their order. All of them, if the pool is not armed any
        more, at the same pace. None while the instances and the held requests of the pool take no more. Mutates."""
        effects: list[ev.Effect] = []
        if self._due <= now:
            self._due = inf
        left = LET_IN_AT_ONCE if self._due == inf else 0
        # The pool that was served longest ago goes first, so that a crowd in one pool does not keep the others waiting.
        for pool in sorted(pools, key=lambda pool: self._let_in_at.get(pool, -inf)):
            full: set[QueueKey] = set()
            no_room: set[int] = set()
            while self.queue.count(pool):
                if left <= 0 or self._room.leaves(pool):
                    self._due = min(self._due, now + LET_IN_PAUSE_S)
                    break
                if (head := self._first_with_place(pool, full, no_room, now)) is None:
                    break
                request = _asked(head, now)
                view = self._view(
                    pool, self._newness(head, now), now, waited_s=request.parked_s, bound_s=self._bound_s(request)
                )
                verdict = decide_admission(view)
                if verdict.outcome is not AdmissionOutcome.ADMIT:
                    break
                left -= 1 + len(request.keys) // KEYS_OF_ONE
                self._let_in_at[pool] = now
                self._refusals.parked.waited(pool, request.priority, request.parked_s, now)
                effects += self._let_in(head, AdmissionRecord(view, verdict), now)
        return effects

    def _first_with_place(self, pool: str, full: set[QueueKey], no_room: set[int], now: float) -> HeldRequest | None:
        """Return the first parked request of a pool that can be placed, or held. It need not be the first of all: an adapter is
        loaded on some instances only. Adds the queues without a place to `full`, and the ids of their lists of instances to
        `no_room`."""
        for head in self.queue.order(pool, full):
            members = id(self._instances.members(pool, head.request.model))
            if members not in no_room and self._held_requests.has_place(pool, head.request.model, now):
                return head
            no_room.add(members)
            full.add(head.queue_key)
        return None

    def _newness(self, head: HeldRequest, now: float) -> Newness:
        """Return what the first parked request of a pool would add. It is computed once in REVIEW_S, since it costs O(keys), and
        the sums of sessions change with every request."""
        known = self._reviewed.get(head.pool)
        if known is None or known.request_id != head.request.request_id or now >= known.until:
            newness = self._admission.newness(head.request, head.pool, now)
            known = self._reviewed[head.pool] = _Review(head.request.request_id, newness, now + REVIEW_S)
        return known.newness

    def retry_due(self, now: float) -> list[ev.Effect]:
        """Let in what fits, and refuse the requests whose time has passed. Mutates."""
        effects = self.let_in(self.queue.pools(), now) if self._due <= now else []
        return [*effects, *self.refuse_expired(now)]

    def refuse_expired(self, now: float) -> list[ev.Effect]:
        """Refuse the requests whose time has passed, as many as one turn may. Mutates."""
        expired = self.queue.expired(now, REFUSED_AT_ONCE)
        staying = [held for held in expired if not self._room.is_leaving(held.request.request_id)]
        return [effect for held in staying for effect in self._at_bound(held, now)]

    def expire(self, now: float) -> None:
        """Drop old ages and reviews. Mutates."""
        while self._ages and next(iter(self._ages.values()))[1] <= now:
            self._ages.popitem(last=False)
        self._reviewed = {pool: review for pool, review in self._reviewed.items() if now < review.until}
        self._let_in_at = {pool: at for pool, at in self._let_in_at.items() if self.queue.count(pool)}

    # ---- one request ----

    def _view(
        self, pool: str, newness: Newness, now: float, *, before: int = 0, waited_s: float = 0.0, bound_s: float = 0.0
    ) -> AdmissionView:
        """Return what an admission is decided on. Sessions that were admitted and whose requests are held count as well: while
        the policy holds one, many others may come to be let in."""
        view = self._admission.view(pool, newness, now, before=before, waited_s=waited_s, bound_s=bound_s)
        held = self._room.held.admitted(pool)
        return replace(view, weighted=view.weighted + held) if held else view

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
            request=with_compact_keys(request),
            gateway_id=gateway_id,
            pool=pool,
            since=min(since, asked),
            answer_by=answer_by,
            reason=PARKED_REASON,
            new_tokens=view.size,
            for_room=False,
            queue_penalty_s=SIZE_WEIGHT * state.curve.cost_s(view.size, 0),
            asked_at=asked,
            parked=True,
            resumes=view.resumes,
            tenant_load=state.ledger.of_tenant(request.tenant) / request.weight,
        )
        displaced, why_not = self._room.displaced_by(held)
        if why_not and view.resumes:
            return self._held_requests.place(request, gateway_id, now)
        if why_not:
            return [self._refusals.not_admitted(request, pool, gateway_id, self.queue.count(pool) + 1, None)]
        effects = self._held_requests.displace(displaced, now)
        self._requests.hold(held, now)
        if request.session:
            self._ages[key] = held.since, answer_by + KEEP_AGE_S
            self._ages.move_to_end(key)
            while len(self._ages) > MAX_AGES:
                self._ages.popitem(last=False)
        return [*effects, self._parked(held, now), *self.let_in((pool,), now)]

    def _parked(self, held: HeldRequest, now: float) -> ev.Parked:
        request = held.request
        return ev.Parked(
            request.request_id, held.gateway_id, held.pool, self._place(held), max(held.answer_by - now, 0.0)
        )

    def _place(self, held: HeldRequest) -> int:
        """Return the place of a parked request, from 1, if all of its class go first. O(classes)."""
        own = held.request.priority.level
        return max(sum(self.queue.count(held.pool, other) for other in PRIORITIES if other.level >= own), 1)

    def _at_bound(self, held: HeldRequest, now: float) -> list[ev.Effect]:
        """Refuse a request whose time has passed, or place it if its session is under way, and remove it from the queue."""
        place, waited_s = self._place(held), now - held.asked_at
        # Its session may have begun meanwhile, by another request or at an owner whose sessions were still being read.
        goes_on = held.resumes or self._admission.has_begun(held.request, held.pool, now)
        self._refusals.parked.waited(held.pool, held.request.priority, waited_s, now)
        view = self._view(
            held.pool,
            Newness("", held.new_tokens, goes_on),
            now,
            before=place - 1,
            waited_s=waited_s,
            bound_s=held.answer_by - held.asked_at,
        )
        record = AdmissionRecord(view, decide_admission(view))
        if record.verdict.outcome is AdmissionOutcome.ADMIT and goes_on:
            return self._let_in(held, record, now)
        self._requests.leave_queue(held.request.request_id)
        if record.verdict.outcome is not AdmissionOutcome.REFUSE:
            # It was about to be let in, but no instance has room.
            why = "parked until its bound"
            return [self._refusals.no_room(held.request, held.pool, held.gateway_id, why, waited_s)]
        return [self._refusals.not_admitted(held.request, held.pool, held.gateway_id, place, record)]

    def _let_in(self, held: HeldRequest, record: AdmissionRecord, now: float) -> list[ev.Effect]:
        """Place or hold a parked request, and remove it from the queue. Mutates."""
        request = _asked(held, now)
        self._requests.let_in(request.request_id)
        self._ages.pop((held.pool, request.session), None)
        return self._held_requests.place(replace(request, admitted=record), held.gateway_id, now)


def _asked(held: HeldRequest, now: float) -> PlacementRequest:
    """Return a parked request as it is placed: its time in the queue of held requests begins now."""
    request, waited_s = held.request, now - held.asked_at
    left = request.ttft_deadline_s
    if left is not None:
        left -= waited_s - request.parked_s
    return replace(request, parked_s=waited_s, ttft_deadline_s=left)
