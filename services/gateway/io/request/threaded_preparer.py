"""Parses calls and prepares them for their runs: at once, or in threads where that takes long; counts the time it takes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog

from pointsman.gateway.core.api import ApiCall, ClientRules, Endpoint, parse
from pointsman.gateway.core.api.decode_body import is_light
from pointsman.gateway.core.request.prepare import IncomingCall, RequestPreparer, Tokens
from pointsman.gateway.core.request.request_context import RequestContext
from pointsman.gateway.core.tokens.chat_template import Unrenderable
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.core.tokens.token_cache import TokenCache
from pointsman.gateway.io.telemetry.metrics import GatewayMetrics

log = structlog.get_logger()

_Made = TypeVar("_Made")


class ThreadedPreparer:
    """Prepares calls, and counts how long their prompts took and which of them have no keys.

    Large bodies are parsed and rendered in one thread of their own, one after the other: Python runs in one thread at a time, and
    each more that wants to takes another share from the event loop. Tokenising lets the interpreter go, so that it may use many.
    """

    def __init__(self, telemetry: GatewayMetrics, token_cache: TokenCache) -> None:
        self._telemetry = telemetry
        self._preparer = RequestPreparer(token_cache)
        self._large_bodies = _Threads(1, "large-bodies")
        self._tokenizing = _Threads(max(2, os.cpu_count() or 1), "tokenizing")

    def close(self) -> None:
        """Begin nothing more that waits for a thread."""
        self._large_bodies.close()
        self._tokenizing.close()

    async def parse(
        self, endpoint: Endpoint, raw: bytes, rules: ClientRules, context_of: Callable[[str], int]
    ) -> ApiCall:
        """As api.parse(). `context_of` may be called in another thread."""
        light = is_light(raw)
        return await self._done(light, partial(parse, endpoint, raw, rules, context_of, light=light))

    async def prepare(self, incoming: IncomingCall, *, dry: bool) -> RequestContext:
        """Tokens, keys and session of a call. Raises ApiRequestError when the prompt is too long. A dry run remembers nothing."""
        tokens, tokenizer, call = None, incoming.tokenizer, incoming.call
        if tokenizer is not None:
            try:
                tokens = await self._tokens(incoming, tokenizer)
            except Unrenderable as reason:
                log.debug("placed without keys", request_id=incoming.request_id, reason=str(reason))
        if tokens is None:
            tokens = await self._done(call.light, partial(self._preparer.estimate, call))
        if not tokens.keys and call.endpoint.generates:
            self._telemetry.placed_without_keys(incoming.state.pool.model)
        return self._preparer.context(incoming, tokens, time.monotonic(), dry=dry)

    async def _tokens(self, incoming: IncomingCall, tokenizer: ModelTokenizer) -> Tokens:
        """The (first) prompt and its keys. Raises Unrenderable and ApiRequestError."""
        light, context = incoming.call.light, incoming.state.pool.max_model_len
        with self._telemetry.tokenize.time():
            pending = await self._done(light, partial(tokenizer.prepare, incoming.call, context))
            prompt = await pending.tokenize_by(self._tokenizing.run)
            return await self._done(light, partial(self._preparer.tokens, incoming, prompt))

    async def _done(self, light: bool, work: Callable[[], _Made]) -> _Made:
        """What `work` on a body makes."""
        if light:
            return work()
        return await self._large_bodies.run(work)


class _Threads:
    """So many threads, and who waits for one of them: an executor keeps the work, and the body, of a client that has left."""

    def __init__(self, count: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._free = asyncio.Semaphore(count)

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], _Made]) -> _Made:
        """What `work` makes in a thread. Who is cancelled while it runs leaves the thread taken until it has ended."""
        await self._free.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)
