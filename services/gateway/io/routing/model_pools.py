"""The models of the fleet as routers last told them, each with a check of its tokenizer against the engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from pointsman.gateway.core.api import Endpoint
from pointsman.gateway.core.pool_state import RECHECK_PAUSE_S, PoolState, TokenizerStatus, names_of
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.core.tokens.token_cache import TokenCache
from pointsman.gateway.io.engines.engine_client import Upstream, UpstreamError
from pointsman.gateway.io.routing.tokenizer_check import first_difference
from pointsman.gateway.io.telemetry.metrics import GatewayMetrics
from pointsman.gateway.io.tokenizer_files import (
    HubRules,
    HubUnreachable,
    TokenizerNotFound,
    find_tokenizer,
    follows_hub,
    load_tokenizer,
)
from pointsman.router.v1 import placement_pb2

log = structlog.get_logger()

ASK_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
SILENT_ROUNDS = 3  # without an answer from any instance, before the model is declared without exact tokens
MISMATCHES = 3
LOAD_S = 30.0
ASK_HUB_AGAIN_S = (5.0, 15.0, 60.0)
_CONVERTED = frozenset({Endpoint.RESPONSES, Endpoint.MESSAGES})


class ModelPools:
    """All models of the fleet as last told, each with its self-check. update() is called for every Fleet."""

    def __init__(
        self,
        upstream: Upstream,
        telemetry: GatewayMetrics,
        tokenizers: Mapping[str, str],
        cache: TokenCache,
        hub: HubRules,
    ) -> None:
        """`hub`: its owners are those of whom `tokenizers` names nothing."""
        self._hub = hub
        self._upstream = upstream
        self._telemetry = telemetry
        self._tokenizers = tokenizers
        self._cache = cache
        self._states: dict[str, PoolState] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._loading: dict[
            tuple[str, bool], asyncio.Future[ModelTokenizer]
        ] = {}  # by source, and whether it is to be the newest
        self._names: dict[str, tuple[str, str]] = {}  # any name -> (pool, LoRA adapter or "")

    def update(self, fleet: placement_pb2.Fleet) -> None:
        """Take over the fleet's state, and check new instances in the background. Mutates."""
        gone = self._states.keys() - {pool.model for pool in fleet.pools}
        for model in gone:
            del self._states[model]
            if (check := self._checks.pop(model, None)) is not None:
                check.cancel()
            self._telemetry.exact.remove(model)
        self._names = names_of(fleet.pools)
        for pool in fleet.pools:
            state = self._states.setdefault(pool.model, PoolState(pool))
            state.pool = pool
            self._check_soon(state)

    def resolve(self, name: str) -> tuple[PoolState, str] | None:
        """The pool that a client's `name` means, and the LoRA adapter it names ("" for none); None when unknown."""
        found = self._names.get(name)
        return (self._states[found[0]], found[1]) if found else None

    def context_of(self, name: str) -> int:
        """The context in tokens of what a client's `name` means; 0 when it is unknown. May be called in any thread."""
        found = self._names.get(name)
        state = self._states.get(found[0]) if found else None
        return state.pool.max_model_len if state else 0

    def states(self) -> list[PoolState]:
        """All pools by name."""
        return [self._states[model] for model in sorted(self._states)]

    def names(self, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
        """Every name that a client may ask for, with its pool's. An alias of a name that nobody serves is none."""
        known = {name: pool for name, (pool, _) in self._names.items()}
        return sorted((known | {alias: known[name] for alias, name in aliases.items() if name in known}).items())

    def check_token_count(self, state: PoolState, endpoint: Endpoint, ours: int, engines: int) -> None:
        """Compare our count of a prompt's tokens with the engine's; after three disagreements in a row check again. An API
        whose bodies are converted (the check cannot see that) is placed without keys from then on. Mutates."""
        if ours == engines:
            state.mismatches[endpoint] = 0
            return
        state.mismatches[endpoint] += 1
        self._telemetry.count_mismatch.labels(state.pool.model).inc()
        if state.mismatches[endpoint] < MISMATCHES:
            return
        if endpoint in _CONVERTED:
            log.warning("the engine counts other prompt tokens", model=state.pool.model, api=endpoint.value)
            state.inexact_endpoints.add(endpoint)
            return
        if time.monotonic() - state.rechecked_at >= RECHECK_PAUSE_S:
            state.mismatches[endpoint], state.rechecked_at = 0, time.monotonic()
            log.warning("the engine counts other prompt tokens; checking again", model=state.pool.model)
            state.verified.clear()
            self._check_soon(state)

    async def checked(self) -> None:
        """Until the checks that are under way have come to an end."""
        await asyncio.gather(*self._checks.values())

    async def close(self) -> None:
        """End all checks."""
        for check in self._checks.values():
            check.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def _check_soon(self, state: PoolState) -> None:
        wanted = _incarnations(state)
        state.verified &= wanted
        state.hub_asked_for &= wanted
        if wanted - state.verified:
            state.inexact_endpoints.clear()  # another incarnation may be another version
        check = self._checks.get(state.pool.model)
        if not wanted - state.verified:
            self._settle(state)  # one that differed may have left
        elif check is None or check.done():
            self._checks[state.pool.model] = asyncio.create_task(self._check_and_log(state))
        self._publish(state)

    def _publish(self, state: PoolState) -> None:
        self._telemetry.exact.labels(state.pool.model).set(state.tokenizer_status is TokenizerStatus.EXACT)
        self._telemetry.count_mismatch.labels(state.pool.model)  # from 0, or the first would be no increase

    def _set_status(self, state: PoolState, tokenizer_status: TokenizerStatus, reason: str = "") -> None:
        if (state.tokenizer_status, state.reason) == (tokenizer_status, reason):
            return
        state.tokenizer_status, state.reason = tokenizer_status, reason
        self._publish(state)
        if tokenizer_status is TokenizerStatus.EXACT:
            log.info("tokenizer equals the engine's", model=state.pool.model)
        else:
            log.warning("placing without block keys", model=state.pool.model, reason=reason)

    async def _check_and_log(self, state: PoolState) -> None:
        try:
            await self._check(state)
        except Exception as error:
            # Nobody awaits this task: unsaid, a fault would leave the model "checking" for ever.
            log.exception("a fault in the tokenizer check", model=state.pool.model)
            self._set_status(state, TokenizerStatus.INEXACT, f"the check failed: {type(error).__name__}")

    async def _check(self, state: PoolState) -> None:
        """Until every instance is verified, or one is found to differ. Where the engines tell another source than the tokenizer
        is from, it is replaced; as long as that one cannot be had, the old one is compared: what the engines say of it counts."""
        tried, missing, ask_at, away, silent = "", None, 0.0, 0, 0
        while True:
            source = self._source(state)
            if state.tokenizer is not None and state.source == source:
                missing = None
            elif missing is None or source != tried or (_passes(missing) and time.monotonic() >= ask_at):
                tried, missing = source, await self._replaced(state, source)
                ask_at = time.monotonic() + ASK_HUB_AGAIN_S[-1]
            compared = await self._compared(state)
            differing = {instance: difference for instance, difference in compared.items() if difference}
            if differing and missing is None:
                difference = min(differing.values())
                self._set_status(state, TokenizerStatus.INEXACT, f"{difference}; the hub is asked for its revision")
                missing = await self._updated(state, set(differing))
                if missing is None:
                    continue
            if differing and not differing.keys() & _incarnations(state):
                continue  # those that differed have left meanwhile
            if state.tokenizer is None or differing:
                reason = "; ".join(filter(None, [*sorted(differing.values())[:1], str(missing)]))
                self._set_status(state, TokenizerStatus.INEXACT, reason)
                if not _passes(missing):
                    # Checked again when an instance comes or restarts: a tokenizer does not change by itself.
                    return
                await asyncio.sleep(ASK_HUB_AGAIN_S[min(away, len(ASK_HUB_AGAIN_S) - 1)])
                ask_at, away = 0.0, away + 1
                continue
            self._settle(state)
            if None not in compared.values():
                return
            silent = 0 if "" in compared.values() else silent + 1
            if silent == SILENT_ROUNDS and not state.verified:
                self._set_status(state, TokenizerStatus.INEXACT, "no instance answers /tokenize")
            await asyncio.sleep(ASK_AGAIN_S[min(silent, len(ASK_AGAIN_S) - 1)])

    def _settle(self, state: PoolState) -> None:
        """What is equal to every engine that could be asked is exact."""
        if state.verified and state.tokenizer is not None:
            self._set_status(state, TokenizerStatus.EXACT)

    async def _compared(self, state: PoolState) -> dict[tuple[str, str], str | None]:
        """What differs at each instance that is not verified, as _compare() says it; those without a difference are, then."""
        if state.tokenizer is None:
            return {}
        left = sorted(_incarnations(state) - state.verified)
        asked = await asyncio.gather(*(self._compare(state, url) for url, _ in left))
        compared = dict(zip(left, asked, strict=True))
        state.verified |= {instance for instance, difference in compared.items() if difference == ""}
        return compared

    async def _replaced(self, state: PoolState, source: str) -> TokenizerNotFound | None:
        """Use the tokenizer of another source; what is in the way of it."""
        try:
            self._use(state, source, await self._loaded(source))
        except TokenizerNotFound as missing:
            return missing
        return None

    def _use(self, state: PoolState, source: str, tokenizer: ModelTokenizer) -> None:
        """Use another tokenizer, once it has been compared."""
        if state.tokenizer is not None:
            self._set_status(state, TokenizerStatus.INEXACT, "another tokenizer is compared")
        state.tokenizer, state.source = tokenizer, source
        state.verified.clear()

    def _source(self, state: PoolState) -> str:
        return self._tokenizers.get(state.pool.model) or state.pool.model_root

    async def _updated(self, state: PoolState, differing: set[tuple[str, str]]) -> TokenizerNotFound | None:
        """Use what the hub has now of a tokenizer that differs from these instances', once for each of them: its engine may have
        another revision than was kept here. What is in the way of it; an error without words where the hub has nothing else."""
        known = differing <= state.hub_asked_for
        if known or not follows_hub(state.source, pinned=state.source in self._tokenizers.values()):
            return TokenizerNotFound("")
        try:
            newest = await self._loaded(state.source, newest=True)
        except TokenizerNotFound as missing:
            if not _passes(missing):
                state.hub_asked_for |= differing
            return missing
        state.hub_asked_for |= differing
        self._use(state, state.source, newest)
        return None

    async def _loaded(self, source: str, *, newest: bool = False) -> ModelTokenizer:
        """The tokenizer of `source`. Raises TokenizerNotFound, and HubUnreachable where it does not come in time."""
        loading = self._loading.get((source, newest))
        if loading is None:
            named = source in self._tokenizers.values()
            hub = replace(self._hub, owners=()) if named else replace(self._hub, other_revision=True)
            loading = self._loading[source, newest] = _load_aside(source, hub, newest, self._cache)
            loading.add_done_callback(lambda _: self._loading.pop((source, newest)))
        try:
            async with asyncio.timeout(LOAD_S):
                return await asyncio.shield(loading)
        except TimeoutError:
            raise HubUnreachable(f"{source!r} has not come from the hub in {LOAD_S:g} s") from None

    async def _compare(self, state: PoolState, url: str) -> str | None:
        """What differs ("" for nothing), None when the instance cannot be asked now."""
        assert state.tokenizer is not None
        try:
            return await first_difference(self._upstream, url, state.pool.model, state.tokenizer)
        except UpstreamError as error:
            log.debug("instance does not answer /tokenize", model=state.pool.model, error=error.text)
            return None


def _incarnations(state: PoolState) -> set[tuple[str, str]]:
    return {(one.url, one.incarnation) for one in state.pool.instances}


def _passes(missing: TokenizerNotFound | None) -> bool:
    """Whether what is in the way may be gone at another try."""
    return isinstance(missing, HubUnreachable)


def _load_aside(source: str, hub: HubRules, newest: bool, cache: TokenCache) -> asyncio.Future[ModelTokenizer]:
    """The tokenizer of `source`, by a thread of its own: a hub that never answers may hold neither the threads that tokenise
    nor the process's end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[ModelTokenizer] = loop.create_future()

    def tell(tokenizer: ModelTokenizer | None, error: Exception | None) -> None:
        if found.done():
            return
        if tokenizer is not None:
            found.set_result(tokenizer)
        elif error is not None:
            found.set_exception(error)
            found.exception()  # whoever waited may have left

    def load() -> None:
        tokenizer, failed = None, None
        try:
            tokenizer = load_tokenizer(find_tokenizer(source, hub, newest=newest), cache)
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, tokenizer, failed)

    threading.Thread(target=load, name="tokenizer", daemon=True).start()
    return found
