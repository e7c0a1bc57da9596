"""Refuses a prompt that does not fit the model's context: by its tokens, or by a lower bound before they are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_gateway.core.api import overflow_texts
from pointsman_gateway.core.api.api_call import Endpoint
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.api.field_checks import is_int

_FIELDS = {
    Endpoint.COMPLETION: "prompt",
    Endpoint.RESPONSES: "input",
    Endpoint.CHAT: "messages",
    Endpoint.MESSAGES: "messages",
}


class ContextExceeded(ApiRequestError):
    """A request does not fit the model's context. `tokens`: number of tokens of the prompt that were counted."""

    def __init__(self, endpoint: Endpoint, message: str, anthropic_message: str, tokens: int) -> None:
        super().__init__(
            400,
            anthropic_message if endpoint is Endpoint.MESSAGES else message,
            param=_FIELDS[endpoint],
            code=overflow_texts.CODE,
        )
        self.tokens = tokens


def check_tokens(endpoint: Endpoint, tokens: int, context: int) -> None:
    """Raises ContextExceeded if a prompt of at least `tokens` tokens leaves no room in a context of `context` tokens (0:
    unknown). Less room than the requested output is no error: vLLM generates what fits (`get_max_tokens`)."""
    if context and tokens >= context:
        message = overflow_texts.prompt_too_long(tokens, context)
        raise ContextExceeded(endpoint, message, overflow_texts.anthropic_prompt_too_long(tokens, context), tokens)


def check_output(endpoint: Endpoint, max_output_tokens: int, context: int, tokens: int) -> None:
    """Raises ContextExceeded if the requested output is larger than the whole context. `tokens`: tokens of the prompt."""
    if context and max_output_tokens > context:
        message = overflow_texts.output_too_long(max_output_tokens, context)
        anthropics = overflow_texts.anthropic_output_too_long(tokens, max_output_tokens, context)
        raise ContextExceeded(endpoint, message, anthropics, tokens)


def check_items(endpoint: Endpoint, body: Mapping[str, Any], context: int) -> None:
    """Raises ContextExceeded if the prompt of an unchecked body has at least as many messages, or token ids, as the context has
    tokens. In all known chat templates a message costs at least the token that begins or ends it."""
    given = body.get(_FIELDS[endpoint]) if endpoint in _FIELDS else None
    if not isinstance(given, list) or not given:
        return
    if endpoint is not Endpoint.COMPLETION or is_int(given[0]):
        check_tokens(endpoint, len(given), context)
        return
    for prompt in given:
        if isinstance(prompt, list):
            check_tokens(endpoint, len(prompt), context)
