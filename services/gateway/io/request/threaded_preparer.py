"""Prepares calls for their runs: tokenises their prompts, in a thread where that takes long, and counts the time it takes."""

from __future__ import annotations

import asyncio
import time
from array import array

import structlog

from pointsman.gateway.core.request.prepare import IncomingCall, RequestPreparer, Tokens
from pointsman.gateway.core.request.request_context import RequestContext
from pointsman.gateway.core.tokens.chat_template import Unrenderable
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.core.tokens.token_cache import TokenCache
from pointsman.gateway.io.telemetry.metrics import GatewayMetrics

log = structlog.get_logger()


class ThreadedPreparer:
    """Prepares calls, and counts how long their prompts took and which of them have no keys."""

    def __init__(self, telemetry: GatewayMetrics, token_cache: TokenCache) -> None:
        self._telemetry = telemetry
        self._preparer = RequestPreparer(token_cache)

    async def prepare(self, incoming: IncomingCall, *, dry: bool) -> RequestContext:
        """Tokens, keys and session of a call. Raises ApiRequestError when the prompt is too long. A dry run remembers nothing."""
        tokens, tokenizer = Tokens(None, array("Q")), incoming.tokenizer
        if tokenizer is not None:
            try:
                tokens = await self._tokens(incoming, tokenizer)
            except Unrenderable as reason:
                log.debug("placed without keys", request_id=incoming.request_id, reason=str(reason))
        if not tokens.keys and incoming.call.endpoint.generates:
            self._telemetry.keyless.labels(incoming.state.pool.model).inc()
        return self._preparer.context(incoming, tokens, time.monotonic(), dry=dry)

    async def _tokens(self, incoming: IncomingCall, tokenizer: ModelTokenizer) -> Tokens:
        """The (first) prompt and its keys. Raises Unrenderable and ApiRequestError."""
        with self._telemetry.tokenize.time():
            prompt = await tokenizer.prepare(incoming.call).tokenize_by(asyncio.to_thread)
            return self._preparer.tokens(incoming, prompt)
