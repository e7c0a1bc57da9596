"""The gateway of a simulation: what the gateway's state machine does when time runs out or no router places."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, serve
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings
from tests.support.lab_values import PLAIN, Passed, simulated
from tests.support.lab_values import ask_once as ask


def simulate(requests: list[TraceRequest], **asked: Any) -> tuple[Simulator, dict[str, RequestRecord]]:
    return simulated(requests, SimulationConfig(**asked))


@dataclass(frozen=True)
class First(Policy):
    """Chooses the first instance that may answer."""

    name: ClassVar[str] = "first"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        return serve(view.eligible()[0], "first")


def test_without_an_owner_for_long_the_gateway_places_by_its_own_counts() -> None:
    requests = [ask("open", 0.0, 64, output=90), ask("a", 10.0, 100), ask("b", 10.5, 100)]
    simulator, records = simulate(
        requests,
        instances=2,
        profile=PLAIN,
        routers=2,
        owner_dies_at_s=9.0,
        takeover_s=30.0,
        ownerless_timeout_s=2.0,
    )
    assert [record.ok for record in records.values()] == [True] * 3
    assert [records[name].decision for name in "ab"] == ["", ""]
    assert (simulator.steps_without_router, simulator.resent_requests) == (2, 0)
    # One instance has an open request, so the other one gets request a.
    assert records["a"].instance != records["open"].instance
    assert records["a"].ttft_s == pytest.approx(2.0 + 2.0)


def test_a_request_without_a_first_byte_in_time_goes_elsewhere() -> None:
    requests = [ask("long", 0.0, 64, output=60), ask("waits", 0.5, 64)]
    simulator, records = simulate(
        requests,
        instances=2,
        profile=PLAIN,
        policy=First(),
        engine=EngineConfig(max_num_seqs=1),
        timeouts=RequestTimeouts(first_byte_s=3.0),
    )
    assert (records["waits"].instance, records["waits"].ttft_s) == pytest.approx(("i1", 3.0 + 1.64))
    # The first instance has cancelled the request.
    assert simulator.busy_s == pytest.approx({"i0": 1.64 + 59.0, "i1": 1.64})


def test_a_request_that_no_instance_answers_in_time_fails() -> None:
    requests = [ask(f"long{number}", 0.0, 64, output=60) for number in range(2)] + [ask("waits", 0.5, 64)]
    simulator, records = simulate(
        requests,
        instances=2,
        profile=PLAIN,
        policy="least_requests",
        engine=EngineConfig(max_num_seqs=1),
        timeouts=RequestTimeouts(first_byte_s=3.0),
        retries=0,
    )
    assert [records[f"long{number}"].status for number in range(2)] == [200, 200]
    assert (records["waits"].status, records["waits"].e2e_s) == pytest.approx((502, 6.0))
    assert simulator.busy_s == pytest.approx({"i0": 1.64 + 59.0, "i1": 1.64 + 59.0})


def test_kv_that_does_not_come_in_time_is_computed_where_the_answer_is() -> None:
    passing = Profile(
        step_s=1.0,
        prefill_token_s=0.01,
        prefill_pair_s=0.0,
        decode_sequence_s=0.0,
        decode_kv_token_s=0.0,
        transfer_s=5.0,
        transfer_token_s=0.0,
    )
    _, records = simulate(
        [ask("a", 0.0, 100)],
        instances=2,
        profile=passing,
        policy=Passed(),
        timeouts=RequestTimeouts(transfer_s=1.5),
    )
    # 2 s of prefill on i0, a transfer that times out after 1.5 s, and the whole prefill once more.
    assert (records["a"].instance, records["a"].ttft_s) == pytest.approx(("i1", 2.0 + 1.5 + 2.0))


def test_who_was_refused_too_often_is_told_the_gateways_own_status() -> None:
    full = StateSettings(limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=0), retry_after_s=2.0)
    requests = [ask("a", 0.0, 64, output=9), ask("b", 0.25, 64)]
    _, records = simulate(requests, instances=1, profile=PLAIN, router=full, retries=2)
    assert (records["b"].status, records["b"].e2e_s) == pytest.approx((429, 4.0))
