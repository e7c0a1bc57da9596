"""Values and policies that several tests of the lab use with engines and simulations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, hold, offload, serve

# A step takes 1 s, plus 0.01 s per prompt token. Everything else costs nothing.
PLAIN = Profile(step_s=1.0, prefill_token_s=0.01, prefill_pair_s=0.0, decode_sequence_s=0.0, decode_kv_token_s=0.0)


def ask(
    session: str, turn: int, at_s: float, ids: Sequence[int], length: int, output: int = 2, think_s: float = 0.0
) -> TraceRequest:
    """Return a request of a trace with blocks of 64 tokens."""
    return TraceRequest(
        timestamp_ms=at_s * 1e3,
        session_id=session,
        turn=turn,
        input_length=length,
        output_length=output,
        hash_ids=tuple(ids),
        block_size=64,
        think_ms=think_s * 1e3,
    )


def ask_once(session: str, at_s: float, length: int, output: int = 1) -> TraceRequest:
    """Return the only turn of a session, whose prompt no other session shares."""
    return ask(session, 1, at_s, (), length, output)


def simulated(requests: list[TraceRequest], asked: SimulationConfig) -> tuple[Simulator, dict[str, RequestRecord]]:
    """Run a simulation; return it and its records by session. Asserts that each request is answered once and none is open."""
    simulator = Simulator(requests, asked)
    records = simulator.run()
    assert sorted((record.session, record.turn) for record in records) == sorted(
        (request.session, request.turn) for request in requests
    )
    for state in simulator.routers.states.values():
        state.check_invariants()
        assert len(state.reservations) == 0
    return simulator, {record.session: record for record in records}


@dataclass(frozen=True)
class Passed(Policy):
    """A policy that prefills on the first instance and decodes on the second."""

    name: ClassVar[str] = "passed"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first, second = view.eligible()
        return offload(request, first, second, "offload", "always")


@dataclass(frozen=True)
class OneAtATime(Policy):
    """A policy that holds requests while another is open, for at most `at_most_s` (0: the router's own limit)."""

    name: ClassVar[str] = "one_at_a_time"
    at_most_s: float = 0.0

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = view.eligible()[0]
        return hold("busy", self.at_most_s) if first.num_requests else serve(first, "free")
