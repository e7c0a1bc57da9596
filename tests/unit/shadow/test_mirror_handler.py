"""The endpoint for mirrored requests: every request is answered at once, and the backlog is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pointsman_gateway.core.http_message import Headers, Request
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from pointsman_shadow.io.metrics import ShadowMetrics
from pointsman_shadow.io.mirror_handler import Backlog, MirroredRequest, MirrorHandler
from pointsman_shadow.io.request_reader import RequestReader, UnusableRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Say something about the sea, the sky and the wind."}]}


def request(method: str, path: str, body: bytes = b"", **headers: str) -> Request:
    named = Headers((name.replace("_", "-"), value) for name, value in headers.items())
    nobody: Any = None
    return Request(method, path, "", named, writer=nobody, held_answer=nobody, body=body)


async def test_every_request_is_answered_before_it_is_understood() -> None:
    backlog = Backlog(100, ShadowMetrics())
    handler = MirrorHandler(backlog, ShadowMetrics(), lambda: {"models": {}})
    for path, body in (("/v1/chat/completions", b"{}"), ("/nonsense", b"\xff"), ("/v1/models", b"")):
        asked = request("POST", path, body, X_Request_ID="r1", Authorization="Bearer of-a-client")
        assert handler.admit(asked) is None
        answer = await handler.answer(asked)
        assert answer is not None
        assert (answer.status, answer.body) == (204, b"")
    first = await backlog.get()
    assert (first.path, first.headers.get("X-Request-ID")) == ("/v1/chat/completions", "r1")
    assert "Authorization" not in first.headers
    report, metrics = await handler.answer(request("GET", "/report")), await handler.answer(request("GET", "/metrics"))
    assert report is not None
    assert json.loads(report.body) == {"models": {}}
    assert metrics is not None
    assert b"pointsman_shadow_excluded_total" in metrics.body


async def test_a_mirrored_request_keeps_what_names_its_session() -> None:
    backlog = Backlog(1_000, ShadowMetrics())
    handler = MirrorHandler(backlog, ShadowMetrics(), lambda: {"models": {}})
    named = {"X_Claude_Code_Session_Id": "run", "X_Claude_Code_Agent_Id": "a"}
    await handler.answer(request("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), **named))
    mirrored = await backlog.get()
    reader = RequestReader({"m": str(TOKENIZER_DIR)}, {})
    asked, _ = await reader.read(mirrored.path, mirrored.headers, mirrored.body, mirrored.at)
    assert asked.session == "run:a"


async def test_what_comes_faster_than_it_is_understood_is_dropped_and_counted() -> None:
    telemetry = ShadowMetrics()
    backlog = Backlog(10, telemetry)
    for number in range(3):
        backlog.put(MirroredRequest("/v1/completions", Headers(), b"12345", float(number)))
    assert telemetry.registry.get_sample_value("pointsman_shadow_excluded_total", {"reason": "backlog"}) == 1
    # Requests that have not been read may still change the order.
    assert backlog.read_until == 0.0
    await backlog.get()
    assert backlog.read_until == 0.0
    await backlog.get()
    assert backlog.read_until == 1.0
    backlog.put(MirroredRequest("/v1/completions", Headers(), b"1234567890", 2.0))
    assert (await backlog.get()).at == 2.0


async def test_a_request_is_understood_as_a_gateway_does() -> None:
    reader = RequestReader({"m": str(TOKENIZER_DIR)}, {"alias": "m"})
    headers = Headers([("X-Request-ID", "r1"), ("X-Session-ID", "talk")])
    asked, placement = await reader.read("/v1/chat/completions", headers, json.dumps(CHAT).encode(), 5.0)
    assert (asked.request_id, asked.at, asked.model, asked.session) == ("r1", 5.0, "m", "talk")
    assert len(asked.keys) == asked.input_tokens // 16 > 0
    assert list(placement.keys) == list(asked.keys)
    other, _ = await reader.read("/v1/chat/completions", Headers(), json.dumps(CHAT | {"model": "alias"}).encode(), 6.0)
    assert other.keys == asked.keys
    # The request names no conversation, so it continues the one with the same prompt.
    assert other.session == "talk"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", b"{", "invalid"),
        ("/v1/chat/completions", json.dumps(CHAT | {"messages": 7}).encode(), "invalid"),
        ("/v1/chat/completions", json.dumps(CHAT | {"model": "other"}).encode(), "model"),
        ("/v1/embeddings", b'{"model": "m", "input": "x"}', "path"),
        ("/favicon.ico", b"", "path"),
    ],
)
async def test_what_cannot_be_compared_says_why(path: str, body: bytes, reason: str) -> None:
    with pytest.raises(UnusableRequest) as refused:
        await RequestReader({"m": str(TOKENIZER_DIR)}, {}).read(path, Headers(), body, 0.0)
    assert refused.value.reason == reason
