"""Statistics of traces: small ones by hand, then those beside the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pointsman_lab.workload.trace_commands import app
from pointsman_lab.workload.trace_files import load_trace, save_trace
from pointsman_lab.workload.trace_formats import SessionDeriver
from pointsman_lab.workload.trace_stats import statistics
from pointsman_lab.workload.traces import TraceRequest, by_session

SHARED = Path(os.environ.get("POINTSMAN_TEST_TRACES", Path(__file__).parents[4] / "shared" / "traces"))


def ask(session: str, turn: int, at_s: float, ids: list[int], length: int, **more: Any) -> TraceRequest:
    fields: dict[str, Any] = {"output_length": 50, "hash_ids": tuple(ids), "block_size": 100, "think_ms": None}
    return TraceRequest(timestamp_ms=at_s * 1e3, session_id=session, turn=turn, input_length=length, **(fields | more))


TRACE = [
    ask("a", 1, 0.0, [1, 2, 3], 310),
    ask("b", 1, 4.0, [1, 4], 200, output_length=150),
    ask("a", 2, 10.0, [1, 2, 3, 5, 6], 560, think_ms=9_000),
    ask("c", 1, 30.0, [7], 190),
]


def test_a_small_trace_by_hand() -> None:
    found = statistics(TRACE, cache_tokens=(300,))
    assert (found["requests"], found["sessions"]) == (4, 3)
    # The last answer would be complete 0.5 s + 50 x 10 ms after the last request.
    assert found["span_s"] == 31.0
    assert found["input_tokens"] == {"p10": 193.0, "p50": 255.0, "p90": 485.0, "p99": 552.5, "max": 560, "mean": 315}
    assert found["turns"]["max"] == 2
    assert found["think_s"]["mean"] == 9.0
    # b finds block 1; a's second turn its first three, which it named itself.
    assert found["ideal_hit_ratio"] == round(400 / 1260, 4)
    assert found["within_session"] == 0.75
    assert found["later_turn_cached"]["mean"] == round(300 / 560, 4)
    # Block 1 after 4 s and after 6 s, blocks 2 and 3 after 10 s.
    assert found["reuse_gap_s"] == {"p10": 4.0, "p50": 6.0, "p90": 10.0, "p99": 10.0, "max": 10.0, "mean": 7.5}
    small, unlimited = found["caches"]
    assert (unlimited["tokens"], unlimited["hit_ratio"]) == (None, found["ideal_hit_ratio"])
    # Three blocks: b's 4 drives out 3, then a finds 1 and 2.
    assert (small["tokens"], small["hit_ratio"]) == (300, round(300 / 1260, 4))
    assert unlimited["classes"] == {"LIGHT": 1.0, "MEDIUM": 0.0, "HEAVY": 0.0}
    flight = found["sessions_in_flight"]
    assert flight["max"] == 2
    # a is there for 11 s, b for 2 s, c for 1 s, of 31 s.
    assert flight["mean"] == round(14 / 31, 4)
    assert (flight["curve"][0], flight["curve"][-1]) == ([0.0, 1], [31.0, 1])


def test_classes_are_the_routers() -> None:
    heavy = [ask("h", 1, 0.0, list(range(200)), 20_000), ask("m", 1, 0.0, list(range(200, 270)), 7_000)]
    found = statistics([*heavy, ask("h", 2, 5.0, list(range(200)), 20_050)], cache_tokens=())
    assert found["caches"][0]["classes"] == pytest.approx({"LIGHT": 1 / 3, "MEDIUM": 1 / 3, "HEAVY": 1 / 3}, abs=1e-4)


def test_nothing_shared_and_nothing_at_all() -> None:
    found = statistics([ask("a", 1, 0.0, [1], 100)])
    assert (found["ideal_hit_ratio"], found["within_session"], found["reuse_gap_s"]) == (0.0, None, None)
    assert found["later_turn_cached"] is found["think_s"] is None
    with pytest.raises(ValueError, match="no requests"):
        statistics([])


def test_the_command_prints_tables_or_json(tmp_path: Path) -> None:
    save_trace(tmp_path / "t.jsonl", TRACE)
    result = CliRunner().invoke(app, ["stats", str(tmp_path / "t.jsonl"), "--cache-tokens", "300"])
    assert result.exit_code == 0, result.output
    assert "4 requests of 3 sessions" in result.output
    as_json = CliRunner().invoke(app, ["stats", str(tmp_path / "t.jsonl"), "--cache-tokens", "300", "--json"])
    assert json.loads(as_json.output) == statistics(TRACE, cache_tokens=(300,))
    # The order in the file is not that of time.
    save_trace(tmp_path / "t.jsonl", TRACE[::-1])
    again = CliRunner().invoke(app, ["stats", str(tmp_path / "t.jsonl"), "--cache-tokens", "300", "--json"])
    assert again.output == as_json.output


@pytest.mark.parametrize(
    ("name", "count", "sessions", "hit_ratio"),
    [
        ("agentic_coding_1214.jsonl.gz", 1_214, 274, 0.7654),
        ("mooncake_conversation.jsonl.gz", 12_031, 8_072, 0.3734),
    ],
)
def test_the_development_traces_are_read(name: str, count: int, sessions: int, hit_ratio: float) -> None:
    path = SHARED / name
    if not path.is_file():
        pytest.fail(f"{path} is missing: say in POINTSMAN_TEST_TRACES where the development traces are", pytrace=False)
    requests = load_trace(path)
    found = statistics(requests)
    assert (found["requests"], found["sessions"], found["ideal_hit_ratio"]) == (count, sessions, hit_ratio)
    # Nearly all sessions that the trace names, or that another rule derived, are found again from prefixes alone.
    chains = SessionDeriver()
    derived = {chains.add(request.whole_blocks, request.input_length)[0] for request in requests}
    assert len(derived) == pytest.approx(len(by_session(requests)), rel=0.03)
