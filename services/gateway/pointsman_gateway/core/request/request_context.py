"""The context of one request, from its parsed body to its end: what to send to instances, and what to place it by."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity, Use, compatible, merged
from pointsman_common.core.tracing import Value
from pointsman_gateway.core.api import ApiCall, Endpoint, with_fields
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.pool_state import PoolState
from pointsman_gateway.core.rate_limits import KeyCharge
from pointsman_gateway.core.request.request_events import StepAssigned, Target
from pointsman_gateway.core.request_trace import RequestTrace
from pointsman_gateway.core.stored_responses import StoredResponse, response_id
from pointsman_gateway.core.tenants import Client
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenIds


@dataclass(slots=True)
class RequestContext:
    """One request. The first fields are known once its body is parsed; `prepare.py` sets the second ones from its tokens."""

    request_id: str  # the gateway's own (Request.id)
    client_id: str  # the id for the client and the engine (Request.client_id)
    call: ApiCall  # loses its body when it is prepared, and its payload when the answer begins
    state: PoolState  # of the model's pool
    lora: str  # the adapter's name; empty: none
    client: Client  # of the request's API key; ANYONE if clients need no key
    headers: Headers  # of the client's request
    key_charge: KeyCharge  # the share of the key's limits that the request takes
    received_at: float  # when the whole body had come, monotonic s
    trace: RequestTrace | None = None  # None: traces are off
    continues: StoredResponse | None = None  # the stored response that the request continues

    # What each attempt places a copy of, under its own id and with its exclusions.
    placement: placement_pb2.PlacementRequest = field(default_factory=placement_pb2.PlacementRequest)
    prompt_tokens: int = 0  # of all prompts, as the engine's usage counts them
    transfer_obstacle: str = ""  # why prefill and answer must be on one instance; empty if they need not be
    inline_kv_transfer: bool = False  # whether the client's own request can carry KV transfer parameters
    answers_model: bool = False  # whether the prompt has a tool's result after the model's last message
    asked: dict[str, Value] = field(default_factory=dict)  # attributes of the request's span
    ids: TokenIds | None = None  # of the prompt, up to its first media part; None if only estimated
    exact_tokens: int = 0  # tokens of the whole prompt; 0 if only estimated
    upstream_headers: dict[str, str] = field(default_factory=dict)  # fields that engines get
    first_token_by: float | None = None  # monotonic s by which the client needs the first token; None: no limit
    ends_session: bool = False  # the client has named the request the last one of its session

    kept_payload: bytes = b""  # the body, while its answer is streamed and may be continued elsewhere
    response_id: str = ""  # of a Responses response, which it keeps if its answer is continued elsewhere
    answered_by: EngineIdentity = UNKNOWN_IDENTITY  # what is known of the engines that have begun the answer
    # Whether the tokens of the engine that began the answer equal the gateway's; None if it is not known.
    answered_exactly: bool | None = None
    rest: TokenIds | None = None  # the prompt's tokens after the last whole block; None if only estimated

    @property
    def tokenizer(self) -> ModelTokenizer | None:
        """The tokenizer for the call's prompt; None if its tokens cannot be computed exactly."""
        return self.state.tokenizer_for(self.call.endpoint) if self.call.endpoint.generates else None

    def answer_begun(self, target: Target) -> None:
        """Note the engine that has begun the answer, or goes on with it. Mutates."""
        self.answered_by = merged(self.answered_by, target.identity)
        if self.answered_exactly is None:
            self.answered_exactly = self.state.tokens_equal(target.url, target.incarnation)

    def may_go_on(self, target: Target) -> bool:
        """Return whether nothing is known that keeps an engine from going on with the answer that others have begun."""
        exactly = self.state.tokens_equal(target.url, target.incarnation)
        return compatible(self.answered_by, target.identity, Use.ANSWER) and (
            None in (exactly, self.answered_exactly) or exactly is self.answered_exactly
        )

    def drop_prompt(self, *, keep: bool) -> None:
        """Release what only sending needs, once an answer has begun. `keep`: the answer may be continued elsewhere, for which
        the body is kept. Mutates."""
        if keep:
            self.kept_payload = self.call.payload
            if self.exact_tokens and self.ids is not None:
                self.rest = self.ids[len(self.placement.keys) * KEY_TOKENS :]
        self.call.drop_prompt()
        self.ids = None

    def headers_of(self, step: StepAssigned) -> dict[str, str]:
        """Return the headers to send with a step. Each step has its own span context in the request's trace."""
        if self.trace is None:
            return self.upstream_headers
        return self.upstream_headers | {"traceparent": self.trace.step_context(step.attempt_id, step.index).traceparent}

    def payload_at(self, target: Target) -> bytes:
        """Return the body to send to an instance. The id of a Responses response contains the instance that stores it, so the
        body depends on the placement. The rest of an answer that another one has begun is not stored: by its id nobody would
        find it there."""
        payload = self.kept_payload or self.call.payload
        if self.call.endpoint is not Endpoint.RESPONSES:
            return payload
        if self.kept_payload:
            said = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])  # perhaps with the client's own `store`
            return msgspec.json.encode(said | {"request_id": self.response_id, "store": False})
        self.response_id = response_id(target.instance_id, target.incarnation, self.placement.tenant, self.request_id)
        return with_fields(payload, {"request_id": self.response_id})
