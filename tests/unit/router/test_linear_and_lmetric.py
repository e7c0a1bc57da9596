"""`linear`, `additive`, `lmetric`, `lmetric1`, `lpwl` and `adaptive` on small views with scores computed by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pointsman_router.core.placement_types import Decision, FleetView
from pointsman_router.core.policy.base import decide
from pointsman_router.core.policy.registry import make_policy
from tests.support.router_values import candidate, request, view


def ruled(name: str, seen: FleetView, tokens: int = 100, **settings: float) -> Decision:
    return decide(make_policy(name, settings), request(tokens=tokens), "m", seen, random.Random(0), "d")


def outcome(decision: Decision) -> tuple[str, str]:
    return decision.instance_id, decision.result.reason


WORK = view(
    candidate("a", new=100, num_requests=0, pending_prefill_tokens=0),
    candidate("b", new=20, cached=80, num_requests=2, pending_prefill_tokens=30),
    candidate("c", new=90, cached=10, num_requests=1, pending_prefill_tokens=0),
)


@pytest.mark.parametrize(
    ("name", "scores", "chosen"),
    [
        ("lmetric", {"a": 0.0, "b": 100.0, "c": 90.0}, "a"),
        ("lmetric1", {"a": 100.0, "b": 150.0, "c": 180.0}, "a"),
        ("lpwl", {"a": 100.0, "b": 50.0, "c": 90.0}, "b"),
    ],
)
def test_least_work(name: str, scores: dict[str, float], chosen: str) -> None:
    decision = ruled(name, WORK)
    assert decision.result.scores == scores
    assert outcome(decision) == (chosen, name)


@pytest.mark.parametrize("name", ["lmetric", "lmetric1", "lpwl"])
def test_least_work_ignores_the_owner_and_breaks_ties_by_new_tokens_requests_and_turn(name: str) -> None:
    cold = (candidate("a"), candidate("b"), candidate("c"))
    assert [outcome(ruled(name, view(*cold, owner="c", turn=turn)))[0] for turn in range(4)] == ["a", "b", "c", "a"]
    # Pending and new add up to the same; fewer new tokens win, then fewer requests.
    equal = view(
        candidate("a", new=100),
        candidate("b", new=60, cached=40, pending_prefill_tokens=40),
        candidate("c", new=60, cached=40, pending_prefill_tokens=40),
    )
    assert outcome(ruled(name, equal))[0] == "b"
    busy = view(candidate("a", new=0, cached=100, num_requests=1), candidate("b", new=0, cached=100))
    assert outcome(ruled(name, busy))[0] == "b"


def test_linear_weighs_load_against_cache() -> None:
    seen = view(
        candidate("a", cached=80, new=20, ongoing_tokens=300),
        candidate("b", cached=0, ongoing_tokens=150),
        candidate("c", cached=10, new=90, ongoing_tokens=200),
    )
    decision = ruled("linear", seen)
    assert decision.result.scores == {"a": 220.0, "b": 150.0, "c": 190.0}
    assert outcome(decision) == ("b", "linear")
    # 300 - 3 * 80 = 60; 150; 200 - 3 * 10 = 170
    assert outcome(ruled("linear", seen, cache_weight=3))[0] == "a"
    assert outcome(ruled("linear", seen, load_weight=0, cache_weight=1))[0] == "a"
    assert [outcome(ruled("linear", view(candidate("a"), candidate("b"), turn=turn)))[0] for turn in (0, 1)] == [
        "a",
        "b",
    ]


# a costs 4 * 0.5 + (100 + 50) / 100 = 3.5 s, b 2 * 0.5 + (50 + 100) / 100 = 2.5 s
ADDITIVE: dict[str, Any] = {"decode_iteration_s": 0.5, "throughput": 100.0}


@pytest.mark.parametrize(
    ("overload_factor", "owner_ongoing", "expected"),
    [
        (2.0, 3_000, ("a", "session_affinity")),  # 3000 <= 2000 * 2 and 3.5 <= 2.5 * 2
        (1.4, 1_000, ("a", "session_affinity")),  # 1000 <= 1000 * 1.4 and 3.5 <= 2.5 * 1.4
        (1.39, 1_000, ("b", "least_cost")),  # 3.5 > 2.5 * 1.39
        (1.4, 3_000, ("b", "least_cost")),  # 3000 > 2000 * 1.4
    ],
)
def test_additive_keeps_the_owner_behind_two_gates(
    overload_factor: float, owner_ongoing: int, expected: tuple[str, str]
) -> None:
    seen = view(
        candidate("a", new=50, cached=50, num_requests=4, pending_prefill_tokens=100, ongoing_tokens=owner_ongoing),
        candidate("b", new=100, num_requests=2, pending_prefill_tokens=50, ongoing_tokens=1_000),
        owner="a",
    )
    decision = ruled("additive", seen, overload_factor=overload_factor, **ADDITIVE)
    assert decision.result.scores == {"a": 3.5, "b": 2.5}
    assert outcome(decision) == expected


def test_additive_without_an_owner_takes_the_least_cost() -> None:
    assert outcome(ruled("additive", view(candidate("a", new=100), candidate("b", new=99)))) == ("b", "least_cost")


def test_adaptive_sends_heavy_requests_to_the_least_decode_and_others_to_cache_and_load() -> None:
    seen = view(
        candidate("a", new=20_000, cached=10_000, ongoing_decode_tokens=500, ongoing_tokens=600),
        candidate("b", new=30_000, ongoing_decode_tokens=400, ongoing_tokens=90_000, num_requests=2),
        candidate("c", new=30_000, ongoing_decode_tokens=400, ongoing_tokens=90_000, num_requests=1),
    )
    heavy = ruled("adaptive", seen, tokens=30_000)
    assert heavy.result.scores == {"a": 500.0, "b": 400.0, "c": 400.0}
    assert outcome(heavy) == ("c", "least_decode")
    assert heavy.mode == "COLOCATED"
    # The route class follows from the new tokens on the instance with the best hit: with one token less on a it is MEDIUM.
    medium = view(
        candidate("a", new=19_999, cached=10_001, ongoing_tokens=60_000),
        candidate("b", new=29_999, cached=1, ongoing_tokens=10_000),
    )
    decision = ruled("adaptive", medium, tokens=30_000)
    assert decision.result.scores == {"a": 25_999.0, "b": 30_999.0}
    assert outcome(decision) == ("a", "cache_and_load")
    assert outcome(ruled("adaptive", medium, tokens=30_000, load_weight=1.0)) == ("b", "cache_and_load")
