"""Completes the context of a parsed request: tokens, block keys, session, and the placement request for the router."""

from __future__ import annotations

import re
import sys
from array import array
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.session_names import session_name
from pointsman_gateway.core.api import ApiCall, estimated_tokens
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.api.prompt_length import check_output, check_tokens
from pointsman_gateway.core.forwarded_headers import upstream_headers
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.request.agent_headers import SESSION_HEADER, AgentIdentity, agent_identity, header_id
from pointsman_gateway.core.request.gen_ai_attributes import request_attributes
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.sessions import Sessions, bounded_id
from pointsman_gateway.core.request.transfer_params import supports_inline_kv_transfer, transfer_obstacle
from pointsman_gateway.core.tenants import DEFAULT_TENANT
from pointsman_gateway.core.tokens.model_tokenizer import Prompt
from pointsman_gateway.core.tokens.token_cache import BlockKeys, TokenCache

MAX_TRACEPARENT = 128
# Header for the time within which a client needs the first token, s. It orders the held requests of the client's own tenant, and
# the request is refused once the time cannot be met.
TTFT_TIMEOUT_HEADER = "X-Pointsman-TTFT-Timeout"
MAX_TTFT_TIMEOUT_S = 3_600.0
# Header by which a client names a request the last one of its session: "1".
SESSION_END_HEADER = "X-Pointsman-Session-End"
# Header for the session that started the request's session and waits for it.
PARENT_HEADER = "X-Pointsman-Parent-Session"
_DECIMAL = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_MAX_TOKENS = (1 << 32) - 1  # that a field of the router's protocol holds
_KEYS_FIELD = placement_pb2.PlacementRequest.KEYS_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt's tokens and block keys; None and no keys if the tokens are only estimated. `count`: number of tokens of all
    prompts of the request, exact or estimated. `computed`: number of tokens that an engine with an empty cache computes."""

    prompt: Prompt | None
    keys: BlockKeys
    count: int
    computed: int


class RequestPreparer:
    """Completes the contexts of requests; keeps sessions, and the block keys of token runs. The caller tokenises the prompt
    before (ModelTokenizer.prepare), in a thread if that takes long. `agent_headers`: whether sessions are also known by the
    headers of agents' programs."""

    def __init__(self, token_cache: TokenCache, *, agent_headers: bool = True) -> None:
        self._token_cache = token_cache
        self._agent_headers = agent_headers
        self._sessions = Sessions()

    def tokens(self, context: RequestContext, prompt: Prompt) -> Tokens:
        """Return the tokens and block keys of a tokenised prompt. Raises ContextExceeded. Mutates `context`: its call's values
        are read for the last time."""
        call, pool = context.call, context.state.pool
        check_tokens(call.endpoint, max(prompt.lengths), pool.max_model_len)
        check_output(call.endpoint, call.max_output_tokens, pool.max_model_len, sum(prompt.lengths))
        keys: BlockKeys = array("Q")
        if call.reads_prefix_cache:
            keys = self._token_cache.keys(prompt.ids, pool.model, context.lora, call.cache_salt)
        count = max(estimated_tokens(call), len(prompt.ids)) if prompt.media else sum(prompt.lengths)
        _read(context)
        return Tokens(prompt, keys, count, _computed(call, count, prompt.common))

    def estimate(self, context: RequestContext) -> Tokens:
        """Return estimated tokens for a prompt whose tokens only the engine can compute. Mutates as tokens() does."""
        call = context.call
        count = estimated_tokens(call)
        _read(context)
        return Tokens(None, array("Q"), count, _computed(call, count, 0))

    def prepare(self, context: RequestContext, tokens: Tokens, now: float, *, dry: bool) -> None:
        """Complete a request's context by its tokens. Raises ApiRequestError. Mutates `context` and, except in a dry run (`dry`),
        the sessions."""
        call, client, headers = context.call, context.client, context.headers
        prompt, keys, request_id, tenant = tokens.prompt, tokens.keys, context.request_id, client.tenant
        agent = agent_identity(headers) if self._agent_headers else AgentIdentity()
        # Codex gives the requests of all agents of a run one prompt_cache_key.
        hint = header_id(headers, SESSION_HEADER) or call.session_id or agent.session or call.prompt_cache_key
        chain = keys if prompt is None else _chain(keys, prompt)
        if not call.endpoint.generates:
            session = ""
        elif dry:
            session = bounded_id(hint) if hint else (self._sessions.find(tenant, chain) or "")
        else:
            session = self._sessions.resolve(tenant, chain, hint=hint, fresh=f"s-{request_id}")
        if context.trace is not None:
            if context.trace.context.sampled and hint:
                context.asked["gen_ai.conversation.id"] = bounded_id(hint)
            context.trace.prepared(request_id, context.asked, now)
        traceparent = headers.get("traceparent")
        placement = context.placement = placement_pb2.PlacementRequest(
            request_id=request_id,
            model=call.model,
            tenant=tenant,
            session_id=session,
            input_tokens=tokens.computed,
            # A pooling request decodes nothing; 0 would mean that the number of output tokens is open.
            max_output_tokens=call.max_output_tokens if call.endpoint.generates else 1,
            # With media the tokens of the text are not all.
            longest_prompt_tokens=0 if prompt is None or prompt.media else max(prompt.lengths),
            exclude=_elsewhere(context),
            traceparent=traceparent if len(traceparent) <= MAX_TRACEPARENT else "",
            priority=client.priority,
            weight=client.weight,
            continues_session=bool(call.previous_response_id) or context.answers_model,
            parkable=True,
        )
        context.prompt_tokens = tokens.count
        if call.sequences > 1:
            placement.sequences, placement.sequence_tokens = call.sequences, tokens.count * call.answers
        if parent := headers.get(PARENT_HEADER):
            placement.parent_session_id = bounded_id(parent)
        lineage = agent if session and hint == agent.session else AgentIdentity()
        if lineage.agent:
            placement.agent_id = bounded_id(lineage.agent)
        if lineage.parent:
            placement.agent_parent_session_id = bounded_id(lineage.parent)
        timeout_s = ttft_timeout_s(headers)
        if timeout_s is not None:
            left = max(context.received_at + timeout_s - now, 0.0)
            placement.ttft_deadline.FromNanoseconds(int(left * 1e9))
            context.first_token_by = context.received_at + timeout_s
        set_keys(placement, keys)
        sent = context.upstream_headers = upstream_headers(headers)
        sent["X-Request-ID"] = context.client_id
        if session:
            # The default tenant's sessions keep their own names, unless these would read as another tenant's.
            own = tenant == DEFAULT_TENANT and "/" not in session
            sent[SESSION_HEADER] = bounded_id(session if own else session_name(tenant, session))
        # Of several prompts only the first has keys. A request that does not read the prefix cache gains nothing from a PREFILL.
        ids = prompt.ids if prompt is not None and len(prompt.lengths) == 1 and call.reads_prefix_cache else None
        context.ids = ids
        context.exact_tokens = 0 if ids is None or (prompt is not None and prompt.media) else len(ids)
        placement.sliceable_tokens = 0 if ids is None else len(ids)
        steady = prompt is not None and prompt.steady
        if not context.transfer_obstacle and not steady:
            context.transfer_obstacle = "another instance may see other tokens"
        placement.single_instance = bool(context.transfer_obstacle)
        ends = ends_session(headers) if SESSION_END_HEADER in headers else agent.final
        context.ends_session = bool(session) and ends


