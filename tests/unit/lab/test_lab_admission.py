"""The admission rules of other systems, and the gate that applies them in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.admission.concur import Concur
from pointsman_lab.admission.registry import RULES
from pointsman_lab.admission.rule import AdmissionRule, Admitted
from pointsman_lab.admission.thunderagent import LONGEST_WAIT_S, ThunderAgent
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core.placement_types import Load
from tests.support.lab_values import PLAIN, ask

NO_LOADS: dict[str, Load] = {}


def names(admitted: Sequence[Admitted]) -> list[tuple[str, str]]:
    return [(admission.program, admission.instance) for admission in admitted]


def test_thunderagent_places_a_new_program_where_the_fewest_tokens_are_and_keeps_it_there() -> None:
    rule = ThunderAgent({"a": 1_000, "b": 1_000})
    assert names(rule.asked("p", 500, 0)) == [("p", "a")]
    assert names(rule.asked("q", 300, 0)) == [("q", "b")]
    assert names(rule.asked("r", 300, 0)) == [("r", "b")]
    rule.answered("p", 550, 1)
    assert names(rule.asked("p", 600, 2)) == [("p", "a")]


def test_thunderagent_lets_new_programs_wait_for_room_the_smallest_first() -> None:
    rule = ThunderAgent({"a": 1_000})
    assert rule.asked("p", 800, 0)
    assert not rule.asked("q", 700, 0)
    # It would fit, but others wait.
    assert not rule.asked("r", 50, 0)
    assert names(rule.tick(NO_LOADS, 5)) == []
    rule.ended("p", 6)
    # Both fit together: the largest is placed first.
    assert names(rule.tick(NO_LOADS, 10)) == [("q", "a"), ("r", "a")]


def test_thunderagent_pauses_programs_in_tool_calls_first_and_resumes_those_with_requests_first() -> None:
    rule = ThunderAgent({"a": 1_000})
    for program in ("p", "q"):
        assert rule.asked(program, 350, 0)
    rule.answered("p", 360, 1)
    # q has grown: 360 + 560 + 2 * 100 > 1,000.
    rule.answered("q", 400, 1)
    assert rule.asked("q", 560, 2)
    assert names(rule.tick(NO_LOADS, 5)) == []
    assert not rule.asked("p", 380, 6)
    assert not rule.asked("n", 100, 6)
    rule.answered("q", 600, 7)
    rule.ended("q", 8)
    assert names(rule.tick(NO_LOADS, 10)) == [("p", "a"), ("n", "a")]


def test_thunderagent_pauses_a_program_with_a_request_when_that_ends() -> None:
    rule = ThunderAgent({"a": 1_000})
    assert rule.asked("p", 700, 0)
    rule.answered("p", 800, 1)
    assert rule.asked("p", 950, 2)
    rule.tick(NO_LOADS, 5)
    rule.answered("p", 980, 6)
    assert not rule.asked("p", 990, 7)
    # It can never fit again, but does not wait for ever.
    assert names(rule.tick(NO_LOADS, 10)) == []
    assert names(rule.tick(NO_LOADS, 7 + LONGEST_WAIT_S)) == [("p", "a")]


def load(usage: float, queries: int, hits: int) -> dict[str, Load]:
    return {"a": Load(0.0, kv_usage=usage, prefix_cache_queries=queries, prefix_cache_hits=hits)}


def test_concur_widens_its_window_while_little_kv_is_used_and_halves_it_when_little_is_cached() -> None:
    rule = Concur(1)
    assert [rule.window, len(rule.asked("p", 1, 0)), len(rule.asked("q", 1, 0))] == [2, 1, 1]
    assert not rule.asked("r", 1, 0)
    assert names(rule.tick(load(0.1, 0, 0), 1)) == [("r", "")]
    # 3 agents do not reach a window of 4.
    rule.tick(load(0.1, 0, 0), 2)
    assert rule.window == 4
    for usage, queries, hits, window in [(0.4, 100, 0, 4), (0.6, 200, 90, 4), (0.6, 300, 100, 2), (0.6, 300, 100, 2)]:
        rule.tick(load(usage, queries, hits), 3)
        assert rule.window == window


def test_concur_pauses_the_agent_that_comes_next_and_resumes_it_before_new_ones() -> None:
    rule = Concur(1)
    for program in ("p", "q", "n"):
        rule.asked(program, 1, 0)
    rule.tick(load(0.9, 100, 0), 1)
    assert rule.window == 1
    assert rule.asked("q", 1, 2) == []
    # p remains active in its tool call.
    rule.answered("p", 1, 3)
    assert names(rule.asked("p", 1, 4)) == [("p", "")]
    assert names(rule.ended("p", 5)) == [("q", "")]
    assert names(rule.ended("q", 6)) == [("n", "")]


@given(
    rule=st.sampled_from(sorted(RULES)),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400), st.integers(0, 2)), max_size=60),
)
def test_every_program_goes_on_once_for_each_request_and_none_is_forgotten(
    rule: str, steps: list[tuple[int, int, int]]
) -> None:
    tried: AdmissionRule = RULES[rule]({"a": 600, "b": 600})
    waiting: set[str] = set()
    running: dict[str, int] = {}
    now = 0.0

    def admit(admitted: Sequence[Admitted]) -> None:
        for admission in admitted:
            waiting.remove(admission.program)
            assert admission.instance in ("", "a", "b")
            running[admission.program] = 1

    for number, tokens, what in steps:
        program, now = f"p{number}", now + 1
        if program in running:
            del running[program]
            admit(tried.ended(program, now) if what else tried.answered(program, tokens, now))
        elif program in waiting:
            if what:
                waiting.remove(program)
                admit(tried.ended(program, now))
        else:
            waiting.add(program)
            admit(tried.asked(program, tokens, now))
        admit(tried.tick(load(0.1 * what, 10 * int(now), 5 * int(now)), now))
    for _ in range(40):
        now += LONGEST_WAIT_S
        for program in list(running):
            del running[program]
            admit(tried.ended(program, now))
        admit(tried.tick(load(0.0, 0, 0), now))
    assert not waiting


def simulate(requests: Sequence[TraceRequest], **asked: Any) -> dict[tuple[str, int], RequestRecord]:
    engine = EngineConfig(kv_blocks=20, max_model_len=320)
    config = SimulationConfig(instances=2, profile=PLAIN, engine=engine, timing="think", **asked)
    simulator = Simulator(list(requests), config)
    records = simulator.run()
    simulator.router.check_invariants()
    assert len(simulator.router.reservations) == 0
    return {(record.session, record.turn): record for record in records}


def test_a_simulated_program_waits_until_another_one_has_ended_and_stays_on_its_instance() -> None:
    # An instance has 320 tokens: room for one program each.
    requests = [ask(name, turn, 0.0, [at + turn], 130 + turn) for at, name in enumerate("abc") for turn in (1, 2)]
    records = simulate(requests, lab_admission="thunderagent")
    assert all(record.ok for record in records.values())
    assert {records["a", 1].instance, records["b", 1].instance} == {"i0", "i1"}
    for name in "abc":
        assert records[name, 1].instance == records[name, 2].instance
    assert records["a", 1].parked_s == 0
    waited = records["c", 1].parked_s
    # Programs are resumed every 5 s, and a's end is at about 7 s.
    assert waited == pytest.approx(10.0)
    assert records["c", 1].ttft_s == pytest.approx(waited + 1 + 1.31)


def test_a_parked_client_can_disconnect() -> None:
    requests = [ask(name, 1, 0.0, [at], 130, output=30) for at, name in enumerate("abc")]
    records = simulate(requests, lab_admission="thunderagent", leaves_after_s=3.0)
    assert {name: record.status for (name, _), record in records.items()} == {"a": 200, "b": 200, "c": 499}
    assert records["c", 1].e2e_s == pytest.approx(3.0)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SimulationError, match="lab_admission: there is no rule 'nobody'"):
        SimulationConfig(lab_admission="nobody")
