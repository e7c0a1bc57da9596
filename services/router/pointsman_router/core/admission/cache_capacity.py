"""What the caches of a pool hold for sessions: the KV of its instances, and of the tiers below at their worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.key_report_types import Tier
from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.prefix.lower_tiers import Store

# States of the instances whose KV counts. One that syncs its keys, or whose agent is gone, has its cache, and is placed on.
SERVING = (InstanceState.READY, InstanceState.SYNCING, InstanceState.LOST)
# Length of the prompt by which a tier's worth is measured, tokens: that of an agent's session after some turns.
TYPICAL_TOKENS = 16_384
# Maximum KV in a tier that counts, as a multiple of the KV of the GPU.
MOST_BELOW = 16.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool's caches hold. In the study of admission, 0.9 of it parks twice as many near a fleet's limit, and with 1.1 of
    it a burst's sessions take longer."""

    # KV of the instances that may answer, plus that of the tiers below them at its worth; 0 if unknown.
    tokens: float = 0.0
    largest: int = 0  # KV of the largest instance, tokens
    ids: tuple[str, ...] = ()  # the instances
    hardware: str = ""  # that of most of them
    reason: str = "no instance of the pool is ready"  # why `tokens` is unknown


class _Held(NamedTuple):
    """What one incarnation of an instance has reported in the tiers below its GPU, in tokens."""

    incarnation: str
    host: int
    storage: int


class CacheCapacity:
    """Measures the capacity of pools by what their instances have reported.

    A tier's size is not announced, so its worth is that of what it holds. A tier holds copies of what is on the GPU as well (vLLM
    stores each block there when it is computed), and storage of what is in host memory: only what exceeds the tier above counts,
    and at most MOST_BELOW times the KV of the GPU, since not every store reports what it removes. Its worth is the share of a
    prefill that loading it saves, for a prompt of TYPICAL_TOKENS. Tiers that answers have shown to lack what they report count
    nothing, as in decisions. An instance that sends its keys anew has what it had before.
    """

    def __init__(self, prefix_knowledge: PrefixKnowledge) -> None:
        self._knowledge = prefix_knowledge
        # Pool -> instance -> what it held when it was READY last.
        self._held: dict[str, dict[str, _Held]] = {}
        # Pool -> number of different blocks in STORAGE when none of its instances sent its keys anew.
        self._different: dict[str, int] = {}

    def of(self, pool: str, instances: Iterable[InstanceRecord]) -> Capacity:
        """Return the capacity of a pool with these instances. O(instances). Mutates what is remembered of them."""
        records = [record for record in instances if record.state in SERVING and not record.info.produces_only]
        serving = [record.info for record in records]
        if not serving:
            return Capacity()
        ids = tuple(info.instance_id for info in serving)
        kinds = [info.hardware for info in serving]
        hardware = max(sorted(set(kinds)), key=kinds.count)
        sizes = [info.kv_capacity_tokens for info in serving]
        if not all(sizes):
            unknown = next(info.instance_id for info in serving if not info.kv_capacity_tokens)
            return Capacity(0.0, 0, ids, hardware, f"the KV capacity of {unknown} is unknown")
        tiers = self._knowledge.lower_tiers or pool in self._held
        below = self._below(pool, records) if tiers else 0.0
        return Capacity(sum(sizes) + below, max(sizes), ids, hardware, "")

    def forget_pool(self, pool: str) -> None:
        """Drop what is remembered of a pool. Mutates."""
        self._held.pop(pool, None)
        self._different.pop(pool, None)

    def _below(self, pool: str, records: Sequence[InstanceRecord]) -> float:
        before = self._held.get(pool, {})
        held = self._held[pool] = {record.info.instance_id: self._held_by(record, before) for record in records}
        worths: dict[tuple[str, int], tuple[float, float]] = {}
        total = 0.0
        # Store -> KV of the instances that use it, what they have above it, the sum of what they have reported, its worth. An
        # instance that shares none has a store of its own.
        stores: dict[Store, list[float]] = {}
        for record in records:
            info = record.info
            kind = info.hardware, info.kv_token_bytes
            if kind not in worths:
                worths[kind] = self._worths(pool, *kind)
            host_worth, storage_worth = worths[kind]
            _, host, storage = held[info.instance_id]
            gpu = info.kv_capacity_tokens
            total += _beyond(host, gpu, gpu) * host_worth
            store = self._knowledge.lower_tiers.store_of(info.instance_id) or Store(pool, f" {info.instance_id}")
            sums = stores.setdefault(store, [0.0, 0.0, 0.0, storage_worth])
            for at, tokens in enumerate((gpu, max(gpu, host), storage)):
                sums[at] += tokens
        # Instances may report the same block of a shared store: it has no more than all stores have different blocks.
        most = self._different_blocks(pool, records) * KEY_TOKENS
        return total + sum(_beyond(min(held, most), above, gpu) * worth for gpu, above, held, worth in stores.values())

    def _different_blocks(self, pool: str, records: Sequence[InstanceRecord]) -> int:
        different = self._knowledge.lower_tiers.different(Tier.STORAGE)
        if any(record.state is InstanceState.SYNCING for record in records):
            different = max(different, self._different.get(pool, 0))
        self._different[pool] = different
        return different

    def _held_by(self, record: InstanceRecord, before: Mapping[str, _Held]) -> _Held:
        instance_id, incarnation = record.info.instance_id, record.info.incarnation
        if not self._knowledge.trusts_lower_tiers(instance_id):
            return _Held(incarnation, 0, 0)
        known = before.get(instance_id)
        if record.state is InstanceState.SYNCING and known is not None and known.incarnation == incarnation:
            return known
        count = self._knowledge.lower_tiers.count
        return _Held(
            incarnation, count(instance_id, Tier.HOST) * KEY_TOKENS, count(instance_id, Tier.STORAGE) * KEY_TOKENS
        )

    def _worths(self, pool: str, hardware: str, token_bytes: int) -> tuple[float, float]:
        prices = self._knowledge.prefill_observer.load_prices(pool, hardware, token_bytes)
        curve = self._knowledge.prefill_observer.curve(pool, hardware)
        host = prices.load(0, TYPICAL_TOKENS, 0, curve)
        storage = prices.load(0, 0, TYPICAL_TOKENS, curve)
        return host.credit_tokens / TYPICAL_TOKENS, storage.credit_tokens / TYPICAL_TOKENS


def _beyond(held: float, above: float, gpu: float) -> float:
    """Return how much of what a tier holds counts: what exceeds the tiers above, at most MOST_BELOW times the GPU's KV."""
    return min(max(held - above, 0.0), MOST_BELOW * gpu)
