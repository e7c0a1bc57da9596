"""What an API says of a request that does not fit the model's context. Pure.

Agents recognise these sentences, compact their conversation and go on, so in OpenAI's formats they are vLLM's, with OpenAI's code
CODE, which some look for, and in Anthropic's format they are Anthropic's. tests/unit/gateway/test_overflow_texts.py has what the
agents look for.
"""

from __future__ import annotations

import re

CODE = "context_length_exceeded"

# vLLM's own sentences with the context and the prompt's tokens. If it counted characters, the tokens are unknown.
_VLLM = (
    re.compile(
        r"maximum context length is (?P<context>\d+) tokens\b.{0,80}? (?P<tokens>\d+) (?!characters)", re.DOTALL
    ),
    re.compile(r"maximum context length is (?P<context>\d+) tokens\b"),
    re.compile(r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<context>\d+)\)"),
    re.compile(r"prompt length (?P<tokens>\d+) exceeds the max_model_len (?P<context>\d+)"),
)


def prompt_too_long(tokens: int, context: int) -> str:
    """Return what vLLM says of a prompt of at least so many tokens, and CODE, as some clients look at the message only."""
    return (
        f"This model's maximum context length is {context} tokens. However, your prompt contains at least {tokens} input tokens, "
        f"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. ({CODE})"
    )


def output_too_long(max_output_tokens: int, context: int) -> str:
    """Return what vLLM says of a limit of output tokens above the whole context."""
    return f"max_tokens={max_output_tokens} cannot be greater than max_model_len={context}. Please request fewer output tokens."


def anthropic_prompt_too_long(tokens: int, context: int) -> str:
    """Return what Anthropic says of a prompt of at least so many tokens. A prompt needs room for one token of output."""
    return f"prompt is too long: {max(tokens, context)} tokens > {context - 1} maximum"


def anthropic_output_too_long(tokens: int, max_output_tokens: int, context: int) -> str:
    """Return what Anthropic says of a prompt of so many tokens with a limit of output tokens that do not fit together."""
    return (
        f"input length and `max_tokens` exceed context limit: {tokens} + {max_output_tokens} > {context}, decrease input length "
        "or `max_tokens` and try again"
    )


def says_too_long(message: str) -> bool:
    """Return whether an engine's message says that the prompt is too long."""
    return any(pattern.search(message) for pattern in _VLLM)


def in_anthropics_words(message: str) -> str:
    """Return an engine's message; as Anthropic would say it, if it says that the prompt is too long."""
    for pattern in _VLLM:
        if (found := pattern.search(message)) is not None:
            context = int(found["context"])
            return anthropic_prompt_too_long(int(found.groupdict().get("tokens", context)), context)
    return message
