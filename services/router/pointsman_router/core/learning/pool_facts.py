"""Counts what a pool's instances report and what is learned of them, so that a policy can be chosen for the pool. Pure."""

from __future__ import annotations

from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.placement_types import LIGHT_NEW_TOKENS, InstanceState, PoolFacts, PrefixSource

# Maximum age of facts that are used again, s. A count over a thousand instances takes about a millisecond.
MAX_AGE_S = 1.0
# Samples from which a prefill curve counts as learned. Its scale, which the default curve lacks, is known after a dozen prefills.
LEARNED_AFTER = 12


class PoolFactsCache:
    """Returns the facts of pools, counted anew when they are older than MAX_AGE_S. Changes nothing but cached data."""

    def __init__(
        self, instances: InstanceRegistry, prefix_knowledge: PrefixKnowledge, prefill_observer: PrefillObserver
    ) -> None:
        self._instances = instances
        self._prefix_knowledge = prefix_knowledge
        self._prefill_observer = prefill_observer
        # Pool -> its facts, and when they were counted, s.
        self._kept: dict[str, tuple[PoolFacts, float]] = {}

    def of(self, pool: str, now: float) -> PoolFacts:
        """Return the facts of `pool` at `now` (s). O(1); once a second O(instances of the pool)."""
        kept = self._kept.get(pool)
        if kept is not None and kept[1] <= now < kept[1] + MAX_AGE_S:
            return kept[0]
        facts = self._count(pool, now)
        self._kept[pool] = facts, now
        return facts

    def forget_pool(self, pool: str) -> None:
        """Drop the facts of a pool that is gone. Mutates."""
        self._kept.pop(pool, None)

    def _count(self, pool: str, now: float) -> PoolFacts:
        instances = exact = learned = 0
        mean_cost = 0.0
        observer, work = self._prefill_observer, self._prefill_observer.mean_work(pool)
        kinds: dict[str, tuple[bool, float]] = {}
        for record in self._instances.members(pool, pool):
            if record.state is not InstanceState.READY or record.produces_only:
                continue
            hardware = record.info.hardware
            if hardware not in kinds:
                curve = observer.curve(pool, hardware)
                cost = curve.work_s(work) / curve.cost_s(LIGHT_NEW_TOKENS, 0) if work.tokens else 0.0
                kinds[hardware] = observer.samples(pool, hardware) >= LEARNED_AFTER, cost
            instances += 1
            exact += self._prefix_knowledge.source(record, now) is PrefixSource.EVENTS
            learned += kinds[hardware][0]
            mean_cost += kinds[hardware][1]
        return PoolFacts(instances, exact, learned, mean_cost / max(instances, 1))
