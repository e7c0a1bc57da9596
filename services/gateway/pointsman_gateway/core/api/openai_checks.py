"""OpenAI's /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_gateway.core.api.field_checks import (
    BOOLEAN,
    COUNT,
    LIST,
    OBJECT,
    SAMPLING,
    Rule,
    check_fields,
    check_turns,
    invalid_parameter,
    is_token_ids,
)

_CHAT: Mapping[str, Rule] = {
    **SAMPLING,
    "max_completion_tokens": COUNT,
    "tools": LIST,
    "documents": LIST,
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}


def check_chat(body: dict[str, Any]) -> None:
    """Check a /v1/chat/completions body. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, _CHAT)
    check_turns(body.get("messages"), "messages")


def check_completion(body: dict[str, Any]) -> None:
    """Check a /v1/completions body. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, SAMPLING)
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return
    good = (isinstance(prompt, str) and prompt) or (
        isinstance(prompt, list)
        and bool(prompt)
        and (is_token_ids(prompt) or all((isinstance(part, str) and part) or is_token_ids(part) for part in prompt))
    )
    if not good:
        raise invalid_parameter("prompt", "a string, a list of strings, or a list of token ids")
