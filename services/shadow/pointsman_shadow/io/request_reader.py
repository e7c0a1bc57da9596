"""Reads requests with the gateway's own parsing, templates, tokenizers, keys and sessions, without sending anything."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping

import structlog

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiRequestError, ClientRules, Endpoint, parse
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.pool_state import PoolState, TokenizerStatus
from pointsman_gateway.core.rate_limits import KeyCharge
from pointsman_gateway.core.request.prepare import RequestPreparer, Tokens
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.tokenizer_files import HubRules, find_tokenizer, load_tokenizer
from pointsman_shadow.core.pending_requests import ArrivedRequest

log = structlog.get_logger()

# Maximum size of the token cache, bytes.
TOKEN_CACHE_BYTES = 128 << 20


class UnusableRequest(Exception):
    """A request cannot be compared. `reason` is a short fixed text, for a metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestReader:
    """Reads requests for the models that were added to it."""

    def __init__(self, tokenizers: Mapping[str, str], aliases: Mapping[str, str]) -> None:
        """Load `tokenizers` (path or hub id by model). Raises TokenizerNotFound."""
        self._cache = TokenCache(TOKEN_CACHE_BYTES)
        self._preparer = RequestPreparer(self._cache)
        # An engine uses a client's own cache salt. Only a Pointsman gateway removes it.
        self._rules = ClientRules(aliases, client_cache_salt=True)
        # By name: the model's state, and the LoRA adapter if the name is one.
        self._known: dict[str, tuple[PoolState, str]] = {}
        for model, source in tokenizers.items():
            self.add_model(model, source)

    def add_model(self, model: str, source: str) -> None:
        """Add a model, and load its tokenizer. Raises TokenizerNotFound. Mutates."""
        folder = find_tokenizer(source, HubRules(other_revision=True))
        self._add(model, load_tokenizer(folder, self._cache))

    def add_model_without_tokenizer(self, model: str, why: str) -> None:
        """Add a model whose requests have no keys. Mutates."""
        log.warning("no tokenizer of a model: its requests share no prefixes", model=model, reason=why)
        self._add(model, None)

    def _add(self, model: str, tokenizer: ModelTokenizer | None) -> None:
        exactness = TokenizerStatus.INEXACT if tokenizer is None else TokenizerStatus.EXACT
        self._known[model] = (PoolState(placement_pb2.Pool(model=model), tokenizer, "", exactness), "")

    def add_names(self, model: str, served_names: tuple[str, ...], lora_names: tuple[str, ...]) -> None:
        """Add other names of a model that was added, and its adapters. Known names stay as they are. Mutates."""
        state, _ = self._known[model]
        for name in lora_names:
            self._known.setdefault(name, (state, name))
        for name in served_names:
            self._known.setdefault(name, (state, ""))

    def has_model(self, model: str) -> bool:
        """Return whether requests for `model` can be read."""
        return model in self._known

    async def read(
        self, path: str, headers: Headers, body: bytes, at: float
    ) -> tuple[ArrivedRequest, placement_pb2.PlacementRequest]:
        """Read a request that arrived `at` (unix s). Return it with the placement request that a gateway would send. Raises
        UnusableRequest."""
        try:
            endpoint = Endpoint(path)
        except ValueError:
            raise UnusableRequest("path", f"{path} is not an endpoint of an engine") from None
        if not endpoint.generates:
            raise UnusableRequest("path", f"{path} does not use the prefix cache")
        try:
            call = parse(endpoint, body, self._rules)
        except ApiRequestError as error:
            raise UnusableRequest("invalid", str(error)) from None
        found = self._known.get(call.model)
        if found is None:
            raise UnusableRequest("model", f"unknown model {call.model!r}")
        state, lora = found
        now = time.monotonic()
        request_id = secrets.token_hex(16)
        context = RequestContext(request_id, request_id, call, state, lora, ANYONE, headers, KeyCharge(), now)
        try:
            self._preparer.prepare(context, await self._tokens(context), now, dry=False)
        except ApiRequestError as error:
            raise UnusableRequest("invalid", str(error)) from None
        placement = context.placement
        asked = ArrivedRequest(
            request_id=headers.get("X-Request-ID") or request_id,
            at=at,
            model=state.pool.model,
            session=placement.session_id,
            input_tokens=placement.input_tokens,
            keys=tuple(placement.keys),
            max_output_tokens=placement.max_output_tokens,
        )
        return asked, placement

    async def _tokens(self, context: RequestContext) -> Tokens:
        """Return the prompt's tokens and keys, or an estimate of the number of tokens. Raises ApiRequestError."""
        tokenizer = context.tokenizer
        if tokenizer is not None:
            try:
                prompt = await tokenizer.prepare(context.call).tokenize_by(asyncio.to_thread)
                return self._preparer.tokens(context, prompt)
            except Unrenderable as reason:
                log.debug("a request without keys", reason=str(reason))
        return self._preparer.estimate(context)
