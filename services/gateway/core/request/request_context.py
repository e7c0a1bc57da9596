"""The context of one request, once it is parsed and tokenised: what to send, and what to place it by."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman.gateway.core.api import ApiCall, Endpoint, with_fields
from pointsman.gateway.core.api.openai_responses import response_id
from pointsman.gateway.core.pool_state import PoolState
from pointsman.gateway.core.rate_limits import Admission
from pointsman.gateway.core.request.request_events import StepAssigned
from pointsman.gateway.core.request_trace import RequestTrace
from pointsman.gateway.core.tokens.token_cache import TokenIds
from pointsman.router.v1 import placement_pb2


@dataclass
class RequestContext:
    """One request: what to send and what to place it by. Monotonic seconds: `received_at`, and `first_token_by`, when its client
    needs the first token (None: it does not say)."""

    request_id: str
    call: ApiCall
    state: PoolState
    placement: placement_pb2.PlacementRequest
    transfer_obstacle: str  # why no other instance may prefill for the one that answers; empty where one may
    ids: TokenIds | None  # of the prompt, as far as its first image; None where they are only estimated
    exact_tokens: int  # of the whole prompt; 0 where they are only estimated
    upstream_headers: dict[str, str]
    received_at: float
    admission: Admission
    trace: RequestTrace | None
    first_token_by: float | None = None

    def drop_prompt(self) -> None:
        """Let go of what only sending needs: nothing is sent any more once an answer has begun. Mutates."""
        self.call.drop_prompt()
        self.ids = None

    def headers_of(self, step: StepAssigned) -> dict[str, str]:
        """What to send with a step: each goes on from a place of its own in the request's trace."""
        if self.trace is None:
            return self.upstream_headers
        return self.upstream_headers | {"traceparent": self.trace.step_context(step.attempt_id, step.index).traceparent}

    def payload_at(self, instance_id: str) -> bytes:
        """What to send to an instance. A response's id says where it is stored, so that is known only now."""
        if self.call.endpoint is not Endpoint.RESPONSES:
            return self.call.payload
        id_ = response_id(instance_id, self.placement.tenant, self.request_id)
        return with_fields(self.call.payload, {"request_id": id_})
