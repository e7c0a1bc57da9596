"""Places requests, or holds those that cannot or should not be placed yet, and retries the held ones when something frees. Pure.

A hold reserves nothing. It ends with a placement, a refusal, the request's end, or its gateway's stream. If the stream ended, the
gateway asks again, with the request's age. A request that can no longer get its first token in time is refused, held or not,
since nobody would read the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.instances.saturation import SATURATED
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.load.reservations import Reservations
from pointsman_router.core.placement_types import Decision, PlacementRequest, StepKind
from pointsman_router.core.policy.unified import Unified
from pointsman_router.core.requests.deadlines import SURE_SHARE, lateness, least_prefill_s
from pointsman_router.core.requests.decider import AllSaturated, Decider, DecideResult
from pointsman_router.core.requests.fair_order import REQUEST_TOKENS, QueueKey
from pointsman_router.core.requests.hold_queue import HeldRequest, with_compact_keys
from pointsman_router.core.requests.placement_plans import PlacementPlans
from pointsman_router.core.requests.refusals import Refusals, not_serving
from pointsman_router.core.requests.request_table import RequestTable

# TRIES: maximum number of decisions that leave their requests held, in a trial of a pool after something freed. TRIES_ON_TICK:
# the same in a trial on a tick. MOST_DECISIONS: maximum number of all decisions of a trial (on a tick: TRIES_ON_TICK). A decision
# costs up to 150 us.
TRIES, TRIES_ON_TICK, MOST_DECISIONS = 8, 64, 32
# RETRY_S: mean interval between two trials of a pool, s. TRIALS_AT_ONCE: trials that a pool may have in a burst after a pause (a
# token bucket). What frees between two trials is handled by the next one. A burst is needed since a first token and the answer's
# end may come together, and a cordon just before.
RETRY_S, TRIALS_AT_ONCE = 0.02, 4
# Minimum interval between the last trial and one that a load report causes, s. An engine sends many reports a second, and most of
# them free nothing.
REPORT_RETRY_S = 0.05
# Minimum interval between two trials of a pool with TRIES_ON_TICK, s.
TICK_RETRY_S = 0.4
# ENDS_AT_ONCE: maximum number of requests that one turn of the event loop answers because their time has passed, about 10 us
# each; it decides on at most TRIES of them. ENDS_PAUSE_S: pause before the others, s.
ENDS_AT_ONCE, ENDS_PAUSE_S = 500, 0.001
# How long before the gateway's timeout a held request is answered, s. It must be more than the interval between ticks (0.5 s).
MARGIN_S = 1.0


@dataclass(slots=True)
class _Trial:
    """One trial of a pool's held requests."""

    decisions: int  # how many more it may make
    tries: int  # how many of them may leave their requests held
    lists: int = MOST_DECISIONS  # how many more lists of instances it may find full
    # Id of a list -> whether it has room, as found since the last placement.
    room: dict[int, bool] = field(default_factory=dict)
    decided: set[QueueKey] = field(default_factory=set)  # the queues in which it has decided
    effects: list[ev.Effect] = field(default_factory=list)  # to return
    changes: list[Callable[[], object]] = field(default_factory=list)  # of the queue, to make after the trial


