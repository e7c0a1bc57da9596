"""The check of one model's tokenizer: it is loaded, compared with each incarnation of the engines, and replaced if it differs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

import structlog

from pointsman_gateway.core.pool_state import Incarnation, PoolState, TokenizerStatus
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.io.tokenizer_files import HubUnreachable, TokenizerNotFound, follows_hub

log = structlog.get_logger()

# Pauses between rounds of comparisons, by the number of rounds in a row without an answer, s.
ASK_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
# Number of rounds in a row without an answer from any instance after which the model's tokens count as inexact.
SILENT_ROUNDS = 3
# Pauses between tries to load from a hub that cannot be reached, by the number of tries, s.
ASK_HUB_AGAIN_S = (5.0, 15.0, 60.0)
# Pause after a refusal, s. Access may be granted, or the hub may have a matching revision, by then.
REFUSED_AGAIN_S = 300.0


class Tokenizers(Protocol):
    """The calls of a check to the pools that it belongs to."""

    def source(self, state: PoolState) -> str:
        """Return the source of the model's tokenizer: a folder or a hub id."""

    def is_pinned(self, source: str) -> bool:
        """Return whether the operator has set this source, so that no other revision may replace it."""

    async def load(self, source: str, *, newest: bool = False) -> ModelTokenizer:
        """Return the tokenizer of `source`; `newest`: query the hub. Raises TokenizerNotFound; HubUnreachable if another try may
        find it."""

    async def compare(self, state: PoolState, url: str) -> str | None:
        """Return the difference to the tokens of an instance ("" for none); None if the instance does not answer."""

    def set_status(self, state: PoolState, tokenizer_status: TokenizerStatus, reason: str = "") -> None:
        """Set whether the model's tokens are exact, and the reason if they are not."""


