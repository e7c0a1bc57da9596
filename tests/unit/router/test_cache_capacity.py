"""What a pool's caches hold for sessions: KV of its instances, and the tiers below at their worth."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_common.core.key_report_types import Delta, SnapshotBegin, Tier
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.cache_capacity import MOST_BELOW, Capacity
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.prefix.exact_index import SWEEP_AFTER
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, state

CAPACITY = 16_000
# 131,072 bytes a token: host memory loads at 13 us a token, storage at 87.
TOKEN_BYTES = 131_072


def fleet(*names: str, storage: str = "") -> RouterState:
    router = state(admission=AdmissionSettings(on=True))
    for number, name in enumerate(names, start=1):
        described: dict[str, Any] = {
            "kv_capacity_tokens": CAPACITY,
            "kv_token_bytes": TOKEN_BYTES,
            "shared_storage": storage,
        }
        join(router, name, number, **described)
    return router


def report(router: RouterState, name: str, message: Delta | SnapshotBegin) -> None:
    record = router.instances.get(name)
    assert record is not None
    router.handle(ev.KeysReported(record.stream_id, name, message), 0.0)


def store(router: RouterState, name: str, tier: int, blocks: int, first: int = 0) -> None:
    record = router.instances.get(name)
    assert record is not None
    report(router, name, Delta(record.sync.seq + 1, tier, tuple(range(first, first + blocks))))


def capacity(router: RouterState) -> Capacity:
    router.admission.was_parked("m", 0.0)
    found = router.admission.pools["m"].capacity
    assert router.admission.status("m", 0.0).capacity == found.tokens
    return found


def below(router: RouterState) -> float:
    """What the tiers below the GPUs add."""
    found = capacity(router)
    return found.tokens - CAPACITY * len(found.ids)


def test_without_tiers_the_capacity_is_the_kv_of_the_instances() -> None:
    assert capacity(fleet("a", "b")) == Capacity(2 * CAPACITY, CAPACITY, ("a", "b"), "", "")


def test_a_host_tier_counts_with_what_exceeds_the_gpu_and_less_than_kv_of_a_gpu() -> None:
    router = fleet("a", "b")
    store(router, "a", Tier.HOST, 1_000)
    assert below(router) == 0, "a copy of what is on the GPU"
    store(router, "a", Tier.HOST, 2_000, first=1_000)
    assert 0.5 * 32_000 < below(router) < 32_000
    assert capacity(router).largest == CAPACITY


def test_storage_counts_with_what_exceeds_the_host_tier_at_its_own_worth() -> None:
    router = fleet("a")
    store(router, "a", Tier.HOST, 3_000)
    host = below(router)
    store(router, "a", Tier.STORAGE, 3_000)
    assert below(router) == host
    store(router, "a", Tier.STORAGE, 2_000, first=3_000)
    storage = below(router) - host
    assert 0 <= storage < host, "the same number of blocks, which take longer to load"
    alone = fleet("a")
    store(alone, "a", Tier.STORAGE, 3_000)
    assert below(alone) == pytest.approx(storage)


def test_an_instance_that_sends_its_keys_anew_has_what_it_had() -> None:
    router = fleet("a", "b")
    store(router, "a", Tier.HOST, 3_000)
    before = capacity(router)
    assert below(router) > 0
    report(router, "a", SnapshotBegin(10))
    record = router.instances.get("a")
    assert record is not None
    assert record.state is InstanceState.SYNCING
    assert not router.lower_tiers.count("a", Tier.HOST)
    assert capacity(router) == before


def test_a_store_that_instances_share_keeps_its_size_while_they_send_their_keys_anew() -> None:
    names = [f"i{number}" for number in range(SWEEP_AFTER)]
    router = fleet(*names, storage="s")
    for at, name in enumerate(names):
        store(router, name, Tier.STORAGE, 2_000, first=2_000 * at)
    before = capacity(router)
    assert below(router) > 0
    for name in names:
        report(router, name, SnapshotBegin(10))
    for _ in range(1_000):
        router.sweep()
    assert router.lower_tiers.different(Tier.STORAGE) == 0
    assert capacity(router) == before


def test_tiers_that_do_not_have_what_they_report_count_nothing() -> None:
    router = fleet("a")
    store(router, "a", Tier.HOST, 3_000)
    assert below(router) > 0
    router.prefix_knowledge._unloaded["a"] = 60.0
    assert below(router) == 0


def test_a_store_that_instances_share_has_each_block_once() -> None:
    alone, shared = fleet("a"), fleet("a", "b", "c", storage="s")
    store(alone, "a", Tier.STORAGE, 9_000)
    for name in ("a", "b", "c"):
        store(shared, name, Tier.STORAGE, 9_000)
    # The blocks of one instance, less the KV of all three, whose copies may be among them.
    worth = below(alone) / (9_000 * 16 - CAPACITY)
    assert below(shared) == pytest.approx((9_000 * 16 - 3 * CAPACITY) * worth)
    apart = fleet("a", "b", "c", storage="s")
    for at, name in enumerate(("a", "b", "c")):
        store(apart, name, Tier.STORAGE, 9_000, first=9_000 * at)
    assert below(apart) == pytest.approx((3 * 9_000 * 16 - 3 * CAPACITY) * worth)


def test_a_store_that_never_removes_counts_up_to_a_limit() -> None:
    router = fleet("a")
    store(router, "a", Tier.STORAGE, 60_000)
    found = capacity(router)
    assert below(router) <= MOST_BELOW * CAPACITY
    store(router, "a", Tier.STORAGE, 60_000, first=60_000)
    assert capacity(router) == found
