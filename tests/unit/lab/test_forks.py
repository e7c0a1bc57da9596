"""Sessions that fork, and what a simulation does with the contexts that their forks share."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.forks import FIRST_ID, MARK, Forks, with_forks
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.subagents import SubagentRequest
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import Policy, fetch_of, serve
from tests.support.lab_values import PLAIN, ask, simulated

SESSIONS: list[Session] = [
    [
        ask(f"s{number}", turn, 60.0 * number, range(100 * number, 100 * number + 20 + turn), 64 * (20 + turn))
        for turn in (1, 2)
    ]
    for number in range(50)
]


def test_forks_begin_with_the_whole_context_of_their_parents_and_follow_them() -> None:
    found = with_forks(SESSIONS, Forks(0.5, least=2, most=5), 1)
    parents = {turns[0].session: turns for turns in SESSIONS}
    assert [turns for turns in found if turns[0].session in parents] == SESSIONS
    forks = [turns for turns in found if turns[0].session not in parents]
    assert len(forks) > 20
    below: dict[str, int] = {}
    for turns in forks:
        first = turns[0]
        assert isinstance(first, SubagentRequest)
        below[first.parent] = below.get(first.parent, 0) + 1
        parent = parents[first.parent][first.parent_turn - 1]
        assert first.session.startswith(parent.session + MARK)
        assert first.hash_ids[: len(parent.whole_blocks)] == parent.whole_blocks
        assert first.input_length > len(parent.whole_blocks) * 64
        for before, turn in itertools.pairwise(turns):
            assert (turn.turn, turn.hash_ids[: len(before.hash_ids)]) == (before.turn + 1, before.hash_ids)
            assert turn.input_length >= before.input_length + before.output_length
        own = turns[-1].hash_ids[len(parent.whole_blocks) :]
        assert all(block >= FIRST_ID for block in own), "what it adds is its own"
    assert set(below.values()) <= {2, 3, 4, 5}
    assert with_forks(SESSIONS, Forks(0.5, least=2, most=5), 1) == found
    assert with_forks(SESSIONS, Forks(), 1) == SESSIONS


@pytest.mark.parametrize("wrong", [{"share": 2.0}, {"least": 0}, {"least": 9, "most": 3}, {"mean_turns": 0.5}])
def test_other_forks_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Forks(**wrong)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fetches(Policy):
    """Answers on the first instance, but the session `b` on the second, which fetches what the first one has cached."""

    name: ClassVar[str] = "fetches"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first, second = view.eligible()
        if request.session_id != "b":
            return serve(first, "first")
        prefix = first.cached_tokens
        return (
            serve(second, "rest")
            if second.cached_tokens >= prefix
            else fetch_of(second, prefix, first.instance_id, "fetch")
        )


def fetched(**changes: object) -> dict[str, RequestRecord]:
    requests = [ask("a", 1, 0.0, range(10), 650), ask("b", 1, 100.0, range(10), 660)]
    asked = SimulationConfig(instances=2, policy=Fetches(), profile=PLAIN, **changes)  # type: ignore[arg-type]
    return simulated(requests, asked)[1]


def test_a_simulated_fetch_moves_the_prefix_and_counts_as_cached() -> None:
    record = fetched()["b"]
    assert (record.reason, record.instance, record.cached_tokens) == ("fetch", "i1", 640)
    # A step of 1 s at the source, which computes one token, 0.01 s + 640 x 1.5e-5 s for the transfer, a step of one token there,
    # and one for the 20 tokens that are left.
    assert record.ttft_s == pytest.approx(1.0 + (0.010 + 640 * 1.5e-5) + 1.0 + 1.2, abs=0.02)


def test_what_a_source_has_evicted_it_computes_and_that_is_no_hit() -> None:
    requests = [
        ask("a", 1, 0.0, range(10), 650),
        ask("c", 1, 50.0, range(100, 115), 970),
        ask("b", 1, 100.0, range(10), 660),
    ]
    fast = replace(PLAIN, step_s=0.1, prefill_token_s=0.001)
    asked = SimulationConfig(
        instances=2, policy=Always(), profile=fast, engine=EngineConfig(kv_blocks=64, max_model_len=1_024)
    )
    record = simulated(requests, asked)[1]["b"]
    assert record.ok
    assert record.cached_tokens == 48, "three blocks are left"


@dataclass(frozen=True)
class Always(Policy):
    """As Fetches, whether the first instance has the prefix or not."""

    name: ClassVar[str] = "always"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first, second = view.eligible()
        if request.session_id == "b" and not second.cached_tokens:
            return fetch_of(second, 640, first.instance_id, "fetch")
        return serve(second if request.session_id == "b" else first, "rest")
