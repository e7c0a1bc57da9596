"""Whether an engine's answer with status 200 has the form of the APIs. If not, the engine is at fault, or a server before it."""

from __future__ import annotations

import re

from pointsman_gateway.core.api import Endpoint

# Field in which vLLM tells usage and parts of an answer in bytes.
METADATA = "metadata"
# Fields of server-sent events, and comments.
_FIELDS = (b"data", b"event", b"id", b"retry", b":")
_BLANK = b" \t\r\n"
# What a stream may have before its engine has computed anything: comments that tell no token ids (vLLM's
# --sse-keep-alive-interval), and events that repeat the request for a response. Then: the beginning of another one.
_ECHO = rb"event: response\.(?:created|queued|in_progress)\r?\n"
_PREAMBLE = re.compile(rb"(?:: [^\n]*+\n\r?\n|" + _ECHO + rb"data:[^\n]*+\n\r?\n)*+")
_MORE_OF_IT = re.compile(rb"(?::(?: [^\n]*+(?:\n\r?)?)?|e[^\n]*+|" + _ECHO + rb"(?:d[^\n]*+(?:\n\r?)?)?)?")
# What each answer of an API has, as it is written in JSON. An error object has none of them.
_ANSWER = {
    Endpoint.CHAT: b'"choices"',
    Endpoint.COMPLETION: b'"choices"',
    Endpoint.RESPONSES: b'"output"',
    Endpoint.MESSAGES: b'"content"',
    Endpoint.EMBEDDINGS: b'"data"',
    Endpoint.RERANK: b'"results"',
    Endpoint.SCORE: b'"data"',
    Endpoint.POOLING: b'"data"',
    Endpoint.CLASSIFY: b'"data"',
}


def is_in_bytes(endpoint: Endpoint, media_type: str) -> bool:
    """Whether an answer is the numbers of embeddings themselves, as clients may ask for (`encoding_format` bytes, bytes_only)."""
    return media_type == "application/octet-stream" and endpoint in (Endpoint.EMBEDDINGS, Endpoint.POOLING)


def has_json_form(body: bytes) -> bool:
    """Whether a body begins and ends as a JSON object or array does. Its inside is not looked at: O(1) but for blanks."""
    whole = body.strip(_BLANK)
    return whole[:1] + whole[-1:] in (b"{}", b"[]")


def has_answer(endpoint: Endpoint, body: bytes) -> bool:
    """Whether a body of JSON has what answers of the API have. Only the name is searched, not parsed: in a text it is escaped."""
    return _ANSWER.get(endpoint, b"") in body


def without_preamble(arrived: bytes) -> bytes:
    """Return the first bytes of a stream from its first event on that tells of an answer, or of an error."""
    return _PREAMBLE.sub(b"", arrived, count=1)


def is_preamble(arrived: bytes) -> bool:
    """Whether the first bytes of a stream tell of no answer, and of no error, yet."""
    return _MORE_OF_IT.fullmatch(without_preamble(arrived)) is not None


def begins_as_events(arrived: bytes) -> bool:
    """Whether the first bytes of a stream can begin server-sent events; True if there are too few to say."""
    begins = arrived.lstrip(b"\xef\xbb\xbf\r\n")
    return any(begins.startswith(field) or field.startswith(begins) for field in _FIELDS)
