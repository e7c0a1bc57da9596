"""The admission rules of other systems, and the gate that applies them in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.admission.concur import Concur
from pointsman_lab.admission.least_attained import LeastAttained
from pointsman_lab.admission.progress_ttl import LONGEST_WAIT_S as FORCED_S
from pointsman_lab.admission.progress_ttl import REFUSED_AFTER_S, WINDOW, ProgressTtl, fitted_ttl_s
from pointsman_lab.admission.registry import RULES
from pointsman_lab.admission.rule import AdmissionRule, Admitted, Answer
from pointsman_lab.admission.thunderagent import DYNAMO, LONGEST_WAIT_S, ThunderAgent
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


def answer(prompt: int, output: int = 0, **more: Any) -> Answer:
    return Answer(prompt, output, **more)


def test_thunderagent_places_a_new_program_where_the_fewest_tokens_are_and_keeps_it_there() -> None:
    rule = ThunderAgent({"a": 1_000, "b": 1_000})
    assert names(rule.asked("p", 500, 0)) == [("p", "a")]
    assert names(rule.asked("q", 300, 0)) == [("q", "b")]
    assert names(rule.asked("r", 300, 0)) == [("r", "b")]
    rule.answered("p", answer(550), 1)
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
    rule.answered("p", answer(360), 1)
    # q has grown: 360 + 560 + 2 * 100 > 1,000.
    rule.answered("q", answer(400), 1)
    assert rule.asked("q", 560, 2)
    assert names(rule.tick(NO_LOADS, 5)) == []
    assert not rule.asked("p", 380, 6)
    assert not rule.asked("n", 100, 6)
    rule.answered("q", answer(600), 7)
    rule.ended("q", 8)
    assert names(rule.tick(NO_LOADS, 10)) == [("p", "a"), ("n", "a")]


def test_thunderagent_pauses_a_program_with_a_request_when_that_ends() -> None:
    rule = ThunderAgent({"a": 1_000})
    assert rule.asked("p", 700, 0)
    rule.answered("p", answer(800), 1)
    assert rule.asked("p", 950, 2)
    rule.tick(NO_LOADS, 5)
    rule.answered("p", answer(980), 6)
    assert not rule.asked("p", 990, 7)
    # It can never fit again, but does not wait for ever.
    assert names(rule.tick(NO_LOADS, 10)) == []
    assert names(rule.tick(NO_LOADS, 7 + LONGEST_WAIT_S)) == [("p", "a")]


def test_thunderagent_pauses_all_that_have_requests_if_pausing_tool_calls_does_not_suffice() -> None:
    rule = ThunderAgent({"a": 1_000})
    for program in ("p", "q"):
        assert rule.asked(program, 300, 0)
        rule.answered(program, answer(300), 1)
    # 500 + 500 + 2 * 100 > 1,000, and one of them would suffice.
    for program in ("p", "q"):
        assert rule.asked(program, 500, 2)
    rule.tick(NO_LOADS, 5)
    for program in ("p", "q"):
        rule.answered(program, answer(500), 6)
        assert not rule.asked(program, 510, 7)


def test_dynamos_plug_in_pauses_from_95_percent_to_80_and_resumes_to_85() -> None:
    rule = ThunderAgent({"a": 1_000}, DYNAMO)
    for program, tokens in (("p", 150), ("q", 250), ("r", 300)):
        assert rule.asked(program, tokens, 0)
    rule.answered("p", answer(150), 1)
    rule.answered("q", answer(250), 1)
    # 150 + 250 + 300 + 3 * 100 = 1,000 > 950; without p 750 <= 800.
    rule.tick(NO_LOADS, 5)
    assert not rule.asked("p", 150, 6)
    assert names(rule.asked("q", 250, 6)) == [("q", "a")]
    # 750 + 250 > 850.
    assert names(rule.tick(NO_LOADS, 10)) == []
    rule.answered("q", answer(250), 11)
    rule.ended("q", 12)
    assert names(rule.tick(NO_LOADS, 15)) == [("p", "a")]


def test_dynamos_plug_in_forgets_a_program_that_is_idle_for_half_an_hour() -> None:
    for limits, waits in ((None, True), (DYNAMO, False)):
        rule = ThunderAgent({"a": 1_000}, *([limits] if limits else []))
        assert rule.asked("p", 800, 0)
        rule.answered("p", answer(800), 1)
        rule.tick(NO_LOADS, 1_801)
        assert bool(rule.asked("q", 200, 1_802)) is not waits


def waiting(*queues: int, usage: float = 0.0) -> dict[str, Load]:
    return {name: Load(0.0, waiting=queue, kv_usage=usage) for name, queue in zip("ab", queues, strict=False)}


def test_least_attained_service_goes_first_while_the_pool_is_saturated() -> None:
    rule = LeastAttained()
    assert names(rule.asked("big", 90_000, 0)) == [("big", "")]
    rule.answered("big", answer(90_000, 500), 1)
    # 5 + 4 waiting requests are below 2 x 5; KV usage counts as well.
    rule.tick(waiting(5, 4), 1)
    assert rule.asked("other", 100, 1)
    rule.tick(waiting(0, 0, usage=0.8), 2)
    for session, parent in (("big", ""), ("child", "big"), ("user", "")):
        assert not rule.asked(session, 100, 3, parent)
    # big has had 91,000 tokens, and its sub-agent counts with it.
    assert names(rule.tick(waiting(0, 0), 4)) == [("user", ""), ("big", ""), ("child", "")]


def test_attained_service_halves_each_minute_and_waits_count_a_fifth() -> None:
    rule = LeastAttained()
    for session, tokens, at in (("early", 2_000, 0.0), ("late", 1_200, 60.0)):
        assert rule.asked(session, tokens, at)
        rule.answered(session, answer(tokens), at)
    rule.tick(waiting(10, 10), 60)
    assert not rule.asked("late", 10, 60)
    assert not rule.asked("early", 10, 61)
    # early has 1,000 of 2,000 left: 0.8 for it, 0.2 for the longer wait of the other one.
    assert names(rule.tick(waiting(0, 0), 62)) == [("early", ""), ("late", "")]


def warm(rule: ProgressTtl, *, interval: float = 1.0, prompt: int = 100, growth: int = 1) -> float:
    """Fill the windows of an instance with requests of one program; return the time after them."""
    now = 0.0
    for number in range(WINDOW + 1):
        assert rule.asked("w", prompt + growth * number, now) or number
        rule.answered("w", answer(prompt + growth * number, 10, cached=prompt + growth * number), now + 0.5)
        now += 0.5 + interval
    rule.ended("w", now)
    return now


def test_progress_ttl_pauses_at_once_until_it_has_seen_a_hundred_returns() -> None:
    rule = ProgressTtl({"a": 1_000})
    assert names(rule.asked("p", 700, 0)) == [("p", "a")]
    assert not rule.asked("q", 700, 0)
    # p is paused after its answer, so q fits.
    assert names(rule.answered("p", answer(700, 10), 1)) == [("q", "a")]


def test_progress_ttl_keeps_a_program_for_its_ttl() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    assert rule.asked("p", 60_000, now)
    assert not rule.asked("q", 60_000, now)
    # 1 s between requests, and 16 s to compute 60,000 tokens again: it is worth to wait a little longer than 1 s.
    assert not rule.answered("p", answer(60_000, 10), now)
    assert not rule.tick(NO_LOADS, now + 1)
    assert names(rule.asked("p", 60_100, now + 1)) == [("p", "a")]
    assert not rule.answered("p", answer(60_100, 10, cached=60_000), now + 2)
    assert names(rule.tick(NO_LOADS, now + 13)) == [("q", "a")]


@pytest.mark.parametrize(("interval", "impact_s", "most"), [(1.0, 30.0, 10.0), (1.0, 0.4, 0.0), (60.0, 8.0, 0.0)])
def test_a_ttl_is_worth_its_time(interval: float, impact_s: float, most: float) -> None:
    intervals = [interval * (1.0 + 0.2 * (at % 5 - 2) / 2) for at in range(WINDOW)]
    ttl_s = fitted_ttl_s(intervals, impact_s)
    assert ttl_s <= most
    assert (ttl_s > interval) is (most > 0)
    assert fitted_ttl_s(intervals[1:], impact_s) == 0


def test_progress_ttl_lets_the_newest_answer_go_first_and_nobody_wait_for_ever() -> None:
    rule = ProgressTtl({"a": 1_000})
    for at, program in enumerate(("old", "new")):
        assert rule.asked(program, 600, at)
        rule.answered(program, answer(600, 10), at + 0.5)
    assert rule.asked("p", 850, 3)
    for program in ("old", "new"):
        assert not rule.asked(program, 600, 4)
    assert names(rule.answered("p", answer(850, 10), 5)) == [("new", "a")]
    assert names(rule.tick(NO_LOADS, 4 + FORCED_S)) == [("old", "a")]


def test_progress_ttl_admits_nobody_where_requests_wait() -> None:
    rule = ProgressTtl({"a": 10_000})
    rule.tick(waiting(1), 0)
    assert not rule.asked("p", 100, 0.5)
    # Not even one that has waited as long as it may.
    assert not rule.tick(waiting(1), 0.5 + FORCED_S)
    assert names(rule.tick(waiting(0), 1.5 + FORCED_S)) == [("p", "a")]


@pytest.mark.parametrize(
    ("usage", "running", "fits"), [(0.3, 1, True), (0.7, 1, False), (0.3, 2, True), (0.6, 2, False)]
)
def test_progress_ttl_counts_the_tokens_that_an_engine_has_in_use(usage: float, running: int, fits: bool) -> None:
    rule = ProgressTtl({"a": 10_000})
    # 5,100 tokens by its own count.
    assert rule.asked("p", 5_000, 0)
    rule.tick({"a": Load(0.0, running=running, kv_usage=usage)}, 1)
    assert bool(rule.asked("q", 5_000, 1.5)) is fits


def test_a_request_of_progress_ttl_that_is_refused_for_its_wait_waits_anew() -> None:
    rule = ProgressTtl({"a": 1_000})
    assert rule.asked("p", 700, 0)
    assert not rule.asked("q", 700, 0)
    for now in (FORCED_S, REFUSED_AFTER_S):
        assert not rule.tick(waiting(1), now)
    # Its retry is not forced yet.
    assert not rule.tick(waiting(0), REFUSED_AFTER_S + 1)
    assert names(rule.tick(waiting(0), REFUSED_AFTER_S + FORCED_S)) == [("q", "a")]


def test_progress_ttl_counts_requests_that_do_not_run_yet_like_those_that_run() -> None:
    rule = ProgressTtl({"a": 10_000})
    for program in ("p", "q"):
        assert rule.asked(program, 2_000, 0)
    rule.tick({"a": Load(0.0, running=1, kv_usage=0.3)}, 1)
    assert not rule.asked("r", 4_000, 1.5)
    assert rule.asked("s", 3_800, 1.5)


def test_progress_ttl_decides_at_each_arrival() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    assert rule.asked("p", 60_000, now)
    rule.answered("p", answer(60_000, 10), now)
    assert names(rule.asked("q", 60_000, now + 11)) == [("q", "a")]


def test_progress_ttl_has_sub_agents_where_their_parents_are_and_keeps_no_place_for_them() -> None:
    rule = ProgressTtl(dict.fromkeys("abcdefgh", 100000))
    [parent] = rule.asked("p", 100, 0)
    for child in ("c1", "c2", "c3", "c4"):
        for at in range(3):
            assert names(rule.asked(child, 100, at, "p" if not at else "")) == [(child, parent.instance)]
            rule.answered(child, answer(100, 10), at + 0.5)
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    assert rule.asked("c", 60_000, now, "p")
    assert not rule.asked("q", 60_000, now)
    assert names(rule.answered("c", answer(60_000, 10), now)) == [("q", "a")]


def served(rule: ProgressTtl, program: str, prompt: int, now: float, rounds: int) -> float:
    """Have `rounds` requests of an active or new program admitted and answered, all but its first prompt cached; return when."""
    for at in range(rounds):
        assert rule.asked(program, prompt, now + at)
        assert not rule.answered(program, answer(prompt, 10, cached=prompt if at else 0), now + at + 0.1)
    return now + rounds


def test_progress_ttl_pauses_a_program_after_14_requests_since_its_admission_for_one_that_needs_its_room() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = served(rule, "p", 60_000, warm(rule, prompt=40_000), 10)
    # It is paused by its TTL, and admitted anew with its context cached.
    rule.tick(NO_LOADS, now + 20)
    now = now + 21
    assert rule.asked("p", 60_000, now)
    assert not rule.asked("q", 60_000, now)
    for at in range(13):
        assert not rule.answered("p", answer(60_000, 10, cached=60_000), now + at + 0.1)
        assert names(rule.asked("p", 60_000, now + at + 1)) == [("p", "a")]
    assert names(rule.answered("p", answer(60_000, 10, cached=60_000), now + 14)) == [("q", "a")]


def test_progress_ttl_pauses_nobody_for_one_that_needs_less_than_will_be_free() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    assert rule.asked("q", 59_800, now)
    now = served(rule, "p", 39_900, now + 60, 13)
    # Now q is to be paused when its request ends.
    assert rule.asked("p", 40_000, now)
    assert not rule.asked("r", 10_000, now)
    assert not rule.answered("p", answer(40_000, 10, cached=39_900), now + 0.1)
    assert names(rule.asked("p", 40_000, now + 1)) == [("p", "a")]


def test_a_program_of_progress_ttl_that_was_paused_for_others_goes_on_after_them() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = served(rule, "p", 60_000, warm(rule, prompt=40_000), 13)
    assert rule.asked("p", 60_000, now)
    for program in ("q", "r"):
        assert not rule.asked(program, 60_000, now)
    assert names(rule.answered("p", answer(60_000, 10, cached=60_000), now + 0.1)) == [("q", "a")]
    # Its answer is the newest; r has none.
    assert not rule.asked("p", 60_000, now + 1)
    assert names(rule.ended("q", now + 2)) == [("r", "a")]


def test_progress_ttl_keeps_room_for_growth_unless_a_larger_batch_gains_more() -> None:
    rule = ProgressTtl({"a": 70_000})
    now = warm(rule, prompt=20_000, growth=100)
    # Two rounds of 100 tokens for each of the two.
    assert rule.asked("p", 40_000, now)
    assert not rule.asked("q", 29_500, now)
    assert names(rule.asked("r", 29_300, now)) == [("r", "a")]


@pytest.mark.parametrize(("tokens", "admitted"), [(20, True), (100, True), (2_000, False)])
def test_progress_ttl_lets_a_small_one_join_a_batch_of_which_no_round_is_left(tokens: int, admitted: bool) -> None:
    rule = ProgressTtl({"a": 70_000})
    now = warm(rule, prompt=20_000, growth=100)
    for at in range(3):
        assert rule.asked("p", 60_000, now + at)
        assert not rule.answered("p", answer(60_000, 10, cached=60_000 if at else 0), now + at + 0.5)
    # 50 tokens remain of those that the next rounds of the new one may need. Ten tokens each gain 0.07 s together.
    assert rule.asked("p", 70_000 - 200 - tokens - 50, now + 3)
    assert bool(rule.asked("q", tokens, now + 3)) is admitted


def test_progress_ttl_pauses_no_more_than_does_not_fit() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    for at, program in enumerate(("p", "q")):
        assert rule.asked(program, 45_000, now + at)
    # Both grow; p is to be paused when its request ends, and q fits without it.
    for program in ("p", "q"):
        rule.answered(program, answer(45_000, 10), now + 2)
        assert rule.asked(program, 52_000, now + 3)
    for at in range(3):
        assert not rule.tick(NO_LOADS, now + 4 + at)
    rule.answered("q", answer(52_000, 10, cached=45_000), now + 7)
    assert rule.asked("q", 52_010, now + 7)
    rule.answered("p", answer(52_000, 10, cached=45_000), now + 8)
    assert not rule.asked("p", 52_010, now + 8)


@pytest.mark.parametrize(("cached", "stays", "goes"), [(40_000, "q", "p"), (30_000, "p", "q")])
def test_progress_ttl_pauses_the_program_first_whose_context_was_computed_first(
    cached: int, stays: str, goes: str
) -> None:
    rule = ProgressTtl({"a": 100_000})
    now = served(rule, "p", 40_000, warm(rule, prompt=40_000), 2)
    rule.tick(NO_LOADS, now + 20)
    now = served(rule, "q", 40_000, now + 20, 1)
    # p comes back later than q was admitted. Its context is still cached, or it is computed anew.
    assert rule.asked("p", 40_000, now)
    rule.answered("p", answer(40_000, 10, cached=cached), now + 0.1)
    for program in ("p", "q"):
        assert rule.asked(program, 52_000, now + 1)
    rule.answered(stays, answer(52_000, 10, cached=40_000), now + 2)
    assert rule.asked(stays, 52_010, now + 2.1)
    rule.answered(goes, answer(52_000, 10, cached=40_000), now + 3)
    assert not rule.asked(goes, 52_010, now + 3.1)


def test_progress_ttl_pauses_the_largest_first_of_those_that_were_admitted_together() -> None:
    rule = ProgressTtl({"a": 100_000})
    now = warm(rule, prompt=40_000)
    rule.tick(waiting(1), now)
    for program, tokens in (("p", 52_000), ("q", 55_000)):
        assert not rule.asked(program, tokens, now)
    now += FORCED_S
    assert len(rule.tick(waiting(0), now)) == 2
    rule.tick(NO_LOADS, now)
    rule.answered("p", answer(52_000, 10), now + 1)
    assert rule.asked("p", 52_010, now + 1.1)


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
    rule.answered("p", answer(1), 3)
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
            admit(tried.ended(program, now) if what else tried.answered(program, answer(tokens), now))
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


@pytest.mark.parametrize("rule", RULES)
def test_a_client_that_left_while_it_was_parked_may_have_further_turns(rule: str) -> None:
    requests = [ask(f"s{at}", turn, 0.0, [at], 130, output=30) for at in range(12) for turn in (1, 2)]
    records = simulate(requests, lab_admission=rule, leaves_after_s=1.0)
    assert len(records) == len(requests)
    assert 499 in {record.status for record in records.values()}


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SimulationError, match="lab_admission: there is no rule 'nobody'"):
        SimulationConfig(lab_admission="nobody")
