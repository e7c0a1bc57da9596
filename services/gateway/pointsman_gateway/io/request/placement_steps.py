"""Gets the placement of one request: each step from the router, or, without a router, from the gateway's own load counts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import structlog

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.request.continuation import continued_placement, copy_of
from pointsman_gateway.core.request.local_placement import place_locally
from pointsman_gateway.core.request.placement_messages import event_of, target_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import (
    AskNextStep,
    AskRouter,
    Event,
    PlaceLocally,
    ReportStepDone,
    RouterLost,
    StepAssigned,
)
from pointsman_gateway.core.tokens.token_cache import TokenIds
from pointsman_gateway.io.request.shared_context import SharedContext
from pointsman_gateway.io.routing.router_client import NoRouter, PlacementReply

log = structlog.get_logger()


class PlacementSteps:
    """Gets the steps of one request's attempts. Each attempt has its own id."""

    def __init__(self, shared: SharedContext, context: RequestContext) -> None:
        self._shared = shared
        self._context = context
        self._requests: dict[str, placement_pb2.PlacementRequest] = {}
        self.answer: TokenIds = array("I")  # the answer so far, which the next attempt continues

    async def ask_router(self, effect: AskRouter, on_parked: Callable[[float], None]) -> Event:
        """Ask the router for an attempt's first step. `on_parked` is called with the maximum further wait, s, if the router parks
        the request."""
        if effect.exclude:
            self._shared.telemetry.retries.inc()
        began = time.monotonic()
        try:
            request = self._request_for(effect.attempt_id, effect.exclude)
            # The client of a continued answer has had its first token.
            first_token_by = None if self.answer else self._context.first_token_by
            step = await self._shared.router.first_step(
                request, self._shared.timeouts.placement_s, first_token_by, on_parked
            )
        except NoRouter:
            return RouterLost(effect.attempt_id)
        self._shared.telemetry.place.observe(time.monotonic() - began)
        return self._to_event(effect.attempt_id, step)

    async def ask_next_step(self, effect: AskNextStep) -> Event:
        """Report the end of a step and wait for the next one."""
        try:
            step = await self._shared.router.next_step(
                effect.attempt_id,
                effect.index,
                effect.error,
                effect.instance_failed,
                self._shared.timeouts.placement_s,
            )
        except NoRouter:
            return RouterLost(effect.attempt_id)
        return self._to_event(effect.attempt_id, step)

    async def place_locally(self, effect: PlaceLocally) -> Event:
        """Choose an instance in the gateway, without a router."""
        request = self._request_for(effect.attempt_id, effect.exclude)
        instances = {one.instance_id: one for one in self._context.state.pool.instances}
        self._shared.round_robin += 1
        placed = place_locally(
            effect.attempt_id,
            instances,
            lambda chosen: target_of(instances[chosen]),
            self._shared.router.inflight(),
            tuple(request.exclude),
            self._shared.round_robin,
        )
        if isinstance(placed, StepAssigned):
            self._shared.telemetry.local.inc()
            log.debug("placed without a router", request_id=request.request_id, instance=placed.target.instance_id)
        return placed

    def adopt(self, step: StepAssigned) -> None:
        """Make an attempt of a step that was not asked for: its instance has answered."""
        self._request_for(step.attempt_id, ())

    def report_step_done(self, effect: ReportStepDone) -> None:
        """Report the end of a step whose next step has already been sent."""
        self._shared.router.step_done(effect.attempt_id, effect.index)

    def record_step(self, step: StepAssigned) -> None:
        """Record the start of a step: from now on the request counts as open on the step's instance."""
        self._shared.router.placed(self._requests[step.attempt_id], step.target.instance_id, step.cached_tokens)

    def _request_for(self, attempt_id: str, exclude: tuple[str, ...]) -> placement_pb2.PlacementRequest:
        request = continued_placement(self._context, self.answer) if self.answer else copy_of(self._context.placement)
        request.request_id = attempt_id
        request.exclude.extend(exclude)
        if self.answer:
            # A server that is gone has taken all of its ranks with it.
            instances = self._context.state.pool.instances
            gone = {one.url for one in instances if one.instance_id in exclude}
            ranks = (one.instance_id for one in instances if one.url in gone)
            request.exclude.extend(one for one in ranks if one not in exclude)
        if self._context.trace is not None:
            request.traceparent = self._context.trace.placement_context(attempt_id).traceparent
        self._requests[attempt_id] = request
        return request

    def _to_event(self, attempt_id: str, step: PlacementReply) -> Event:
        if isinstance(step, placement_pb2.Refusal):
            self._shared.telemetry.refused(step.code)
        return event_of(attempt_id, step)
