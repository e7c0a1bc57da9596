"""What the caches of a pool hold for sessions: the KV of its instances, and of the tiers below at their worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.router.core.instances.instance_registry import InstanceRecord
from pointsman.router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman.router.core.prefix.lower_tiers import TIER_HOST, TIER_STORAGE, LowerTiers
from pointsman.router.core.types import InstanceInfo, InstanceState

# States of the instances whose KV counts. One that syncs its keys has its cache, and is placed on.
SERVING = (InstanceState.READY, InstanceState.SYNCING)
# Length of the prompt by which a tier's worth is measured, tokens: that of an agent's session after some turns.
TYPICAL_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool's caches hold. `tokens`: the KV of the instances that may answer, plus `below`, that of the tiers below them at
    its worth; 0 if unknown, for `reason`. In the study of admission, 0.9 of it parks twice as many near a fleet's limit, and with
    1.1 of it a burst's sessions take longer. `largest`: KV of the largest instance. `ids`: the instances. `hardware`: that of
    most of them."""

    tokens: float = 0.0
    below: float = 0.0
    largest: int = 0
    ids: tuple[str, ...] = ()
    hardware: str = ""
    reason: str = "no instance of the pool is ready"


class CacheCapacity:
    """Measures the capacity of pools by what their instances have reported.

    A tier's size is not announced, so its worth is that of what it holds. A tier holds copies of what is on the GPU as well (vLLM
    stores each block there when it is computed), and storage of what is in host memory: only what exceeds the tier above counts.
    Its worth is the share of a prefill that loading it saves, for a prompt of TYPICAL_TOKENS.
    """

    def __init__(self, lower_tiers: LowerTiers, prefill_observer: PrefillObserver) -> None:
        self._lower_tiers = lower_tiers
        self._prefill_observer = prefill_observer

    def of(self, pool: str, instances: Iterable[InstanceRecord]) -> Capacity:
        """Return the capacity of a pool with these instances. O(instances)."""
        serving = [one.info for one in instances if one.state in SERVING and not one.produces_only]
        if not serving:
            return Capacity()
        ids = tuple(one.instance_id for one in serving)
        kinds = [one.hardware for one in serving]
        hardware = max(sorted(set(kinds)), key=kinds.count)
        sizes = [one.kv_capacity_tokens for one in serving]
        if not all(sizes):
            unknown = next(one.instance_id for one in serving if not one.kv_capacity_tokens)
            return Capacity(0.0, 0.0, 0, ids, hardware, f"the KV capacity of {unknown} is unknown")
        below = self._below(pool, serving) if self._lower_tiers else 0.0
        return Capacity(sum(sizes) + below, below, max(sizes), ids, hardware, "")

    def _below(self, pool: str, serving: Iterable[InstanceInfo]) -> float:
        total = 0.0
        worths: dict[tuple[str, int], tuple[float, float]] = {}
        for one in serving:
            kind = one.hardware, one.kv_token_bytes
            if kind not in worths:
                worths[kind] = self._worths(pool, *kind)
            above = one.kv_capacity_tokens
            for tier, worth in zip((TIER_HOST, TIER_STORAGE), worths[kind], strict=True):
                held = self._lower_tiers.count(one.instance_id, tier) * KEY_TOKENS
                total += max(held - above, 0) * worth
                above = max(above, held)
        return total

    def _worths(self, pool: str, hardware: str, token_bytes: int) -> tuple[float, float]:
        prices = self._prefill_observer.load_prices(pool, hardware, token_bytes)
        curve = self._prefill_observer.curve(pool, hardware)
        host = prices.load(0, TYPICAL_TOKENS, 0, curve)
        storage = prices.load(0, 0, TYPICAL_TOKENS, curve)
        return host.credit_tokens / TYPICAL_TOKENS, storage.credit_tokens / TYPICAL_TOKENS
