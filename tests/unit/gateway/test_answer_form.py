"""Which answers of engines have the form of the APIs."""

from __future__ import annotations

import pytest

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.streaming.answer_form import begins_as_events, has_answer, has_json_form


@pytest.mark.parametrize("body", [b"{}", b' \n{"a": [1]}\r\n', b"[1, 2]"])
def test_a_json_object_or_array_has_the_form(body: bytes) -> None:
    assert has_json_form(body)


@pytest.mark.parametrize("body", [b"", b"  ", b"{", b"<html></html>", b'{"a": 1', b"data: {}\n\n", b"null", b"[1}"])
def test_another_body_has_not(body: bytes) -> None:
    assert not has_json_form(body)


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [
        (Endpoint.CHAT, b'{"id": "1", "choices": []}'),
        (Endpoint.COMPLETION, b'{"choices":[{"text":""}]}'),
        (Endpoint.RESPONSES, b'{"output": [], "error": null}'),
        (Endpoint.MESSAGES, b'{"type": "message", "content": []}'),
        (Endpoint.EMBEDDINGS, b'{"data": []}'),
        (Endpoint.TOKENIZE, b"{}"),
    ],
)
def test_what_answers_of_an_api_have_is_looked_for(endpoint: Endpoint, answer: bytes) -> None:
    assert has_answer(endpoint, answer)


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES, Endpoint.RERANK])
@pytest.mark.parametrize("body", [b'{"error": {"message": "no \\"choices\\""}}', b"{}", b"[]", b'{"detail": "x"}'])
def test_an_error_object_is_no_answer(endpoint: Endpoint, body: bytes) -> None:
    assert not has_answer(endpoint, body)


@pytest.mark.parametrize(
    "arrived",
    [b"data: {}", b"event: a\ndata: {}\n\n", b": t 1\n", b"id: 1", b"d", b"", b"\r\n", b"\xef\xbb\xbfdata: 1"],
)
def test_what_may_begin_events_does(arrived: bytes) -> None:
    assert begins_as_events(arrived)


@pytest.mark.parametrize("arrived", [b"<html>", b"{", b'{"error": 1}', b" data: 1", b"dark"])
def test_what_cannot_begin_events_does_not(arrived: bytes) -> None:
    assert not begins_as_events(arrived)
