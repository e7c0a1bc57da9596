"""Policies that may part prefill and decode: every branch and every reason, on views computed by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman_router.core.analysis.decision_replay import redecide
from pointsman_router.core.placement_types import Candidate, Decision, FleetView, Step, StepKind, Unseen
from pointsman_router.core.policy.base import decide
from pointsman_router.core.policy.registry import make_policy
from tests.support.router_values import candidate, request, view

TOKENS = 100_000


def ruled(name: str, seen: FleetView, **settings: float | str | bool) -> Decision:
    asked = request(tokens=TOKENS, session_id="s")
    return decide(make_policy(name, settings), asked, "m", seen, random.Random(0), "d")


def plan(decision: Decision) -> list[tuple[str, str]]:
    return [(step.instance_id, step.reason) for step in decision.result.steps]


def holding(name: str, cached: int, **load: int) -> Candidate:
    return candidate(name, new=TOKENS - cached, cached=cached, **load)


# ---- adaptive_offload ----


def test_adaptive_offload_always_offloads_heavy_requests() -> None:
    seen = view(
        holding("a", 0, ongoing_tokens=500),
        holding("b", 0, ongoing_tokens=300),
        holding("c", 60_000, ongoing_tokens=100),  # best hit, least loaded: decodes, so cannot be P
        owner="a",
    )
    decision = ruled("adaptive_offload", seen)
    assert decision.result.steps == (
        Step(StepKind.PREFILL, "b", "offload", prefix_tokens=TOKENS),
        Step(StepKind.SERVE, "c", "offload", kv_source="b"),
    )
    assert (decision.result.reason, decision.mode, decision.next_owner) == ("heavy", "OFFLOAD", "c")
    assert decision.route_class == "HEAVY"
    assert decision.result.scores == {"a": 100_000.0, "b": 100_000.0, "c": 40_000.0}


def test_adaptive_offload_breaks_ties_by_load_then_cache_then_turn() -> None:
    cold = (holding("a", 0, ongoing_tokens=1), holding("b", 0), holding("c", 0))
    assert [plan(ruled("adaptive_offload", view(*cold, turn=turn)))[1][0] for turn in (0, 1, 2)] == ["b", "b", "c"]
    least = view(holding("a", 60_000), holding("b", 10, ongoing_tokens=5), holding("c", 20, ongoing_tokens=5))
    assert plan(ruled("adaptive_offload", least))[0][0] == "c"


@pytest.mark.parametrize(
    ("cached_a", "cached_b", "owner", "expected", "reason"),
    [
        (80_001, 90_000, "a", "a", "session_affinity"),  # 19,999 new on the owner
        (80_000, 90_000, "a", "b", "best_cache_hit"),  # HEAVY on the owner, not on b
        (80_001, 90_000, "", "b", "best_cache_hit"),
    ],
)
def test_adaptive_offload_keeps_light_requests_whole(
    cached_a: int, cached_b: int, owner: str, expected: str, reason: str
) -> None:
    decision = ruled("adaptive_offload", view(holding("a", cached_a), holding("b", cached_b), owner=owner))
    assert plan(decision) == [(expected, reason)]
    assert (decision.result.reason, decision.mode) == (reason, "COLOCATED")


def test_adaptive_offload_alone() -> None:
    decision = ruled("adaptive_offload", view(holding("a", 0), candidate("b", excluded="draining")))
    assert plan(decision) == [("a", "no_other_instance")]


# ---- elastic ----

# With these, 40,000 new tokens on D gain 0.5 * 40,000 / 10,000 = 2 s and take 0.4 s to transfer: P may have 1.6 s of work.
COST = {"throughput": 10_000.0, "transfer_token_s": 1e-5}


def pair(p_ongoing: int, d_decode: int, d_ongoing: int = 50_000, d_cached: int = 60_000) -> FleetView:
    """D owns the session and is within unified's gate; P is idle but for `p_ongoing`."""
    return view(
        holding("d", d_cached, ongoing_tokens=d_ongoing, ongoing_decode_tokens=d_decode, num_requests=1),
        holding("p", 0, ongoing_tokens=p_ongoing, num_requests=1),
        owner="d",
    )


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (pair(15_999, 1), "prefill_idle_decode_busy"),
        (pair(16_000, 1), "prefill_overloaded"),  # 2 s are not more than 1.6 + 0.4 s
        (pair(0, 0), "decode_idle"),
        (pair(50_000, 0), "decode_idle"),
        (pair(0, 1, d_cached=80_001), "below_threshold"),
        (pair(0, 1, d_cached=80_000), "prefill_idle_decode_busy"),
    ],
)
def test_elastic_by_cost(seen: FleetView, reason: str) -> None:
    decision = ruled("elastic", seen, **COST)
    assert decision.result.reason == reason
    if reason == "prefill_idle_decode_busy":
        assert plan(decision) == [("p", "offload"), ("d", "offload")]
        assert decision.result.steps[0].prefix_tokens == TOKENS
        assert decision.result.steps[1].kv_source == "p"
        assert (decision.mode, decision.next_owner) == ("OFFLOAD", "d")
    else:
        assert plan(decision) == [("d", "session_affinity")]
        assert decision.mode == "COLOCATED"


