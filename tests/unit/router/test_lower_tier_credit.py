"""Credit for blocks below an instance's GPU, from its events to decisions of all policies, by example."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_SCHEME, digest_of, prompt_keys
from pointsman_common.core.key_report_types import Delta, SnapshotBegin, SnapshotChunk, SnapshotEnd, Tier
from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, inputs_digest, redecide
from pointsman_router.core.instances.prediction_audit import AGAIN_S, SHORTFALLS
from pointsman_router.core.kv_load import NO_LOAD
from pointsman_router.core.learning.load_price_fit import LoadPriceFit
from pointsman_router.core.placement_types import Candidate, Decision, Load
from pointsman_router.core.prefill_curve import DEFAULT_CURVE
from pointsman_router.core.prefix.provisional_blocks import PROVISIONAL_S
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.telemetry.decision_log import LoggedDecision
from tests.support.router_values import hello, info, join, place, request, set_policy, state

PROMPT = list(range(40_000))
KEYS = prompt_keys(PROMPT, "m")
DEVICE, HOST = 1, 2


def report(router: RouterState, *messages: Any, name: str = "a", now: float = 0.0) -> list[ev.Effect]:
    record = router.instances.get(name)
    assert record is not None
    effects = [
        effect
        for message in messages
        for effect in router.handle(ev.KeysReported(record.stream_id, name, message), now)
    ]
    router.check_invariants()
    return effects


def decided(router: RouterState, now: float = 0.0, prompt: list[int] = PROMPT) -> Decision:
    decision = router.explain(request(f"dry-{now}", prompt=prompt), now)
    assert isinstance(decision, Decision)
    return decision


def seen(router: RouterState, name: str = "a", now: float = 0.0) -> Candidate:
    found = decided(router, now).view.find(name)
    assert found is not None
    return found


def two(**changes: Any) -> RouterState:
    """`a` has 1,000 of the prompt's blocks on its GPU and 1,000 more in host memory, `b` has 1,100 on its GPU."""
    router = state()
    join(router, "a", 1, KEYS[:1_000], **changes)
    join(router, "b", 2, KEYS[:1_100], **changes)
    report(router, Delta(1, Tier.HOST, KEYS[:2_000]))
    return router


def test_a_prefix_continues_from_the_gpu_into_host_memory_and_storage() -> None:
    router = two()
    report(router, Delta(2, Tier.STORAGE, KEYS[2_000:2_200]))
    one = seen(router)
    assert (one.kv_load.host_tokens, one.kv_load.storage_tokens) == (16_000, 3_200)
    assert 0 < one.kv_load.price_tokens < 19_200
    assert one.present_tokens == 35_200
    assert one.cached_tokens == 35_200 - one.kv_load.price_tokens
    assert one.cached_tokens + one.new_tokens == len(PROMPT)
    assert one.prefill_s(DEFAULT_CURVE, len(PROMPT)) == pytest.approx(
        DEFAULT_CURVE.cost_s(4_800, 35_200) + one.kv_load.seconds
    )
    assert seen(router, "b").kv_load == NO_LOAD
    assert one.provisional_tokens == 0


def test_only_what_follows_without_a_gap_is_credited() -> None:
    router = state()
    join(router, "a", 1, KEYS[:1_000])
    report(router, Delta(1, Tier.HOST, KEYS[1_001:2_000]), Delta(2, Tier.STORAGE, KEYS[1_002:]))
    assert seen(router).kv_load == NO_LOAD
    assert seen(router).cached_tokens == 16_000
    report(router, Delta(3, Tier.HOST, KEYS[1_000:1_001]))
    assert (seen(router).kv_load.host_tokens, seen(router).kv_load.storage_tokens) == (16_000, 39_984 - 32_000)


def test_the_last_token_is_always_computed() -> None:
    router = state()
    join(router, "a", 1)
    report(router, Delta(1, Tier.HOST, KEYS))
    assert len(KEYS) * 16 == len(PROMPT)
    assert seen(router).present_tokens == len(PROMPT) - 16


def test_a_load_that_takes_longer_than_computing_counts_nothing() -> None:
    router = two(kv_token_bytes=10**9)
    one = seen(router)
    assert one.kv_load.price_tokens == one.kv_load.tokens == 16_000
    assert (one.cached_tokens, one.new_tokens) == (16_000, 24_000)
    assert seen(router, "b").cached_tokens > one.cached_tokens


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_sees_the_credit_and_decides_again_alike(policy: str) -> None:
    router = two()
    set_policy(router, make_policy(policy))
    decision = decided(router)
    assert decision.view.find("a") == seen(router)
    chosen = decision.view.find(decision.instance_id)
    assert chosen is not None
    assert decision.kv_load == chosen.kv_load
    assert not differences(decision, redecide(decision, policies=POLICIES))
    other = make_policy("unified" if policy != "unified" else "foresight")
    assert redecide(decision, other).view == decision.view
    if policy in ("unified", "foresight", "adaptive-linear", "lmetric", "linear"):
        assert decision.instance_id == "a"


