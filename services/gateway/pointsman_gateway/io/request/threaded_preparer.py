"""Parses and prepares calls: small ones in the event loop, large ones in threads. Measures the time of prompts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import structlog

from pointsman_gateway.core.api import ApiCall, ClientRules, Endpoint, parse
from pointsman_gateway.core.api.decode_body import Decoded
from pointsman_gateway.core.pauses import set_pause
from pointsman_gateway.core.request.prepare import RequestPreparer, Tokens
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.tenants import Client
from pointsman_gateway.core.tokens.encoders import LARGE_PIECE_CHARS
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer, PendingPrompt
from pointsman_gateway.core.tokens.render_budget import OverBudget, Unrenderable
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.request.fair_turns import FairTurns
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics

log = structlog.get_logger()

_Made = TypeVar("_Made")
# A body of more bytes waits for a turn of the event loop in which at most TURN_BYTES of such bodies are prepared, or it alone.
# TURN_BYTES take some 6 ms.
COUNTED_BYTES, TURN_BYTES = 32 << 10, 1 << 19
# A thread that has worked for WORK_S lets the event loop have the interpreter. If that took longer than GIVEN_S the loop had
# work, and the thread leaves it alone for REST_S more. Otherwise the two would have the interpreter in turns of SWITCH_S
# (io/main.py), and each of the loop's turns would take twice as long.
WORK_S, GIVEN_S, REST_S = 0.0005, 0.0002, 0.001


class ThreadedPreparer:
    """Prepares calls, measures the time of their prompts, and counts prompts without block keys.

    Large bodies are parsed and rendered in a single thread, one after the other. Python runs one thread at a time, and each
    further thread would take another share of the event loop's time. So is a light body whose prompt exceeds the limits of the
    event loop (`render_budget`). Tokenising releases the interpreter, so it uses several threads. Texts in large pieces, which
    take much memory, are tokenised one after the other. Clients take turns at each of these (`FairTurns`).

    A large body's values and its prompt may take many times its bytes. So there are only as many at once as there are threads
    that tokenise: the caller decodes a body by decode_light(), and takes one of the `large_turns` if it is not light, from before
    it is parsed until it is prepared."""

    def __init__(self, telemetry: GatewayMetrics, token_cache: TokenCache, *, agent_headers: bool = True) -> None:
        self._telemetry = telemetry
        self._preparer = RequestPreparer(token_cache, agent_headers=agent_headers)
        self._large_bodies = _Threads(1, "large-bodies")
        tokenizing = max(2, os.cpu_count() or 1)
        self._tokenizing = _Threads(tokenizing, "tokenizing")
        self.large_turns = FairTurns(tokenizing)  # at the memory for large bodies
        self._large_pieces = _Threads(1, "large-pieces")
        self._turn_bytes = 0  # of bodies of more than COUNTED_BYTES in this turn of the event loop

    def close(self) -> None:
        """Cancel work that waits for a thread."""
        self._large_bodies.close()
        self._tokenizing.close()
        self._large_pieces.close()

    async def loop_turn(self, size: int) -> None:
        """Wait for a turn of the event loop in which there is room for a body of `size` bytes, more than COUNTED_BYTES. Several
        that have arrived at once would be prepared in one turn."""
        while self._turn_bytes and self._turn_bytes + size > TURN_BYTES:  # noqa: ASYNC110 (it waits for turns)
            await asyncio.sleep(0)
        if not self._turn_bytes:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._turn_bytes += size

    def _next_turn(self) -> None:
        self._turn_bytes = 0

    async def parse(
        self,
        client: Client,
        endpoint: Endpoint,
        raw: bytes,
        rules: ClientRules,
        context_of: Callable[[str], int],
        light: Decoded | None,
    ) -> ApiCall:
        """As api.parse(), for a `client`. `context_of` may be called in another thread."""
        work = partial(parse, endpoint, raw, rules, context_of, light_body=light)
        return await self._done(client, light is not None, work)

    async def prepare(self, context: RequestContext, *, dry: bool) -> None:
        """Complete the context of a request: its tokens, block keys and session. Raises ApiRequestError if the prompt is too
        long. Mutates `context`.

        A dry run leaves no state behind.
        """
        tokens, tokenizer, call = None, context.tokenizer, context.call
        if tokenizer is not None:
            try:
                tokens = await self._tokens(context, tokenizer)
            except Unrenderable as reason:
                log.debug("placed without keys", request_id=context.request_id, reason=str(reason))
        if tokens is None:
            tokens = await self._done(context.client, call.light, partial(self._preparer.estimate, context))
        if not tokens.keys and call.endpoint.generates:
            self._telemetry.placed_without_keys(context.state.pool.model)
        self._preparer.prepare(context, tokens, time.monotonic(), dry=dry)

    async def _tokens(self, context: RequestContext, tokenizer: ModelTokenizer) -> Tokens:
        """Return the tokens and keys of the (first) prompt. Raises Unrenderable and ApiRequestError."""
        call, limit = context.call, context.state.pool.max_model_len
        with self._telemetry.tokenize.time():
            if not call.light:
                return await self._tokens_of_large(context, tokenizer)
            if len(call.payload) > COUNTED_BYTES:
                await self.loop_turn(len(call.payload))
            try:
                pending = tokenizer.prepare(call, limit, light=True)
            except OverBudget:
                call.light = False
            else:
                return await self._tokenized(context, pending)
            # Not while the error is handled: it refers to all that was rendered, and would keep it.
            async with self.large_turns.turn(context.client):
                return await self._tokens_of_large(context, tokenizer)

    async def _tokens_of_large(self, context: RequestContext, tokenizer: ModelTokenizer) -> Tokens:
        work = partial(tokenizer.prepare, context.call, context.state.pool.max_model_len)
        return await self._tokenized(context, await self._large_bodies.run(context.client, work))

    async def _tokenized(self, context: RequestContext, pending: PendingPrompt) -> Tokens:
        threads = self._large_pieces if pending.longest > LARGE_PIECE_CHARS else self._tokenizing
        prompt = await pending.tokenize_by(partial(threads.run, context.client))
        return await self._done(context.client, context.call.light, partial(self._preparer.tokens, context, prompt))

    async def _done(self, client: Client, light: bool, work: Callable[[], _Made]) -> _Made:
        """Return the result of `work`, which runs in a thread unless the body is `light`."""
        if light:
            return work()
        return await self._large_bodies.run(client, work)


class GivesWay:
    """The pause of a thread beside the event loop: rests if the loop has work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        """Rest, if the thread has worked for WORK_S and the loop has work. Mutates."""
        now = time.perf_counter()
        if now - self._since < WORK_S:
            return
        time.sleep(1e-6)  # not 0, with which the thread often has the interpreter again before the loop wakes up
        if time.perf_counter() - now > GIVEN_S:
            time.sleep(REST_S)
        self._since = time.perf_counter()


class _Threads:
    """A fixed number of threads, at which clients take turns. An executor's own queue would keep the work, and the body, of a
    client that has disconnected."""

    def __init__(self, count: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(count, name, initializer=lambda: set_pause(GivesWay()))
        self._turns = FairTurns(count)

    def close(self) -> None:
        """Start no further work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, client: Client, work: Callable[[], _Made]) -> _Made:
        """Run `work` of `client` in a thread and return its result. If the caller is cancelled, the thread stays busy until
        `work` has ended."""
        await self._turns.take(client)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        finally:
            # An error refers to this frame by its traceback, and to the frames of `work`, which have the body. With the future,
            # which refers to the error, they would be a cycle, and the body would stay in memory until it is collected.
            del running

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._turns.give_back()
        if not running.cancelled():
            running.exception()  # none is left to see it if the caller was cancelled