def test_elastic_tells_what_it_compared() -> None:
    assert ruled("elastic", pair(5_000, 1), **COST).result.figures == {
        "gain_s": 2.0,
        "queue_s": 0.5,
        "transfer_s": 0.4,
        "decode_new_tokens": 40_000,
        "prefill_new_tokens": 100_000,
    }
    assert ruled("elastic", pair(5_000, 1), decider="heuristic").result.figures == {
        "prefill_ongoing_tokens": 5_000,
        "decode_ongoing_tokens": 50_000,
        "mean_ongoing_tokens": 27_500,
        "decode_new_tokens": 40_000,
        "prefill_new_tokens": 100_000,
    }


def test_elastic_says_when_no_idle_instance_could_pay_for_the_transfer() -> None:
    assert ruled("elastic", pair(0, 1), **COST, transfer_base_s=1.6).result.reason == "transfer_dominates"
    assert ruled("elastic", pair(0, 1), **COST, transfer_base_s=1.59).result.reason == "prefill_idle_decode_busy"


@pytest.mark.parametrize(
    ("p_ongoing", "d_ongoing", "d_decode", "third", "reason"),
    [
        (10, 50, 1, 90, "prefill_idle_decode_busy"),  # 10 < 50, 10 <= 1.5 * 50
        (50, 50, 1, 90, "prefill_overloaded"),  # P.ongoing >= D.ongoing
        (49, 50, 1, 90, "prefill_idle_decode_busy"),
        (10, 50, 0, 90, "decode_idle"),
        (60, 50, 0, 90, "decode_idle"),
        (0, 0, 0, 0, "decode_idle"),
    ],
)
def test_elastic_by_heuristic(p_ongoing: int, d_ongoing: int, d_decode: int, third: int, reason: str) -> None:
    seen = view(
        *pair(p_ongoing, d_decode, d_ongoing).candidates,
        holding("q", 0, ongoing_tokens=third, num_requests=1),
        owner="d",
    )
    decision = ruled("elastic", seen, decider="heuristic")
    assert decision.result.reason == reason
    assert len(decision.result.steps) == (2 if reason == "prefill_idle_decode_busy" else 1)


def test_elastic_heuristic_refuses_a_p_above_its_share_of_the_mean() -> None:
    # The mean is 35; P is the least loaded other one, so only a factor below its usual value can forbid 20.
    seen = pair(20, 1, d_ongoing=50)
    assert (
        ruled("elastic", seen, decider="heuristic", prefill_overload_factor=0.5).result.reason == "prefill_overloaded"
    )
    assert (
        ruled("elastic", seen, decider="heuristic", prefill_overload_factor=0.6).result.reason
        == "prefill_idle_decode_busy"
    )


def test_elastic_prefills_on_the_least_loaded_other_instance_and_needs_one() -> None:
    seen = view(
        *pair(3_000, 1).candidates,
        holding("q", 10, ongoing_tokens=2_000),
        holding("r", 20, ongoing_tokens=2_000),
        owner="d",
    )
    assert plan(ruled("elastic", seen, **COST))[0][0] == "r"
    mixed = view(*seen.candidates[:3], replace(seen.candidates[3], kv_gives="NIXL"), owner="d")
    assert plan(ruled("elastic", mixed, **COST))[0][0] == "q"
    alone = ruled("elastic", view(seen.candidates[0], candidate("p", excluded="unhealthy"), owner="d"), **COST)
    assert (plan(alone), alone.result.reason) == ([("d", "session_affinity")], "no_other_instance")


