"""What a pool's caches hold for sessions: KV of its instances, and the tiers below at their worth."""

from __future__ import annotations

import pytest

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.admission.cache_capacity import Capacity
from pointsman.router.core.admission.session_admission import AdmissionSettings
from pointsman.router.core.instances.report_sync import Delta
from pointsman.router.core.prefix.lower_tiers import TIER_HOST, TIER_STORAGE
from pointsman.router.core.router_state import RouterState
from tests.support.router_values import join, state

CAPACITY = 16_000
# 131,072 bytes a token: host memory loads at 13 us a token, storage at 87.
TOKEN_BYTES = 131_072


def fleet(*names: str) -> RouterState:
    router = state(admission=AdmissionSettings(on=True))
    for number, name in enumerate(names, start=1):
        join(router, name, number, kv_capacity_tokens=CAPACITY, kv_token_bytes=TOKEN_BYTES)
    return router


def store(router: RouterState, name: str, tier: int, blocks: int, first: int = 0) -> None:
    record = router.instances.get(name)
    assert record is not None
    seq = record.sync.seq + 1
    router.handle(ev.KeysReported(record.stream_id, name, Delta(seq, tier, tuple(range(first, first + blocks)))), 0.0)


def capacity(router: RouterState) -> Capacity:
    router.admission.was_parked("m", 0.0)
    found = router.admission.pools["m"].capacity
    assert router.admission.status("m", 0.0).capacity == found.tokens
    return found


def test_without_tiers_the_capacity_is_the_kv_of_the_instances() -> None:
    assert capacity(fleet("a", "b")) == Capacity(2 * CAPACITY, 0.0, CAPACITY, ("a", "b"), "", "")


def test_a_host_tier_counts_with_what_exceeds_the_gpu_and_less_than_kv_of_a_gpu() -> None:
    router = fleet("a", "b")
    store(router, "a", TIER_HOST, 1_000)
    assert capacity(router).below == 0, "a copy of what is on the GPU"
    store(router, "a", TIER_HOST, 2_000, first=1_000)
    found = capacity(router)
    assert 0.5 * 32_000 < found.below < 32_000
    assert found.tokens == 2 * CAPACITY + found.below
    assert found.largest == CAPACITY


def test_storage_counts_with_what_exceeds_the_host_tier_at_its_own_worth() -> None:
    router = fleet("a")
    store(router, "a", TIER_HOST, 3_000)
    host = capacity(router).below
    store(router, "a", TIER_STORAGE, 3_000)
    assert capacity(router).below == host
    store(router, "a", TIER_STORAGE, 2_000, first=3_000)
    storage = capacity(router).below - host
    assert 0 <= storage < host, "the same number of blocks, which take longer to load"
    alone = fleet("a")
    store(alone, "a", TIER_STORAGE, 3_000)
    assert capacity(alone).below == pytest.approx(storage)
