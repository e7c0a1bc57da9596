"""What the gateway knows of each model: names, instances, and whether its own tokens equal the engines'."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pointsman.router.v1 import placement_pb2
from services.gateway.dialects import Kind
from services.gateway.self_check import differs
from services.gateway.telemetry import Telemetry
from services.gateway.token_cache import TokenCache
from services.gateway.tokens import ModelTokenizer, TokenizerMissing, locate
from services.gateway.upstream import Upstream, UpstreamError

log = structlog.get_logger()

ASK_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
SILENT_ROUNDS = 3  # without an answer from any instance, before the model is declared without exact tokens
MISMATCHES = 3
RECHECK_PAUSE_S = 60.0
_CONVERTED = frozenset({Kind.RESPONSES, Kind.MESSAGES})


class Exactness(enum.Enum):
    """How far our tokens of a model can be trusted."""

    CHECKING = "checking"
    EXACT = "exact"
    INEXACT = "inexact"


@dataclass
class PoolState:
    """One model. `tokenizer` is used only while `exactness` is EXACT; `reason` says why it is not."""

    pool: placement_pb2.Pool
    tokenizer: ModelTokenizer | None = None
    source: str = ""
    exactness: Exactness = Exactness.CHECKING
    reason: str = "not checked yet"
    verified: set[tuple[str, str]] = field(default_factory=set)  # (url, incarnation)
    mismatches: Counter[Kind] = field(default_factory=Counter)  # in a row
    inexact: set[Kind] = field(default_factory=set)  # APIs whose prompts we were seen to convert otherwise
    rechecked_at: float = -RECHECK_PAUSE_S
    task: asyncio.Task[None] | None = None

    def usable(self, kind: Kind) -> ModelTokenizer | None:
        """The tokenizer, where its tokens are known to be the engine's for an API's prompts."""
        return self.tokenizer if self.exactness is Exactness.EXACT and kind not in self.inexact else None


class Pools:
    """All models of the fleet as last told, each with its self-check. update() is called for every Fleet."""

    def __init__(
        self, upstream: Upstream, telemetry: Telemetry, tokenizers: Mapping[str, str], cache: TokenCache
    ) -> None:
        self._upstream = upstream
        self._telemetry = telemetry
        self._tokenizers = tokenizers
        self._cache = cache
        self._states: dict[str, PoolState] = {}
        self._names: dict[str, tuple[str, str]] = {}  # any name -> (pool, LoRA adapter or "")

    def update(self, fleet: placement_pb2.Fleet) -> None:
        """Take over the fleet's state, and check new instances in the background. Mutates."""
        gone = self._states.keys() - {pool.model for pool in fleet.pools}
        for model in gone:
            self._stop(self._states.pop(model))
            self._telemetry.exact.remove(model)
        self._names = {}
        for pool in fleet.pools:
            state = self._states.setdefault(pool.model, PoolState(pool))
            state.pool = pool
            for lora in pool.lora_names:
                self._names.setdefault(lora, (pool.model, lora))
            for name in (pool.model, *pool.served_names):
                self._names[name] = (pool.model, "")
            self._check_soon(state)

    def resolve(self, name: str) -> tuple[PoolState, str] | None:
        """The pool that a client's `name` means, and the LoRA adapter it names ("" for none); None when unknown."""
        found = self._names.get(name)
        return (self._states[found[0]], found[1]) if found else None

    def states(self) -> list[PoolState]:
        """All pools by name."""
        return [self._states[model] for model in sorted(self._states)]

    def names(self, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
        """Every name that a client may ask for, with its pool's. An alias of a name that nobody serves is none."""
        known = {name: pool for name, (pool, _) in self._names.items()}
        return sorted((known | {alias: known[name] for alias, name in aliases.items() if name in known}).items())

    def counted(self, state: PoolState, kind: Kind, ours: int, engines: int) -> None:
        """Compare our count of a prompt's tokens with the engine's; after three disagreements in a row check again. An API
        whose bodies are converted (the check cannot see that) is placed without keys from then on. Mutates."""
        if ours == engines:
            state.mismatches[kind] = 0
            return
        state.mismatches[kind] += 1
        self._telemetry.count_mismatch.labels(state.pool.model).inc()
        if state.mismatches[kind] < MISMATCHES:
            return
        if kind in _CONVERTED:
            log.warning("the engine counts other prompt tokens", model=state.pool.model, api=kind.value)
            state.inexact.add(kind)
            return
        if time.monotonic() - state.rechecked_at >= RECHECK_PAUSE_S:
            state.mismatches[kind], state.rechecked_at = 0, time.monotonic()
            log.warning("the engine counts other prompt tokens; checking again", model=state.pool.model)
            state.verified.clear()
            self._check_soon(state)

    async def close(self) -> None:
        """End all checks."""
        tasks = [state.task for state in self._states.values() if state.task is not None]
        for state in self._states.values():
            self._stop(state)
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _stop(state: PoolState) -> None:
        if state.task is not None:
            state.task.cancel()

    def _check_soon(self, state: PoolState) -> None:
        wanted = {(one.url, one.incarnation) for one in state.pool.instances}
        state.verified &= wanted
        if wanted - state.verified:
            state.inexact.clear()  # another incarnation may be another version
        if (wanted - state.verified) and (state.task is None or state.task.done()):
            state.task = asyncio.create_task(self._check_or_say(state))
        self._publish(state)

    def _publish(self, state: PoolState) -> None:
        self._telemetry.exact.labels(state.pool.model).set(state.exactness is Exactness.EXACT)
        self._telemetry.count_mismatch.labels(state.pool.model)  # from 0, or the first would be no increase

    def _judge(self, state: PoolState, exactness: Exactness, reason: str = "") -> None:
        if (state.exactness, state.reason) == (exactness, reason):
            return
        state.exactness, state.reason = exactness, reason
        self._publish(state)
        if exactness is Exactness.EXACT:
            log.info("tokenizer equals the engine's", model=state.pool.model)
        else:
            log.warning("placing without block keys", model=state.pool.model, reason=reason)

    async def _check_or_say(self, state: PoolState) -> None:
        try:
            await self._check(state)
        except Exception as error:
            # Nobody awaits this task: unsaid, a fault would leave the model "checking" for ever.
            log.exception("a fault in the tokenizer check", model=state.pool.model)
            self._judge(state, Exactness.INEXACT, f"the check failed: {type(error).__name__}")

    async def _check(self, state: PoolState) -> None:
        """Until every instance is verified, or one is found to differ."""
        source = self._tokenizers.get(state.pool.model) or state.pool.model_root
        if state.tokenizer is None or state.source != source:
            try:
                state.tokenizer = await asyncio.to_thread(_load, source, self._cache)
                state.source = source
            except TokenizerMissing as missing:
                state.tokenizer = None
                self._judge(state, Exactness.INEXACT, str(missing))
                return
        silent = 0
        while left := {(one.url, one.incarnation) for one in state.pool.instances} - state.verified:
            asked = await asyncio.gather(*(self._compare(state, url) for url, _ in sorted(left)))
            for instance, difference in zip(sorted(left), asked, strict=True):
                if difference == "":
                    state.verified.add(instance)
            differences = [difference for difference in asked if difference]
            if differences:
                # Checked again when an instance comes or restarts: a tokenizer does not change by itself.
                self._judge(state, Exactness.INEXACT, differences[0])
                return
            if "" in asked:
                self._judge(state, Exactness.EXACT)
            else:
                silent += 1
                if silent == SILENT_ROUNDS and not state.verified:
                    self._judge(state, Exactness.INEXACT, "no instance answers /tokenize")
            if None in asked:
                await asyncio.sleep(ASK_AGAIN_S[min(silent, len(ASK_AGAIN_S) - 1)])

    async def _compare(self, state: PoolState, url: str) -> str | None:
        """What differs ("" for nothing), None when the instance cannot be asked now."""
        assert state.tokenizer is not None
        try:
            return await differs(self._upstream, url, state.pool.model, state.tokenizer)
        except UpstreamError as error:
            log.debug("instance does not answer /tokenize", model=state.pool.model, error=error.text)
            return None


def _load(source: str, cache: TokenCache) -> ModelTokenizer:
    folder: Path = locate(source)
    return ModelTokenizer.load(folder, cache)
