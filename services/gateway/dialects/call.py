"""The parts that every API shares: which there are, what a parsed request is, and the rules that hold for a client. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.dialects.errors import Form


class Kind(enum.Enum):
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
    def placed(self) -> bool:
        """Whether it costs an instance a step of its model; the others are answered by the engine's HTTP server alone."""
        return self in _GENERATING or self in _POOLING

    @property
    def form(self) -> Form:
        """How its errors are written."""
        return _FORMS.get(self, Form.OPENAI)


_GENERATING = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.MESSAGES})
_POOLING = frozenset({Kind.EMBEDDINGS, Kind.RERANK, Kind.SCORE, Kind.POOLING, Kind.CLASSIFY})
_FORMS = {Kind.RESPONSES: Form.RESPONSES, Kind.MESSAGES: Form.ANTHROPIC, Kind.COUNT_TOKENS: Form.ANTHROPIC}

# Every path that takes a body, as vLLM names it, with all its names for reranking and scoring.
ROUTES: Mapping[str, Kind] = {kind.value: kind for kind in Kind} | {
    "/v1/rerank": Kind.RERANK,
    "/v2/rerank": Kind.RERANK,
    "/v1/score": Kind.SCORE,
}


def form_of(path: str) -> Form:
    """The form of errors on `path`, also on one that nobody serves."""
    kind = ROUTES.get(path)
    if kind is not None:
        return kind.form
    return Form.ANTHROPIC if path.startswith("/v1/messages/") else Form.OPENAI


@dataclass(frozen=True)
class Rules:
    """What holds for the client that asks. `cache_salt` is its tenant's own; it goes before one that the client may set."""

    aliases: Mapping[str, str] = field(default_factory=dict)  # name asked for -> name served
    client_cache_salt: bool = False
    cache_salt: str = ""
    own_session: bool = True  # whether the session id in the body may reach the engine as the client wrote it


@dataclass
class Call:
    """One parsed request.

    `payload` is what goes upstream: the client's own bytes, or a new encoding when something had to go (`stripped` names what),
    with what we set (`added`) put in front. `chat` is the prompt as a chat completions body, None where there is none.
    """

    kind: Kind
    model: str  # the name that the engines know; aliases are resolved
    asked: str  # the name that the client wrote
    stream: bool
    max_output_tokens: int  # 0 when open
    session_hint: str  # body session_id, else prompt_cache_key; empty when neither
    cache_salt: str
    opaque: str  # why the engine's tokens cannot be told from the body; empty where they can
    reads_cache: bool  # whether the engine looks for the prompt in its prefix cache
    body: dict[str, Any]
    payload: bytes
    chat: dict[str, Any] | None = None
    previous: str = ""  # the stored response that this one continues
    stripped: tuple[str, ...] = ()
    usage_is_ours: bool = False  # a stream's usage was asked for by us: the client must not see it

    def forget_prompt(self) -> None:
        """Let go of what only sending needs: a stream may last for minutes after that, and prompts are long. Mutates."""
        self.body, self.payload, self.chat = {}, b"", None


def with_fields(payload: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object's bytes with `fields` put in front of the others, which it must not have itself; nothing is encoded anew."""
    if not fields:
        return payload
    rest = payload.lstrip()[1:].lstrip()
    head = msgspec.json.encode(dict(fields))[:-1]
    return head + (b"," if not rest.startswith(b"}") else b"") + rest
