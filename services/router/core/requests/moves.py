"""Chooses which requests leave the instances that operators empty (`drain --move`), at a pace that the others can take. Pure.

Another instance has to compute the prompt and the answer so far, unless it has a part of them cached. So no more requests are
under way to other instances than these have no other prefill to compute for, but always one. Until it leaves, a request makes
progress where it is. Times are in s.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances.instance_registry import InstanceRegistry
from pointsman.router.core.load.reservations import Reservation, Reservations
from pointsman.router.core.requests.decider import AllSaturated, Decider
from pointsman.router.core.requests.open_requests import OpenRequests
from pointsman.router.core.types import Decision, InstanceState, Phase, PlacementRequest, StepKind

# How long a request counts as under way after its gateway was told, and after what time it is told again if it is still there.
LEAVES_WITHIN_S = 2.0
TELL_AGAIN_S = 15.0
# Minimum time between two looks at an instance's requests: each costs a microsecond, and every report of a gateway asks.
LOOK_EVERY_S = 0.05


class Moves:
    """The requests that were told to leave, and when."""

    def __init__(
        self,
        instances: InstanceRegistry,
        requests: OpenRequests,
        reservations: Reservations,
        decider: Decider,
    ) -> None:
        self._instances = instances
        self._requests = requests
        self._reservations = reservations
        self._decider = decider
        self._told: dict[str, float] = {}
        self._looked_at = -inf

    def next(self, now: float) -> list[ev.Effect]:
        """Return which requests leave now; none if the last call was less than LOOK_EVERY_S ago. Mutates."""
        moving = self._instances.moving()
        if not moving or now - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at = now
        sources: dict[str, list[Reservation]] = {}
        for record in moving:
            here = self._reservations.of_instance(record.info.instance_id)
            sources.setdefault(record.info.model, []).extend(here)
        there = {one.request_id for reservations in sources.values() for one in reservations}
        self._told = {request_id: at for request_id, at in self._told.items() if request_id in there}
        return [effect for pool, here in sources.items() for effect in self._of_pool(pool, here, now)]

    def _of_pool(self, pool: str, here: list[Reservation], now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        leaving = sum(now - self._told.get(one.request_id, -inf) < LEAVES_WITHIN_S for one in here)
        room = self._room(pool) - leaving
        # What costs least first: so the number of streams falls fastest, and the costly ones may end by themselves.
        for one in sorted(here, key=lambda one: (_cost(one), one.request_id)) if room > 0 else ():
            if now - self._told.get(one.request_id, -inf) < TELL_AGAIN_S or (asked := self._asked(one)) is None:
                continue
            verdict = self._decider.decide(asked, now)
            if isinstance(verdict, AllSaturated):
                break  # It would have to wait, while it makes progress where it is.
            if not isinstance(verdict, Decision):
                self._told[one.request_id] = now - LEAVES_WITHIN_S  # Asked again later: no other instance may have it.
                continue
            self._told[one.request_id] = now
            effects.append(ev.Move(one.request_id, one.gateway_id))
            if len(effects) >= room:
                break
        return effects

    def _asked(self, one: Reservation) -> PlacementRequest | None:
        """Return as what a request would be placed if it left its instance; None if it cannot leave."""
        state = self._requests.placed(one.request_id)
        if not one.gateway_id or state is None or state.decision is None or not state.decision.request.movable:
            return None
        if (plan := state.plan) is not None and plan.result.steps[one.step_index].kind is not StepKind.SERVE:
            return None
        asked = state.decision.request
        return replace(asked, keys=state.keys, exclude=(*asked.exclude, one.instance_id))

    def _room(self, pool: str) -> int:
        """Return how many more requests may be under way to the pool's other instances."""
        others = [one for one in self._instances.members(pool, pool) if one.state is InstanceState.READY]
        if not others:
            return 0
        free = sum(not self._reservations.prefills(one.info.instance_id) for one in others)
        return free or 1 - sum(self._arriving(one.info.instance_id) for one in others)

    def _arriving(self, instance_id: str) -> int:
        """Return how many continued answers an instance is computing the beginning of."""
        states = (self._requests.placed(one.request_id) for one in self._reservations.open_prefills(instance_id))
        return sum(one is not None and one.decision is not None and one.decision.request.resumed for one in states)


def _cost(reservation: Reservation) -> int:
    """Return how many tokens are computed a second time if a request leaves its instance."""
    if reservation.phase is Phase.DECODE:
        return reservation.input_tokens
    return reservation.prefilled_tokens
