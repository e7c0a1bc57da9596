"""Whether an engine computes what it accepts, and when its prefix cache was reset without a KV event so far. Pure.

vLLM accepts requests while it is asleep or paused, and keeps them until it is woken up or resumed. Its gauges show the last step,
so it looks idle. It resets its prefix cache when it falls asleep (level 1 and 2) and, by default, when it is paused. It publishes
AllBlocksCleared only with the next step that has a request, which can be placed by keys that the engine no longer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pointsman_agent.core.engine_metrics import Sample, Scrape

# Operations of POST /sleep and POST /release_kv_cache_memory, as vLLM's metrics name them. Both discard the KV cache, except
# a sleep of level 0.
_FALLING_ASLEEP = frozenset({"sleep", "release_kv_cache_memory"})
_SLEEP_OPERATIONS = _FALLING_ASLEEP | {"wake"}
# Operations that change weights in place, as vLLM's metrics name them.
_CHANGING_WEIGHTS = frozenset({"start", "start_draft", "update", "finish"})


def suspension(sample: Sample, scrape: Scrape, *, paused: bool) -> str:
    """Return why a rank does not compute the requests that it accepts; "" if it computes them.

    `paused`: the answer of GET /is_paused. It is true of a sleeping engine, too."""
    if not sample.awake:
        if sample.discard_all:
            return "asleep (level 2: weights and KV cache are discarded)"
        if sample.weights_offloaded:
            return "asleep (level 1: weights are in host memory, the KV cache is discarded)"
        return "asleep (its scheduler is paused)"
    if scrape.in_progress & _FALLING_ASLEEP:
        return "falling asleep"
    if scrape.in_progress & _CHANGING_WEIGHTS:
        return "its weights are being changed"
    return "paused" if paused else ""


class Reset(NamedTuple):
    """A reset of a prefix cache. `over`: the engine may have computed since then, and events may have told of it."""

    reason: str
    over: bool


class CacheResets:
    """Finds resets of one process's prefix cache in consecutive scrapes."""

    def __init__(self) -> None:
        self._completed: Mapping[str, int] | None = None
        # Whether the last scrape showed no sleep, and GET /is_paused answered that the engine is paused.
        self._seemed_paused = False

    def sleeps(self, scrape: Scrape) -> bool:
        """Return whether the engine sleeps or wakes up in this scrape, or has done so since the last one observed."""
        awake = all(sample.awake for sample in scrape.ranks.values())
        return not awake or bool((self._done(scrape) | scrape.in_progress) & _SLEEP_OPERATIONS)

    def observe(self, scrape: Scrape, *, paused: bool) -> Reset | None:
        """Return why the keys that were known before the scrape may be wrong; None if no reset is seen. Mutates.

        A pause and a sleep without a known level count as resets: a missing key is better than a wrong one. While a reason holds,
        each scrape returns it, because events from before the reset may arrive late. Scrape and answer are of two moments, and a
        sleeping engine is paused, too. So a pause counts from the next scrape on, if that does not show a sleep. Until then
        nothing is placed on the instance.
        """
        done, no_sleep = self._done(scrape), not self.sleeps(scrape)
        # A count that is no number in one scrape is not new in the next.
        self._completed = {**(self._completed or {}), **scrape.completed}
        samples = scrape.ranks.values()
        seemed_paused, self._seemed_paused = self._seemed_paused, no_sleep and paused
        if any(sample.weights_offloaded or sample.discard_all for sample in samples):
            return Reset("the engine is asleep", over=False)
        if seemed_paused and no_sleep:
            return Reset("the engine is paused", over=False) if paused else Reset("the engine was paused", over=True)
        if done & _CHANGING_WEIGHTS:
            return Reset("the engine's weights were changed", over=True)
        if "release_kv_cache_memory" in done or ("sleep" in done and all(sample.awake for sample in samples)):
            return Reset("the engine was asleep", over=True)
        return None

    def _done(self, scrape: Scrape) -> set[str]:
        """Return the operations that have ended since the last scrape observed; none in the first."""
        before = self._completed
        return (
            set()
            if before is None
            else {name for name, count in scrape.completed.items() if count > before.get(name, 0)}
        )
