"""Two fleets that differ only in placement, on requests whose outcome is known."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.counterfactual import ObservedRequest, PairedFleets, PlacementTotals, RequestPair
from pointsman_lab.simulation.online_simulator import OnlineSimulator
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev

NAMES = ("a:1", "b:1")
BLOCKS = 100


def simulation(policy: str = "unified") -> SimulationConfig:
    return SimulationConfig(
        instances=2, names=NAMES, policy=policy, engine=EngineConfig(kv_blocks=8_000, max_model_len=100_000)
    )


def observed(number: int, at_s: float, blocks: range, instance: str = "", **more: Any) -> ObservedRequest:
    return ObservedRequest(
        timestamp_ms=1e12 + at_s * 1e3,
        session_id="s",
        turn=number,
        input_length=len(blocks) * 16 + 8,
        output_length=9,
        hash_ids=tuple(blocks),
        block_size=16,
        request_id=f"r{number}",
        model="m",
        instance=instance,
        **more,
    )


def compare(
    requests: list[ObservedRequest], policy: str = "unified", assumed: str = "round_robin"
) -> list[RequestPair]:
    fleets = PairedFleets(simulation(policy), assumed)
    ended = [ended_request for request in requests for ended_request in fleets.submit(request)] + fleets.finish()
    assert fleets.open == 0
    return sorted(ended, key=lambda one: one.request.turn)


def test_what_another_placement_would_have_found() -> None:
    """A session that alternates finds nothing on its second instance; a session that stays finds its whole last prompt."""
    requests = [observed(n, n * 10.0, range(BLOCKS + n), instance=NAMES[n % 2]) for n in range(4)]
    compared = compare(requests)
    assert [comparison.recorded.instance for comparison in compared] == ["a:1", "b:1", "a:1", "b:1"]
    assert [comparison.recorded.cached_tokens for comparison in compared] == [
        0,
        0,
        (BLOCKS + 1) * 16,
        (BLOCKS + 2) * 16,
    ]
    assert len({comparison.counterfactual.instance for comparison in compared}) == 1
    # An answer continues in the partial block of its prompt, and all but its last token is cached for the next prompt.
    assert [comparison.counterfactual.cached_tokens for comparison in compared] == [
        0,
        *((BLOCKS + n) * 16 for n in (1, 2, 3)),
    ]

    totals = PlacementTotals()
    for comparison in compared:
        totals.add(comparison)
    summary = totals.summary()
    assert summary["saved_tokens"] == sum(
        (comparison.counterfactual.cached_tokens or 0) - (comparison.recorded.cached_tokens or 0)
        for comparison in compared
    )
    assert summary["placement_known"] == 4
    assert summary["same_instance"] == sum(
        comparison.request.instance == comparison.counterfactual.instance for comparison in compared
    )
    assert summary["recorded"]["instances"]["a:1"]["requests"] == 2


def test_the_same_placement_finds_the_same() -> None:
    requests = [observed(n, n * 0.2, range(BLOCKS + n)) for n in range(12)]
    first = compare(requests)
    again = compare(
        [
            observed(n, n * 0.2, range(BLOCKS + n), comparison.counterfactual.instance)
            for n, comparison in enumerate(first)
        ]
    )
    for comparison in again:
        assert comparison.recorded.cached_tokens == comparison.counterfactual.cached_tokens
        assert comparison.recorded.ttft_s == comparison.counterfactual.ttft_s


def test_an_unknown_placement_is_assumed() -> None:
    compared = compare([observed(n, n * 10.0, range(BLOCKS), instance) for n, instance in enumerate(("", "gone:1"))])
    assert [comparison.recorded.instance for comparison in compared] == ["a:1", "b:1"]


def test_what_the_engines_said_is_compared_with_the_model_of_the_same_placement() -> None:
    totals = PlacementTotals()
    went = (("a:1", 0), ("a:1", 1_000), ("b:1", 0), ("elsewhere:1", 5))
    requests = [
        observed(number, number * 9.0, range(BLOCKS), instance, cached_tokens=said)
        for number, (instance, said) in enumerate(went)
    ]
    for comparison in compare(requests):
        totals.add(comparison)
    said = totals.summary()["engine_reported"]
    assert said == {
        "requests": 3,
        "cached_tokens": 1_000,
        "modelled_tokens": BLOCKS * 16,
        "hit_ratio": pytest.approx(1_000 / 4_824, abs=1e-6),
        "modelled_hit_ratio": pytest.approx(1_600 / 4_824, abs=1e-6),
    }


def test_a_request_that_no_engine_could_serve_is_counted_apart() -> None:
    totals = PlacementTotals()
    for comparison in compare([observed(0, 0.0, range(7_000)), observed(1, 1.0, range(5))]):
        totals.add(comparison)
    summary = totals.summary()
    assert (summary["requests"], summary["failed"], summary["prompt_tokens"]) == (2, 1, 88)


def test_one_that_was_noted_late_comes_when_it_is_known() -> None:
    compared = compare([observed(0, 5.0, range(9)), observed(1, 2.0, range(9)), observed(2, 6.0, range(9))])
    assert [comparison.counterfactual.t_send for comparison in compared] == [0.0, 0.0, 1.0]


def test_a_simulation_given_its_requests_one_by_one_is_the_one_given_all_at_once() -> None:
    trace = [
        TraceRequest(timestamp_ms=n * 150.0, session_id=n, turn=1, input_length=3_000 + n, output_length=20,
                     hash_ids=tuple(range(n % 5 * 1_000, n % 5 * 1_000 + 187)), block_size=16)
        for n in range(40)
    ]  # fmt: skip
    whole = Simulator(trace, simulation()).run()
    effects: list[ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed] = []
    stepwise = OnlineSimulator(simulation(), lambda effect, now: effects.append(effect))
    records = []
    for request in trace:
        moment = request.timestamp_ms / 1e3
        records += stepwise.advance(moment)
        stepwise.submit(request, moment)
    records += stepwise.finish()
    assert records == whole
    assert sum(isinstance(effect, ev.DecisionMade) for effect in effects) == len(trace)
    stepwise.router.check_invariants()
