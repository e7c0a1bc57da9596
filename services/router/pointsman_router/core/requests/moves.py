"""Chooses which requests leave the instances that operators empty (`drain --move`), or whose engine is silent (engine_life.py),
at a pace that the others can take. Pure.

Another instance has to compute the prompt and the answer so far, unless it has a part of them cached. So no more requests are
under way to other instances than these have no other prefill to compute for, but always one. Until it leaves, a request makes
progress where it is. Times are in s.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import Decision, InstanceState, Phase, PlacementRequest, StepKind
from pointsman_router.core.requests.decider import AllSaturated, Decider
from pointsman_router.core.requests.request_table import RequestTable

# How long a request counts as under way after its gateway was told, and after what time it is told again if it is still there.
LEAVES_WITHIN_S = 2.0
TELL_AGAIN_S = 15.0
# Minimum time between two looks at an instance's requests, also after one that found none to leave. Each request costs a
# microsecond, a decision 150, and every report of a first token asks for a look.
LOOK_EVERY_S, LOOK_IN_VAIN_S = 0.05, 0.4
MOST_DECISIONS = 32


class _Notice(NamedTuple):
    """When a request was told to leave, or could not be, how often, and whether its answer had begun."""

    at: float
    times: int
    begun: bool

    def again(self, at: float) -> _Notice:
        return self._replace(at=at, times=self.times + 1)


_NO_NOTICE = _Notice(-inf, 0, begun=False)


class RequestMoves:
    """The requests that were told to leave, and when."""

    def __init__(
        self,
        instances: InstanceRegistry,
        requests: RequestTable,
        reservations: Reservations,
        decider: Decider,
    ) -> None:
        self._instances = instances
        self._requests = requests
        self._reservations = reservations
        self._decider = decider
        self._notices: dict[str, _Notice] = {}
        self._look_at = -inf

    def next(self, now: float) -> list[ev.Effect]:
        """Return which requests leave now; none if it is too early for another look. Mutates."""
        moving = self._instances.moving()
        if not moving:
            self._notices.clear()
            return []
        if now < self._look_at:
            return []
        sources: dict[str, list[Reservation]] = {}
        for record in moving:
            # The request on trial shows whether a silent engine has recovered.
            here = [
                reserved
                for reserved in self._reservations.of_instance(record.info.instance_id)
                if reserved.request_id != record.life.trial
            ]
            sources.setdefault(record.info.model, []).extend(here)
        there = {reservation.request_id for reservations in sources.values() for reservation in reservations}
        self._notices = {request_id: notice for request_id, notice in self._notices.items() if request_id in there}
        effects = [effect for pool, here in sources.items() for effect in self._of_pool(pool, here, now)]
        self._look_at = now + (LOOK_EVERY_S if effects else LOOK_IN_VAIN_S)
        return effects

    def _of_pool(self, pool: str, here: list[Reservation], now: float) -> list[ev.Effect]:
        leaving = sum(now - self._notice_of(reservation).at < LEAVES_WITHIN_S for reservation in here)
        room = min(self._room(pool) - leaving, MOST_DECISIONS)
        if room <= 0 or self._requests.room.held.count(pool):
            return []  # A request that leaves would have to wait, while it makes progress where it is.
        due = [reservation for reservation in here if now - self._notice_of(reservation).at >= TELL_AGAIN_S]
        effects: list[ev.Effect] = []
        targets: set[str] = set()
        for reservation in heapq.nsmallest(MOST_DECISIONS, due, key=self._order):
            notice = self._notice_of(reservation)
            if (asked := self._asked(reservation)) is None:
                self._notices[reservation.request_id] = notice.again(now - LEAVES_WITHIN_S)
                continue
            # The decisions of a look do not see each other: each has an instance of its own.
            verdict = self._decider.decide(replace(asked, exclude=(*asked.exclude, *targets)), now)
            if isinstance(verdict, AllSaturated) or (targets and not isinstance(verdict, Decision)):
                break
            if not isinstance(verdict, Decision):  # No other instance may have it.
                self._notices[reservation.request_id] = notice.again(now - LEAVES_WITHIN_S)
                continue
            if not verdict.result.steps:  # The policy would hold it.
                continue
            target = self._instances.get(verdict.instance_id)
            if target is None or target.life.opened:
                continue  # It would be no better off there.
            targets.add(verdict.instance_id)
            self._notices[reservation.request_id] = notice.again(now)
            silent = not self._instances.empties(reservation.instance_id)
            unbegun = not notice.begun
            effects.append(ev.Move(reservation.request_id, reservation.gateway_id, silent=silent, unbegun=unbegun))
            if len(effects) >= room:
                break
        return effects

    def _notice_of(self, reservation: Reservation) -> _Notice:
        """Return the notice of a request. One from before its answer began counts as none: what it may leave for has changed."""
        notice = self._notices.get(reservation.request_id, _NO_NOTICE)
        begun = reservation.phase is Phase.DECODE
        return notice if notice.begun is begun else _NO_NOTICE._replace(times=notice.times, begun=begun)

    def _order(self, reservation: Reservation) -> tuple[int, int, str]:
        """Requests that were told in vain come last. Then what costs least comes first: so the number of streams falls fastest,
        and the costly ones may end by themselves."""
        return self._notice_of(reservation).times, _cost(reservation), reservation.request_id

    def _asked(self, reservation: Reservation) -> PlacementRequest | None:
        """Return as what a request would be placed if it left its instance; None if it cannot leave."""
        state = self._requests.placed(reservation.request_id)
        if not reservation.gateway_id or state is None or (asked := state.request) is None or not asked.movable:
            return None
        if (plan := state.plan) is not None and plan.result.steps[reservation.step_index].kind is not StepKind.SERVE:
            return None
        begun = reservation.phase is Phase.DECODE
        here = self._instances.get(reservation.instance_id)
        return replace(
            asked,
            keys=state.keys,
            exclude=(*asked.exclude, reservation.instance_id),
            single_instance=asked.single_instance or begun,
            sliceable_tokens=0 if begun else asked.sliceable_tokens,
            continues=asked.continues or begun,
            resumed=asked.resumed or begun,
            begun_by=here.info.identity if begun and here is not None else asked.begun_by,
        )

    def _room(self, pool: str) -> int:
        """Return how many more requests may be under way to the pool's other instances."""
        others = [record for record in self._instances.members(pool, pool) if record.state is InstanceState.READY]
        if not others:
            return 0
        free = sum(not self._reservations.prefills(record.info.instance_id) for record in others)
        return free or 1 - sum(self._arriving(record.info.instance_id) for record in others)

    def _arriving(self, instance_id: str) -> int:
        """Return how many continued answers an instance is computing the beginning of."""
        states = (
            self._requests.placed(reservation.request_id)
            for reservation in self._reservations.open_prefills(instance_id)
        )
        asked = (state.request for state in states if state is not None)
        return sum(request is not None and request.resumed for request in asked)


def _cost(reservation: Reservation) -> int:
    """Return how many tokens are computed a second time if a request leaves its instance."""
    if reservation.phase is Phase.DECODE:
        return reservation.input_tokens
    return reservation.prefilled_tokens
