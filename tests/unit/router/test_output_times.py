"""The time that engines take for an output token, as learned from streamed answers, and what follows from it."""

from __future__ import annotations

import random

import pytest

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import STALLED_S
from pointsman_router.core.learning.output_times import FIRST_TOKEN_S, MARGIN, OutputTimes
from pointsman_router.core.placement_types import Load
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state


def test_what_nine_of_ten_answers_took_is_learned_of_each_pool_and_hardware() -> None:
    times, rng = OutputTimes(), random.Random(1)
    for _ in range(2_000):
        tokens = rng.randint(1, 500)
        times.answered("m", "H200", tokens * rng.uniform(0.010, 0.020), tokens)
    assert times.token_s("m", "H200") / MARGIN == pytest.approx(0.019, rel=0.15)
    assert times.token_s("m", "L4") == times.token_s("n", "H200") == MARGIN * FIRST_TOKEN_S


def test_an_answer_that_its_client_reads_slowly_counts_like_any_other() -> None:
    times = OutputTimes()
    for _ in range(200):
        times.answered("m", "", 1.0, 100)
    before = times.token_s("m", "")
    times.answered("m", "", 3_600.0, 100)
    times.answered("m", "", 1.0, 0)
    assert before < times.token_s("m", "") < 1.1 * before


def silent_after(state_: RouterState, name: str, since: float, max_output_tokens: int = 0, generates_s: int = 0) -> int:
    """Place a request whose answer is not streamed, and return after how many seconds its engine counts as silent.
    `generates_s`: how long it generates tokens, by its agent; 0: the agent sends no loads."""
    asked = request(name, tokens=100, max_output_tokens=max_output_tokens)
    assert isinstance(place(state_, asked, since), ev.Placed)
    for second in range(1_000):
        if generates_s:
            load = Load(since + second, running=1, generation_tokens=min(second, generates_s))
            state_.handle(ev.LoadReported(1, "a", load), since + second)
        state_.handle(ev.Tick(), since + second)
        if any(record.life.opened for record in state_.instances.records()):
            return second
    raise AssertionError(name)


def fleet() -> RouterState:
    state_ = state()
    join(state_, "a", 1)
    state_.handle(ev.LoadReported(1, "a", Load(0.0)), 0.0)
    return state_


def test_an_answer_that_is_not_streamed_is_expected_in_the_time_of_streamed_ones() -> None:
    unlearned = silent_after(fleet(), "whole", 0.0, max_output_tokens=1_000)
    state_ = fleet()
    for number in range(300):
        name = f"s{number}"
        assert isinstance(place(state_, request(name, tokens=100, streamed=True), 0.0), ev.Placed)
        state_.handle(ev.FirstToken(name), 0.1)
        # 5 ms a token
        timings = {"first_token": 100.0, "done": 600.0}
        state_.handle(ev.Finished(name, "OK", output_tokens=101, timings_ms=timings), 0.6)
    learned = silent_after(state_, "whole", 100.0, max_output_tokens=1_000)
    assert unlearned - learned == pytest.approx(1_000 * (MARGIN * FIRST_TOKEN_S - 0.01), abs=3.0)
    assert silent_after(fleet(), "endless", 0.0) > 200


def test_an_engine_that_generates_is_not_silent_until_it_stops() -> None:
    assert silent_after(fleet(), "endless", 0.0, generates_s=400) == pytest.approx(400 + STALLED_S, abs=2.0)