class HeldRequests:
    """Answers or holds the requests of a RouterState. `decider` decides on them, `plans` carries decisions out.

    Requests with the same model that wait for the same instance (or for any) form a queue. A trial decides, in order, on the
    requests of the queues for which something was freed, until too many stay held. The next trials continue with the queues that
    it did not reach. So a request waits only behind requests of its own queue. When the fleet or the time has changed, a trial
    tries all queues, unless earlier trials left some.

    `reservations.less_busy` names the instances that have less to do. A trial removes those whose queues it has tried.
    """

    def __init__(
        self,
        requests: RequestTable,
        decider: Decider,
        plans: PlacementPlans,
        views: FleetViewBuilder,
        instances: InstanceRegistry,
        reservations: Reservations,
        prefill_observer: PrefillObserver,
        refusals: Refusals,
        retry_after_s: float,
    ) -> None:
        self.queue = requests.room.held
        self._waiting_room = requests.room
        self._requests = requests
        self._decider = decider
        self._plans = plans
        self._views = views
        self._instances = instances
        self._less_busy = reservations.less_busy
        self._curve_samples = prefill_observer.samples
        self._refusals = refusals
        self._retry_after_s = retry_after_s
        self._fallback = Unified()
        # By pool: when it was tried last (_tried_at), last with TRIES_ON_TICK (_tried_many_at), and when to try it next (_due).
        # _paid_until: the time of the next trial if there were one every RETRY_S (the state of the token bucket).
        self._tried_at: dict[str, float] = {}
        self._paid_until: dict[str, float] = {}
        self._tried_many_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._ends_due = inf
        # By pool. _freed: present if something was freed since the last trial, for all queues (True), or only for the queues that
        # wait for a less busy instance or for any (False). _rest: queues that earlier trials did not reach.
        self._freed: dict[str, bool] = {}
        self._rest: dict[str, set[QueueKey]] = {}

    @property
    def retry_at(self) -> float:
        """When to call `retry_due`, in s; inf: not needed. Each call of another method may change it."""
        return min(self._ends_due, *self._due.values()) if self._due else self._ends_due

    def place(self, request: PlacementRequest, gateway_id: str, now: float, previous_id: str = "") -> list[ev.Effect]:
        """Answer a new request now, or hold it (no effects). `previous_id`: if the rest of a plan is to be placed, the decision
        on the part that is done. Mutates."""
        if (waiting := self.queue.get(request.request_id)) is not None:
            self._requests.ask_again(waiting, gateway_id)
            return []
        verdict = self._decider.decide(request, now)
        if isinstance(verdict, ev.Refused):
            if previous_id:
                return self.serve_there(request.request_id, now)
            return [replace(verdict, gateway_id=gateway_id)]
        work = 0
        if not previous_id:
            if (late := self.refused_as_late(request, verdict, gateway_id)) is not None:
                return [late]
            if self._requests.attained.on:  # the work of a held request takes a look at all instances
                work = _work(verdict) + REQUEST_TOKENS
                self._requests.attained.add(verdict.pool, request, work, now)
        if isinstance(verdict, Decision) and previous_id:
            verdict = replace(verdict, previous_id=previous_id)
        placeable = isinstance(verdict, Decision) and bool(verdict.result.steps)
        if isinstance(verdict, Decision) and placeable and not self._has_to_queue(verdict):
            return self._plans.commit(verdict, gateway_id, now)
        held = replace(self._held(request, gateway_id, verdict, now, previous_id), program_work=work)
        displaced, why_not = self._waiting_room.displaced_by(held)
        if not why_not:
            effects = self.displace(displaced, now)
            self._requests.hold(held, now)
            return [*effects, *(self.retry((verdict.pool,), now) if placeable else [])]
        if isinstance(verdict, Decision) and placeable:
            return self._plans.commit(verdict, gateway_id, now)
        effects = self._answer(held, now, "queue_full", why_not)
        if self._requests.placed(request.request_id) is None:
            self._requests.not_served(held)
        return effects

    def has_place(self, pool: str, model: str, now: float) -> bool:
        """Return whether a further request of `model` could be placed, or could wait for it."""
        return self.queue.shares(pool).missing(1) == 0 or self._views.has_room(pool, model, now)

    def displace(self, displaced: Iterable[HeldRequest], now: float) -> list[ev.Effect]:
        """Answer requests that give up their place to another one, held or parked. Mutates."""
        effects: list[ev.Effect] = []
        for waits in displaced:
            if (gone := self._waiting_room.why_leaving(waits.request.request_id)) is not None:
                effects += self._requests.leave(waits, gone)
                continue
            if not waits.parked:
                why = "the queue is full, and a request of another class or tenant takes this request's place"
                effects += self._end(waits, now, "queue_full", why)
                continue
            self._requests.leave_queue(waits.request.request_id)
            place = self._waiting_room.parked.count(waits.pool) + 1
            effects.append(self._refusals.not_admitted(waits.request, waits.pool, waits.gateway_id, place, None))
        return effects

    def retry(self, pools: Iterable[str], now: float) -> list[ev.Effect]:
        """Something freed in these pools: try their held requests, now, or soon if that was done just before. Mutates."""
        return [effect for pool in pools for effect in self._retry(pool, now, now)]

    def retry_all(self, now: float) -> list[ev.Effect]:
        """The fleet has changed, which may have freed anything: try the held requests of all pools and queues, as `retry`.
        Mutates."""
        return [effect for pool in self.queue.pools() for effect in self._retry(pool, now, now, everywhere=True)]

    def reported(self, pool: str, instance_id: str, now: float) -> list[ev.Effect]:
        """An instance of the pool reported its load, which may have freed something: try the pool, now or soon. Mutates."""
        self._less_busy.add(instance_id)
        return self._retry(pool, now, self._tried_at.get(pool, -inf) + REPORT_RETRY_S)

    def retry_due(self, now: float) -> list[ev.Effect]:
        """Try the pools whose next trial is due, and answer further requests whose time has passed. Mutates."""
        due = [pool for pool, at in self._due.items() if at <= now]
        effects = [effect for pool in due for effect in self._serve(pool, now, TRIES)]
        return [*effects, *(self._end_expired(now) if self._ends_due <= now else ())]

    def tick(self, now: float) -> list[ev.Effect]:
        """Time has passed: try all pools, and answer the requests whose time has passed. Mutates."""
        effects = []
        for pool in self.queue.pools():
            if now - self._tried_many_at.get(pool, -inf) >= TICK_RETRY_S:
                self._tried_many_at[pool] = now
                self._freed[pool] = True
                effects += self._serve(pool, now, TRIES_ON_TICK)
            else:
                effects += self._retry(pool, now, now, everywhere=True)
        return [*effects, *self._end_expired(now)]

    def expire(self, now: float) -> None:
        """Drop times of trials that no longer matter. Mutates."""
        self._tried_at = {pool: at for pool, at in self._tried_at.items() if now - at < REPORT_RETRY_S}
        self._paid_until = {pool: at for pool, at in self._paid_until.items() if at > now}
        self._tried_many_at = {pool: at for pool, at in self._tried_many_at.items() if now - at < TICK_RETRY_S}

    def refused_as_late(self, request: PlacementRequest, verdict: DecideResult, gateway_id: str) -> ev.Refused | None:
        """Return the refusal of a request that cannot get its first token in time, by the view of `verdict`; None if it can, or
        has no deadline."""
        if request.ttft_deadline_s is None or isinstance(verdict, ev.Refused):
            return None
        least_s = least_prefill_s(request, verdict.pool, verdict.view, self._curve_samples)
        if not (why := lateness(request.ttft_deadline_s, least_s)):
            return None
        return ev.Refused(request.request_id, "DEADLINE_EXCEEDED", why, gateway_id=gateway_id, pool=verdict.pool)

    def _has_to_queue(self, decision: Decision) -> bool:
        """Return whether a placeable request must queue behind held ones. It must if others wait for room on an instance of its
        plan, or if the policy set a queue penalty for it and any request of the pool waits."""
        pool = decision.pool
        if not self.queue.count(pool):
            return False
        if decision.result.queue_penalty_s is not None:
            return True
        waiting = self.queue.waiting_for_room(pool)
        return any(
            self._instances.answers(step.instance_id, model) for step in decision.result.steps for model in waiting
        )

    def _held(
        self, request: PlacementRequest, gateway_id: str, verdict: Decision | AllSaturated, now: float, previous_id: str
    ) -> HeldRequest:
        since = now - request.age_s
        # The gateway's timeout, and so the router's, restarts with each step.
        answer_by = (now if previous_id else since) + self.queue.settings.timeout_s
        if (left := request.deadline_s) is not None:
            answer_by = min(answer_by, now + left - min(MARGIN_S, left / 2))
        held = HeldRequest(
            with_compact_keys(request),
            gateway_id,
            verdict.pool,
            since,
            answer_by,
            "",
            0,
            for_room=True,
            previous_id=previous_id,
            asked_at=now,
        )
        if (needed := request.ttft_deadline_s) is not None and not previous_id:
            held = replace(held, first_token_by=now + needed)
        return self._judged(held, verdict)

    def _judged(self, held: HeldRequest, verdict: Decision | AllSaturated) -> HeldRequest:
        """Return `held`, updated by the result of its last trial."""
        least_s = 0.0
        if held.first_token_by < inf:
            least_s = least_prefill_s(held.request, verdict.pool, verdict.view, self._curve_samples)
        if isinstance(verdict, AllSaturated):
            start_by = held.first_token_by - least_s
            new = _least_new(verdict)
            return replace(held, reason=SATURATED, new_tokens=new, for_room=True, start_by=start_by, waits_for="")
        result = verdict.result
        answer_by = min(held.answer_by, held.since + result.max_hold_s) if result.max_hold_s else held.answer_by
        # A request that could be placed but queues behind others waits for room as they do.
        for_room = bool(result.steps)
        # A request that the policy holds is placed while there is still time for its whole prefill, and for the next tick.
        mean_s = 0.0 if for_room else least_s / SURE_SHARE + MARGIN_S
        return replace(
            held,
            reason=result.reason,
            new_tokens=_least_new(verdict),
            for_room=for_room,
            answer_by=answer_by,
            waits_for="" if for_room else result.waits_for,
            queue_penalty_s=result.queue_penalty_s,
            start_by=held.first_token_by - max(least_s, mean_s),
        )

    def _retry(self, pool: str, now: float, not_before: float, *, everywhere: bool = False) -> list[ev.Effect]:
        if not self.queue.count(pool):
            return []
        self._freed[pool] = everywhere or self._freed.get(pool, False)
        at = max(not_before, self._paid_until.get(pool, -inf) - (TRIALS_AT_ONCE - 1) * RETRY_S)
        if at <= now:
            return self._serve(pool, now, TRIES)
        self._due[pool] = min(at, self._due.get(pool, inf))
        return []

    def _serve(self, pool: str, now: float, tries: int) -> list[ev.Effect]:
        """Try the pool's held requests until `tries` of them stay held: first the queues for which something was freed, then,
        with at least half of the tries, the queues that earlier trials did not reach. Queues that this trial does not reach are
        tried after RETRY_S. Mutates."""
        if self._waiting_room.leaves(pool):
            self._due[pool] = now + RETRY_S
            return []
        self._tried_at[pool] = now
        self._paid_until[pool] = max(self._paid_until.get(pool, -inf), now) + RETRY_S
        self._due.pop(pool, None)
        keys = self.queue.queue_keys(pool)
        rest, freed = self._rest.pop(pool, set()) & keys, self._freed.pop(pool, None)
        everywhere = freed is True and not rest
        first = {key for key in keys if everywhere or (key[1] in self._less_busy if key[1] else freed is not None)}
        self._less_busy.difference_update(instance_id for _, instance_id in first)
        trial = _Trial(max(tries, MOST_DECISIONS), tries - tries // 2 if rest else tries)
        left = self._try(pool, first, trial, now)
        if rest := rest - first | (left & rest) - trial.decided:
            trial.tries += tries // 2
            left = left - rest | self._try(pool, rest, trial, now)
        # The queue changes only after the trial, since a walk over its order must not see changes.
        for change in trial.changes:
            change()
        if left:
            self._rest[pool] = left
            self._due[pool] = now + RETRY_S
        return trial.effects

    def _try(self, pool: str, keys: set[QueueKey], trial: _Trial, now: float) -> set[QueueKey]:
        """Try the requests of these queues in order until a limit of the trial is reached; return the queues still to be
        tried."""
        if not keys:
            return set()
        full = self.queue.queue_keys(pool) - keys
        stay_held: set[QueueKey] = set()
        for held in self.queue.order(pool, full):
            request_id, key = held.request.request_id, held.queue_key
            if not self._room(pool, key[0], trial, now):
                # Later requests of this queue have no room either. Other queues may: an adapter is loaded on some instances only.
                full.add(key)
                if not trial.lists:
                    return keys - full
                continue
            if not trial.tries:
                return keys - full - stay_held
            if not trial.decisions:
                return keys - full
            trial.decisions -= 1
            trial.decided.add(key)
            verdict = self._decider.decide(_aged(held, now), now)
            if _elsewhere(verdict, held):
                trial.changes.append(partial(self._requests.leave_queue, request_id))
                trial.effects += self._moved(held, now)
            elif (late := self._late(held, verdict, now)) is not None:
                trial.changes.append(partial(self._requests.leave_queue, request_id))
                trial.effects.append(late)
            elif isinstance(verdict, Decision) and verdict.result.steps:
                trial.changes.append(partial(self._requests.served, request_id, _computed(verdict)))
                going_on = replace(
                    verdict, previous_id=held.previous_id, notes=(*verdict.notes, *self.queue.notes(held))
                )
                trial.effects += self._plans.commit(going_on, held.gateway_id, now)
                trial.room.clear()
            else:
                trial.tries -= 1
                stay_held.add(key)
                if not isinstance(verdict, ev.Refused):
                    trial.changes.append(partial(self._requests.change_hold, self._judged(held, verdict)))
        return set()

    def _room(self, pool: str, model: str, trial: _Trial, now: float) -> bool:
        key = id(self._instances.members(pool, model))
        if key not in trial.room:
            trial.room[key] = self._views.has_room(pool, model, now)
            trial.lists -= not trial.room[key]
        return trial.room[key]

    def _end_expired(self, now: float) -> list[ev.Effect]:
        """Answer requests whose time has passed, as many as one turn may answer. Mutates."""
        effects: list[ev.Effect] = []
        decisions = TRIES
        saturated: dict[tuple[str, int], bool] = {}
        for held in self.queue.expired(now, ENDS_AT_ONCE):
            if self._waiting_room.is_leaving(held.request.request_id):
                continue
            request, why = held.request, f"held for {now - held.since:.1f} s"
            members = held.pool, id(self._instances.members(held.pool, request.model))
            if self._needs_no_view(held):
                if members not in saturated:
                    saturated[members] = self._views.saturated(held.pool, request.model, now)
                if saturated[members]:
                    effects += self._refused(held, why, now)
                    self._requests.leave_queue(request.request_id)
                    continue
            if not decisions:
                break
            decisions -= 1
            if now < held.answer_by and self._is_in_time_after_all(held, now):
                continue
            effects += self._end(held, now, "hold_expired", why)
            saturated.clear()
        self._ends_due = now + ENDS_PAUSE_S if self.queue.expired(now, 1) else inf
        return effects

    def _needs_no_view(self, held: HeldRequest) -> bool:
        """Return whether a request whose time has passed is refused if all instances are saturated, without a decision."""
        return not self._is_placed_in_the_end(held) and held.first_token_by == inf and not held.request.exclude

    def _is_placed_in_the_end(self, held: HeldRequest) -> bool:
        """Return whether the request, when its time has passed, is placed by a policy that does not hold it."""
        return not held.for_room and self.queue.settings.expiry == "place"

    def _refused(self, held: HeldRequest, why: str, now: float) -> list[ev.Effect]:
        if held.previous_id:
            return self.serve_there(held.request.request_id, now)
        waited_s = now - held.since
        if waited_s > 0:
            self._refusals.held.waited(held.pool, held.request.priority, waited_s, now)
        return [self._refusals.no_room(held.request, held.pool, held.gateway_id, why, waited_s)]

    def _is_in_time_after_all(self, held: HeldRequest, now: float) -> bool:
        """Return whether a request that waits for room may wait longer: more of its prompt is cached than at its last trial, so
        it is not late yet. Updates its hold then. Mutates."""
        verdict = self._decider.decide(_aged(held, now), now)
        if not isinstance(verdict, AllSaturated) or _elsewhere(verdict, held):
            return False
        held = self._judged(held, verdict)
        if held.ends_at <= now:
            return False
        self._requests.change_hold(held)
        return True

    def _late(self, held: HeldRequest, verdict: DecideResult, now: float) -> ev.Refused | None:
        if held.first_token_by == inf:
            return None
        request = replace(held.request, ttft_deadline_s=held.first_token_by - now)
        return self.refused_as_late(request, verdict, held.gateway_id)

    def _moved(self, held: HeldRequest, now: float) -> list[ev.Effect]:
        """Return the answer to a request whose model name has moved to another pool, which another router may own."""
        if held.previous_id:
            return self.serve_there(held.request.request_id, now)
        why = f"{held.request.model!r} belongs to another model now"
        return [not_serving(held.request.request_id, held.pool, why, held.gateway_id)]

    def serve_there(self, request_id: str, now: float) -> list[ev.Effect]:
        """Replace the rest of a plan that has begun by one SERVE on its instance, because it could not be placed. Mutates."""
        return self._plans.serve_there(request_id, "the rest of the plan could not be placed", now)

    def _end(self, held: HeldRequest, now: float, note: str, why: str) -> list[ev.Effect]:
        """Answer a request that may not wait any longer, and remove it from the queue."""
        effects = self._answer(held, now, note, why)
        self._requests.leave_queue(held.request.request_id)
        return effects

    def _answer(self, held: HeldRequest, now: float, note: str, why: str) -> list[ev.Effect]:
        """Answer a request that may not wait, or not any longer."""
        policy = None
        if self._is_placed_in_the_end(held):
            facts = self._views.facts(held.pool, now)
            policy = self._decider.policy.without_holds(facts) or self._fallback
        verdict = self._decider.decide(_aged(held, now), now, policy)
        if _elsewhere(verdict, held):
            return self._moved(held, now)
        if (late := self._late(held, verdict, now)) is not None:
            return [late]
        if isinstance(verdict, Decision) and verdict.result.steps:
            noted = replace(verdict, notes=(*verdict.notes, note), previous_id=held.previous_id)
            return self._plans.commit(noted, held.gateway_id, now)
        if isinstance(verdict, ev.Refused) and not held.previous_id:
            # The model was known when the request came, so its absence is temporary.
            return [replace(verdict, code="UNAVAILABLE", retry_after_s=self._retry_after_s, gateway_id=held.gateway_id)]
        return self._refused(held, why, now)


def _least_new(verdict: Decision | AllSaturated) -> int:
    """Return the least prefill that a request needs on any instance that it could be placed on."""
    if isinstance(verdict, AllSaturated):
        return min(candidate.new_tokens for candidate in verdict.view.candidates if candidate.excluded == SATURATED)
    return min(candidate.new_tokens for candidate in verdict.view.eligible())


def _work(verdict: Decision | AllSaturated) -> int:
    """Return the tokens that a request needs computed: where it is placed, or else at least."""
    if isinstance(verdict, Decision) and verdict.result.steps:
        return max(verdict.request.input_tokens - verdict.cached_tokens, 0)
    return _least_new(verdict)


def _elsewhere(verdict: DecideResult, held: HeldRequest) -> bool:
    return not isinstance(verdict, ev.Refused) and verdict.pool != held.pool


def _aged(held: HeldRequest, now: float) -> PlacementRequest:
    return replace(held.request, age_s=now - held.since)


def _computed(decision: Decision) -> int:
    """Return the number of tokens that the first step of a decision must compute."""
    steps = decision.result.steps
    first = decision.view.find(steps[0].instance_id)
    assert first is not None
    if steps[0].fetches:
        return 0
    if steps[-1].kind is StepKind.PREFILL:
        return max(steps[-1].prefix_tokens - first.cached_tokens, 0)
    return first.new_tokens