def test_elastic_offloads_to_the_cache_owner_even_where_unified_would_leave_it() -> None:
    seen = view(
        holding("d", 60_000, ongoing_tokens=9_000, ongoing_decode_tokens=9_000, num_requests=5),
        holding("p", 0, ongoing_tokens=1_000, num_requests=1),
        owner="d",
    )
    assert plan(ruled("unified", seen)) == [("p", "least_load_x_work")]
    assert plan(ruled("elastic", seen, **COST)) == [("p", "offload"), ("d", "offload")]
    # If an offload does not pay, the plan is unified's, and the reason is elastic's.
    idle = view(
        holding("d", 60_000, ongoing_tokens=9_000, num_requests=5),
        holding("p", 0, ongoing_tokens=1_000, num_requests=1),
        owner="d",
    )
    decision = ruled("elastic", idle, **COST)
    assert (plan(decision), decision.result.reason) == ([("p", "least_load_x_work")], "decode_idle")


def test_elastic_takes_unifieds_choice_for_d_when_caches_are_equal() -> None:
    # b: 100,000 * 1; a: (100,000 + 0.01 * 9,000) * 2. a has fewer ongoing tokens, and b is unified's choice.
    seen = view(
        holding("a", 0, ongoing_tokens=9_000, ongoing_decode_tokens=9_000, num_requests=2),
        holding("b", 0, ongoing_tokens=10_000, ongoing_decode_tokens=1_000, num_requests=1),
    )
    assert plan(ruled("elastic", seen, **COST)) == [("a", "offload"), ("b", "offload")]


def test_elastic_passes_over_a_cache_owner_above_the_ceiling() -> None:
    # d is above the ceiling: 17 requests are more than 16 and than twice the others' mean. Only p, without the cache, is left.
    seen = view(
        holding("d", 60_000, ongoing_decode_tokens=9_000, num_requests=17), holding("p", 0, num_requests=1), owner="d"
    )
    decision = ruled("elastic", seen, **COST)
    assert (plan(decision), decision.result.reason) == ([("p", "least_load_x_work")], "no_other_instance")


@given(
    st.integers(0, 200_000), st.integers(0, 200_000), st.integers(1, 200_000), st.sampled_from(["cost", "heuristic"])
)
def test_elastic_never_starts_to_offload_because_others_get_busier(
    less: int, more: int, d_ongoing: int, how: str
) -> None:
    """Source of the property: at low load most HEAVY requests offload, when saturated almost none."""
    less, more = sorted((less, more))
    modes = [ruled("elastic", pair(p, 1, d_ongoing), decider=how).mode for p in (less, more)]
    assert modes != ["COLOCATED", "OFFLOAD"]


# ---- migrate ----


def host_and(
    *others: Candidate, requests: int = 10, decode: int = 50_000, cached: int = 90_000, turn: int = 0
) -> FleetView:
    """The session's owner h, which unified's gate is set to keep, and others."""
    host = holding("h", cached, num_requests=requests, ongoing_decode_tokens=decode)
    return view(host, *others, owner="h", turn=turn)


KEEP = {"overload_factor": 1e6}


def migrated(seen: FleetView, **settings: float | str | bool) -> Decision:
    return ruled("migrate", seen, **{**KEEP, **settings})


def test_migrate_prefills_on_the_host_and_decodes_elsewhere() -> None:
    decision = migrated(host_and(holding("a", 0, num_requests=7)))
    assert decision.result.steps == (
        Step(StepKind.PREFILL, "h", "migrate", prefix_tokens=TOKENS),
        Step(StepKind.SERVE, "a", "migrate", kv_source="h"),
    )
    assert (decision.result.reason, decision.mode, decision.instance_id) == ("migrate", "OFFLOAD", "a")
    assert decision.result.figures == {"host_load": 10, "target_load": 7}
    assert decision.route_class == "LIGHT"  # the prefill is the host's, with 90 % cached


