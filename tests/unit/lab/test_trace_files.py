"""Files of traces in our own format: what is accepted, what is refused and how."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab.workload.trace_files import load_trace, read_trace, save_trace
from pointsman_lab.workload.traces import TraceError, by_session

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
    texts = (line if isinstance(line, str | bytes) else json.dumps(line) for line in lines)
    path.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
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
    before = packed.read_bytes()
    save_trace(packed, requests)
    assert packed.read_bytes() == before


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
        (LINE, "turn: 1 of session a occurs twice"),
        (b'{"timestamp_ms": 1, "session_id": "caf\xe9"}', "can't decode byte"),
        (b'{"timestamp_ms": 1, "other": ' + b"[" * 100_000, "recursion"),
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


def test_a_trace_is_read_as_a_stream(tmp_path: Path) -> None:
    stream = read_trace(write(tmp_path / "t.jsonl", LINE, "{"))
    assert next(stream).session == "a"
    with pytest.raises(TraceError, match=r"t\.jsonl:2: "):
        next(stream)
