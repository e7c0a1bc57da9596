"""What one request's run is given: the request as it is understood, and what all requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.router.v1 import placement_pb2
from services.gateway.breakdown import BreakdownLog
from services.gateway.dialects import Call, Kind, with_fields
from services.gateway.dialects.responses import response_id
from services.gateway.limits import Grant
from services.gateway.moves import Limits, StepGiven
from services.gateway.offload import Bootstraps, Releases
from services.gateway.pools import Pools, PoolState
from services.gateway.router_client import RouterClient
from services.gateway.telemetry import Telemetry
from services.gateway.token_cache import Ids
from services.gateway.upstream import Upstream

if TYPE_CHECKING:
    from services.gateway.traces import Traced


@dataclass
class Tools:
    """What every request works with."""

    router: RouterClient
    upstream: Upstream
    bootstraps: Bootstraps
    releases: Releases
    pools: Pools
    telemetry: Telemetry
    limits: Limits
    whole_limits: Limits  # of answers that are not streamed
    breakdown: BreakdownLog
    tell_placement: bool
    turn: int = 0  # round-robin among equals for placements of our own


@dataclass
class Job:
    """One request, understood: what to send and what to place it by. `received` is monotonic seconds."""

    request_id: str
    call: Call
    state: PoolState
    placement: placement_pb2.PlacementRequest
    ids: Ids | None  # of the prompt, as far as its first image; None where they are only estimated
    known_tokens: int  # of the whole prompt; 0 where they are only estimated
    up_headers: dict[str, str]
    received: float
    grant: Grant
    traced: Traced | None

    def forget_prompt(self) -> None:
        """Let go of what only sending needs: nothing is sent any more once an answer has begun. Mutates."""
        self.call.forget_prompt()
        self.ids = None

    def headers_of(self, step: StepGiven) -> dict[str, str]:
        """What to send with a step: each goes on from a place of its own in the request's trace."""
        if self.traced is None:
            return self.up_headers
        return self.up_headers | {"traceparent": self.traced.step(step.attempt_id, step.index).traceparent}

    def payload_at(self, instance_id: str) -> bytes:
        """What to send to an instance. A response's id says where it is stored, so that is known only now."""
        if self.call.kind is not Kind.RESPONSES:
            return self.call.payload
        id_ = response_id(instance_id, self.placement.tenant, self.request_id)
        return with_fields(self.call.payload, {"request_id": id_})
