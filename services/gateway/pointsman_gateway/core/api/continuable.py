"""Says whether an answer can go on at another engine, as if that engine had generated it from its beginning. Pure.

Only what is known to be right is continued. The other engine computes the rest from the prompt and the answer's tokens. What an
engine computes from its output so far, and not from the tokens, would begin anew there: the random numbers of a seed, penalties
for presence and frequency, grammars, limits of thinking, forbidden words. Log-probabilities of the tokens so far are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pointsman_gateway.core.api.api_call import Endpoint

# Name in `vllm_xargs` by which the gateway asks for the ids of an answer, or has it continued
# (connector/pointsman_connector/answer_record.py).
RECORD_FIELD = "pointsman_answer"
# Fields with which the rest follows from the prompt and the answer's tokens, whatever their values: of all APIs, of OpenAI's, of
# each one.
_FREE_EVERYWHERE = frozenset(
    {
        "cache_salt",
        "metadata",
        "model",
        "service_tier",
        "stream",
        "temperature",
        "tools",
        "top_k",
        "top_p",
    }
)
_FREE_OF_OPENAI = _FREE_EVERYWHERE | frozenset(
    {
        "chat_template_kwargs",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "prompt_cache_key",
        "repetition_penalty",
        "request_id",
        "safety_identifier",
        "session_id",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "stream_options",
        "user",
    }
)
_FREE = _FREE_OF_OPENAI | frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "continue_final_message",
        "documents",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_tokens",
        "prompt",
        "reasoning_effort",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "spaces_between_special_tokens",
    }
)
_FREE_OF_MESSAGES = _FREE_EVERYWHERE | frozenset(
    {
        "cache_control",
        "max_tokens",
        "messages",
        "stop_sequences",
        "system",
    }
)
_FREE_OF_RESPONSES = _FREE_OF_OPENAI | frozenset(
    {
        "input",
        "instructions",
        "max_output_tokens",
        "reasoning",
    }
)


def _no_constraint(value: Any) -> bool:
    return not value or value == {"type": "text"}


def _of_type(value: Any, *kinds: str) -> bool:
    return isinstance(value, dict) and value.get("type") in kinds


# Fields that are harmless with these values. Null is harmless for any field.
_HARMLESS_OF_OPENAI: Mapping[str, Callable[[Any], bool]] = {
    "top_logprobs": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "tool_choice": lambda value: value in ("auto", "none"),
    "include_reasoning": lambda value: value is True,
    # False puts a grammar on the answer.
    "parallel_tool_calls": lambda value: value is True,
}
_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    **_HARMLESS_OF_OPENAI,
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "use_beam_search": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "response_format": _no_constraint,
    "bad_words": lambda value: value == [],
}
_HARMLESS_IN_MESSAGES: Mapping[str, Callable[[Any], bool]] = {
    "tool_choice": lambda value: _of_type(value, "auto", "none") and not value.get("disable_parallel_tool_use"),
    # A budget of thinking is a limit that would begin anew.
    "thinking": lambda value: _of_type(value, "disabled", "adaptive"),
    "output_config": lambda value: isinstance(value, dict) and value.keys() <= {"effort"},
}
_HARMLESS_IN_RESPONSES: Mapping[str, Callable[[Any], bool]] = {
    **_HARMLESS_OF_OPENAI,
    "background": lambda value: value is False,
    "include": lambda value: isinstance(value, list) and value in ([], ["reasoning.encrypted_content"]),
    "text": lambda value: (
        isinstance(value, dict) and value.keys() <= {"format", "verbosity"} and _no_constraint(value.get("format"))
    ),
    "truncation": lambda value: value == "disabled",
}
_BY_ENDPOINT = {
    Endpoint.CHAT: (_FREE, _HARMLESS),
    Endpoint.COMPLETION: (_FREE, _HARMLESS),
    Endpoint.MESSAGES: (_FREE_OF_MESSAGES, _HARMLESS_IN_MESSAGES),
    Endpoint.RESPONSES: (_FREE_OF_RESPONSES, _HARMLESS_IN_RESPONSES),
}


def is_continuable(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Return whether the answer to a streamed request can be continued. `body` is checked."""
    if endpoint not in _BY_ENDPOINT or body.get("stream") is not True:
        return False
    free, harmless = _BY_ENDPOINT[endpoint]
    for name in body.keys() - free:
        value = body[name]
        if name == "seed" and endpoint is not Endpoint.MESSAGES:
            if value is not None and body.get("temperature") != 0:
                return False
        # The gateway's own vllm_xargs must be the only one, also beside null.
        elif name == "vllm_xargs" or (value is not None and not (name in harmless and harmless[name](value))):
            return False
    tools = body["tools"] if isinstance(body.get("tools"), list) else ()
    if any(map(_is_strict, tools)):
        return False
    if endpoint is Endpoint.RESPONSES and not all(map(_is_client_s, tools)):
        return False
    # A single prompt, as a text or as token ids.
    prompt = body.get("prompt")
    return (
        endpoint is not Endpoint.COMPLETION
        or isinstance(prompt, str)
        or (isinstance(prompt, list) and isinstance(prompt[0], int))
    )


# Fields with which an answer does not follow from the prompt and its text: they concern what is not yet text, or the end of the
# prompt.
_NOT_BY_TEXT = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "ignore_eos",
        "include_stop_str_in_output",
        "min_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "tools",
    }
)


def is_continuable_by_text(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Return whether an answer that is continuable can be continued by an engine that only gets its text. `body` is checked."""
    # Of the other APIs these fields are not checked.
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETION) or any(body.get(name) is not None for name in _NOT_BY_TEXT):
        return False
    if (body.get("stream_options") or {}).get("continuous_usage_stats"):
        return False
    # Without a limit an engine's own holds for a completion, which is short and would begin anew.
    return endpoint is Endpoint.CHAT or (isinstance(body.get("prompt"), str) and body.get("max_tokens") is not None)


def _is_strict(tool: Any) -> bool:
    """Whether a tool's arguments follow a grammar also where the model chooses whether to call it."""
    # Messages and Responses have no inner object.
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _is_client_s(tool: Any) -> bool:
    """Whether the client carries out a tool of Responses. The server itself calls the others, and asks its engine again."""
    return _of_type(tool, "function") or (_of_type(tool, "custom") and _no_constraint(tool.get("format")))
