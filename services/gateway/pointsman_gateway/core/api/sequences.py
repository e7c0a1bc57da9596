"""Counts the sequences that an engine runs for a request: its prompts, times the answers (`n`) to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman_gateway.core.api.api_call import Endpoint
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.api.field_checks import is_int

# The fields with a request's prompts, or a pooling API's texts. Of two sides of a score the longer one counts.
_PROMPTS: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.COMPLETION: ("prompt", "prompt_embeds"),
    Endpoint.EMBEDDINGS: ("input",),
    Endpoint.POOLING: ("input",),
    Endpoint.CLASSIFY: ("input",),
    Endpoint.RERANK: ("documents",),
    Endpoint.SCORE: ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),
}


def prompts_of(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a checked body of /v1/completions, as texts or token ids; none if it has only embeddings."""
    given = body.get("prompt") or []
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def count_prompts(endpoint: Endpoint, body: Mapping[str, Any], most: int) -> int:
    """Return the number of prompts of an unchecked body. O(1). Raises ApiRequestError if they are more than `most`."""
    lists = [(name, body.get(name)) for name in _PROMPTS.get(endpoint, ())]
    name, count = max(
        ((name, len(given)) for name, given in lists if isinstance(given, list) and given and not is_int(given[0])),
        key=lambda found: found[1],
        default=("", 1),
    )
    if count > most:
        # As vLLM says it of its own maximum (`validate_prompt_list_length`).
        raise _refused(name, f"{name} list length {count} exceeds the maximum allowed count of {most}.")
    return count


def count_answers(endpoint: Endpoint, body: Mapping[str, Any], prompts: int, most: int) -> int:
    """Return the number of answers to each prompt of a checked body. Raises ApiRequestError if all prompts together get more than
    `most`."""
    answers = body.get("n") if endpoint in (Endpoint.CHAT, Endpoint.COMPLETION) else None
    if answers is None:
        return 1
    count: int = answers
    if count > most:
        # As vLLM says it of its own maximum (`_verify_num_sequences`).
        raise _refused("n", f"n must be at most {most}, got {count}.")
    if count * prompts > most:
        raise _refused("n", f"n must be at most {most // prompts} for {prompts} prompts, got {count}.")
    return count


def _refused(param: str, message: str) -> ApiRequestError:
    return ApiRequestError(400, message, param=param, code="invalid_value")
