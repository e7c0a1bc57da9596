"""From a parsed call to a job: its tokens and keys, its session, and what the router is asked."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array

import structlog
from xxhash import xxh3_64_intdigest

from pointsman.router.v1 import placement_pb2
from services.gateway.aside import not_stored
from services.gateway.auth import DEFAULT_TENANT
from services.gateway.chat_template import Unrenderable
from services.gateway.dialects import Call, DialectError, Kind, estimated_tokens
from services.gateway.dialects.responses import stored_at
from services.gateway.http.message import Request
from services.gateway.job import Job
from services.gateway.limits import Grant
from services.gateway.pools import PoolState
from services.gateway.router_client import set_keys
from services.gateway.sessions import Sessions, bounded_id
from services.gateway.telemetry import Telemetry
from services.gateway.token_cache import Keys, TokenCache
from services.gateway.tokens import INLINE_CHARS, ModelTokenizer, Prompt
from services.gateway.upstream import FORWARD_UP

log = structlog.get_logger()

MAX_TRACEPARENT = 128
_PROMPT_FIELDS = {Kind.COMPLETION: "prompt", Kind.RESPONSES: "input", Kind.CHAT: "messages", Kind.MESSAGES: "messages"}


class Understanding:
    """Turns calls into jobs; remembers sessions, and texts whose tokens are known."""

    def __init__(self, telemetry: Telemetry, token_cache: TokenCache) -> None:
        self._telemetry = telemetry
        self._token_cache = token_cache
        self._sessions = Sessions()

    async def job(
        self,
        request: Request,
        call: Call,
        state: PoolState,
        lora: str,
        tenant: str,
        grant: Grant,
        received: float,
        *,
        dry: bool,
    ) -> Job:
        """Tokens, keys and session of a call. Raises DialectError when the prompt is too long. A dry run remembers nothing."""
        request_id = secrets.token_hex(16)
        tokenizer = state.usable(call.kind) if call.kind.generates else None
        prompt: Prompt | None = None
        keys: Keys = array("Q")
        count = 0
        if tokenizer is not None:
            try:
                prompt, keys = await self._tokens(call, tokenizer, state.pool.model, lora)
                count = max(estimated_tokens(call), len(prompt.ids)) if prompt.media else len(prompt.ids)
                _check_length(call, prompt.longest, state.pool.max_model_len)
            except Unrenderable as reason:
                log.debug("placed without keys", request_id=request_id, reason=str(reason))
        if prompt is None:
            count = estimated_tokens(call)
        if not keys and call.kind.generates:
            self._telemetry.keyless.labels(state.pool.model).inc()
        hint = request.headers.get("X-Session-ID") or call.session_hint
        chain = keys if prompt is None else _chain(keys, prompt)
        if not call.kind.generates:
            session = ""
        elif dry:
            session = bounded_id(hint) if hint else (self._sessions.find(tenant, chain) or "")
        else:
            session = self._sessions.resolve(tenant, chain, hint=hint, fresh=f"s-{request_id}")
        if request.traced is not None:
            request.traced.understood(request_id, time.monotonic())
        traceparent = request.headers.get("traceparent")
        placement = placement_pb2.PlacementRequest(
            request_id=request_id,
            model=call.model,
            tenant=tenant,
            session_id=session,
            input_tokens=count,
            # Who only embeds or scores decodes nothing; 0 would mean an open end.
            max_output_tokens=call.max_output_tokens if call.kind.generates else 1,
            exclude=_elsewhere(call, state, tenant),
            traceparent=traceparent if len(traceparent) <= MAX_TRACEPARENT else "",
        )
        set_keys(placement, keys)
        headers = {name: request.headers[name] for name in FORWARD_UP if name in request.headers}
        headers["X-Request-ID"] = bounded_id(request.headers.get("X-Request-ID", "") or request_id)
        if session:
            headers["X-Session-ID"] = bounded_id(session if tenant == DEFAULT_TENANT else f"{tenant}/{session}")
        several = (
            call.kind is Kind.COMPLETION
            and isinstance(call.body.get("prompt"), list)
            and not isinstance(call.body["prompt"][0], int)
            and len(call.body["prompt"]) > 1
        )
        # Of several prompts only the first was counted; what no cache is read for needs no PREFILL.
        ids = prompt.ids if prompt is not None and not several and call.reads_cache else None
        placement.sliceable_tokens = 0 if ids is None else len(ids)
        return Job(
            request_id=request_id,
            call=call,
            state=state,
            placement=placement,
            ids=ids,
            known_tokens=0 if ids is None or (prompt is not None and prompt.media) else len(ids),
            up_headers=headers,
            received=received,
            grant=grant,
            traced=request.traced,
        )

    async def _tokens(self, call: Call, tokenizer: ModelTokenizer, model: str, lora: str) -> tuple[Prompt, Keys]:
        """The (first) prompt and its keys. Raises Unrenderable."""
        with self._telemetry.tokenize.time():
            unread = tokenizer.begin(call)
            prompt = unread.read() if unread.missing <= INLINE_CHARS else await asyncio.to_thread(unread.read)
            if not call.reads_cache:
                return prompt, array("Q")
            return prompt, self._token_cache.keys(prompt.ids, model, lora, call.cache_salt)


def _elsewhere(call: Call, state: PoolState, tenant: str) -> list[str]:
    """Every instance but the one that stores the response which `call` continues. Raises DialectError when none does."""
    if not call.previous:
        return []
    ids = [one.instance_id for one in state.pool.instances]
    here = stored_at(call.previous, tenant, ids)
    if here is None:
        raise not_stored(call.previous)
    return [one for one in ids if one != here]


def _chain(keys: Keys, prompt: Prompt) -> Keys:
    """What a session is known by: the keys, and the first of the media behind them."""
    return array("Q", [*keys, xxh3_64_intdigest(prompt.media)]) if prompt.media else keys


def _check_length(call: Call, longest: int, limit: int) -> None:
    if limit and (longest >= limit or longest + call.max_output_tokens > limit):
        asked = f" and {call.max_output_tokens} of output" if call.max_output_tokens else ""
        raise DialectError(
            400,
            f"The model's context is {limit} tokens, but the request needs {longest} of input{asked}.",
            param=_PROMPT_FIELDS[call.kind],
            code="context_length_exceeded",
        )
