"""Requests that cannot be placed yet, or should not be: held, tried again when something frees, answered in time. Pure.

A hold reserves nothing. It ends by a placement, by a refusal, by the request's end, or with its gateway's stream; after the last
the gateway asks again, with the request's age.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from math import inf

import msgspec
from msgspec.structs import replace

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances.saturation import SATURATED
from pointsman.router.core.policy.base import Policy
from pointsman.router.core.policy.unified import Unified
from pointsman.router.core.requests.hold_queue import HeldRequest, HoldQueue, QueueSettings
from pointsman.router.core.types import Decision, FleetView, PlacementRequest

# Requests tried again whenever something frees, and whenever time passes: a decision costs up to 150 us.
TRIES, TRIES_ON_TICK = 8, 64
# Load reports, of which each engine sends many a second, have a pool tried again no sooner than so long after the last time.
REPORT_RETRY_S = 0.05
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
# (instance, model): whether the instance answers to the model.
Answers = Callable[[str, str], bool]


class HeldRequests:
    """The waiting requests of a RouterState, and when and how they are answered. Decides and reserves by what it is given."""

    def __init__(
        self,
        settings: QueueSettings,
        retry_after_s: float,
        decide: Decide,
        commit: Commit,
        serve_there: ServeThere,
        has_room: HasRoom,
        answers: Answers,
        without_holds: Callable[[], Policy | None],
    ) -> None:
        self.queue = HoldQueue(settings)
        self._settings = settings
        self._retry_after_s = retry_after_s
        self._decide = decide
        self._commit = commit
        self._serve_there = serve_there
        self._has_room = has_room
        self._answers = answers
        self._without_holds = without_holds
        self._fallback = Unified()
        self._tried_at: dict[str, float] = {}

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
        if isinstance(verdict, Decision) and previous_id:
            verdict = replace(verdict, previous_id=previous_id)
        placeable = isinstance(verdict, Decision) and bool(verdict.result.steps)
        if isinstance(verdict, Decision) and placeable and not self._has_to_queue(verdict):
            return self._commit(verdict, gateway_id, now)
        held = self._held(request, gateway_id, verdict, now, previous_id)
        why_not = self.queue.offer(held)
        if not why_not:
            return self._serve(verdict.pool, now, TRIES) if placeable else []
        if isinstance(verdict, Decision) and placeable:
            return self._commit(verdict, gateway_id, now)
        return self._end(held, now, "queue_full", why_not)

    def retry(self, pools: Iterable[str], now: float) -> list[ev.Effect]:
        """Something freed in these pools: answer whom it allows. Mutates."""
        return [effect for pool in pools for effect in self._serve(pool, now, TRIES)]

    def reported(self, pool: str, now: float) -> list[ev.Effect]:
        """An instance of the pool told its load, which may have freed something. Mutates."""
        if now - self._tried_at.get(pool, -inf) < REPORT_RETRY_S:
            return []
        return self._serve(pool, now, TRIES)

    def tick(self, now: float) -> list[ev.Effect]:
        """Time has passed: answer whom that allows, and whose time is over. Mutates."""
        self._tried_at = {pool: at for pool in self.queue.pools() if (at := self._tried_at.get(pool)) is not None}
        effects = [effect for pool in self.queue.pools() for effect in self._serve(pool, now, TRIES_ON_TICK)]
        for held in self.queue.expired(now):
            self.queue.remove(held.request.request_id)
            effects += self._end(held, now, "hold_expired", f"held for {now - held.since:.1f} s")
        return effects

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

    def refusal(self, request: PlacementRequest, pool: str, gateway_id: str, why: str) -> ev.Refused:
        """What a request is told when there is no room for it."""
        message = f"every instance of {pool!r} is at its limit ({why})"
        return ev.Refused(request.request_id, "RESOURCE_EXHAUSTED", message, self._retry_after_s, gateway_id)

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
        return _judged(held, verdict)

    def _serve(self, pool: str, now: float, tries: int) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        full: set[str] = set()
        self._tried_at[pool] = now
        for held in self.queue.order(pool, now):
            model = held.request.model
            if model in full:
                continue
            if not self._has_room(pool, model, now):
                # Nor for those behind it that ask for the same; an adapter is loaded on some instances only.
                full.add(model)
                continue
            if not tries:
                break
            tries -= 1
            verdict = self._decide(_aged(held, now), now, None)
            if _elsewhere(verdict, held):
                self.queue.remove(held.request.request_id)
                effects += self._moved(held, now)
            elif isinstance(verdict, Decision) and verdict.result.steps:
                self.queue.answered(held.request.request_id)
                effects += self._commit(replace(verdict, previous_id=held.previous_id), held.gateway_id, now)
            elif not isinstance(verdict, ev.Refused):
                self.queue.update(_judged(held, verdict))
        return effects

    def _moved(self, held: HeldRequest, now: float) -> list[ev.Effect]:
        """The answer to a request whose name belongs to another pool than when it came, which another router may own."""
        if held.previous_id:
            return self._serve_there(held.request, held.gateway_id, now)
        why = f"{held.request.model!r} belongs to another model now"
        return [replace(not_serving(held.request.request_id, held.pool, why), gateway_id=held.gateway_id)]

    def _end(self, held: HeldRequest, now: float, note: str, why: str) -> list[ev.Effect]:
        """The answer to a request that may not wait (any longer)."""
        by_default = not held.for_room and self._settings.expiry == "place"
        verdict = self._decide(_aged(held, now), now, (self._without_holds() or self._fallback) if by_default else None)
        if _elsewhere(verdict, held):
            return self._moved(held, now)
        if isinstance(verdict, Decision) and verdict.result.steps:
            noted = replace(verdict, notes=(*verdict.notes, note), previous_id=held.previous_id)
            return self._commit(noted, held.gateway_id, now)
        if held.previous_id:
            return self._serve_there(held.request, held.gateway_id, now)
        if isinstance(verdict, ev.Refused):
            # The model was known when the request came, so its absence is a passing one.
            return [replace(verdict, code="UNAVAILABLE", retry_after_s=self._retry_after_s, gateway_id=held.gateway_id)]
        return [self.refusal(held.request, held.pool, held.gateway_id, why)]


def not_serving(request_id: str, pool: str, why: str) -> ev.Refused:
    """The answer to a request that is to be sent again: nothing is wrong with it but the moment, or the router it asked."""
    return ev.Refused(request_id, "UNAVAILABLE", why, NOT_SERVING_RETRY_S, not_serving=True, pool=pool)


def _elsewhere(verdict: DecideResult, held: HeldRequest) -> bool:
    return not isinstance(verdict, ev.Refused) and verdict.pool != held.pool


def _aged(held: HeldRequest, now: float) -> PlacementRequest:
    return replace(held.request, age_s=now - held.since)


def _judged(held: HeldRequest, verdict: Decision | AllSaturated) -> HeldRequest:
    """`held` with what its last trial said."""
    if isinstance(verdict, AllSaturated):
        new = min(one.new_tokens for one in verdict.view.candidates if one.excluded == SATURATED)
        return replace(held, reason=SATURATED, new_tokens=new, for_room=True)
    result, new = verdict.result, min(one.new_tokens for one in verdict.view.eligible())
    answer_by = min(held.answer_by, held.since + result.max_hold_s) if result.max_hold_s else held.answer_by
    queue_penalty_s = result.queue_penalty_s
    # A request that could be placed, and yet stands behind others, waits for room as they do.
    return replace(
        held,
        reason=result.reason,
        new_tokens=new,
        for_room=bool(result.steps),
        answer_by=answer_by,
        queue_penalty_s=queue_penalty_s,
    )
