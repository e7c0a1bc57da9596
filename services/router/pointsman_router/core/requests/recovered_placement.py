"""Builds the decision for a request that an earlier owner of its pool placed. Pure."""

from __future__ import annotations

from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import (
    Decision,
    FleetView,
    PlacementRequest,
    PolicyRef,
    PolicyResult,
    Step,
    StepKind,
    route_class,
)

REASON = "recovered"


def recovered_decision(
    reservation: Reservation, request: PlacementRequest, policy: PolicyRef, steps_done: int
) -> Decision:
    """Return a decision that places `request` on the instance of `reservation` by one SERVE, since the rest of the plan was lost
    with the earlier owner. `steps_done`: number of steps that have ended; all that is known of them is that they were PREFILLs.

    The decision keeps the id of the first decision, whose view and scores are only in the log of the earlier owner.
    """
    done = (Step(StepKind.PREFILL, reservation.instance_id, REASON),) * steps_done
    step = Step(StepKind.SERVE, reservation.instance_id, REASON)
    return Decision(
        decision_id=reservation.decision_id,
        request=request,
        pool=reservation.pool,
        view=FleetView(()),
        policy=policy,
        result=PolicyResult((*done, step), REASON),
        route_class=route_class(reservation.new_tokens, request.input_tokens),
        mode="COLOCATED",
        cached_tokens=max(request.input_tokens - reservation.new_tokens, 0),
        runner_up="",
        margin=None,
        key_count=len(request.keys),
    )
