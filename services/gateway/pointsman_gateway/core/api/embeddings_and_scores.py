"""The APIs of pooling models (/v1/embeddings, /rerank, /score, /pooling, /classify), and /tokenize and /detokenize.

The pooling APIs need one step and no decode. The engine's HTTP server answers /tokenize and /detokenize alone. The body formats
are those of vLLM 0.32 `entrypoints/{pooling,serve/tokenize}`. A server has only the pooling routes that its model supports
(`--runner pooling`, or chosen by vLLM; `--convert`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_gateway.core.api.field_checks import (
    LIST,
    OBJECT,
    POSITIVE,
    STRING,
    Rule,
    check_fields,
    check_turns,
    invalid_parameter,
    is_token_ids,
)

_RULES: Mapping[str, Rule] = {
    "user": STRING,
    "cache_salt": STRING,
    "dimensions": POSITIVE,
    "encoding_format": STRING,
    "vllm_xargs": OBJECT,
}
# The pairs of field names that /score accepts for its two sides.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def check_input(body: dict[str, Any]) -> None:
    """Check a body with `input` or `messages`. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, _RULES)
    if body.get("input") is None and body.get("messages") is not None:
        check_fields(body, {"messages": LIST})
        return
    given = body.get("input")
    texts = given if isinstance(given, list) else [given]
    good = is_token_ids(given) or (
        bool(texts) and all(isinstance(text, str | dict) or is_token_ids(text) for text in texts)
    )
    if not good:
        raise invalid_parameter("input", "a string, a list of strings, or a list of token ids")


def check_rerank(body: dict[str, Any]) -> None:
    """Check a /rerank body. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, _RULES)
    _check_side(body, "query")
    _check_side(body, "documents")


def check_score(body: dict[str, Any]) -> None:
    """Check a /score body. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, _RULES)
    sides = next((pair for pair in _SIDES if all(body.get(name) is not None for name in pair)), _SIDES[0])
    for name in sides:
        _check_side(body, name)


def check_tokenize(body: Mapping[str, Any]) -> None:
    """Check a /tokenize body. Raises ApiRequestError."""
    if body.get("messages") is not None:
        check_turns(body["messages"], "messages")
    elif not isinstance(body.get("prompt"), str):
        raise invalid_parameter("prompt", "a string")


def check_detokenize(body: Mapping[str, Any]) -> None:
    """Check a /detokenize body. Raises ApiRequestError."""
    if not is_token_ids(body.get("tokens")):
        raise invalid_parameter("tokens", "a list of token ids")


def _check_side(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str | dict | list) for text in texts):
        raise invalid_parameter(name, "a text or a list of texts")
