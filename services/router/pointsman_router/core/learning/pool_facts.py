"""Counts what a pool's instances report and what is learned of them, and keeps the counts by which the pool's policy is chosen.

So the choice does not follow each resynchronisation of an instance. Pure; times in s on one clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.placement_types import LIGHT_NEW_TOKENS, NO_FACTS, InstanceState, PoolFacts, PrefixSource
from pointsman_router.core.policy.base import TakenPolicy

# Maximum age of facts that are used again, s. A count over a thousand instances takes about a millisecond.
MAX_AGE_S = 1.0
# Samples from which a prefill curve counts as learned, and requests of its pool: the scale, which the default curve lacks, is
# known after a dozen prefills, and so is the mean request.
LEARNED_AFTER = 12
# Mean cost, as in PoolFacts, below which it takes SURE_AFTER requests to know it: some of a one-turn chat are as long as an
# agent's.
CLEAR_COST, SURE_AFTER = 1.0, 100
# How long facts must ask for another policy without interruption before it is taken, s. A resynchronisation takes less.
SETTLE_S = 10.0
# Minimum time for which a policy is kept that was taken instead of another one, s.
LEAST_KEPT_S = 60.0
# Relative distance from a bound of the mean cost up to which the mean does not ask for another policy.
COST_BAND = 0.1


class PoolFactsCounter:
    """Counts the facts of pools."""

    def __init__(
        self, instances: InstanceRegistry, prefix_knowledge: PrefixKnowledge, prefill_observer: PrefillObserver
    ) -> None:
        self._instances = instances
        self._prefix_knowledge = prefix_knowledge
        self._prefill_observer = prefill_observer

    def of(self, pool: str, now: float) -> PoolFacts:
        """Return the facts of `pool` at `now`. O(instances of the pool)."""
        instances = exact = learned = 0
        mean_cost = 0.0
        observer, work = self._prefill_observer, self._prefill_observer.mean_work(pool)
        record = observer.mean_work_record(pool)
        requests = record.requests if record is not None else 0
        kinds: dict[str, tuple[bool, float]] = {}
        for instance in self._instances.members(pool, pool):
            if instance.state is not InstanceState.READY or instance.info.produces_only:
                continue
            hardware = instance.info.hardware
            if hardware not in kinds:
                curve = observer.curve(pool, hardware)
                cost = curve.work_s(work) / curve.cost_s(LIGHT_NEW_TOKENS, 0) if work.tokens else 0.0
                # A long prompt among the first short ones would decide for a minute.
                counted = requests >= (LEARNED_AFTER if cost >= CLEAR_COST else SURE_AFTER)
                kinds[hardware] = counted and observer.samples(pool, hardware) >= LEARNED_AFTER, cost
            instances += 1
            source, trust = self._prefix_knowledge.source(instance, now), instance.trust
            # Before the first answer that confirms or contradicts an instance's events, they are expected to be right: so neither
            # a pool that begins nor an instance that restarts has another policy until then.
            expected = instance.follows_events and instance.sync.live and not trust.losses
            exact += source is PrefixSource.EVENTS or (source is PrefixSource.APPROXIMATE and expected)
            learned += kinds[hardware][0]
            mean_cost += kinds[hardware][1]
        return PoolFacts(instances, exact, learned, mean_cost / max(instances, 1))


class PoolChoice(NamedTuple):
    """The policy that decides for a pool, by facts that are kept, and since when (s). `facts`: the newest ones. `asked`: the
    policy that these ask for, if it is another one; it is taken if they keep to it."""

    taken: TakenPolicy
    since: float
    facts: PoolFacts
    asked: TakenPolicy | None


@dataclass(slots=True)
class _Pool:
    counted: PoolFacts  # the newest
    counted_at: float  # when they were counted, s; -inf: stored by an earlier owner, to be counted anew
    kept: PoolFacts  # by which the policy is chosen
    taken: TakenPolicy  # by them
    since: float  # when the choice began
    changed: bool = False  # whether it took the place of one by other facts
    asked_since: float | None = None  # since when the newest facts ask for another one


class PoolChoices:
    """The facts of pools, counted anew when they are older than MAX_AGE_S, and those of them by which policies are chosen.

    The newest facts are used as long as they lead to the same choice as those in use. If they lead to another one, the facts in
    use are kept until this has lasted for SETTLE_S, and the present choice for LEAST_KEPT_S. A pool's first change comes sooner:
    at once if the choice was made for lack of knowledge, else after SETTLE_S.
    """

    def __init__(self, count: Callable[[str, float], PoolFacts], taken: Callable[[PoolFacts], TakenPolicy]) -> None:
        """`count`: PoolFactsCounter.of. `taken`: Policy.taken of the policy in force."""
        self._count = count
        self._taken = taken
        self._pools: dict[str, _Pool] = {}
        self._untold: list[ev.PolicyTaken | ev.PoolFactsSet] = []

    def facts(self, pool: str, now: float) -> PoolFacts:
        """Return the facts by which the policy of `pool` is chosen at `now`. O(1); once a second O(instances of the pool)."""
        return self._at(pool, now).kept

    def choice(self, pool: str, now: float) -> PoolChoice:
        """Return the policy of `pool` at `now`. Costs as `facts`."""
        known = self._at(pool, now)
        asked = self._taken(known.counted) if known.asked_since is not None else None
        return PoolChoice(known.taken, known.since, known.counted, asked)

    def policy_set(self, now: float) -> None:
        """Choose by the newest facts where operators have put another policy in force. Mutates; O(instances)."""
        for pool, known in self._pools.items():
            taken = self._taken(known.kept)
            if taken.acts_as(known.taken):
                known.taken = taken
            else:
                known.counted, known.counted_at = self._count(pool, now), now
                self._take(pool, known, now, changed=False)

    def tick(self, owns: Callable[[str], bool], now: float) -> list[ev.PolicyTaken | ev.PoolFactsSet]:
        """Count what is due, and return the changes since the last call of the pools that this replica `owns`. Mutates."""
        if self._taken(NO_FACTS).reason:  # other policies do not depend on facts
            for pool in self._pools:
                if owns(pool):
                    self._at(pool, now)
        untold, self._untold = [effect for effect in self._untold if owns(effect.pool)], []
        return untold

    def kept(self, pool: str) -> PoolFacts | None:
        """Return the facts that a later owner of the pool is to begin with; None while the first choice lasts."""
        known = self._pools.get(pool)
        return known.kept if known is not None and known.changed else None

    def take_over(self, pool: str, facts: PoolFacts | None, now: float) -> None:
        """Begin with the facts by which an earlier owner chose the policy of the pool, if it stored any. Mutates."""
        self._pools.pop(pool, None)
        if facts is not None:
            self._pools[pool] = _Pool(facts, float("-inf"), facts, self._taken(facts), now, changed=True)

    def forget_pool(self, pool: str) -> None:
        """Drop a pool that is gone, or another replica's. Mutates."""
        self._pools.pop(pool, None)

    def _at(self, pool: str, now: float) -> _Pool:
        known = self._pools.get(pool)
        if known is None:
            found = self._count(pool, now)
            known = self._pools[pool] = _Pool(found, now, found, self._taken(found), now)
        elif not known.counted_at <= now < known.counted_at + MAX_AGE_S:
            known.counted, known.counted_at = self._count(pool, now), now
            if self._settled(known, now):
                self._take(pool, known, now, changed=True)
        return known

    def _settled(self, known: _Pool, now: float) -> bool:
        """Return whether the newest facts are to be used. Mutates `known.asked_since`."""
        found, used = known.counted, known.taken
        if self._taken(found).acts_as(used):
            return True
        if used.provisional and not known.changed:
            return True
        around = (replace(found, mean_cost=found.mean_cost * factor) for factor in (1.0 - COST_BAND, 1.0 + COST_BAND))
        if any(self._taken(facts).acts_as(used) for facts in around):
            known.asked_since = None
            return False
        if known.asked_since is None:
            known.asked_since = now
        return now >= known.asked_since + SETTLE_S and (not known.changed or now >= known.since + LEAST_KEPT_S)

    def _take(self, pool: str, known: _Pool, now: float, *, changed: bool) -> None:
        """Use the newest facts. `changed`: whether another choice than before is due to them, not to operators. Mutates."""
        known.kept, known.asked_since = known.counted, None
        before, known.taken = known.taken, self._taken(known.kept)
        if known.taken.acts_as(before):
            return
        known.since, known.changed = now, changed
        self._untold += [
            ev.PolicyTaken(
                pool, known.taken.policy.name, known.taken.reason, before.policy.name, before.reason, known.kept
            ),
            ev.PoolFactsSet(known.kept, pool),
        ]
