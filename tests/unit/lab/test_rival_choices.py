"""The readings of other routers' rules choose what the routers' own programs chose in drawn states."""

from __future__ import annotations

from pointsman_lab.rival_policies.registry import make_policy
from tests.support.rival_choices import agrees, read_states


def test_sglang_cache_aware_chooses_as_sglang_router_does() -> None:
    states = read_states("sglang-router")
    assert len(states) >= 1_000
    assert all(map(agrees, states))


def test_the_states_of_sglang_router_lead_to_each_part_of_its_rule() -> None:
    policy = make_policy("sglang_cache_aware")
    states = read_states("sglang-router")
    least, most = (
        [pick(instance["requests"] for instance in state["instances"].values()) for state in states]
        for pick in (min, max)
    )
    settings = policy.ref().settings
    assert sum(high - low > settings["balance_abs"] for low, high in zip(least, most, strict=True)) >= 10
    matched = [max(instance["cached"] for instance in state["instances"].values()) / state["input"] for state in states]
    threshold = settings["cache_threshold"]
    assert min(sum(share > threshold for share in matched), sum(share <= threshold for share in matched)) >= 200


def test_dynamo_kv_chooses_as_dynamos_selection_core_does() -> None:
    states = read_states("dynamo")
    assert len(states) >= 1_000
    apart = [state for state in states if not state["shared_blocks"]]
    assert len(apart) >= 400
    # Dynamo counts whole blocks, the view tokens: costs that are nearly equal may change places.
    assert sum(map(agrees, apart)) >= 0.99 * len(apart)
    # Dynamo counts blocks once that several open requests of an instance share; the view does not know them.
    shared = [state for state in states if state["shared_blocks"]]
    assert len(shared) >= 300
    assert sum(map(agrees, shared)) >= 0.9 * len(shared)


def test_smg_differs_little_from_its_predecessor() -> None:
    states = read_states("smg")
    assert len(states) >= 1_000
    assert sum(map(agrees, states)) >= 0.97 * len(states)
