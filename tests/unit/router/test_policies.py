"""Policies on small views with scores computed by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core.analysis.decision_replay import inputs_digest
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult, route_class
from pointsman_router.core.policy.base import Policy, SettingError, build, decide, serve, settings_of
from tests.support.router_values import candidate, request, view


def choose(
    name: str, seen: FleetView, asked: PlacementRequest | None = None, **settings: float | str | bool
) -> tuple[str, str]:
    decision = decide(make_policy(name, settings), asked or request(tokens=100), "m", seen, random.Random(0), "d")
    return decision.instance_id, decision.result.reason


def test_unified_scores_work_times_requests() -> None:
    # a: (0 + 100 + 0.01 * 1000) * max(0, 1) = 110; b: (50 + 20) * 2 = 140; c: (10 + 90) * 1 = 100
    seen = view(
        candidate("a", new=100, ongoing_decode_tokens=1_000),
        candidate("b", new=20, cached=80, pending_prefill_tokens=50, num_requests=2),
        candidate("c", new=90, cached=10, pending_prefill_tokens=10, num_requests=1),
    )
    decision = decide(make_policy("unified"), request(tokens=100), "m", seen, random.Random(0), "d")
    assert decision.result.scores == {"a": 110.0, "b": 140.0, "c": 100.0}
    assert (decision.instance_id, decision.result.reason) == ("c", "least_load_x_work")
    assert (decision.runner_up, decision.margin) == ("a", 10.0)


def test_unified_keeps_a_session_with_its_owner_even_where_another_scores_better() -> None:
    seen = view(
        candidate("a", new=40, cached=60, pending_prefill_tokens=500, num_requests=1),
        candidate("b", new=100, num_requests=1),
        owner="a",
    )
    assert choose("unified", seen) == ("a", "session_affinity")


@pytest.mark.parametrize(
    ("cached", "owner_requests", "other_requests", "stays"),
    [
        (51, 1, 1, True),
        (50, 1, 1, False),  # exactly half is not more than half
        (90, 13, 7, True),  # 13 <= 10 * 1.3
        (90, 14, 6, False),  # 14 > 10 * 1.3
        (90, 1, 0, False),  # 1 > 0.5 * 1.3
    ],
)
def test_unified_gate(cached: int, owner_requests: int, other_requests: int, stays: bool) -> None:
    seen = view(
        candidate("a", new=100 - cached, cached=cached, num_requests=owner_requests, pending_prefill_tokens=10_000),
        candidate("b", new=100, num_requests=other_requests),
        owner="a",
    )
    assert choose("unified", seen) == (("a", "session_affinity") if stays else ("b", "least_load_x_work"))


def test_unified_ties_break_by_new_tokens_then_requests_then_turn() -> None:
    cold = (candidate("a"), candidate("b"), candidate("c"))
    assert [choose("unified", view(*cold, turn=turn))[0] for turn in range(4)] == ["a", "b", "c", "a"]
    # Equal scores of 0: an idle instance before a busy one with the prompt fully cached.
    tied = (candidate("a", new=0, cached=100, num_requests=1), candidate("b", new=0, cached=100))
    assert choose("unified", view(*tied))[0] == "b"


NO_CEILING: dict[str, Any] = {"ceiling_min": 1e6}


@pytest.mark.parametrize("overload_factor", [1.3, 1e6])  # the gate refuses the owner, or would let it pass
def test_unified_ceiling_passes_over_an_overloaded_owner_that_has_all_cached(overload_factor: float) -> None:
    # a: (0 + 0) * 40 = 0, the best score there is; b: (50 + 100) * 3 = 450. Ceiling of a: max(16, 2 * 3).
    seen = view(
        candidate("a", new=0, cached=100, num_requests=40),
        candidate("b", new=100, pending_prefill_tokens=50, num_requests=3),
        owner="a",
    )
    without = choose("unified", seen, overload_factor=overload_factor, **NO_CEILING)
    assert without == ("a", "session_affinity" if overload_factor > 2 else "least_load_x_work")
    assert choose("unified", seen, overload_factor=overload_factor) == ("b", "ceiling_changed_choice")


@pytest.mark.parametrize(
    ("owner_requests", "others", "chosen"),
    [
        (16, 0, "a"),  # up to ceiling_min whatever the others have
        (17, 0, "b"),
        (17, 8, "b"),
        (17, 9, "a"),  # 17 <= 2 * 9
        (18, 9, "a"),
        (19, 9, "b"),
    ],
)
def test_unified_ceiling_is_a_multiple_of_the_others_mean(owner_requests: int, others: int, chosen: str) -> None:
    seen = view(
        candidate("a", new=0, cached=100, num_requests=owner_requests),
        candidate("b", new=90, cached=10, num_requests=others),
        candidate("c", new=100, num_requests=others),
    )
    assert choose("unified", seen)[0] == chosen


def test_unified_ceiling_spares_the_only_one_and_the_least_loaded() -> None:
    assert choose("unified", view(candidate("a", num_requests=1_000))) == ("a", "least_load_x_work")
    tight: dict[str, Any] = {"ceiling_factor": 1.0, "ceiling_min": 0.0}
    assert choose("unified", view(candidate("a", num_requests=9), candidate("b", num_requests=9)), **tight)[0] == "a"
    # An excluded instance is no reason to pass over the only one left.
    alone = view(candidate("a", num_requests=100), candidate("b", excluded="draining"))
    assert choose("unified", alone) == ("a", "least_load_x_work")


def test_excluded_candidates_are_never_chosen() -> None:
    seen = view(candidate("a", excluded="draining"), candidate("b", num_requests=50), owner="a")
    for name in POLICIES:
        assert choose(name, seen)[0] == "b"


def test_baselines() -> None:
    seen = view(
        candidate("a", num_requests=2),
        candidate("b", num_requests=1),
        candidate("c", num_requests=1),
        owner="a",
        turn=2,
    )
    assert choose("round_robin", seen) == ("c", "round_robin")
    assert choose("least_requests", seen) == ("c", "least_requests")
    assert choose("sticky", seen) == ("a", "session_affinity")
    assert choose("sticky", view(*seen.candidates, owner="gone", turn=1)) == ("b", "least_requests")
    assert {choose("random", seen)[0] for _ in range(3)} == {choose("random", seen)[0]}  # seeded: always the same


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("nothing", {}, "name"),
        ("unified", {"weight": 1}, "settings.weight"),
        ("unified", {"decode_weight": -0.1}, "settings.decode_weight"),
        ("unified", {"decode_weight": "0.1"}, "settings.decode_weight"),
        ("unified", {"affinity_ratio": True}, "settings.affinity_ratio"),
        ("unified", {"overload_factor": float("nan")}, "settings.overload_factor"),
        ("elastic", {"decider": "luck"}, "settings.decider"),
        ("elastic", {"decider": 1}, "settings.decider"),
        ("migrate", {"rotate_affinity": 1}, "settings.rotate_affinity"),
        ("unified:decode_weight", {}, "name"),
        ("unified:weight=1", {}, "settings.weight"),
        ("unified:decode_weight=NaN", {}, "settings.decode_weight"),
        ("elastic:decider=luck", {}, "settings.decider"),
        ("unified", {"decode_weight": 10**400}, "settings.decode_weight"),
        ("unified:decode_weight=1" + 5_000 * "0", {}, "settings.decode_weight"),
        ("unified:decode_weight=" + 100_000 * "[", {}, "settings.decode_weight"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_wrong_settings_name_the_field(name: str, settings: dict[str, object], field: str) -> None:
    with pytest.raises(SettingError) as error:
        make_policy(name, settings)
    assert error.value.field == field


@dataclass(frozen=True)
class WithState(Policy):
    name: ClassVar[str] = "with_state"
    last: dict[str, float] = field(default_factory=dict)

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        return serve(view.eligible()[0], "random")


def test_a_field_that_is_no_setting_is_named() -> None:
    with pytest.raises(TypeError, match="field 'last' of WithState is no setting"):
        settings_of(WithState)
    with pytest.raises(TypeError, match="last"):
        build(WithState, {})


def test_a_policys_name_may_have_its_settings() -> None:
    named = make_policy("elastic:decider=heuristic, heavy_new_tokens=500", {"heavy_new_tokens": 7.0})
    assert named == make_policy("elastic", {"decider": "heuristic", "heavy_new_tokens": 500})
    assert named.ref().name == "elastic"
    assert make_policy("migrate:rotate_affinity=true") == make_policy("migrate", {"rotate_affinity": True})


@pytest.mark.parametrize(
    ("new", "total", "expected"),
    [
        (20_000, 130_000, "HEAVY"),
        (19_999, 40_001, "LIGHT"),
        (19_999, 39_998, "MEDIUM"),
        (4_999, 4_999, "LIGHT"),
        (5_000, 5_000, "MEDIUM"),
    ],
)
def test_route_class(new: int, total: int, expected: str) -> None:
    assert route_class(new, total) == expected


def test_equal_inputs_have_equal_digests() -> None:
    seen = view(candidate("a"), candidate("b"))
    digests = {
        inputs_digest(decide(make_policy("unified"), request(name, tokens=100), "m", seen, random.Random(0), name))
        for name in ("r1", "r2")
    }
    assert len(digests) == 1
    other = decide(make_policy("unified"), request(tokens=101), "m", seen, random.Random(0), "d")
    assert inputs_digest(other) not in digests
    sliceable = request(tokens=100, sliceable_tokens=64)
    assert inputs_digest(decide(make_policy("unified"), sliceable, "m", seen, random.Random(0), "d")) not in digests
