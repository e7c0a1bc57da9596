"""Traces that are made of other traces, of access logs and of files of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pointsman_cli.main import COMMANDS, app
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TINY_TRACE, TraceRequest

SYSTEM = {"role": "system", "content": "You set the points of a railway. " * 40}


def convert(source: Path, out: Path, *words: str) -> Result:
    COMMANDS["trace"].register()
    return CliRunner().invoke(app, ["trace", "convert", str(source), str(out), *words])


def converted(folder: Path, lines: list[dict[str, Any]], *words: str) -> list[TraceRequest]:
    source, out = folder / "requests.jsonl", folder / "trace.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = convert(source, out, "--tokenizers", f"m={TOKENIZER_DIR}", *words)
    assert done.exit_code == 0, done.output
    again = folder / "again.jsonl"
    assert convert(source, again, "--tokenizers", f"m={TOKENIZER_DIR}", *words).exit_code == 0
    assert again.read_bytes() == out.read_bytes()
    return load_trace(out)


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[number % 2], "content": text} for number, text in enumerate(texts))]
    return {"model": "m", "messages": messages, **more}


def shared(first: TraceRequest, second: TraceRequest) -> int:
    return len(set(first.hash_ids) & set(second.hash_ids))


def test_bodies_alone_become_a_trace_with_sessions_and_an_assumed_interval(tmp_path: Path) -> None:
    first, other = chat("go " * 50), chat("stop " * 50)
    second = chat("go " * 50, "gone " * 20, "and back", max_tokens=7)
    trace = converted(tmp_path, [first, other, second], "--every-s", "2")
    assert [request.timestamp_ms for request in trace] == [0, 2_000, 4_000]
    assert [(request.session, request.turn) for request in trace] == [("found-1", 1), ("found-2", 1), ("found-1", 2)]
    assert [request.output_length for request in trace] == [200, 200, 7]
    assert shared(trace[0], trace[1]) >= 10
    assert shared(trace[0], trace[2]) > 10
    assert all(request.input_length > 200 and request.block_size == 16 for request in trace)


def test_lines_of_other_apis_and_of_batch_files_are_read(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat("go")},
        {"model": "m", "prompt": "the points " * 30},
        {"model": "m", "input": "the points " * 30},
        {"model": "m", "system": "the points", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9},
    ]
    assert len(converted(tmp_path, lines)) == 4


def test_a_log_has_times_sessions_and_answers_of_its_own(tmp_path: Path) -> None:
    lines = [
        {"time": 100.0 + number, "duration_s": 2.5 - number, "session": "s", "path": "/v1/chat/completions",
         "body": chat("go " * (number + 1)), "usage": {"completion_tokens": 30 + number}}
        for number in range(2)
    ]  # fmt: skip
    trace = converted(tmp_path, lines)
    # In the order of their arrival: the first arrived at 97.5 s, the second at 99.5 s.
    assert [(request.session, request.turn, request.timestamp_ms, request.output_length) for request in trace] == [
        ("s", 1, 0.0, 30),
        ("s", 2, 2_000.0, 31),
    ]


def test_what_cannot_be_converted_is_counted_by_its_cause(tmp_path: Path) -> None:
    source = tmp_path / "requests.jsonl"
    lines = [
        json.dumps(chat("go")),
        "GET / HTTP/1.1",
        "no",
        json.dumps({"model": "x", "prompt": "a"}),
        '{"model": "m"}',
    ]
    source.write_text("\n".join(lines) + "\n")
    done = convert(source, tmp_path / "trace.jsonl", "--tokenizers", f"m={TOKENIZER_DIR}")
    assert done.exit_code == 0
    assert done.stdout == f"{tmp_path}/trace.jsonl: 1 requests\n"
    assert "2 unreadable lines; the first is line 2: JSON is malformed" in done.stderr
    assert "1 for models without a tokenizer or engines here; the first is line 4: unknown model 'x'" in done.stderr
    assert "1 without a prompt; the first is line 5" in done.stderr


def test_a_file_of_which_nothing_can_be_used_says_why_and_what_to_give(tmp_path: Path) -> None:
    source = tmp_path / "requests.jsonl"
    source.write_text(json.dumps(chat("go")) + "\n")
    done = convert(source, tmp_path / "trace.jsonl")
    assert done.exit_code == 2
    assert "no line has a request that can be used" in done.output
    assert "--tokenizers MODEL=FOLDER" in done.output
    assert "docs/shadow.md" in done.output
    assert not (tmp_path / "trace.jsonl").exists()
    source.write_text('127.0.0.1 - - [28/Nov/2026:10:00:00 +0000] "POST /v1/completions" 200 12\n')
    assert "lab/README.md" in convert(source, tmp_path / "trace.jsonl").output
    assert convert(source, source).exit_code == 2


@pytest.mark.parametrize("name", ["own.jsonl", "deep/own.jsonl.gz"])
def test_a_trace_of_another_format_stays_the_same_trace(tmp_path: Path, name: str) -> None:
    done = convert(TINY_TRACE, tmp_path / name)
    assert done.exit_code == 0, done.output
    assert load_trace(tmp_path / name) == load_trace(TINY_TRACE)