def _read(context: RequestContext) -> None:
    """Note in `context` what is needed of its call's values, and release them. Mutates. It takes some 10 ms to release many."""
    call = context.call
    context.transfer_obstacle = transfer_obstacle(call)
    context.inline_kv_transfer = supports_inline_kv_transfer(call)
    context.answers_model = _answers_model(call)
    if context.trace is not None and context.trace.context.sampled:
        context.asked = request_attributes(call)
    call.drop_values()


def _computed(call: ApiCall, count: int, common: int) -> int:
    """Return the number of tokens that an engine with an empty cache computes for prompts of `count` tokens in total, the first
    `common` of which they all have.

    vLLM runs each answer to each prompt as a request of its own. The blocks that one of them computes are in the prefix cache
    from the step in which it is scheduled, so the others do not compute them.
    """
    if call.reads_prefix_cache:
        return count - (call.prompts - 1) * (common - common % KEY_TOKENS)
    return min(count * call.answers, _MAX_TOKENS)


def _answers_model(call: ApiCall) -> bool:
    """Return whether the prompt has a tool's result after the model's last message."""
    messages = (call.chat or {}).get("messages")
    if not isinstance(messages, list):
        return False
    for message in reversed(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("tool", "function"):
            return True
        if role == "assistant":
            return False
    return False


def ttft_timeout_s(headers: Headers) -> float | None:
    """Return the seconds, from its request, within which a client needs the first token; None if it set no limit.

    Raises ApiRequestError for an invalid value.
    """
    if TTFT_TIMEOUT_HEADER not in headers:
        return None
    given = headers.get(TTFT_TIMEOUT_HEADER)
    # Stricter than float(): no inf, nan, 1e9 or 1_0.
    seconds = float(given) if _DECIMAL.fullmatch(given) else 0.0
    if not 0.0 < seconds <= MAX_TTFT_TIMEOUT_S:
        message = f"{TTFT_TIMEOUT_HEADER} must be a number of seconds over 0 and up to {MAX_TTFT_TIMEOUT_S:,.0f}, such as 2.5."
        raise ApiRequestError(400, message, param=TTFT_TIMEOUT_HEADER, code="invalid_ttft_timeout")
    return seconds


def ends_session(headers: Headers) -> bool:
    """Return whether the client has named its request the last one of its session. Raises ApiRequestError for a value other than
    0 and 1."""
    given = headers.get(SESSION_END_HEADER, "0")
    if given not in ("0", "1"):
        message = f"{SESSION_END_HEADER} must be 1, or 0 as without the header."
        raise ApiRequestError(400, message, param=SESSION_END_HEADER, code="invalid_session_end")
    return given == "1"


def set_keys(request: placement_pb2.PlacementRequest, keys: array[int]) -> None:
    """Set the block keys (of type "Q") of `request`, which has none. Mutates `request`.

    The keys are merged as encoded bytes: adding them one by one takes 40 us per thousand.
    """
    if not keys:
        return
    if sys.byteorder != "little":
        keys = keys[:]
        keys.byteswap()
    packed, size = keys.tobytes(), len(keys) * keys.itemsize
    head = bytearray([_KEYS_FIELD << 3 | 2])  # a field of bytes, and its length as a varint
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    request.MergeFromString(bytes(head) + packed)


def _elsewhere(context: RequestContext) -> list[str]:
    """Return all instances except the one that stores the response which the request continues; empty if it continues none.
    Also those that get no requests now: the router may try one of them."""
    if context.continues is None:
        return []
    here, pool = context.continues.instance.instance_id, context.state.pool
    known = (instance.instance_id for instances in (pool.instances, pool.other_instances) for instance in instances)
    return [instance_id for instance_id in known if instance_id != here]


def _chain(keys: BlockKeys, prompt: Prompt) -> BlockKeys:
    """Return the keys that identify the session: the block keys, and a hash of the prompt's first media part."""
    return array("Q", [*keys, xxh3_64_intdigest(prompt.media)]) if prompt.media else keys