def test_a_decision_is_made_again_from_its_record() -> None:
    router = two()
    decision = decided(router)
    record = msgspec.json.encode(
        LoggedDecision(replace(decision, request=replace(decision.request, keys=())), 0.0, 0.0)
    )
    read = msgspec.json.decode(record, type=LoggedDecision).decision
    assert read.kv_load == decision.kv_load != NO_LOAD
    assert inputs_digest(read) == inputs_digest(decision)
    assert not differences(read, redecide(read, policies=POLICIES))


# ---- who evicts ----


def test_blocks_that_leave_a_tier_are_not_credited() -> None:
    router = two()
    assert not report(router, Delta(2, Tier.HOST, removed=KEYS[1_500:2_000]))
    assert seen(router).kv_load.host_tokens == 8_000
    report(router, Delta(3, DEVICE, cleared=True))
    assert seen(router).present_tokens == 0
    assert router.lower_tiers.count("a", Tier.HOST) == 0


def test_blocks_that_leave_the_gpu_are_loaded_from_below() -> None:
    router = two()
    report(router, Delta(2, DEVICE, removed=KEYS[400:1_000]))
    assert seen(router).kv_load.host_tokens == 25_600
    assert seen(router).present_tokens == 32_000


def test_a_removal_of_what_a_tier_does_not_have_asks_for_a_snapshot() -> None:
    router = two()
    effects = report(router, Delta(2, Tier.HOST, removed=[KEYS[2_400]]))
    assert any(isinstance(effect, ev.Resync) for effect in effects)
    assert router.lower_tiers.count("a", Tier.HOST) == 0
    report(
        router,
        SnapshotBegin(7),
        SnapshotChunk(Tier.HOST, KEYS[:1_200]),
        SnapshotChunk(DEVICE, KEYS[:1_000]),
        SnapshotEnd(7, 2_200, digest_of(DEVICE, KEYS[:1_000]) ^ digest_of(HOST, KEYS[:1_200])),
    )
    assert seen(router).kv_load.host_tokens == 3_200


def test_an_instance_that_is_gone_leaves_no_key() -> None:
    router = two()
    router.handle(ev.AgentGoodbye(1, "a"), 0.0)
    assert router.lower_tiers.count("a", Tier.HOST) == 0
    router.check_invariants()


def test_a_new_incarnation_begins_without_lower_tiers() -> None:
    router = two()
    router.handle(ev.AgentHello(3, info("a", incarnation="2"), KEY_SCHEME, 1, 0), 0.0)
    assert router.lower_tiers.count("a", Tier.HOST) == 0
    assert seen(router).kv_load == NO_LOAD


def test_an_agent_that_resumes_keeps_the_lower_tiers() -> None:
    router = two()
    router.handle(ev.AgentHello(3, info("a"), KEY_SCHEME, 1, 1), 0.0)
    assert seen(router).kv_load.host_tokens == 16_000


def test_tiers_without_room_cost_no_credit_on_the_gpu() -> None:
    router = state(max_keys=1_500)
    join(router, "a", 1, KEYS[:1_000])
    assert not report(router, Delta(1, Tier.HOST, KEYS[:1_600]))
    assert seen(router).cached_tokens == 16_000
    assert not report(router, Delta(2, Tier.HOST, KEYS[1_600:1_700]), Delta(3, Tier.HOST, removed=KEYS[:1_700]))
    assert seen(router).kv_load == NO_LOAD
    report(router, Delta(4, DEVICE, cleared=True), Delta(5, Tier.HOST, KEYS[:1_200]))
    assert seen(router).kv_load.host_tokens == 19_200


def test_an_instance_waits_for_room_for_its_keys_on_the_gpu_alone() -> None:
    router = state(max_keys=1_000)
    join(router, "a", 1, list(range(1, 951)))
    hello(router, "b", 2)
    lower = range(10_000, 15_000)
    report(
        router,
        SnapshotBegin(0),
        SnapshotChunk(DEVICE, KEYS[:50]),
        SnapshotChunk(HOST, lower[:2_500]),
        SnapshotChunk(DEVICE, KEYS[50:100]),
        SnapshotChunk(HOST, lower[2_500:]),
        SnapshotEnd(0, 5_100, digest_of(DEVICE, KEYS[:100]) ^ digest_of(HOST, lower)),
        name="b",
    )
    router.handle(ev.AgentGoodbye(1, "a"), 1.0)
    assert ev.Resync(2, "b", "the index has room again") in router.handle(ev.Tick(), 1.0)


