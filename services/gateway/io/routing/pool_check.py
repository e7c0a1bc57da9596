"""Keeps one model's tokenizer equal to its engines': has it loaded, compared with each of their incarnations, and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

import structlog

from pointsman.gateway.core.pool_state import Incarnation, PoolState, TokenizerStatus
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.io.tokenizer_files import HubUnreachable, TokenizerNotFound, follows_hub

log = structlog.get_logger()

ASK_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
SILENT_ROUNDS = 3  # without an answer from any instance, before the model is declared without exact tokens
ASK_HUB_AGAIN_S = (5.0, 15.0, 60.0)
REFUSED_AGAIN_S = 300.0  # what was refused may be granted, and the hub may have what fits by then


class Tokenizers(Protocol):
    """What a check asks of the pools that it belongs to."""

    def source(self, state: PoolState) -> str:
        """Where the model's tokenizer is to be had."""

    def is_pinned(self, source: str) -> bool:
        """Whether none but this source will do."""

    async def load(self, source: str, *, newest: bool = False) -> ModelTokenizer:
        """The tokenizer of `source`. Raises TokenizerNotFound, and HubUnreachable where another try may find it."""

    async def compare(self, state: PoolState, url: str) -> str | None:
        """What differs at an instance ("" for nothing), None when it cannot be asked now."""

    def set_status(self, state: PoolState, tokenizer_status: TokenizerStatus, reason: str = "") -> None:
        """Note how far the model's tokens can be trusted."""


