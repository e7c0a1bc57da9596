"""The parts that every API shares: the endpoints, a parsed request, and the rules that hold for a client."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pointsman.gateway.core.api.errors import ErrorFormat


class Endpoint(enum.Enum):
    """The APIs with a body; the value is the path upstream."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/rerank"
    SCORE = "/score"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"

    # Members are looked up in dictionaries some twenty times a request; enum's own hash is a Python function.
    __hash__ = object.__hash__

    @property
    def generates(self) -> bool:
        """Whether it decodes: its prompt has tokens to place by, its session goes on."""
        return self in _GENERATING

    @property
    def is_placed(self) -> bool:
        """Whether it costs an instance a step of its model; the others are answered by the engine's HTTP server alone."""
        return self in _GENERATING or self in _POOLING

    @property
    def error_format(self) -> ErrorFormat:
        """How its errors are written."""
        return _FORMS.get(self, ErrorFormat.OPENAI)


_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES})
_POOLING = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.POOLING, Endpoint.CLASSIFY})
_FORMS = {
    Endpoint.RESPONSES: ErrorFormat.RESPONSES,
    Endpoint.MESSAGES: ErrorFormat.ANTHROPIC,
    Endpoint.COUNT_TOKENS: ErrorFormat.ANTHROPIC,
}

# Every path that takes a body, as vLLM names it, with all its names for reranking and scoring.
ROUTES: Mapping[str, Endpoint] = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
    "/v1/score": Endpoint.SCORE,
}


def error_format_of(path: str) -> ErrorFormat:
    """The form of errors on `path`, also on one that nobody serves."""
    endpoint = ROUTES.get(path)
    if endpoint is not None:
        return endpoint.error_format
    return ErrorFormat.ANTHROPIC if path.startswith("/v1/messages/") else ErrorFormat.OPENAI


@dataclass(frozen=True)
class ClientRules:
    """What holds for the client that asks. `cache_salt` is its tenant's own; it goes before one that the client may set."""

    aliases: Mapping[str, str] = field(default_factory=dict)  # name asked for -> name served
    client_cache_salt: bool = False
    cache_salt: str = ""
    own_session: bool = True  # whether the session id in the body may reach the engine as the client wrote it


@dataclass
class ApiCall:
    """One parsed request.

    `payload` is what goes upstream: the client's own bytes, or a new encoding when something had to go (`stripped` names what),
    with what we set (`added`) put in front. `chat` is the prompt as a chat completions body, None where there is none.
    """

    endpoint: Endpoint
    model: str  # the name that the engines know; aliases are resolved
    requested_model: str  # the name that the client wrote
    stream: bool
    max_output_tokens: int  # 0 when open
    session_hint: str  # body session_id, else prompt_cache_key; empty when neither
    cache_salt: str
    untokenizable: str  # why the engine's tokens cannot be told from the body; empty where they can
    reads_prefix_cache: bool  # whether the engine looks for the prompt in its prefix cache
    body: dict[str, Any]
    payload: bytes
    chat: dict[str, Any] | None = None
    previous_response_id: str = ""  # the stored response that this one continues
    stripped: tuple[str, ...] = ()
    hide_usage: bool = False  # a stream's usage was asked for by us: the client must not see it
    light: bool = False  # what decode_body.is_light() says of the body

    def drop_prompt(self) -> None:
        """Let go of what only sending needs: a stream may last for minutes after that, and prompts are long. Mutates."""
        self.body, self.payload, self.chat = {}, b"", None


def with_fields(payload: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object's bytes with `fields` put in front of the others, which it must not have itself; nothing is encoded anew."""
    if not fields:
        return payload
    begin = payload.index(b"{") + 1
    blanks = 1 << 10
    while not (after := payload[begin : begin + blanks].lstrip()):
        begin += blanks
    head = msgspec.json.encode(dict(fields))[:-1]
    # What follows is copied once: it may be long.
    return b"".join((head, b"" if after.startswith(b"}") else b",", memoryview(payload)[begin:]))