def test_keys_of_an_unknown_tier_are_checked_and_not_credited() -> None:
    router = two()
    assert not report(router, Delta(2, 9, KEYS[2_000:]))
    assert seen(router).kv_load.host_tokens == 16_000


def test_instances_with_the_same_store_load_each_others_blocks() -> None:
    router = state()
    join(router, "a", 1, KEYS[:1_000], shared_storage="s")
    join(router, "b", 2, shared_storage="s")
    join(router, "c", 3)
    report(router, Delta(1, Tier.STORAGE, KEYS[:2_000]))
    assert [seen(router, name).kv_load.storage_tokens for name in "abc"] == [16_000, 32_000, 0]


# ---- requests ----


def test_the_price_is_a_part_of_the_work_until_the_load_is_done() -> None:
    router = two()
    placed = place(router, request("r", prompt=PROMPT))
    assert isinstance(placed, ev.Placed)
    assert placed.decision.instance_id == "a"
    reservation = router.reservations.get("r")
    assert reservation is not None
    price = placed.decision.kv_load.price_tokens
    assert reservation.new_tokens == 8_000 + price
    # The engine's events report loaded blocks as those of its own cache.
    report(router, Delta(2, DEVICE, KEYS[1_000:2_000]))
    reservation = router.reservations.get("r")
    assert reservation is not None
    assert reservation.pending_tokens == pytest.approx(8_000, abs=16)


# Time between two of the requests below, s.
EVERY_S = 2.0 * PROVISIONAL_S


def loaded(router: RouterState, number: int, now: float, *, load_s: float, cached: int | None = None) -> None:
    """A request that loads 1,000 blocks in `load_s`, on an engine as fast as its curve says."""
    name = f"r{number}"
    placed = place(router, request(name, prompt=PROMPT, exclude=("b",)), now)
    assert isinstance(placed, ev.Placed)
    one = placed.decision.view.find("a")
    assert one is not None
    computed_s = router.prefill_observer.curve("m", "").cost_s(len(PROMPT) - one.present_tokens, one.present_tokens)
    now += computed_s + load_s
    router.handle(ev.FirstToken(name), now)
    router.handle(ev.Finished(name, "OK", cached_tokens=one.present_tokens if cached is None else cached), now)
    # Provisional blocks must not count in the next request.
    router.handle(ev.Tick(), now + PROVISIONAL_S + 0.5)
    report(router, Delta(2 + number, DEVICE), now=now + PROVISIONAL_S + 0.5)


def learned() -> RouterState:
    """As `two`, with a curve that was learned from prompts that load nothing."""
    router = two()
    for number in range(6):
        other = list(range(50_000 + number * 10_000, 55_000 + number * 10_000))
        place(router, request(f"c{number}", prompt=other, exclude=("b",)), 10.0 * number)
        router.handle(ev.FirstToken(f"c{number}"), 10.0 * number + DEFAULT_CURVE.cost_s(5_000, 0))
        router.handle(ev.Finished(f"c{number}", "OK"), 10.0 * number + 1.0)
        for name in "ab":
            router.handle(ev.LoadReported(*(1, "a") if name == "a" else (2, "b"), Load(10.0 * number)), 10.0 * number)
    return router


def test_the_price_is_learned_from_first_tokens() -> None:
    router = learned()
    before = seen(router, now=51.0).kv_load
    samples = router.prefill_observer.samples("m", "")
    for number in range(LoadPriceFit.TRUSTED_AFTER + 2):
        loaded(router, number, 52.0 + EVERY_S * number, load_s=10 * before.seconds)
    now = 52.0 + EVERY_S * (LoadPriceFit.TRUSTED_AFTER + 2)
    after = seen(router, now=now).kv_load
    assert after.seconds == pytest.approx(10 * before.seconds, rel=0.2)
    assert after.price_tokens > before.price_tokens
    assert router.prefill_observer.samples("m", "") == samples, "the curve learns from prompts that load nothing"


def test_tiers_that_are_not_loaded_lose_their_credit_for_a_while() -> None:
    router = learned()
    for number in range(SHORTFALLS + 2):
        loaded(router, number, 52.0 + EVERY_S * number, load_s=0.01, cached=16_000)
    now = 52.0 + EVERY_S * (SHORTFALLS + 2)
    assert seen(router, now=now).kv_load == NO_LOAD
    assert seen(router, now=now).cached_tokens == 16_000, "the blocks on the GPU were there"
    report(router, Delta(2 + SHORTFALLS + 2, DEVICE), now=now + AGAIN_S)
    router.handle(ev.Tick(), now + AGAIN_S)
    assert seen(router, now=now + AGAIN_S).kv_load.host_tokens == 16_000