class PoolCheck:
    """The check of one model. What engines say of a tokenizer counts: where they tell another source it is replaced, but as long
    as that one cannot be had the old one is compared."""

    def __init__(self, tokenizers: Tokenizers, state: PoolState) -> None:
        self._tokenizers = tokenizers
        self._state = state
        self._task: asyncio.Task[None] | None = None
        self._seen: object = None
        self._changed = asyncio.Event()
        self._at_rest = asyncio.Event()

    def notice(self, *, again: bool = False) -> None:
        """The model's instances or source may be others now; `again`: what is verified no longer counts."""
        state, present = self._state, self._state.incarnations()
        state.differed &= present
        for known in (state.verified, state.hub_asked_for):
            known &= set() if again else present
        seen = (self._tokenizers.source(state), present)
        if again or seen != self._seen:
            self._seen = seen
            self._changed.set()
        if present <= state.verified:
            self._settle()  # one that differed may have left
            return
        state.inexact_endpoints.clear()  # another incarnation may be another version
        if self._task is None or self._task.done():
            self._at_rest.clear()
            self._task = asyncio.create_task(self._run_and_log())

    async def rested(self) -> None:
        """Until it is over, or waits for something to change."""
        if self._task is not None:
            await self._at_rest.wait()

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run_and_log(self) -> None:
        try:
            await self._run()
        except Exception as error:
            # Nobody awaits this task: unsaid, a fault would leave the model "checking" for ever.
            log.exception("a fault in the tokenizer check", model=self._state.pool.model)
            reason = f"the check failed: {type(error).__name__}"
            self._tokenizers.set_status(self._state, TokenizerStatus.INEXACT, reason)
        finally:
            self._at_rest.set()

    async def _run(self) -> None:
        """Until every instance is verified."""
        state = self._state
        missing: TokenizerNotFound | None = None
        tried, tried_for, ask_at, away, silent = "", frozenset[Incarnation](), 0.0, 0, 0
        while True:
            self._changed.clear()
            self._at_rest.clear()
            source, present = self._tokenizers.source(state), state.incarnations()
            if state.tokenizer is not None and state.source == source:
                missing = None
            elif missing is None or source != tried or present - tried_for or time.monotonic() >= ask_at:
                away = away if source == tried else 0
                tried, tried_for, missing = source, present, await self._replace(source)
                ask_at = time.monotonic() + (ASK_HUB_AGAIN_S[-1] if _passes(missing) else REFUSED_AGAIN_S)
            compared = await self._compare()
            differing = {instance: difference for instance, difference in compared.items() if difference}
            if differing and missing is None:
                missing = await self._update(differing)
                if missing is None:
                    continue
            if state.tokenizer is None or differing:
                reason = "; ".join(filter(None, [*sorted(differing.values())[:1], str(missing)]))
                self._tokenizers.set_status(state, TokenizerStatus.INEXACT, reason)
                if _passes(missing):
                    pause_s = ASK_HUB_AGAIN_S[min(away, len(ASK_HUB_AGAIN_S) - 1)]
                    away += 1
                else:
                    pause_s = REFUSED_AGAIN_S
                    self._at_rest.set()
                if not await self._change_within(pause_s):
                    ask_at = 0.0
                    if not _passes(missing):
                        state.hub_asked_for.clear()
                continue
            self._settle()
            if state.incarnations() <= state.verified:
                return
            if None not in compared.values():
                continue  # others came meanwhile
            silent = 0 if "" in compared.values() else silent + 1
            if silent == SILENT_ROUNDS and not state.verified:
                self._tokenizers.set_status(state, TokenizerStatus.INEXACT, "no instance answers /tokenize")
            await self._change_within(ASK_AGAIN_S[min(silent, len(ASK_AGAIN_S) - 1)])

    async def _change_within(self, pause_s: float) -> bool:
        """Wait until instances or source are others than at the last look, or that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        return self._changed.is_set()

    def _settle(self) -> None:
        """What equals every engine that could be asked is exact; one that differed when it was last asked still does."""
        state = self._state
        if state.verified and state.tokenizer is not None and not state.differed:
            self._tokenizers.set_status(state, TokenizerStatus.EXACT)

    async def _compare(self) -> dict[Incarnation, str | None]:
        """What differs at each instance that is not verified, as compare() says it; those without a difference are, then."""
        state = self._state
        if state.tokenizer is None:
            return {}
        left = sorted(state.incarnations() - state.verified)
        asked = await asyncio.gather(*(self._tokenizers.compare(state, url) for url, _ in left))
        present = state.incarnations()
        compared = {one: answer for one, answer in zip(left, asked, strict=True) if one in present}
        equal = {instance for instance, difference in compared.items() if difference == ""}
        state.verified |= equal
        state.differed = (state.differed - equal) | {one for one, difference in compared.items() if difference}
        return compared

    async def _replace(self, source: str) -> TokenizerNotFound | None:
        """Use the tokenizer of another source; what is in the way of it."""
        try:
            self._use(source, await self._tokenizers.load(source))
        except TokenizerNotFound as missing:
            return missing
        self._state.hub_asked_for.clear()
        return None

    def _use(self, source: str, tokenizer: ModelTokenizer) -> None:
        """Use another tokenizer, once it has been compared."""
        state = self._state
        if state.tokenizer is not None:
            self._tokenizers.set_status(state, TokenizerStatus.INEXACT, "another tokenizer is compared")
        state.tokenizer, state.source = tokenizer, source
        state.verified.clear()
        state.differed.clear()

    async def _update(self, differing: dict[Incarnation, str]) -> TokenizerNotFound | None:
        """Use what the hub has now of a tokenizer that differs from these instances', once for each of them (and again when all
        is tried again): its engine may have another revision than was kept here. What is in the way of it; an error without
        words where the hub has nothing else."""
        state = self._state
        known = differing.keys() <= state.hub_asked_for
        if known or not follows_hub(state.source, pinned=self._tokenizers.is_pinned(state.source)):
            return TokenizerNotFound("")
        reason = f"{min(differing.values())}; the hub is asked for its revision"
        self._tokenizers.set_status(state, TokenizerStatus.INEXACT, reason)
        try:
            newest = await self._tokenizers.load(state.source, newest=True)
        except TokenizerNotFound as missing:
            if not _passes(missing):
                state.hub_asked_for |= differing.keys()
            return missing
        state.hub_asked_for |= differing.keys()
        self._use(state.source, newest)
        return None


def _passes(missing: TokenizerNotFound | None) -> bool:
    """Whether what is in the way may be gone at another try."""
    return isinstance(missing, HubUnreachable)
