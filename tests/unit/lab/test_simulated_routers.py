"""Router replicas in a simulation: who owns what, an owner's death, and what it costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult, Step, StepKind
from pointsman_router.core.policy.base import Policy, hold, serve, slice_of
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings
from tests.support import lab_values
from tests.support.lab_values import PLAIN, OneAtATime
from tests.support.lab_values import ask_once as ask
from tests.support.lab_values import simulated as simulate

TWO = SimulationConfig(instances=1, profile=PLAIN, routers=2, takeover_s=3.0)


@dataclass(frozen=True)
class Sliced(Policy):
    """The first 64 tokens alone, then all, on the first instance."""

    name: ClassVar[str] = "sliced"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = view.eligible()[0].instance_id
        steps = (Step(StepKind.PREFILL, first, "slice", prefix_tokens=64), Step(StepKind.SERVE, first, "whole"))
        return PolicyResult(steps, "sliced")


def test_a_standby_changes_nothing() -> None:
    requests = generate(15, 20.0, seed=2)
    alone = Simulator(requests, SimulationConfig(instances=3)).run()
    shared = Simulator(requests, SimulationConfig(instances=3, routers=3)).run()
    assert [(record.session, record.turn, record.ttft_s) for record in shared] == [
        (record.session, record.turn, record.ttft_s) for record in alone
    ]


def test_each_pool_has_an_owner_and_its_own_instances() -> None:
    asked = SimulationConfig(instances=4, pools=4, routers=2)
    simulator, records = simulate([ask(f"s{number}", float(number), 32) for number in range(8)], asked)
    # Sessions and instances are assigned to pools in turn.
    assert [records[f"s{number}"].instance for number in range(8)] == ["i0", "i1", "i2", "i3"] * 2
    owners = {simulator.routers.owner(f"simulated-{number}") for number in range(4)}
    assert owners == {"sim-0", "sim-1"}


def test_who_comes_while_nobody_owns_the_pool_waits_for_the_new_owner() -> None:
    requests = [ask("first", 0.0, 100), ask("between", 10.0, 100), ask("after", 30.0, 100)]
    simulator, records = simulate(requests, replace(TWO, owner_dies_at_s=9.0))
    # 1 + 100 * 0.01 s; the second request first waits for a new owner until 12 s.
    assert [record.ttft_s for record in records.values()] == pytest.approx([2.0, 4.0, 2.0])
    assert simulator.resent_requests == 1
    assert len(simulator.routers.states) == 1


def test_a_hand_over_keeps_both_and_costs_its_own_time() -> None:
    requests = [ask("first", 0.0, 100), ask("between", 10.0, 100)]
    simulator, records = simulate(requests, replace(TWO, hand_over_at_s=9.5, hand_over_takes_s=1.0))
    assert records["between"].ttft_s == pytest.approx(2.5)
    assert len(simulator.routers.states) == 2


def test_what_was_held_is_asked_again_with_its_age() -> None:
    # Held from 0.25 s on for at most 4 s; the owner dies at 1, the next one comes at 2 s. At the tick at 4.5 s the hold ends.
    requests = [ask("a", 0.0, 64, output=60), ask("b", 0.25, 64)]
    asked = replace(TWO, policy=OneAtATime(4.0), owner_dies_at_s=1.0, takeover_s=1.0)
    simulator, records = simulate(requests, asked)
    assert simulator.resent_requests == 1
    # a's step under way then ends at 4.64 s, and b takes one of 1.64 s.
    assert records["b"].ttft_s == pytest.approx(4.64 + 1.64 - 0.25)


def test_open_streams_are_announced_and_count_at_the_new_owner() -> None:
    # Held while a is open, also by an owner that had not placed a: until a's end at 10.64 s.
    requests = [ask("a", 0.0, 64, output=10), ask("b", 6.0, 64)]
    _, records = simulate(requests, replace(TWO, policy=OneAtATime(), owner_dies_at_s=1.0, takeover_s=1.0))
    assert records["b"].ttft_s == pytest.approx(10.64 + 1.64 - 6.0)


def test_a_plan_that_went_with_its_owner_is_made_anew_by_the_next_one() -> None:
    # The slice ends at 1.64 s, when the pool has no owner. The next owner, at 4 s, plans the same slice, whose last block is
    # computed again in 1.16 s, and then the rest.
    simulator, records = simulate([ask("a", 0.0, 128)], replace(TWO, policy=Sliced(), owner_dies_at_s=1.0))
    assert (records["a"].ttft_s, records["a"].cached_tokens) == pytest.approx((4.0 + 1.16 + 1.64, 0))
    assert (simulator.resent_requests, simulator.steps_without_router) == (1, 0)
    # Here a new owner exists by then. It does not know the plan, and the request is placed anew at once.
    asked = replace(TWO, policy=Sliced(), owner_dies_at_s=0.5, takeover_s=0.5)
    simulator, records = simulate([ask("a", 0.0, 128)], asked)
    assert records["a"].ttft_s == pytest.approx(1.64 + 1.16 + 1.64)
    assert (simulator.resent_requests, simulator.steps_without_router) == (1, 0)


@dataclass(frozen=True)
class Offloads(Policy):
    """All is computed on one instance and answered by another."""

    name: ClassVar[str] = "offloads"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        one, other = sorted(candidate.instance_id for candidate in view.eligible())
        prefill = Step(StepKind.PREFILL, one, "there", prefix_tokens=request.input_tokens)
        return PolicyResult((prefill, Step(StepKind.SERVE, other, "here", kv_source=one)), "offload")


@pytest.mark.parametrize("takeover_s", [0.5, 3.0])
def test_an_offload_that_lost_its_owner_is_answered_where_the_prefix_is(takeover_s: float) -> None:
    asked = replace(TWO, instances=2, policy=Offloads(), owner_dies_at_s=0.5, takeover_s=takeover_s)
    simulator, records = simulate([ask("a", 0.0, 128)], asked)
    assert (records["a"].instance, simulator.resent_requests, simulator.steps_without_router) == ("i0", 0, 1)
    assert records["a"].ttft_s == pytest.approx(2.28 + 1.16)


@dataclass(frozen=True)
class SlicedAndHeld(OneAtATime):
    """The first 64 tokens alone, then, while another request is open, nothing, then the rest."""

    name: ClassVar[str] = "sliced_and_held"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = view.eligible()[0]
        if request.age_s and first.num_requests > 1:
            return hold("others")
        return slice_of(first, 64, "slice") if not first.cached_tokens else serve(first, "rest")


@pytest.mark.parametrize("word_s", [0.0, 4.0])
def test_a_hold_between_two_steps_that_outlasts_the_gateway_gives_one_answer(word_s: float) -> None:
    # a's slice ends while b's long answer runs, and the rest is held for longer than the gateway waits; messages take
    # word_s, so that the router's answer and the gateway's own step may cross.
    asked = SimulationConfig(
        instances=1,
        profile=PLAIN,
        policy=SlicedAndHeld(),
        placement_s=word_s,
        router=StateSettings(queue=QueueSettings(timeout_s=300.0)),
        timeouts=RequestTimeouts(placement_s=10.0),
    )
    requests = [ask(name, number / 4, 128, output=60) for number, name in enumerate("abcdef")]
    simulator, records = simulate(requests, asked)
    assert {record.status for record in records.values()} == {200}
    assert bool(simulator.steps_without_router) == bool(word_s)


def test_an_answer_on_its_way_from_a_dead_owner_does_not_count() -> None:
    asked = replace(TWO, placement_s=4.0, takeover_s=1.0)
    plain, _ = simulate([ask(f"s{number}", 20.0 * number, 32) for number in range(20)], asked)
    assert plain.resent_requests == 0
    requests = [ask(f"s{number}", 0.1 * number, 32) for number in range(30)]
    simulator, records = simulate(requests, replace(asked, owner_dies_at_s=1.5))
    assert all(record.ok for record in records.values())
    assert simulator.resent_requests > 5


MOMENTS = st.none() | st.floats(0.0, 40.0)


@given(st.integers(0, 5), MOMENTS, MOMENTS, st.integers(1, 3), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.2]))
@settings(max_examples=15)
def test_every_request_is_answered_once_whatever_happens_to_owners(
    seed: int, dies: float | None, handed: float | None, pools: int, placement_s: float, loss: float
) -> None:
    requests = generate(12, 20.0, seed=seed)
    policies: list[Any] = ["unified", OneAtATime(2.0), Sliced(), "elastic", "foresight"]
    asked = SimulationConfig(
        instances=3,
        policy=policies[seed % len(policies)],
        routers=2 + seed % 2,
        pools=pools,
        placement_s=placement_s,
        report_loss=loss,
        api_s=placement_s / 3,
        owner_dies_at_s=dies,
        hand_over_at_s=handed,
        takeover_s=1.5,
    )
    simulator = Simulator(requests, asked)
    records = simulator.run()
    assert sorted((record.session, record.turn) for record in records) == sorted(
        (request.session, request.turn) for request in requests
    )
    assert all(record.ok for record in records)
    for state in simulator.routers.states.values():
        state.check_invariants()
        assert len(state.reservations) == 0
    again = Simulator(requests, asked)
    assert again.run() == records


@pytest.mark.parametrize(
    "wrong",
    [
        {"routers": 0},
        {"pools": 9},
        {"owner_dies_at_s": 1.0},
        {"hand_over_at_s": 1.0},
        {"takeover_s": -1.0, "routers": 2},
        {"api_s": -1.0},
        {"timing": "never"},
    ],
)
def test_impossible_replicas_name_their_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(SimulationError, match=f"^{next(iter(wrong))}: "):
        SimulationConfig(**wrong)


def test_a_dead_replica_comes_back_and_takes_what_is_its_own() -> None:
    turns = [lab_values.ask("a", turn, at_s, range(turn), 64 * turn) for turn, at_s in ((1, 0.0), (2, 20.0), (3, 60.0))]
    asked = replace(TWO, instances=2, owner_dies_at_s=10.0, owner_back_after_s=15.0)
    simulator = Simulator(turns, asked)
    first = simulator.run()
    # The successor owns the pool from 13 s on. From 10 + 15 + 6 s on the other router is settled, and owns it again.
    owner = simulator.routers.owner("simulated")
    assert (owner, [record.decision.rpartition("-")[0] for record in first]) == (
        "sim-1",
        ["sim-1", "sim-0", "sim-1-again"],
    )
    # Agents have reported cached blocks to it that were computed before it started.
    assert [record.cached_tokens for record in first] == [0, 64, 128]
    assert len(simulator.routers.states[owner].index) == len(simulator.routers.states["sim-0"].index) > 0
    for state in simulator.routers.states.values():
        state.check_invariants()


def most_lost_s(requests: list[TraceRequest], asked: SimulationConfig, moments: list[float]) -> float:
    """The longest additional wait for a first token that an owner's death at any of the moments causes to any request."""
    _, alive = simulate(requests, asked)
    lost = []
    for moment in moments:
        _, records = simulate(requests, replace(asked, owner_dies_at_s=moment))
        lost += [(record.ttft_s or 0.0) - (alive[name].ttft_s or 0.0) for name, record in records.items()]
    return max(lost)


