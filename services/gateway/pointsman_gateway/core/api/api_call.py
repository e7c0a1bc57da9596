"""The types that all APIs share: endpoints, parsed requests, and the rules for a client."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pointsman_gateway.core.api.errors import ErrorFormat


class Endpoint(enum.Enum):
    """The APIs whose requests have a body. The value is the path at the engine."""

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

    # Members are dictionary keys some twenty times per request, and enum's own hash is a Python function.
    __hash__ = object.__hash__

    @property
    def generates(self) -> bool:
        """Whether requests decode. Such a request has prompt tokens to place it by, and a session."""
        return self in _GENERATING

    @property
    def is_placed(self) -> bool:
        """Whether requests are placed: they cost a step of the model. The engine's HTTP server answers the others alone."""
        return self in _GENERATING or self in _POOLING

    @property
    def error_format(self) -> ErrorFormat:
        """The format of the API's errors."""
        return _FORMS.get(self, ErrorFormat.OPENAI)


_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES})
_POOLING = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.POOLING, Endpoint.CLASSIFY})
_FORMS = {
    Endpoint.RESPONSES: ErrorFormat.RESPONSES,
    Endpoint.MESSAGES: ErrorFormat.ANTHROPIC,
    Endpoint.COUNT_TOKENS: ErrorFormat.ANTHROPIC,
}

# All paths with a body, as in vLLM, including all of vLLM's paths for reranking and scoring.
ROUTES: Mapping[str, Endpoint] = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
    "/v1/score": Endpoint.SCORE,
}


def error_format_of(path: str, by_anthropic: bool = False) -> ErrorFormat:
    """Return the format of errors on `path`, which need not be a served path. `by_anthropic`: the request has the header that
    Anthropic's clients send; the lists of models have both vendors' clients."""
    endpoint = ROUTES.get(path.removesuffix("/"))
    if endpoint is not None:
        return endpoint.error_format
    by_anthropic = by_anthropic and (path + "/").startswith("/v1/models/")
    return ErrorFormat.ANTHROPIC if by_anthropic or path.startswith("/v1/messages/") else ErrorFormat.OPENAI


@dataclass(frozen=True)
class ClientRules:
    """Rules for the requests of one client. `cache_salt` is its tenant's; it replaces one that the client sets."""

    aliases: Mapping[str, str] = field(default_factory=dict)  # requested name -> served name
    client_cache_salt: bool = False  # setting: clients may set a salt, if their tenant has none
    cache_salt: str = ""
    own_session: bool = True  # whether the body's session id may reach the engine unchanged
    max_sequences: int = 1 << 14  # of one request: its prompts, times the answers to each (vLLM's own maximum of `n`)


@dataclass
class ApiCall:
    """One parsed request.

    `payload` is the body for the engine: the client's own bytes, or a new encoding if fields were removed or replaced (`stripped`
    names the removed ones). Fields that the gateway sets are at its front. `chat` is the prompt as a chat completions body, None
    if the API has none or it cannot be converted. `body` and `chat` are there until the request is prepared (drop_values).
    """

    endpoint: Endpoint  # the API; of several paths of one API the client may have used any
    model: str  # the model's name at the engines; aliases are resolved
    requested_model: str  # the name that the client sent
    stream: bool  # whether the client wants a stream; False for APIs that do not generate
    max_output_tokens: int  # 0 when open
    session_id: str  # of the body; empty without one
    prompt_cache_key: str  # of the body; empty without one
    cache_salt: str  # the tenant's, else the client's own, if it may set one; empty: none
    untokenizable: str  # why the prompt's tokens cannot be computed from the body; empty if they can
    reads_prefix_cache: bool  # whether the engine looks up the prompt in its prefix cache
    body: dict[str, Any]
    payload: bytes
    chat: dict[str, Any] | None = None
    previous_response_id: str = ""  # the stored response that the request continues
    stripped: tuple[str, ...] = ()
    hide_usage: bool = False  # only the gateway requested the stream's usage: it is not forwarded
    light: bool = False  # whether decode_light() has decoded the body
    decoded_bytes: int = 0  # at most so many bytes of memory do the body's values take
    continuable: bool = False  # whether another engine can go on with its answer (continuable.py)
    continuable_by_text: bool = False  # whether it can if it only knows the answer's text
    prompts: int = 1  # number of prompts, or of a pooling API's texts
    answers: int = 1  # number of answers to each (`n`)

    @property
    def sequences(self) -> int:
        """Number of sequences that the engine runs."""
        return self.prompts * self.answers

    def drop_values(self) -> None:
        """Release the decoded body, whose values may take many times the memory of its bytes, while the request may be held for
        minutes. Mutates."""
        self.body, self.chat = {}, None

    def drop_prompt(self) -> None:
        """Release what only sending needs, since prompts are long and a stream may last for minutes after sending. Mutates."""
        self.drop_values()
        self.payload = b""


def with_fields(payload: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object's bytes with `fields`, which it must not have yet, at its front. The other bytes are unchanged."""
    if not fields:
        return payload
    begin = payload.index(b"{") + 1
    blanks = 1 << 10
    while not (after := payload[begin : begin + blanks].lstrip()):
        begin += blanks
    head = msgspec.json.encode(dict(fields))[:-1]
    # The payload may be long, so it is copied only once.
    return b"".join((head, b"" if after.startswith(b"}") else b",", memoryview(payload)[begin:]))
