"""The models of the fleet as routers last reported them, each with a check of its tokenizer against the engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import structlog

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.pool_state import RECHECK_PAUSE_S, PoolState, TokenizerStatus, names_of
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.engines.engine_client import Upstream, UpstreamError
from pointsman_gateway.io.routing.pool_check import PoolCheck
from pointsman_gateway.io.routing.tokenizer_check import first_difference
from pointsman_gateway.io.routing.tokenizer_proof import prove
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics
from pointsman_gateway.io.tokenizer_files import (
    HubRules,
    HubUnreachable,
    TokenizerNotFound,
    find_tokenizer,
    load_tokenizer,
)

log = structlog.get_logger()

# Number of different token counts in a row after which a tokenizer is checked again.
MISMATCHES = 3
# Maximum wait for a tokenizer to be loaded, s.
LOAD_S = 30.0
# Maximum wait for a comparison of two encoders that is being made at the end, s.
PROOF_END_S = 3.0
# How long a model without instances is expected back, s: long enough for an engine that starts again.
EXPECTED_S = 600.0
# APIs whose bodies the gateway converts before it renders a prompt.
_CONVERTED = frozenset({Endpoint.RESPONSES, Endpoint.MESSAGES})


class ModelPools:
    """All models of the fleet, each with the check of its tokenizer. update() is called whenever the fleet changes."""

    def __init__(
        self,
        upstream: Upstream,
        telemetry: GatewayMetrics,
        tokenizers: Mapping[str, str],
        cache: TokenCache,
        hub: HubRules,
    ) -> None:
        """`hub`: its `owners` restrict only tokenizers that `tokenizers` does not name."""
        self._hub = hub
        self._upstream = upstream
        self._telemetry = telemetry
        self._tokenizers = tokenizers
        self._cache = cache
        self._states: dict[str, PoolState] = {}
        self._checks: dict[str, PoolCheck] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loading: dict[tuple[str, bool], asyncio.Future[ModelTokenizer]] = {}  # (source, newest) -> the tokenizer
        self._proofs: list[threading.Thread] = []
        self._ended = threading.Event()
        self._names: dict[str, tuple[str, str]] = {}  # any name -> (pool, LoRA adapter or "")
        # Any name of a pool that has left the fleet -> until when it is expected back.
        self._left: dict[str, float] = {}
        # Models whose tokenizers are given and that the fleet is told not to have.
        self._unknown: set[str] = set()

    def update(self, pools: Sequence[placement_pb2.Pool]) -> None:
        """Set the pools of the fleet, and check new instances in the background. Mutates."""
        gone = self._states.keys() - {pool.model for pool in pools}
        for model in gone:
            del self._states[model]
            closing = asyncio.ensure_future(self._checks.pop(model).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._telemetry.keep_models(pool.model for pool in pools)
        names, until = names_of(pools), time.monotonic() + EXPECTED_S
        self._left |= {name: until for name, (pool, _) in self._names.items() if pool in gone}
        self._left = {name: left for name, left in self._left.items() if name not in names and left > time.monotonic()}
        self._names = names
        # A fleet without any model may be starting.
        unknown = set(self._tokenizers) - names.keys() if names else set()
        if unknown - self._unknown:
            given, served = sorted(unknown), sorted(names)
            log.warning("no engine serves a model whose tokenizer is given", given=given, served=served)
        self._unknown |= unknown
        for pool in pools:
            state = self._states.setdefault(pool.model, PoolState(pool))
            state.pool = pool
            if pool.model not in self._checks:
                self._checks[pool.model] = PoolCheck(self, state)
            self._checks[pool.model].notice()
            self._publish(state)

    def resolve(self, name: str) -> tuple[PoolState, str] | None:
        """Return the pool that a client's `name` refers to and the LoRA adapter ("" for none); None if the name is unknown."""
        found = self._names.get(name)
        return (self._states[found[0]], found[1]) if found else None

    def expects(self, name: str) -> bool:
        """Return whether a name that resolve() does not know is probably one of the fleet again soon: its pool has left it not
        long ago, or the operator has named the model's tokenizer."""
        return self._left.get(name, 0.0) > time.monotonic() or name in self._tokenizers

    def context_of(self, name: str) -> int:
        """Return the context length of the model that a client's `name` refers to, in tokens; 0 if it is unknown. May be called
        from any thread."""
        found = self._names.get(name)
        state = self._states.get(found[0]) if found else None
        return state.pool.max_model_len if state else 0

    def states(self) -> list[PoolState]:
        """Return all pools, sorted by name."""
        return [self._states[model] for model in sorted(self._states)]

    def names(self, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return every name that a client may request, with the name of its pool. Aliases of names without a pool are omitted."""
        known = {name: pool for name, (pool, _) in self._names.items()}
        return sorted((known | {alias: known[name] for alias, name in aliases.items() if name in known}).items())

    def check_token_count(self, state: PoolState, endpoint: Endpoint, ours: int, engines: int) -> None:
        """Compare the gateway's count of a prompt's tokens with the engine's. Mutates.

        After MISMATCHES different counts in a row the tokenizer is checked again. An API whose bodies are converted is instead
        placed without block keys from then on, because the check does not cover the conversion.
        """
        if ours == engines:
            state.mismatches[endpoint] = 0
            return
        state.mismatches[endpoint] += 1
        self._telemetry.token_counts_differ(state.pool.model)
        if state.mismatches[endpoint] < MISMATCHES:
            return
        if endpoint in _CONVERTED:
            log.warning("the engine counts other prompt tokens", model=state.pool.model, api=endpoint.value)
            state.inexact_endpoints.add(endpoint)
            return
        if time.monotonic() - state.rechecked_at >= RECHECK_PAUSE_S:
            state.mismatches[endpoint], state.rechecked_at = 0, time.monotonic()
            log.warning("the engine counts other prompt tokens; checking again", model=state.pool.model)
            self._checks[state.pool.model].notice(again=True)

    async def close(self) -> None:
        """End all checks and proofs."""
        self._ended.set()
        await asyncio.gather(*(asyncio.to_thread(proof.join, PROOF_END_S) for proof in self._proofs))
        await asyncio.gather(*(check.close() for check in self._checks.values()), *self._closing)

    def _publish(self, state: PoolState) -> None:
        exact = state.tokenizer_status is TokenizerStatus.EXACT
        fast = state.tokenizer.is_fast if state.tokenizer is not None else None
        self._telemetry.tokenizer_is(state.pool.model, exact=exact, fast=fast)

    def _start_proof(self, tokenizer: ModelTokenizer) -> None:
        loop, loaded = asyncio.get_running_loop(), weakref.ref(tokenizer)

        def run() -> None:
            if not prove(loaded, self._ended):
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self._publish_all)

        self._proofs = [proof for proof in self._proofs if proof.is_alive()]
        self._proofs.append(threading.Thread(target=run, name="tokenizer-proof", daemon=True))
        self._proofs[-1].start()

    def _publish_all(self) -> None:
        for state in self._states.values():
            self._publish(state)

    # Calls from checks (Tokenizers).

    def set_status(self, state: PoolState, tokenizer_status: TokenizerStatus, reason: str = "") -> None:
        if (state.tokenizer_status, state.reason) == (tokenizer_status, reason):
            return
        state.tokenizer_status, state.reason = tokenizer_status, reason
        self._publish(state)
        if tokenizer_status is TokenizerStatus.EXACT:
            log.info("tokenizer equals the engine's", model=state.pool.model)
        else:
            log.warning("placing without block keys", model=state.pool.model, reason=reason)

    def source(self, state: PoolState) -> str:
        return self._tokenizers.get(state.pool.model) or state.pool.model_root

    def is_pinned(self, source: str) -> bool:
        """See Tokenizers. Sources that the operator has set are pinned."""
        return source in self._tokenizers.values()

    async def load(self, source: str, *, newest: bool = False) -> ModelTokenizer:
        """See Tokenizers. Raises HubUnreachable also if loading takes longer than LOAD_S."""
        loading = self._loading.get((source, newest))
        if loading is None:
            pinned = self.is_pinned(source)
            hub = replace(self._hub, owners=()) if pinned else replace(self._hub, other_revision=True)
            loading = self._loading[source, newest] = _load_aside(source, hub, newest, self._cache)
            loading.add_done_callback(partial(self._loaded, source, newest))
        try:
            async with asyncio.timeout(LOAD_S):
                return await asyncio.shield(loading)
        except TimeoutError:
            raise HubUnreachable(f"{source!r} has not come from the hub in {LOAD_S:g} s") from None

    def _loaded(self, source: str, newest: bool, loading: asyncio.Future[ModelTokenizer]) -> None:
        del self._loading[source, newest]
        # Marks an error as retrieved: the waiting task may have been cancelled.
        if loading.exception() is None and loading.result().is_fast:
            self._start_proof(loading.result())

    async def compare(self, state: PoolState, url: str) -> str | None:
        assert state.tokenizer is not None
        try:
            return await first_difference(self._upstream, url, state.pool.model, state.tokenizer)
        except UpstreamError as error:
            log.debug("instance does not answer /tokenize", model=state.pool.model, error=error.text)
            return None


def _load_aside(source: str, hub: HubRules, newest: bool, cache: TokenCache) -> asyncio.Future[ModelTokenizer]:
    """Load the tokenizer of `source` in a separate daemon thread. A hub that never answers then blocks neither the threads that
    tokenise nor the end of the process."""
    found: Future[ModelTokenizer] = Future()

    def load() -> None:
        try:
            found.set_result(load_tokenizer(find_tokenizer(source, hub, newest=newest), cache))
        except TokenizerNotFound as missing:
            found.set_exception(missing)
        except BaseException as error:
            # Unexpected file contents: a tokenizer that is in use stays in use. A panic of the library is no Exception.
            log.exception("a tokenizer cannot be read", source=source)
            reason = f"the tokenizer of {source!r} cannot be read: {type(error).__name__}"
            found.set_exception(TokenizerNotFound(reason))

    threading.Thread(target=load, name="tokenizer", daemon=True).start()
    return asyncio.wrap_future(found)
