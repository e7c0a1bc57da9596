"""Where one request goes: its steps as the router gives them, or, without a router, the instance with the least in flight."""

from __future__ import annotations

import time

import structlog
from google.protobuf import duration_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from services.gateway.job import Job, Tools
from services.gateway.kv_transfer import MOONCAKE, NIXL
from services.gateway.moves import (
    UNAVAILABLE,
    Ask,
    AskLocally,
    AwaitNext,
    Event,
    Refused,
    RouterLost,
    StepGiven,
    StepOver,
    Target,
)
from services.gateway.router_client import RouterAway, Step

log = structlog.get_logger()

RETRY_S = 1.0
_PROTOCOLS = {agent_pb2.KV_PROTOCOL_MOONCAKE: MOONCAKE, agent_pb2.KV_PROTOCOL_NIXL: NIXL}


class Placing:
    """Asks for the steps of one request's attempts, each under an id of its own."""

    def __init__(self, tools: Tools, job: Job) -> None:
        self._tools = tools
        self._job = job
        self._requests: dict[str, placement_pb2.PlacementRequest] = {}

    async def ask(self, ask: Ask) -> Event:
        """An attempt's first step."""
        if ask.exclude:
            self._tools.telemetry.retries.inc()
        began = time.monotonic()
        try:
            request = self._request_for(ask.attempt_id, ask.exclude)
            step = await self._tools.router.first_step(request, self._tools.limits.place_s)
        except RouterAway:
            return RouterLost(ask.attempt_id)
        self._tools.telemetry.place.observe(time.monotonic() - began)
        return self._understood(ask.attempt_id, step)

    async def await_next(self, effect: AwaitNext) -> Event:
        """The step after one that is over."""
        try:
            step = await self._tools.router.next_step(
                effect.attempt_id, effect.index, effect.error, effect.instance_failed
            )
        except RouterAway:
            return RouterLost(effect.attempt_id)
        return self._understood(effect.attempt_id, step)

    async def ask_locally(self, ask: AskLocally) -> Event:
        """A step of our own."""
        request = self._request_for(ask.attempt_id, ask.exclude)
        instances = {one.instance_id: one for one in self._job.state.pool.instances}
        self._tools.turn += 1
        chosen = least_inflight(
            sorted(instances), self._tools.router.inflight(), tuple(request.exclude), self._tools.turn
        )
        if chosen is None:
            return Refused(ask.attempt_id, UNAVAILABLE, "No instance is ready for this model.", RETRY_S)
        self._tools.telemetry.local.inc()
        log.debug("placed without a router", request_id=request.request_id, instance=chosen)
        return StepGiven(ask.attempt_id, target_of(instances[chosen]), degraded=True)

    def step_over(self, effect: StepOver) -> None:
        """A step is over, and the one after it under way."""
        self._tools.router.step_over(effect.attempt_id, effect.index)

    def note(self, step: StepGiven) -> None:
        """The step is being done: from now on the request counts where it runs."""
        self._tools.router.placed(self._requests[step.attempt_id], step.target.instance_id, step.cached_tokens)

    def _request_for(self, attempt_id: str, exclude: tuple[str, ...]) -> placement_pb2.PlacementRequest:
        request = placement_pb2.PlacementRequest()
        request.CopyFrom(self._job.placement)
        request.request_id = attempt_id
        request.exclude.extend(exclude)
        if self._job.traced is not None:
            request.traceparent = self._job.traced.question(attempt_id).traceparent
        self._requests[attempt_id] = request
        return request

    def _understood(self, attempt_id: str, step: Step) -> Event:
        if isinstance(step, placement_pb2.Refusal):
            self._tools.telemetry.refusals.labels(str(step.code)).inc()
            wait = _seconds(step.retry_after) if step.HasField("retry_after") else None
            return Refused(attempt_id, step.code, step.message, wait)
        given = step.step
        prefill = given.prefix_tokens if given.kind == placement_pb2.STEP_KIND_PREFILL else 0
        return StepGiven(
            attempt_id,
            target_of(given.instance),
            given.index,
            prefill,
            _seconds(given.deadline),
            step.decision_id,
            step.cached_tokens,
            step.degraded,
            target_of(given.kv_target) if given.HasField("kv_target") else None,
            target_of(given.kv_source) if given.HasField("kv_source") else None,
        )


def _seconds(wire: duration_pb2.Duration) -> float:
    # Without the detour over a timedelta, which takes ten times as long.
    return wire.seconds + wire.nanos / 1e9


def target_of(instance: placement_pb2.InstanceRef) -> Target:
    """Where to send for `instance`."""
    rank = instance.data_parallel_rank if instance.HasField("data_parallel_rank") else None
    kv = instance.kv_transfer
    return Target(
        instance.instance_id,
        instance.url,
        rank,
        instance.incarnation,
        _PROTOCOLS.get(kv.protocol, ""),
        kv.bootstrap_url,
        kv.decode_first,
        kv.role != agent_pb2.KV_ROLE_PRODUCER,
    )


def least_inflight(ids: list[str], inflight: dict[str, int], exclude: tuple[str, ...], turn: int) -> str | None:
    """The instance with the fewest open requests, the `turn`-th of them where several are equal; None when all are excluded."""
    ready = [one for one in ids if one not in exclude]
    if not ready:
        return None
    least = min(inflight.get(one, 0) for one in ready)
    best = [one for one in ready if inflight.get(one, 0) == least]
    return best[turn % len(best)]
