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
    ended = [one for request in requests for one in fleets.submit(request)] + fleets.finish()
    assert fleets.open == 0
    return sorted(ended, key=lambda one: one.request.turn)


def test_what_another_placement_would_have_found() -> None:
    """A session that alternates finds nothing on its second instance; a session that stays finds its whole last prompt."""
    requests = [observed(n, n * 10.0, range(BLOCKS + n), instance=NAMES[n % 2]) for n in range(4)]
    compared = compare(requests)
    assert [one.recorded.instance for one in compared] == ["a:1", "b:1", "a:1", "b:1"]
    assert [one.recorded.cached_tokens for one in compared] == [0, 0, (BLOCKS + 1) * 16, (BLOCKS + 2) * 16]
    assert len({one.counterfactual.instance for one in compared}) == 1
    # An answer continues in the partial block of its prompt, and all but its last token is cached for the next prompt.
    assert [one.counterfactual.cached_tokens for one in compared] == [0, *((BLOCKS + n) * 16 for n in (1, 2, 3))]

    totals = PlacementTotals()
    for one in compared:
        totals.add(one)
    told = totals.summary()
    assert told["saved_tokens"] == sum(
        (one.counterfactual.cached_tokens or 0) - (one.recorded.cached_tokens or 0) for one in compared
    )
    assert told["placement_known"] == 4
    assert told["same_instance"] == sum(one.request.instance == one.counterfactual.instance for one in compared)
    assert told["recorded"]["instances"]["a:1"]["requests"] == 2


def test_the_same_placement_finds_the_same() -> None:
    requests = [observed(n, n * 0.2, range(BLOCKS + n)) for n in range(12)]
    first = compare(requests)
    again = compare(
        [observed(n, n * 0.2, range(BLOCKS + n), one.counterfactual.instance) for n, one in enumerate(first)]
    )
    for one in again:
        assert one.recorded.cached_tokens == one.counterfactual.cached_tokens
        assert one.recorded.ttft_s == one.counterfactual.ttft_s


def test_an_unknown_placement_is_assumed() -> None:
    compared = compare([observed(n, n * 10.0, range(BLOCKS), instance) for n, instance in enumerate(("", "gone:1"))])
    assert [one.recorded.instance for one in compared] == ["a:1", "b:1"]


def test_what_the_engines_said_is_compared_with_the_model_of_the_same_placement() -> None:
    totals = PlacementTotals()
    went = (("a:1", 0), ("a:1", 1_000), ("b:1", 0), ("elsewhere:1", 5))
    requests = [
        observed(number, number * 9.0, range(BLOCKS), instance, cached_tokens=said)
        for number, (instance, said) in enumerate(went)
    ]
    for one in compare(requests):
        totals.add(one)
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
    for one in compare([observed(0, 0.0, range(7_000)), observed(1, 1.0, range(5))]):
        totals.add(one)
    told = totals.summary()
    assert (told["requests"], told["failed"], told["prompt_tokens"]) == (2, 1, 88)


def test_one_that_was_noted_late_comes_when_it_is_told() -> None:
    compared = compare([observed(0, 5.0, range(9)), observed(1, 2.0, range(9)), observed(2, 6.0, range(9))])
    assert [one.counterfactual.t_send for one in compared] == [0.0, 0.0, 1.0]


def test_a_simulation_told_one_by_one_is_the_one_told_at_once() -> None:
    trace = [
        TraceRequest(timestamp_ms=n * 150.0, session_id=n, turn=1, input_length=3_000 + n, output_length=20,
                     hash_ids=tuple(range(n % 5 * 1_000, n % 5 * 1_000 + 187)), block_size=16)
        for n in range(40)
    ]  # fmt: skip
    whole = Simulator(trace, simulation()).run()
    told: list[ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed] = []
    stepwise = OnlineSimulator(simulation(), lambda effect, now: told.append(effect))
    records = []
    for request in trace:
        moment = request.timestamp_ms / 1e3
        records += stepwise.advance(moment)
        stepwise.submit(request, moment)
    records += stepwise.finish()
    assert records == whole
    assert sum(isinstance(effect, ev.DecisionMade) for effect in told) == len(trace)
    stepwise.router.check_invariants()
