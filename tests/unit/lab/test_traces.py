"""Traces: what is accepted, what is refused and how, and what the generator makes."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lab.generate import SessionShape, generate, make_tiny
from lab.traces import TINY_TRACE, TraceError, by_session, load_trace, save_trace, shared_prefix

SHARED = Path(__file__).parents[4] / "shared" / "traces"
LINE: dict[str, Any] = {
    "timestamp_ms": 5,
    "session_id": "a",
    "turn": 1,
    "input_length": 1030,
    "output_length": 7,
    "hash_ids": [1, 2],
    "block_size": 512,
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    later = LINE | {"session_id": 3, "timestamp_ms": 9, "think_ms": 4, "unknown": "ignored"}
    with_tail = LINE | {"turn": 2, "timestamp_ms": 7, "hash_ids": [1, 2, 3]}
    path = write(tmp_path / "t.jsonl", later, "", with_tail, LINE)
    requests = load_trace(path)
    assert [(request.session, request.turn, request.think_ms) for request in requests] == [
        ("a", 1, None),
        ("a", 2, None),
        ("3", 1, 4),
    ]
    assert {name: [request.turn for request in turns] for name, turns in by_session(requests).items()} == {
        "a": [1, 2],
        "3": [1],
    }
    packed = tmp_path / "t.jsonl.gz"
    save_trace(packed, requests)
    assert load_trace(packed) == requests


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "truncated"),
        ('{"timestamp_ms": 1}', "session_id"),
        (LINE | {"turn": "1"}, r"\$.turn"),
        (LINE | {"turn": 0}, r"\$.turn"),
        (LINE | {"input_length": -1}, r"\$.input_length"),
        (LINE | {"hash_ids": [1, "x"]}, r"\$.hash_ids\[1\]"),
        (LINE | {"hash_ids": [1]}, "hash_ids: 1 for input_length 1030"),
        (LINE | {"think_ms": -2}, r"\$.think_ms"),
        (LINE, "turn: 1 of session a is there twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, field: str) -> None:
    path = write(tmp_path / "bad.jsonl", LINE, line)
    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: .*{field}"):
        load_trace(path)


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"{}" * 1000)[:-12])
    for path in (tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl"), cut):
        with pytest.raises(TraceError, match=path.name):
            load_trace(path)


@pytest.mark.parametrize(
    ("name", "count", "sessions"),
    [("agentic_coding_1214.jsonl.gz", 1214, 274), ("mooncake_conversation.jsonl.gz", 12031, None)],
)
def test_the_development_traces_are_read(name: str, count: int, sessions: int | None) -> None:
    path = SHARED / name
    if not path.is_file():
        pytest.fail(f"{path} is missing: it belongs beside the repository, in ../shared/traces")
    requests = load_trace(path)
    assert len(requests) == count
    if sessions:
        assert len(by_session(requests)) == sessions


def test_generated_sessions_grow_and_share_their_agents_prompt() -> None:
    shape = SessionShape(agents=2, system_tokens=1024)
    requests = generate(20, 60.0, seed=3, shape=shape)
    assert requests == generate(20, 60.0, seed=3, shape=shape)
    assert requests != generate(20, 60.0, seed=4, shape=shape)
    sessions = by_session(requests)
    assert len(sessions) == 20
    firsts = [turns[0].hash_ids for turns in sessions.values()]
    shared = [shared_prefix(firsts[0], other) for other in firsts[1:]]
    assert set(shared) == {0, 2}
    for turns in sessions.values():
        assert [request.turn for request in turns] == list(range(1, len(turns) + 1))
        for before, after in pairwise(turns):
            assert shared_prefix(before.hash_ids, after.hash_ids) == len(before.hash_ids)
            assert after.input_length > before.input_length + before.output_length
            assert after.timestamp_ms > before.timestamp_ms


def test_the_shipped_trace_is_what_the_generator_makes(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny.jsonl.gz")
    assert load_trace(tmp_path / "tiny.jsonl.gz") == load_trace(TINY_TRACE)
    assert TINY_TRACE.stat().st_size < 60_000
