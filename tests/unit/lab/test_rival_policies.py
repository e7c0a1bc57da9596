"""The peers' scores on small views, computed by hand from their formulas."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core.placement_types import Candidate, Decision, FleetView
from pointsman_router.core.policy.base import decide
from pointsman_router.core.prefill_curve import PrefillCurve
from tests.support.router_values import candidate, request, view


def ruled(name: str, seen: FleetView, tokens: int = 1_600, seed: int = 0, **settings: Any) -> Decision:
    return decide(make_policy(name, settings), request(tokens=tokens), "m", seen, random.Random(seed), "d")


def outcome(decision: Decision) -> tuple[str, str]:
    return decision.instance_id, decision.result.reason


def holding(name: str, cached: int, tokens: int = 1_600, **load: float) -> Candidate:
    return candidate(name, new=tokens - cached, cached=cached, **load)


@pytest.mark.parametrize(
    "name", ["dynamo_kv", "sglang_cache_aware", "llmd_default", "llmd_affinity", "aibrix_prefix", "preble"]
)
def test_ties_go_at_random_through_the_seed(name: str) -> None:
    seen = view(holding("a", 0), holding("b", 0), holding("c", 0))
    drawn = Counter(ruled(name, seen, seed=seed).instance_id for seed in range(60))
    assert set(drawn) == {"a", "b", "c"}
    assert max(drawn.values()) < 40


# ---- dynamo_kv ----


def test_dynamo_adds_prefill_and_decode_blocks() -> None:
    seen = view(
        holding("a", 800, pending_prefill_tokens=160, ongoing_tokens=1_600),  # (10 + 100 - 50) + 100
        holding("b", 0, ongoing_tokens=320),  # 100 + 20
        holding("c", 0, pending_prefill_tokens=480),  # 30 + 100
    )
    decision = ruled("dynamo_kv", seen)
    assert decision.result.scores == {"a": 160.0, "b": 120.0, "c": 130.0}
    assert outcome(decision) == ("b", "kv_cost")
    assert outcome(ruled("dynamo_kv", seen, prefill_load_scale=0)) == ("c", "kv_cost")
    assert ruled("dynamo_kv", seen, prefill_load_scale=3).result.scores == {"a": 280.0, "b": 320.0, "c": 390.0}


def test_dynamo_temperature_draws_the_better_more_often() -> None:
    seen = view(holding("a", 1_600), holding("b", 0))
    cool = Counter(ruled("dynamo_kv", seen, seed=seed, temperature=0.5).instance_id for seed in range(300))
    assert 240 < cool["a"] < 285  # 1 / (1 + exp(-2)) = 0.88
    hot = Counter(ruled("dynamo_kv", seen, seed=seed, temperature=1_000).instance_id for seed in range(300))
    assert 110 < hot["a"] < 190
    assert {ruled("dynamo_kv", seen, seed=seed, temperature=1e-9).instance_id for seed in range(20)} == {"a"}
    assert ruled("dynamo_kv", view(seen.candidates[0]), temperature=1).result.reason == "kv_softmax"


@pytest.mark.parametrize(
    ("cached", "p_pending", "settings", "reason"),
    [
        (0, 0, {}, "kv_cost"),  # off
        (0, 0, {"disaggregate": True}, "remote_prefill"),
        (5_953, 0, {"disaggregate": True}, "kv_cost"),  # 2,047 of 8,000 uncached
        (5_952, 0, {"disaggregate": True}, "remote_prefill"),
        (5_953, 0, {"disaggregate": True, "local_ratio": 0.25}, "remote_prefill"),  # 2,047 > 0.25 * 8,000
        (0, 1, {"disaggregate": True}, "kv_cost"),  # the prefill instance is busy
        (0, 16, {"disaggregate": True, "busy_blocks": 1}, "remote_prefill"),
        (0, 17, {"disaggregate": True, "busy_blocks": 1}, "kv_cost"),
    ],
)
def test_dynamo_disaggregates_on_conditions(cached: int, p_pending: int, settings: dict[str, Any], reason: str) -> None:
    seen = view(
        holding("d", cached, 8_000),
        holding("p", 0, 8_000, pending_prefill_tokens=p_pending, ongoing_tokens=90_000),
        holding("q", 0, 8_000, pending_prefill_tokens=p_pending + 1, ongoing_tokens=90_000),
    )
    decision = ruled("dynamo_kv", seen, 8_000, **settings)
    assert outcome(decision) == ("d", reason)
    assert [step.instance_id for step in decision.result.steps] == (["p", "d"] if reason == "remote_prefill" else ["d"])


def test_dynamo_alone_cannot_disaggregate() -> None:
    assert outcome(ruled("dynamo_kv", view(holding("d", 0, 8_000)), 8_000, disaggregate=True)) == ("d", "kv_cost")


def test_dynamo_has_nothing_to_disaggregate_of_an_empty_prompt() -> None:
    empty = view(holding("d", 0, 0), holding("p", 0, 0))
    assert ruled("dynamo_kv", empty, 0, disaggregate=True, local_tokens=0).mode == "COLOCATED"


# ---- sglang_cache_aware ----


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [
        ((70, 5), 1_600, ("b", "imbalanced")),  # 65 > 64 and 70 > 7.5
        ((69, 5), 1_600, ("a", "prefix_match")),  # 64 is not more than 64
        ((300, 205), 1_600, ("a", "prefix_match")),  # 300 <= 1.5 * 205
        ((9, 5), 481, ("a", "prefix_match")),
        ((9, 5), 480, ("b", "least_requests")),  # exactly 0.3 is not more than 0.3
    ],
)
def test_sglang(loads: tuple[int, int], cached: int, expected: tuple[str, str]) -> None:
    seen = view(holding("a", cached, num_requests=loads[0]), holding("b", 0, num_requests=loads[1]))
    decision = ruled("sglang_cache_aware", seen)
    assert outcome(decision) == expected
    if expected[1] == "prefix_match":
        assert decision.result.scores == {"a": -cached / 1_600, "b": 0.0}
    else:
        assert decision.result.scores == {"a": float(loads[0]), "b": float(loads[1])}


# ---- llmd_default ----


def test_llmd_weighs_queue_kv_and_prefix() -> None:
    seen = view(
        holding("a", 800, waiting=4, kv_usage=0.5),  # -(2 * 0 + 2 * 0.5 + 3 * 0.5)
        holding("b", 0, waiting=0, kv_usage=0.25),  # -(2 * 1 + 2 * 0.75)
        holding("c", 400, waiting=1, kv_usage=1.0),  # -(2 * 0.75 + 0 + 3 * 0.25)
    )
    decision = ruled("llmd_default", seen)
    assert decision.result.scores == {"a": -2.5, "b": -3.5, "c": -2.25}
    assert outcome(decision) == ("b", "weighted_score")
    assert outcome(ruled("llmd_default", seen, prefix_weight=6)) == ("a", "weighted_score")
    equal = view(holding("a", 0, waiting=3), holding("b", 0, waiting=3))
    assert ruled("llmd_default", equal).result.scores == {"a": -4.0, "b": -4.0}


@pytest.mark.parametrize(("threshold", "places"), [(0, ["a"]), (801, ["a"]), (800, ["c", "a"]), (1, ["c", "a"])])
def test_llmd_splits_from_a_threshold(threshold: int, places: list[str]) -> None:
    seen = view(holding("a", 800), holding("b", 0, kv_usage=0.9), holding("c", 0, kv_usage=0.1))
    decision = ruled("llmd_default", seen, pd_threshold_tokens=threshold)
    assert [step.instance_id for step in decision.result.steps] == places
    assert decision.result.reason == ("weighted_score" if len(places) == 1 else "pd_threshold")
    alone = ruled("llmd_default", view(seen.candidates[0]), pd_threshold_tokens=threshold)
    assert alone.mode == "COLOCATED"


# ---- llmd_affinity ----


@pytest.mark.parametrize(
    ("cached", "pending", "expected"),
    [
        ((1_280, 0), (900, 0), ("a", "prefix_match")),  # 0.8 of the prompt, and 900 is not more than 1 s x 900
        ((1_280, 0), (901, 0), ("a", "lpwl")),  # both are left: 1,221 against 1,600
        ((1_280, 0), (1_300, 0), ("b", "lpwl")),  # 1,620 against 1,600
        ((1_279, 0), (0, 0), ("a", "lpwl")),  # nobody is sticky: 321 against 1,600
        ((1_279, 0), (1_280, 0), ("b", "lpwl")),
        ((1_600, 1_280), (400, 0), ("b", "prefix_match")),  # 400 against 320
        ((1_600, 1_280), (300, 0), ("a", "prefix_match")),
    ],
)
def test_llmd_affinity_sticks_until_saturated(
    cached: tuple[int, int], pending: tuple[int, int], expected: tuple[str, str]
) -> None:
    places = zip("ab", cached, pending, strict=True)
    seen = view(*(holding(name, hit, pending_prefill_tokens=load) for name, hit, load in places))
    decision = ruled("llmd_affinity", seen, max_penalty_s=1, peak_tokens_per_s=900)
    assert outcome(decision) == expected
    assert decision.result.scores is not None
    assert decision.result.scores["a"] == pending[0] + 1_600 - cached[0]


def test_llmd_affinity_is_calibrated_by_the_learned_curve() -> None:
    # The curve before any prefill: 8,192 tokens in 0.578 s, so 18 s are 255,200 tokens.
    pending = 18 * 8_192 / PrefillCurve().cost_s(8_192, 0)
    for more, instance in ((-1.0, "a"), (1.0, "b")):
        seen = view(holding("a", 1_600, pending_prefill_tokens=int(pending + more)), holding("b", 0))
        assert ruled("llmd_affinity", seen).instance_id == instance
    assert ruled("llmd_affinity", seen, peak_tokens_per_s=15_928).instance_id == "a"


# ---- aibrix_prefix ----


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [
        ((9, 0, 1), (1_600, 0, 0), ("b", "imbalanced")),
        # Mean 4, sigma sqrt((16 + 4 + 4) / 3) = 2.83: 8 > 6.83, so the longest match is too busy.
        ((8, 2, 2), (1_600, 0, 160), ("c", "prefix_match")),
        ((6, 0, 6), (800, 0, 1_600), ("c", "prefix_match")),  # 6 <= 4 + 2.83
        ((6, 0, 5), (800, 0, 800), ("c", "prefix_match")),  # equal matches: fewer requests
        ((8, 2, 3), (1_600, 0, 0), ("b", "least_requests")),  # the only match is too busy
        ((3, 2, 1), (0, 0, 0), ("c", "least_requests")),
    ],
)
def test_aibrix(loads: tuple[int, ...], cached: tuple[int, ...], expected: tuple[str, str]) -> None:
    seen = view(*(holding(name, hit, num_requests=load) for name, load, hit in zip("abc", loads, cached, strict=True)))
    assert outcome(ruled("aibrix_prefix", seen)) == expected


def test_aibrix_scores_only_the_matches_it_would_take() -> None:
    seen = view(holding("a", 1_600, num_requests=8), holding("b", 0, num_requests=2), holding("c", 160, num_requests=2))
    assert ruled("aibrix_prefix", seen).result.scores == {"c": -0.1}
    assert ruled("aibrix_prefix", seen, sigmas=2).result.scores == {"a": -1.0, "c": -0.1}


# ---- preble ----


@pytest.mark.parametrize(
    ("cached", "pending", "expected"),
    [
        (801, 200, ("a", "exploit")),  # 200 <= 2 * mean(200, 0)
        (800, 200, ("b", "explore")),  # half is not more than half; 200 + 800 against 0 + 900
        (801, 0, ("a", "exploit")),
    ],
)
def test_preble_exploits_a_match_that_saves_more_than_half(
    cached: int, pending: int, expected: tuple[str, str]
) -> None:
    seen = view(holding("a", cached, pending_prefill_tokens=pending), holding("b", 700))
    assert outcome(ruled("preble", seen)) == expected


def test_preble_explores_when_the_match_is_overloaded() -> None:
    # Work 2,000 + 0.01 * 10,000 = 2,100; mean over three 700; 2,100 > 2 * 700.
    seen = view(
        holding("a", 1_500, pending_prefill_tokens=2_000, ongoing_decode_tokens=10_000),
        holding("b", 0),
        holding("c", 100),
    )
    decision = ruled("preble", seen)
    assert decision.result.scores == {"a": 2_200.0, "b": 1_600.0, "c": 1_500.0}
    assert outcome(decision) == ("c", "explore")
    assert outcome(ruled("preble", seen, overload_factor=3)) == ("a", "exploit")


def test_preble_counts_what_it_would_evict() -> None:
    seen = view(
        holding("a", 100, kv_usage=0.5, kv_capacity_tokens=2_000),  # 1,500 new, 1,000 free
        holding("b", 0, kv_usage=1.0),  # capacity unknown
        holding("c", 0, kv_usage=0.5, kv_capacity_tokens=4_000),  # fits
    )
    decision = ruled("preble", seen)
    assert decision.result.scores == {"a": 2_000.0, "b": 1_600.0, "c": 1_600.0}
    assert ruled("preble", seen, eviction_weight=0).result.scores["a"] == 1_500.0


# ---- stale reports ----


def test_an_instance_whose_agent_fell_silent_while_it_was_idle_does_not_draw_all() -> None:
    seen = view(
        candidate("a", new=1_600, waiting=0, kv_usage=0.0, stale=True, kv_capacity_tokens=2_000),
        candidate("b", new=1_600, waiting=1, kv_usage=0.5, kv_capacity_tokens=2_000),
        candidate("c", new=1_600, waiting=3, kv_usage=0.9, kv_capacity_tokens=2_000),
    )
    for name in ("llmd_default", "preble"):
        decision = ruled(name, seen)
        assert decision.instance_id == "b", name
        assert decision.result.scores["a"] == decision.result.scores["c"], name


def test_where_all_reports_are_stale_they_make_no_difference() -> None:
    seen = view(
        *(candidate(name, new=1_600, waiting=at, kv_usage=at / 10, stale=True) for at, name in enumerate("abc"))
    )
    for name in ("llmd_default", "preble"):
        assert len(set(ruled(name, seen).result.scores.values())) == 1, name