class PoolCheck:
    """The check of one model. Engines decide: if they report another source, the tokenizer is replaced. While the new source
    cannot be loaded, the old tokenizer stays and is compared."""

    def __init__(self, tokenizers: Tokenizers, state: PoolState) -> None:
        self._tokenizers = tokenizers
        self._state = state
        self._task: asyncio.Task[None] | None = None
        self._seen: object = None
        self._changed = asyncio.Event()

    def notice(self, *, again: bool = False) -> None:
        """Start or update the check when the model's instances or source may have changed. `again`: verify all of them again."""
        state, present, foreign = self._state, self._state.incarnations(), self._state.foreign()
        state.differed &= present
        for known in (state.verified, state.hub_asked_for):
            known &= set() if again else present
        if again:
            state.differed -= foreign
        seen = (self._tokenizers.source(state), present, foreign)
        if again or seen != self._seen:
            self._seen = seen
            self._changed.set()
        if state.tokenizer_status is TokenizerStatus.EXACT and state.differed - foreign:
            # The pool's tokenizer is from another place now: that of an instance which had other tokens than this one.
            self._tokenizers.set_status(state, TokenizerStatus.INEXACT, "another tokenizer is being compared")
        if present <= state.settled():
            self._settle()  # an instance that differed may have left
            return
        state.inexact_endpoints.clear()  # a new incarnation may have another version of vLLM
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_and_log())

    async def close(self) -> None:
        """Cancel the check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run_and_log(self) -> None:
        try:
            await self._run()
        except Exception as error:
            # No task awaits this one: without the log and the status, a fault would leave the model in CHECKING forever.
            log.exception("a fault in the tokenizer check", model=self._state.pool.model)
            reason = f"the check failed: {type(error).__name__}"
            self._tokenizers.set_status(self._state, TokenizerStatus.INEXACT, reason)

    async def _run(self) -> None:
        """Run until every instance is verified."""
        state = self._state
        missing: TokenizerNotFound | None = None
        tried, tried_for, ask_at, away, silent = "", frozenset[Incarnation](), 0.0, 0, 0
        while True:
            self._changed.clear()
            source, present = self._tokenizers.source(state), state.incarnations()
            if state.tokenizer is not None and state.source == source:
                missing = None
            elif missing is None or source != tried or present - tried_for or time.monotonic() >= ask_at:
                away = away if source == tried else 0
                tried, tried_for, missing = source, present, await self._replace(source)
                ask_at = time.monotonic() + (ASK_HUB_AGAIN_S[-1] if _passes(missing) else REFUSED_AGAIN_S)
            compared = await self._compare()
            # An instance with a tokenizer from another place has another one, and the others keep theirs.
            foreign = state.foreign()
            differing = {
                instance: difference
                for instance, difference in compared.items()
                if difference and instance not in foreign
            }
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
                if not await self._change_within(pause_s):
                    ask_at = 0.0
                    if not _passes(missing):
                        state.hub_asked_for.clear()
                continue
            self._settle()
            if state.incarnations() <= state.settled():
                return
            if None not in compared.values():
                continue  # new instances appeared during the comparison
            silent = 0 if "" in compared.values() else silent + 1
            if silent == SILENT_ROUNDS and not state.verified:
                self._tokenizers.set_status(state, TokenizerStatus.INEXACT, "no instance answers /tokenize")
            await self._change_within(ASK_AGAIN_S[min(silent, len(ASK_AGAIN_S) - 1)])

    async def _change_within(self, pause_s: float) -> bool:
        """Wait up to `pause_s` for a change of the instances or the source; return whether there was one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        return self._changed.is_set()

    def _settle(self) -> None:
        """Set EXACT if the tokenizer equals at least one engine and no engine with a tokenizer from
        the same place differed at its last comparison."""
        state = self._state
        if state.verified and state.tokenizer is not None and not state.differed - state.foreign():
            self._tokenizers.set_status(state, TokenizerStatus.EXACT)

    async def _compare(self) -> dict[Incarnation, str | None]:
        """Return the result of compare() for each unverified instance. Instances without a difference become verified."""
        state = self._state
        if state.tokenizer is None:
            return {}
        left = sorted(state.incarnations() - state.settled())
        asked = await asyncio.gather(*(self._tokenizers.compare(state, url) for url, _ in left))
        present = state.incarnations()
        compared = {instance: answer for instance, answer in zip(left, asked, strict=True) if instance in present}
        equal = {instance for instance, difference in compared.items() if difference == ""}
        state.verified |= equal
        state.differed = (state.differed - equal) | {
            instance for instance, difference in compared.items() if difference
        }
        return compared

    async def _replace(self, source: str) -> TokenizerNotFound | None:
        """Load and use the tokenizer of another source. Return the error if it cannot be loaded, else None."""
        try:
            self._use(source, await self._tokenizers.load(source))
        except TokenizerNotFound as missing:
            return missing
        self._state.hub_asked_for.clear()
        return None

    def _use(self, source: str, tokenizer: ModelTokenizer) -> None:
        """Set another tokenizer, which is INEXACT until it has been compared."""
        state = self._state
        if state.tokenizer is not None:
            self._tokenizers.set_status(state, TokenizerStatus.INEXACT, "another tokenizer is being compared")
        state.tokenizer, state.source = tokenizer, source
        state.verified.clear()
        state.differed.clear()

    async def _update(self, differing: dict[Incarnation, str]) -> TokenizerNotFound | None:
        """Load and use the hub's current revision of a tokenizer that differs from these instances'.

        An engine may have another revision than the local cache. The hub is queried once for each instance, and again when
        everything is tried again. Return the error if there is one, else None; an error without text means that the hub has no
        other revision.
        """
        state = self._state
        known = differing.keys() <= state.hub_asked_for
        if known or not follows_hub(state.source, pinned=self._tokenizers.is_pinned(state.source)):
            return TokenizerNotFound("")
        reason = f"{min(differing.values())}; querying the hub for its current revision"
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
    """Return whether another try may succeed."""
    return isinstance(missing, HubUnreachable)
