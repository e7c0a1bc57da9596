"""The progress that a replay prints while it runs."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from pointsman_lab.live.replay_command import ReplayProgress
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.traces import TraceRequest


def requests(count: int) -> list[TraceRequest]:
    values: dict[str, Any] = {
        "timestamp_ms": 0,
        "turn": 1,
        "input_length": 10,
        "output_length": 1,
        "hash_ids": (),
        "block_size": 16,
    }
    return [TraceRequest(session_id=number, **values) for number in range(count)]


def test_what_is_about_to_be_sent_is_printed_at_once_then_each_tenth_and_each_failure() -> None:
    out = io.StringIO()
    with ReplayProgress(Console(file=out, width=200)) as progress:
        progress.begin([requests(12), requests(8)], "m")
        assert out.getvalue() == "20 requests of 2 sessions for m\n"
        for number in range(20):
            failed: dict[str, Any] = {"status": 503, "error": "no instance"} if number == 3 else {"status": 200}
            progress.add(RequestRecord(session="a", turn=number, t_send=float(number), e2e_s=0.5, **failed))
    lines = out.getvalue().splitlines()[1:]
    assert lines[:3] == [
        "    1.5 s  2 of 20 answered, 0 failed",
        "a turn 3: 503 no instance",
        "    3.5 s  4 of 20 answered, 1 failed",
    ]
    assert lines[-1] == "   19.5 s  20 of 20 answered, 1 failed"
    assert len(lines) == 11


def test_a_terminal_shows_a_bar() -> None:
    out = io.StringIO()
    with ReplayProgress(Console(file=out, width=100, force_terminal=True)) as progress:
        progress.begin([requests(2)], "m")
        progress.add(RequestRecord(session="a", turn=1, status=200))
        progress.add(RequestRecord(session="a", turn=2, status=200))
    assert "2/2" in out.getvalue()
    assert "answered" not in out.getvalue()
