"""What a line of an access log says."""

from __future__ import annotations

import json

import pytest

from pointsman_shadow.core.access_log import LineError, read_line, upstream_of
from pointsman_shadow.core.pending_requests import RequestOutcome


def test_a_line_as_nginx_writes_it() -> None:
    body = '{"model": "m", "prompt": "\\"quoted\\" ü"}'
    line = read_line(
        json.dumps(
            {"time": "1700000010.250", "duration_s": "1.250", "id": "ab", "status": "200", "upstream": "10.0.0.1:8000",
             "session": "", "path": "/v1/completions?x=1", "body": body}
        ).encode()
    )  # fmt: skip
    assert (line.arrived_at, line.ended_at) == (1700000009.0, 1700000010.25)
    assert line.request == ("/v1/completions", body.encode())
    assert line.end == RequestOutcome(200, "10.0.0.1:8000")


def test_a_line_with_tokens_and_usage() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    line = read_line(
        json.dumps(
            {"time": "2026-01-01T00:00:00+00:00", "model": "m", "prompt_token_ids": [1, 2, 3], "usage": usage}
        ).encode()
    )
    assert line.arrived_at == 1767225600.0
    assert line.request is not None
    assert json.loads(line.request[1]) == {"model": "m", "prompt": [1, 2, 3]}
    assert line.end == RequestOutcome(output_tokens=7, cached_tokens=2)


@pytest.mark.parametrize(
    ("text", "upstream"),
    [("", ""), ("-", ""), ("a:1", "a:1"), ("a:1, b:2", "b:2"), ("a:1, b:2 : c:3", "c:3"), ("http://h:80/v1", "h:80")],
)
def test_the_upstream_that_answered(text: str, upstream: str) -> None:
    assert upstream_of(text) == upstream


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "truncated"),
        (b'{"id": "x"}', "time"),
        (b'{"time": "soon"}', "time"),
        (b'{"time": 1.0, "duration_s": "long"}', "duration_s"),
        (b'{"time": 1.0, "status": "fine"}', "status"),
        (b'{"time": "nan"}', "time"),
        (b'{"time": "inf"}', "time"),
        (b'{"time": -1.0}', "time"),
        (b'{"time": 1e300}', "time"),
        (b'{"time": 1.0, "duration_s": "nan"}', "duration_s"),
        (b'{"time": 1.0, "duration_s": -1}', "duration_s"),
        (b'{"time": 1.0, "duration_s": 2}', "duration_s"),
        (b'{"time": 1.0, "status": "nan"}', "status"),
        (b'{"time": 1.0, "status": 1' + b"0" * 400 + b"}", "status"),
        (b'{"time": 1.0, "status": "inf"}', "status"),
        (b'{"time": 1.0, "prompt_token_ids": [1]}', "model"),
        (b'{"time": 1.0, "prompt_token_ids": "x"}', "prompt_token_ids"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: bytes, word: str) -> None:
    def use() -> object:
        found = read_line(line)
        return found.arrived_at, found.end, found.request

    with pytest.raises(LineError, match=word):
        use()


@pytest.mark.parametrize(
    "fields",
    [
        b'"cached_tokens": -1, "output_tokens": -1',
        b'"cached_tokens": 9000000000, "output_tokens": 9000000000',
        b'"usage": {"prompt_tokens_details": {"cached_tokens": -1}, "completion_tokens": true}',
        b'"usage": {"prompt_tokens_details": [1], "completion_tokens": 90000000000000000000000}',
        b'"usage": {"input_tokens_details": "x", "output_tokens": "many"}',
    ],
)
def test_numbers_of_tokens_that_cannot_be_are_unknown(fields: bytes) -> None:
    end = read_line(b'{"time": 1.0, "status": 200, ' + fields + b"}").end
    assert (end.status, end.cached_tokens, end.output_tokens) == (200, None, None)
