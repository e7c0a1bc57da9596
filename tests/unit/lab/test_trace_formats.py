"""Trace formats of other projects, checked by hand; sessions derived from prefixes; errors that name their field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pointsman_lab.workload.trace_commands import app
from pointsman_lab.workload.trace_files import load_trace, read_trace, save_trace
from pointsman_lab.workload.trace_formats import SessionDeriver
from pointsman_lab.workload.traces import TraceError, TraceRequest, by_session


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shown(requests: list[TraceRequest]) -> list[tuple[str, int, float, int, tuple[int, ...]]]:
    return [
        (request.session, request.turn, request.timestamp_ms, request.input_length, request.hash_ids)
        for request in requests
    ]


def mooncake(at: float, length: int, ids: list[int], output: int = 9) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids}


def bailian(chat: int, parent: int, at: float, turn: int, length: int, ids: list[int]) -> dict[str, Any]:
    words = {"type": "text", "turn": turn, "output_length": 5}
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": length, "hash_ids": ids} | words


def test_mooncake_sessions_follow_from_prefixes(tmp_path: Path) -> None:
    lines = [
        mooncake(0, 1400, [0, 1, 2]),
        mooncake(5, 1600, [0, 3, 4, 5], output=0),  # shares the system prompt alone: another session
        mooncake(9, 2000, [0, 1, 6, 7]),  # block 2 was partial; it keeps all whole blocks of the first
        mooncake(9, 700, [0, 8]),  # block 0 is nobody's any more
    ]
    requests = load_trace(write(tmp_path / "m.jsonl", *lines))
    assert shown(requests) == [
        ("0", 1, 0, 1400, (0, 1, 2)),
        ("1", 1, 5, 1600, (0, 3, 4, 5)),
        ("0", 2, 9, 2000, (0, 1, 6, 7)),
        ("2", 1, 9, 700, (0, 8)),
    ]
    assert {request.block_size for request in requests} == {512}
    assert {request.think_ms for request in requests} == {None}
    assert requests[1].output_length == 1


def test_a_session_that_keeps_half_or_less_is_another_one() -> None:
    chains = SessionDeriver()
    assert chains.add((1, 2, 3, 4), 40) == (0, 1)
    assert chains.add((1, 2, 3, 6, 7), 50) == (0, 2)
    assert chains.add((1, 2, 9, 10, 11, 12), 60) == (1, 1)
    # Blocks 1 and 2 belong to no session now, those after them still to the first.
    assert chains.add((1, 2, 3, 6, 7, 8), 60) == (0, 3)
    assert chains.add((1, 2), 70) == (2, 1)
    # The same input again does not count as a next turn.
    assert chains.add((1, 2, 3, 6, 7, 8), 60) == (3, 1)
    assert chains.add((), 9) == (4, 1)
    # If an id does not imply the ids before it, it is another block after other ids.
    assert chains.add((6, 7, 8), 80) == (5, 1)


def test_what_two_sessions_share_belongs_to_neither() -> None:
    chains = SessionDeriver()
    assert chains.add((1, 2, 3), 30) == (0, 1)
    assert chains.add((1, 2, 4), 30) == (1, 1)
    # Longer than either, and with more than half of either's blocks.
    assert chains.add((1, 2, 5, 6), 40) == (2, 1)


def test_bailian_sessions_are_chains_of_chats(tmp_path: Path) -> None:
    lines = [
        bailian(10, -1, 0.0, 1, 40, [1, 2, 3]),
        bailian(11, 10, 1.5, 2, 64, [1, 2, 4, 5]),
        bailian(12, 10, 2.0, 2, 48, [1, 2, 6]),  # the second child of 10: a session of its own
        bailian(13, 11, 3.25, 3, 80, [1, 2, 4, 5, 7]),
        bailian(14, 99, 4.0, 7, 16, [8]),  # its parent was cut off
    ]
    requests = load_trace(write(tmp_path / "b.jsonl", *lines))
    assert shown(requests) == [
        ("10", 1, 0.0, 40, (1, 2, 3)),
        ("10", 2, 1500.0, 64, (1, 2, 4, 5)),
        ("12", 1, 2000.0, 48, (1, 2, 6)),
        ("10", 3, 3250.0, 80, (1, 2, 4, 5, 7)),
        ("14", 1, 4000.0, 16, (8,)),
    ]
    assert {request.block_size for request in requests} == {16}


def test_aiperf_turns_are_put_together(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "input_length": 1100, "output_length": 100, "hash_ids": [0, 1, 2], "timestamp": 2000.0},
        {"session_id": "b", "input_length": 1030, "output_length": 1, "hash_ids": [0, 3, 4], "timestamp": 2500.0},
        {"session_id": "a", "input_length": 900, "output_length": 50, "hash_ids": [5, 6], "delay": 300.0},
        {"session_id": "a", "input_length": 600, "output_length": 50, "hash_ids": [7, 8], "delay": 0.0},
    ]
    requests = load_trace(write(tmp_path / "a.jsonl", *lines))
    # 1,100 + 100 answered + 900 new; the third block holds all three and is the session's own.
    assert shown(requests) == [
        ("a", 1, 2000.0, 1100, (0, 1)),
        ("b", 1, 2500.0, 1030, (0, 3)),
        ("a", 2, 3800.0, 2100, (0, 1, -1, -2)),
        ("a", 3, 4800.0, 2750, (0, 1, -1, -2, -3)),
    ]
    assert [request.think_ms for request in requests] == [0.0, 0.0, 300.0, 0.0]
    assert [request.output_length for request in requests] == [100, 1, 50, 50]


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([mooncake(0, 512, [1]), mooncake(1, 600, [1, 2, 3])], "2: hash_ids: 3"),
        ([mooncake(5, 512, [1]), mooncake(4, 512, [1])], "2: timestamp: 4 is before"),
        ([mooncake(0, 512, [1]), mooncake(1, 0, [])], r"2: .*\$.input_length"),
        ([mooncake(0, 512, [1]) | {"timestamp": "now"}], r"1: .*\$.timestamp"),
        ([bailian(1, -1, 0, 1, 16, [1]), bailian(1, -1, 0, 1, 16, [1])], "2: chat_id: 1 occurs twice"),
        ([bailian(1, -1, 0, 1, 16, [1, 2, 3])], "1: hash_ids: 3 for input_length 16 in blocks of 16"),
        ([{"session_id": "a", "input_length": 9}, {"session_id": "a", "input_length": 9}], "2: delay: missing"),
        ([{"session_id": "a", "input_length": 9, "hash_ids": [1, 2]}], "1: hash_ids: 2 for input_length 9"),
        ([{"session_id": "a", "input_length": 9}, {"session_id": "a", "text_input": "hello"}], "2: .*input_length"),
        (
            [{"messages": []}],
            r"1: its fields \(messages\) match no known format: pointsman, mooncake, bailian, aiperf",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[dict[str, Any]], where: str) -> None:
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(TraceError, match=rf"bad\.jsonl:{where}") as caught:
        load_trace(path)
    assert caught.value.__traceback__ is not None, "which keeps what the frames hold"
    assert str(path) not in [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    failed = CliRunner().invoke(app, ["stats", str(path)])
    assert failed.exit_code == 2
    assert "bad.jsonl:" in failed.output


def test_a_format_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(0, 512, [1]) | {"session_id": "a"})
    assert load_trace(path)[0].session == "a"
    assert load_trace(path, "mooncake")[0].session == "0"
    with pytest.raises(TraceError, match="csv: unknown trace format; known formats: auto, pointsman"):
        load_trace(path, "csv")


def test_a_converted_trace_is_the_same_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", *(mooncake(number, 700, [0, number + 1]) for number in range(50)))
    assert save_trace(tmp_path / "deep" / "own.jsonl.gz", read_trace(path)) == 50
    assert load_trace(tmp_path / "deep" / "own.jsonl.gz") == load_trace(path)
    assert len(by_session(read_trace(path))) == 50
    with pytest.raises(TraceError, match="cannot be written"):
        save_trace(tmp_path / "m.jsonl" / "below", load_trace(path))