@pytest.mark.parametrize(("rotate", "owner"), [(False, "h"), (True, "a")])
def test_migrate_keeps_or_rotates_the_affinity(rotate: bool, owner: str) -> None:
    assert migrated(host_and(holding("a", 0)), rotate_affinity=rotate).next_owner == owner


@pytest.mark.parametrize(
    ("seen", "settings", "reason"),
    [
        (host_and(holding("a", 0), cached=95_001), {}, "below_threshold"),
        (host_and(holding("a", 0), cached=95_000), {}, "migrate"),
        (host_and(holding("a", 0), cached=98_000), {"min_new_tokens": 2_000}, "migrate"),
        (host_and(holding("a", 0), decode=0), {}, "host_idle"),
        (host_and(holding("a", 0), decode=0), {"min_prefill_decode_busy": 0}, "migrate"),
        (host_and(holding("a", 0), decode=999), {"min_prefill_decode_busy": 1_000}, "host_idle"),
        (host_and(holding("a", 0, num_requests=8)), {}, "no_lighter_instance"),  # 8 > 0.7 * 10
        (host_and(holding("a", 0, num_requests=8)), {"target_load_ratio": 0.8}, "migrate"),
        (host_and(holding("a", 0), requests=1), {}, "no_lighter_instance"),  # a gap of 1 < 2
        (host_and(holding("a", 0), requests=1), {"min_load_gap": 1}, "migrate"),
        (host_and(), {}, "no_lighter_instance"),
    ],
)
def test_migrate_knobs(seen: FleetView, settings: dict[str, float], reason: str) -> None:
    decision = migrated(seen, **settings)
    assert decision.result.reason == reason
    if reason != "migrate":
        assert plan(decision) == [("h", "session_affinity")]
        assert decision.next_owner == "h"


def test_migrate_counts_answers_on_their_way_as_load() -> None:
    assert migrated(host_and(holding("a", 0, num_requests=5, recent_migrations=2))).result.reason == "migrate"
    hot = migrated(host_and(holding("a", 0, num_requests=5, recent_migrations=3)))
    assert (plan(hot), hot.result.reason) == ([("h", "session_affinity")], "no_lighter_instance")


def test_migrate_rotation_is_blind_to_caches_and_cache_rich_is_not() -> None:
    others = (
        holding("a", 0),
        holding("b", 0, num_requests=9),  # too busy to be a target
        holding("c", 40_000, num_requests=3),
        holding("d", 40_000, num_requests=1, recent_migrations=1),
    )
    targets = [migrated(host_and(*others, turn=turn)).instance_id for turn in range(4)]
    assert targets == ["a", "c", "d", "a"]
    assert {migrated(host_and(*others, turn=turn), picker="cache_rich").instance_id for turn in range(4)} == {"d"}
    tied = (holding("a", 5), holding("b", 5))
    assert [migrated(host_and(*tied, turn=turn), picker="cache_rich").instance_id for turn in (0, 1)] == ["a", "b"]


def test_migrate_without_an_owner_takes_unifieds_choice_as_host() -> None:
    seen = view(
        holding("a", 90_000, num_requests=4, ongoing_decode_tokens=1), holding("b", 0, num_requests=2), owner="gone"
    )
    # a: (10,000 + 0.01) * 4; b: 100,000 * 2
    decision = ruled("migrate", seen)
    assert plan(decision) == [("a", "migrate"), ("b", "migrate")]
    assert decision.next_owner == "a"


def test_a_recorded_shortlist_has_the_ceiling_of_the_whole_pool() -> None:
    owner = holding("a", 70_000, num_requests=35, ongoing_decode_tokens=1)
    idle = [holding(other, 0, num_requests=10) for other in "bcd"]
    shortlist = replace(view(owner, *idle, owner="a"), unseen=Unseen(instances=100, num_requests=3_000))
    recorded = ruled("unified", shortlist)
    assert plan(recorded) == [("a", "session_affinity")]
    assert redecide(recorded, make_policy("migrate")).result.steps[0].instance_id == "a"
    assert redecide(recorded, make_policy("elastic")).result.figures["decode_new_tokens"] == TOKENS - 70_000
