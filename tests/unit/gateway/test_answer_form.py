"""Which answers of engines have the form of the APIs."""

from __future__ import annotations

import pytest

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.streaming.answer_form import (
    begins_as_events,
    has_answer,
    has_json_form,
    is_preamble,
    without_preamble,
)


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


def response_event(name: str) -> bytes:
    return b'event: response.%b\ndata: {"response":{"tools":[{"name":"f"}]}}\n\n' % name.encode()


PREAMBLES = [
    b": keep-alive\n\n" * 3,
    b": ping\r\n\r\n",
    response_event("created") + b": keep-alive\n\n" + response_event("queued") + response_event("in_progress"),
    response_event("created").replace(b"\n", b"\r\n"),
]


@pytest.mark.parametrize("preamble", PREAMBLES)
def test_a_preamble_tells_of_no_answer_wherever_it_is_cut(preamble: bytes) -> None:
    assert all(is_preamble(preamble[:cut]) for cut in range(len(preamble) + 1))


@pytest.mark.parametrize("preamble", [b"", *PREAMBLES])
@pytest.mark.parametrize(
    "first",
    [
        b":5\n\n",
        b":5",
        b":\n\n",
        b":.\n\n",
        b"data: {}\n\n",
        b"data: {",
        b"event: response.output_item.added\ndata: {}\n\n",
        b"event: response.created_by\ndata: {}\n\n",
        b"event: error\ndata: {}\n\n",
        b"<html>",
        b": a comment\ndata: {}\n\n",
    ],
)
def test_an_answer_begins_behind_its_preamble(preamble: bytes, first: bytes) -> None:
    assert not is_preamble(preamble + first)
    assert without_preamble(preamble + first + response_event("created")) == first + response_event("created")