def most_waited_s(records: dict[str, RequestRecord]) -> float:
    """The longest time to a first token of a small request."""
    return max(record.ttft_s or 0.0 for name, record in records.items() if name.startswith("small"))


STREAM = [ask(f"s{number}", 2.5 * number, 40 + 30 * (number % 3), output=2) for number in range(12)]


@pytest.mark.parametrize("policy", ["unified", OneAtATime()], ids=["placed at once", "held"])
def test_an_owners_death_costs_nobody_more_than_its_takeover(policy: str | Policy) -> None:
    asked = replace(TWO, policy=policy, takeover_s=1.5)
    lost = most_lost_s(STREAM, asked, [0.4 + 1.7 * number for number in range(20)])
    assert 0.5 < lost <= 1.5 + 1e-9


def test_an_owners_death_costs_small_requests_between_slices_no_more_than_its_takeover() -> None:
    requests = [lab_values.ask(f"usual{number}", 1, number, (), 4_000, output=4) for number in range(12)]
    requests.append(lab_values.ask("heavy", 1, 15.0, (), 60_000, output=20))
    requests += [lab_values.ask(f"small{number}", 1, 15.2 + number, (), 3_000, output=4) for number in range(14)]
    asked = SimulationConfig(instances=1, policy="foresight", routers=2, takeover_s=1.5)
    _, alive = simulate(requests, asked)
    assert {record.rule for record in alive.values()} == {"at_once", "slice"}
    alone_s = alive["usual0"].ttft_s or 0.0
    # The small requests wait for the rest of a slice, not for the 13 s of the whole prompt.
    assert alone_s < most_waited_s(alive) < 3 * alone_s
    for moment in (15.1, 16.4, 17.9, 19.0, 22.0, 27.0):
        _, records = simulate(requests, replace(asked, owner_dies_at_s=moment))
        # Only the longest wait is compared: when in a slice a request comes is chance, with or without a death.
        assert most_waited_s(records) <= most_waited_s(alive) + 1.5
