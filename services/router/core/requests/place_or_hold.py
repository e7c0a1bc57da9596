"""Requests that cannot be placed yet, or should not be: held, tried again when something frees, answered in time. Pure.

A hold reserves nothing. It ends by a placement, by a refusal, by the request's end, or with its gateway's stream; after the last
the gateway asks again, with the request's age. A request that cannot have its first token in time any more is refused, held or
not: nobody would read the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import msgspec
from msgspec.structs import replace

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances.saturation import SATURATED
from pointsman.router.core.policy.base import Policy
from pointsman.router.core.policy.unified import Unified
from pointsman.router.core.requests.deadlines import SURE_SHARE, CurveSamples, lateness, least_prefill_s
from pointsman.router.core.requests.fair_order import Line
from pointsman.router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman.router.core.requests.retry_after import RetryAfter
from pointsman.router.core.types import Decision, FleetView, PlacementRequest, StepKind

# Decisions of one trial of a pool that may leave their requests held, where something freed and where time has passed, and all
# decisions of one: each costs up to 150 us.
TRIES, TRIES_ON_TICK, MOST_DECISIONS = 8, 64, 32
# A pool is tried once in so long, and a few times more at once where it was not tried for as long: what frees meanwhile is
# gathered. A first token and the answer's end may come together, and a cordon just before.
RETRY_S, TRIALS_AT_ONCE = 0.02, 4
# Of load reports each engine sends many a second, most of which free nothing: they wait so long after the last trial.
REPORT_RETRY_S = 0.05
# The same of the many trials when time has passed.
TICK_RETRY_S = 0.4
# Requests whose time is over that one turn answers, some 10 us each, of which it decides on TRIES at the most; others are due
# after a pause.
ENDS_AT_ONCE, ENDS_PAUSE_S = 500, 0.001
# An answer must reach the gateway before it gives up; ticks are half a second apart.
MARGIN_S = 1.0
# How soon to ask again where nothing is wrong but the moment.
NOT_SERVING_RETRY_S = 0.1


class AllSaturated(msgspec.Struct, frozen=True, gc=False):
    """All instances of `pool` that could serve a request are saturated."""

    pool: str
    view: FleetView


DecideResult = Decision | ev.Refused | AllSaturated
# (request, now, policy or None for the one in force): decides and changes nothing.
Decide = Callable[[PlacementRequest, float, Policy | None], DecideResult]
# (decision, gateway id, now): reserves, and returns the effects, the answer last.
Commit = Callable[[Decision, str, float], list[ev.Effect]]
# (request, gateway id, now): what is left of a plan that has begun is one SERVE where it was; returns the effects.
ServeThere = Callable[[PlacementRequest, str, float], list[ev.Effect]]
# (pool, model, now): whether an instance of the pool that answers to the model may be placed on at all.
HasRoom = Callable[[str, str, float], bool]
# The same arguments: whether it is saturation alone that keeps requests for the model from the pool.
Saturated = Callable[[str, str, float], bool]
# (pool, model): the pool's instances that answer to the model; of models with equal ones the same object.
Members = Callable[[str, str], object]
# (instance, model): whether the instance answers to the model.
Answers = Callable[[str, str], bool]


@dataclass(slots=True)
class _Trial:
    """How many more `decisions` it may make, and how many `tries` of these may leave their requests held; in which lines it has
    `decided`, and what came of that."""

    decisions: int
    tries: int
    # How many more lists of instances it may find full, and by list what it has found since it last placed a request.
    lists: int = MOST_DECISIONS
    room: dict[int, bool] = field(default_factory=dict)
    decided: set[Line] = field(default_factory=set)
    effects: list[ev.Effect] = field(default_factory=list)
    changes: list[Callable[[], object]] = field(default_factory=list)


class HeldRequests:
    """The waiting requests of a RouterState, and when and how they are answered. Decides and reserves by what it is given.

    Requests that wait for the same are a line. A trial asks, in order, for those whose line something was freed for, until too
    many stay held; what it leaves, the next ones go on with, while others come before. So whoever waits for one instance waits
    behind those alone that wait for the same. When the fleet or the time has changed, all lines are gone through.

    `eased`: instances that have less to do since the lines that wait for them were tried; it empties it of these.
    """

    def __init__(
        self,
        settings: QueueSettings,
        retry_after_s: float,
        decide: Decide,
        commit: Commit,
        serve_there: ServeThere,
        has_room: HasRoom,
        saturated: Saturated,
        members: Members,
        answers: Answers,
        eased: set[str],
        without_holds: Callable[[], Policy | None],
        curve_samples: CurveSamples,
    ) -> None:
        self.queue = HoldQueue(settings)
        self._settings = settings
        self._retry_after_s = retry_after_s
        self.retry_after = RetryAfter(retry_after_s)
        self._decide = decide
        self._commit = commit
        self._serve_there = serve_there
        self._has_room = has_room
        self._saturated = saturated
        self._members = members
        self._answers = answers
        self._eased = eased
        self._without_holds = without_holds
        self._curve_samples = curve_samples
        self._fallback = Unified()
        # By pool. `_paid_until`: had it been tried just once in RETRY_S, the next trial would be then.
        self._tried_at: dict[str, float] = {}
        self._paid_until: dict[str, float] = {}
        self._tried_many_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._ends_due = inf
        # By pool. `_freed`: something was since the last trial, for all lines (True) or for those alone that wait for what was
        # eased, or for any instance. `_rest`: lines that trials are still to go on with.
        self._freed: dict[str, bool] = {}
        self._rest: dict[str, set[Line]] = {}

    @property
    def retry_at(self) -> float | None:
        """When `retry_due` is to be called, in s; None: never, as things are."""
        at = min(self._due.values(), default=inf)
        return min(at, self._ends_due) if min(at, self._ends_due) < inf else None

    def place(self, request: PlacementRequest, gateway_id: str, now: float, previous_id: str = "") -> list[ev.Effect]:
        """Answer a new request now, or hold it (no effects). `previous_id`: the decision on the part of its plan that is done,
        when the rest is to be placed. Mutates."""
        if (waiting := self.queue.get(request.request_id)) is not None:
            # Asked again, as after a broken call: whoever asked last gets the answer.
            self.queue.update(replace(waiting, gateway_id=gateway_id))
            return []
        verdict = self._decide(request, now, None)
        if isinstance(verdict, ev.Refused):
            return (
                self._serve_there(request, gateway_id, now)
                if previous_id
                else [replace(verdict, gateway_id=gateway_id)]
            )
        if not previous_id and (late := self.refused_as_late(request, verdict, gateway_id)) is not None:
            return [late]
        if isinstance(verdict, Decision) and previous_id:
            verdict = replace(verdict, previous_id=previous_id)
        placeable = isinstance(verdict, Decision) and bool(verdict.result.steps)
        if isinstance(verdict, Decision) and placeable and not self._has_to_queue(verdict):
            return self._commit(verdict, gateway_id, now)
        held = self._held(request, gateway_id, verdict, now, previous_id)
        effects: list[ev.Effect] = []
        if (displaced := self.queue.make_room(held)) is not None:
            why = "the queue is full and this request's class goes last"
            effects = self._end(displaced, now, "queue_full", why)
        why_not = self.queue.offer(held)
        if not why_not:
            return [*effects, *(self.retry((verdict.pool,), now) if placeable else [])]
        if isinstance(verdict, Decision) and placeable:
            return self._commit(verdict, gateway_id, now)
        return self._end(held, now, "queue_full", why_not)

    def retry(self, pools: Iterable[str], now: float) -> list[ev.Effect]:
        """Something freed in these pools: answer whom it allows, now or, where that was done just before, soon. Mutates."""
        return [effect for pool in pools for effect in self._retry(pool, now, now)]

    def retry_all(self, now: float) -> list[ev.Effect]:
        """The fleet has changed, which may have freed anything: the same for all that wait. Mutates."""
        return [effect for pool in self.queue.pools() for effect in self._retry(pool, now, now, everywhere=True)]

    def reported(self, pool: str, instance_id: str, now: float) -> list[ev.Effect]:
        """An instance of the pool told its load, which may have freed something. Mutates."""
        self._eased.add(instance_id)
        return self._retry(pool, now, self._tried_at.get(pool, -inf) + REPORT_RETRY_S)

    def retry_due(self, now: float) -> list[ev.Effect]:
        """Answer whom that allows which freed since pools were tried last, in those whose time has come, and go on with those
        whose time is over. Mutates."""
        due = [pool for pool, at in self._due.items() if at <= now]
        effects = [effect for pool in due for effect in self._serve(pool, now, TRIES)]
        return [*effects, *(self._end_expired(now) if self._ends_due <= now else ())]

    def tick(self, now: float) -> list[ev.Effect]:
        """Time has passed: answer whom that allows, and whose time is over. Mutates."""
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
        """Forget when pools were tried that may be tried again. Mutates."""
        self._tried_at = {pool: at for pool, at in self._tried_at.items() if now - at < REPORT_RETRY_S}
        self._paid_until = {pool: at for pool, at in self._paid_until.items() if at > now}
        self._tried_many_at = {pool: at for pool, at in self._tried_many_at.items() if now - at < TICK_RETRY_S}
        self.retry_after.expire(now)

    def cancel(self, request_id: str) -> None:
        """A request ended while it waited. Mutates."""
        self.queue.remove(request_id)

    def drop_gateway(self, gateway_id: str, keep: frozenset[str] = frozenset()) -> None:
        """A gateway's stream ended, or began anew: it asks again, for all but what it says to `keep`. A plan that had begun it
        ends by itself. Mutates."""
        for held in list(self.queue):
            if held.gateway_id == gateway_id and held.request.request_id not in keep:
                self.queue.remove(held.request.request_id)

    def drop_pool(self, pool: str, why: str) -> list[ev.Effect]:
        """Another router answers the pool's requests from now on: those that wait here are to ask there. Mutates."""
        effects: list[ev.Effect] = []
        for held in [held for held in self.queue if held.pool == pool]:
            self.queue.remove(held.request.request_id)
            effects.append(replace(not_serving(held.request.request_id, pool, why), gateway_id=held.gateway_id))
        return effects

    def refusal(
        self, request: PlacementRequest, pool: str, gateway_id: str, why: str, waited_s: float = 0.0
    ) -> ev.Refused:
        """What a request is told when there is no room for it, and it has waited so long."""
        retry_after_s = self.retry_after.seconds(pool, request.priority, waited_s)
        message = f"every instance of {pool!r} is at its limit ({why})"
        code = "RESOURCE_EXHAUSTED"
        return ev.Refused(request.request_id, code, message, retry_after_s, gateway_id, pool=pool)

    def refused_as_late(self, request: PlacementRequest, verdict: DecideResult, gateway_id: str) -> ev.Refused | None:
        """What a request is told that cannot have its first token in time, by what was decided on it now; None where it can, or
        needs it at no certain time."""
        if request.ttft_deadline_s is None or isinstance(verdict, ev.Refused):
            return None
        least_s = least_prefill_s(request, verdict.pool, verdict.view, self._curve_samples)
        why = lateness(request.ttft_deadline_s, least_s)
        return ev.Refused(request.request_id, "DEADLINE_EXCEEDED", why, gateway_id=gateway_id) if why else None

    def _has_to_queue(self, decision: Decision) -> bool:
        """Whether a request that could be placed goes behind those that wait: all do behind those that wait for room where they
        would go, and those to whom the policy gives a queue_penalty behind all."""
        pool = decision.pool
        if decision.result.queue_penalty_s is not None and self.queue.count(pool):
            return True
        waiting = self.queue.waiting_for_room(pool)
        return any(self._answers(step.instance_id, model) for step in decision.result.steps for model in waiting)

    def _held(
        self, request: PlacementRequest, gateway_id: str, verdict: Decision | AllSaturated, now: float, previous_id: str
    ) -> HeldRequest:
        since = now - request.age_s
        # The gateway's patience, and so ours, begins anew with each step.
        answer_by = (now if previous_id else since) + self._settings.timeout_s
        if (left := request.deadline_s) is not None:
            answer_by = min(answer_by, now + left - min(MARGIN_S, left / 2))
        # As numbers of 8 bytes, because many requests of 130k tokens may wait.
        request = replace(request, keys=array("Q", request.keys))
        held = HeldRequest(
            request, gateway_id, verdict.pool, since, answer_by, "", 0, for_room=True, previous_id=previous_id
        )
        if (needed := request.ttft_deadline_s) is not None and not previous_id:
            held = replace(held, first_token_by=now + needed)
        return self._judged(held, verdict)

    def _judged(self, held: HeldRequest, verdict: Decision | AllSaturated) -> HeldRequest:
        """`held` with what its last trial said."""
        least_s = 0.0
        if held.first_token_by < inf:
            least_s = least_prefill_s(held.request, verdict.pool, verdict.view, self._curve_samples)
        if isinstance(verdict, AllSaturated):
            new = min(one.new_tokens for one in verdict.view.candidates if one.excluded == SATURATED)
            start_by = held.first_token_by - least_s
            return replace(held, reason=SATURATED, new_tokens=new, for_room=True, start_by=start_by, waits_for="")
        result, new = verdict.result, min(one.new_tokens for one in verdict.view.eligible())
        answer_by = min(held.answer_by, held.since + result.max_hold_s) if result.max_hold_s else held.answer_by
        # A request that could be placed, and yet stands behind others, waits for room as they do.
        for_room = bool(result.steps)
        # What the policy alone holds is placed while there is time for all of its prefill, and for the next tick.
        mean_s = 0.0 if for_room else least_s / SURE_SHARE + MARGIN_S
        return replace(
            held,
            reason=result.reason,
            new_tokens=new,
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
        """Try the pool's requests, line by line, until `tries` of them stay held: those that something was freed for, and with
        half of the tries at the least what trials have left before. What is left then is due soon. Mutates."""
        self._tried_at[pool] = now
        self._paid_until[pool] = max(self._paid_until.get(pool, -inf), now) + RETRY_S
        self._due.pop(pool, None)
        lines = self.queue.lines(pool)
        rest, freed = self._rest.pop(pool, set()) & lines, self._freed.pop(pool, None)
        everywhere = freed is True and not rest
        first = {line for line in lines if everywhere or (line[1] in self._eased if line[1] else freed is not None)}
        self._eased.difference_update(instance_id for _, instance_id in first)
        trial = _Trial(max(tries, MOST_DECISIONS), tries - tries // 2 if rest else tries)
        left = self._try(pool, first, trial, now)
        if rest := rest - first | (left & rest) - trial.decided:
            trial.tries += tries // 2
            left = left - rest | self._try(pool, rest, trial, now)
        # The queue changes when all are tried: the order is of those that waited before.
        for change in trial.changes:
            change()
        if left:
            self._rest[pool] = left
            self._due[pool] = now + RETRY_S
        return trial.effects

    def _try(self, pool: str, lines: set[Line], trial: _Trial, now: float) -> set[Line]:
        """Try the requests of these lines in order as long as the trial may; returns the lines that are still to be tried."""
        if not lines:
            return set()
        full = self.queue.lines(pool) - lines
        stay_held: set[Line] = set()
        for held in self.queue.order(pool, full):
            request_id, line = held.request.request_id, held.line
            if not self._room(pool, line[0], trial, now):
                # Nor for those behind it that ask for the same; an adapter is loaded on some instances only.
                full.add(line)
                if not trial.lists:
                    return lines - full
                continue
            if not trial.tries:
                return lines - full - stay_held
            if not trial.decisions:
                return lines - full
            trial.decisions -= 1
            trial.decided.add(line)
            verdict = self._decide(_aged(held, now), now, None)
            if _elsewhere(verdict, held):
                trial.changes.append(partial(self.queue.remove, request_id))
                trial.effects += self._moved(held, now)
            elif (late := self._late(held, verdict, now)) is not None:
                trial.changes.append(partial(self.queue.remove, request_id))
                trial.effects.append(late)
            elif isinstance(verdict, Decision) and verdict.result.steps:
                trial.changes.append(partial(self.queue.answered, request_id, _computed(verdict)))
                trial.effects += self._commit(replace(verdict, previous_id=held.previous_id), held.gateway_id, now)
                trial.room.clear()
            else:
                trial.tries -= 1
                stay_held.add(line)
                if not isinstance(verdict, ev.Refused):
                    trial.changes.append(partial(self.queue.update, self._judged(held, verdict)))
        return set()

    def _room(self, pool: str, model: str, trial: _Trial, now: float) -> bool:
        key = id(self._members(pool, model))
        if key not in trial.room:
            trial.room[key] = self._has_room(pool, model, now)
            trial.lists -= not trial.room[key]
        return trial.room[key]

    def _end_expired(self, now: float) -> list[ev.Effect]:
        """Answer those whose time is over: as many as one turn may. Mutates."""
        effects: list[ev.Effect] = []
        decisions = TRIES
        saturated: dict[tuple[str, int], bool] = {}
        for held in self.queue.expired(now, ENDS_AT_ONCE):
            request, why = held.request, f"held for {now - held.since:.1f} s"
            line = held.pool, id(self._members(held.pool, request.model))
            if self._needs_no_view(held):
                if line not in saturated:
                    saturated[line] = self._saturated(held.pool, request.model, now)
                if saturated[line]:
                    self.queue.remove(request.request_id)
                    effects += self._refused(held, why, now)
                    continue
            if not decisions:
                break
            decisions -= 1
            if now < held.answer_by and self._is_in_time_after_all(held, now):
                continue
            self.queue.remove(request.request_id)
            effects += self._end(held, now, "hold_expired", why)
            saturated.clear()
        self._ends_due = now + ENDS_PAUSE_S if self.queue.expired(now, 1) else inf
        return effects

    def _needs_no_view(self, held: HeldRequest) -> bool:
        """Whether a request whose time is over is refused where all instances are saturated, whatever else they are."""
        return not self._is_placed_by_default(held) and held.first_token_by == inf and not held.request.exclude

    def _is_placed_by_default(self, held: HeldRequest) -> bool:
        """Whether its end is a placement by a policy that does not hold it."""
        return not held.for_room and self._settings.expiry == "place"

    def _refused(self, held: HeldRequest, why: str, now: float) -> list[ev.Effect]:
        if held.previous_id:
            return self._serve_there(held.request, held.gateway_id, now)
        waited_s = now - held.since
        if waited_s > 0:
            self.retry_after.waited(held.pool, held.request.priority, waited_s, now)
        return [self.refusal(held.request, held.pool, held.gateway_id, why, waited_s)]

    def _is_in_time_after_all(self, held: HeldRequest, now: float) -> bool:
        """Whether a request that waits for room would not be late yet: more of its prompt is cached than when it was last tried.
        Mutates."""
        verdict = self._decide(_aged(held, now), now, None)
        if not isinstance(verdict, AllSaturated) or _elsewhere(verdict, held):
            return False
        held = self._judged(held, verdict)
        if held.ends_at <= now:
            return False
        self.queue.update(held)
        return True

    def _late(self, held: HeldRequest, verdict: DecideResult, now: float) -> ev.Refused | None:
        if held.first_token_by == inf:
            return None
        request = replace(held.request, ttft_deadline_s=held.first_token_by - now)
        return self.refused_as_late(request, verdict, held.gateway_id)

    def _moved(self, held: HeldRequest, now: float) -> list[ev.Effect]:
        """The answer to a request whose name belongs to another pool than when it came, which another router may own."""
        if held.previous_id:
            return self._serve_there(held.request, held.gateway_id, now)
        why = f"{held.request.model!r} belongs to another model now"
        return [replace(not_serving(held.request.request_id, held.pool, why), gateway_id=held.gateway_id)]

    def _end(self, held: HeldRequest, now: float, note: str, why: str) -> list[ev.Effect]:
        """The answer to a request that may not wait (any longer)."""
        policy = (self._without_holds() or self._fallback) if self._is_placed_by_default(held) else None
        verdict = self._decide(_aged(held, now), now, policy)
        if _elsewhere(verdict, held):
            return self._moved(held, now)
        if (late := self._late(held, verdict, now)) is not None:
            return [late]
        if isinstance(verdict, Decision) and verdict.result.steps:
            noted = replace(verdict, notes=(*verdict.notes, note), previous_id=held.previous_id)
            return self._commit(noted, held.gateway_id, now)
        if isinstance(verdict, ev.Refused) and not held.previous_id:
            # The model was known when the request came, so its absence is a passing one.
            return [replace(verdict, code="UNAVAILABLE", retry_after_s=self._retry_after_s, gateway_id=held.gateway_id)]
        return self._refused(held, why, now)


def not_serving(request_id: str, pool: str, why: str) -> ev.Refused:
    """The answer to a request that is to be sent again: nothing is wrong with it but the moment, or the router it asked."""
    return ev.Refused(request_id, "UNAVAILABLE", why, NOT_SERVING_RETRY_S, not_serving=True, pool=pool)


def _elsewhere(verdict: DecideResult, held: HeldRequest) -> bool:
    return not isinstance(verdict, ev.Refused) and verdict.pool != held.pool


def _aged(held: HeldRequest, now: float) -> PlacementRequest:
    return replace(held.request, age_s=now - held.since)


def _computed(decision: Decision) -> int:
    """The tokens that the first step of a decision adds to compute."""
    steps = decision.result.steps
    first = decision.view.find(steps[0].instance_id)
    assert first is not None
    if steps[-1].kind is StepKind.PREFILL:
        return max(steps[-1].prefix_tokens - first.cached_tokens, 0)
    return first.new_tokens
