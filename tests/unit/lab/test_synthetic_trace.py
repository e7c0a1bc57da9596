"""Generated sessions: their structure, and whether their statistics are those of the workload that they imitate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pointsman_lab.workload.synthetic_trace import AGENTIC, SMALL, ShapeError, generate, shape_with
from pointsman_lab.workload.trace_commands import app
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.trace_stats import statistics
from pointsman_lab.workload.traces import TINY_TRACE, by_session, shared_prefix


def test_sessions_grow_and_share_their_agents_prompt() -> None:
    shape = replace(SMALL, agents=2, system_tokens=1024)
    requests = generate(20, 60.0, seed=3, shape=shape)
    assert requests == generate(20, 60.0, seed=3, shape=shape)
    assert requests != generate(20, 60.0, seed=4, shape=shape)
    sessions = by_session(requests)
    assert len(sessions) == 20
    firsts = [turns[0].hash_ids for turns in sessions.values()]
    assert {shared_prefix(one, other) for one, other in pairwise(firsts)} == {0, 2}
    for turns in sessions.values():
        assert [request.turn for request in turns] == list(range(1, len(turns) + 1))
        for before, after in pairwise(turns):
            assert shared_prefix(before.hash_ids, after.hash_ids) == len(before.hash_ids)
            assert after.input_length > before.input_length + before.output_length
            assert after.timestamp_ms > before.timestamp_ms
    # Additional sessions change nothing in earlier ones.
    more = by_session(generate(25, 60.0, seed=3, shape=shape))
    assert [turn.input_length for turn in more["s019"]] == [turn.input_length for turn in sessions["s019"]]


def test_a_reset_keeps_the_system_prompt_alone_and_a_model_is_not_outgrown() -> None:
    shape = replace(SMALL, agents=1, system_tokens=1024, reset_chance=1.0, summary_tokens=600)
    for turns in by_session(generate(10, 60.0, seed=1, shape=shape)).values():
        for before, after in pairwise(turns):
            assert shared_prefix(before.hash_ids, after.hash_ids) == 2
    tight = replace(SMALL, max_tokens=8_192)
    sessions = by_session(generate(50, 60.0, seed=1, shape=tight)).values()
    assert max(turn.input_length for turns in sessions for turn in turns) <= 8_192
    assert any(after.input_length < before.input_length for turns in sessions for before, after in pairwise(turns))


def test_a_parent_waits_for_its_sub_agent() -> None:
    sessions = by_session(generate(10, 60.0, seed=1, shape=replace(SMALL, subagent_chance=1.0)))
    parents = [turns for name, turns in sessions.items() if "/" not in name]
    assert len(sessions) - len(parents) == sum(len(turns) - 1 for turns in parents)
    for turns in parents:
        for before, after in pairwise(turns):
            below = sessions[f"{before.session}/a{before.turn}"]
            assert before.timestamp_ms < below[0].timestamp_ms
            assert below[-1].timestamp_ms < after.timestamp_ms
            assert after.think_ms is not None
            assert after.think_ms > below[-1].timestamp_ms - below[0].timestamp_ms


@pytest.mark.parametrize("seed", [101, 102, 103])
def test_the_figures_are_those_of_the_workload(seed: int) -> None:
    found = statistics(generate(230, 600.0, seed, AGENTIC))
    assert 900 < found["requests"] < 1_700
    assert 20_000 < found["input_tokens"]["p50"] < 40_000
    assert 75_000 < found["input_tokens"]["p90"] < 100_000
    assert 110_000 < found["input_tokens"]["max"] <= 131_072
    assert 80 < found["output_tokens"]["p50"] < 220
    assert 0.75 < found["later_turn_cached"]["mean"] < 0.95
    assert 0.90 < found["within_session"] < 0.97
    assert 0.10 < found["caches"][-1]["classes"]["HEAVY"] < 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": "3"}, "turns: no such parameter; the parameters are agents, "),
        ({"mean_turns": "0.5"}, "mean_turns"),
        ({"human_share": "1.5"}, "human_share"),
        ({"agents": "two"}, "agents"),
    ],
)
def test_an_impossible_shape_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        shape_with(SMALL, changes)


def test_a_system_prompt_must_leave_room() -> None:
    with pytest.raises(ShapeError, match="max_tokens: 6000 is less than twice a system prompt of 3072 tokens"):
        generate(1, 1.0, seed=1, shape=shape_with(SMALL, {"max_tokens": "6000"}))


def test_the_shipped_trace_is_what_the_command_makes(tmp_path: Path) -> None:
    made = tmp_path / "tiny.jsonl.gz"
    command = ["generate", str(made), "--sessions", "16", "--span-s", "30", "--seed", "4", "--shape", "small"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert load_trace(made) == load_trace(TINY_TRACE)
    assert TINY_TRACE.stat().st_size < 10_000
    refused = CliRunner().invoke(app, [*command, "--set", "agents=0"])
    assert refused.exit_code == 2
    assert "agents" in refused.output
