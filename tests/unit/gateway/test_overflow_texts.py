"""Agents recognise a full context by what the gateway says, as they do by what vLLM or Anthropic says, and compact."""

from __future__ import annotations

import json
import re

import pytest

from pointsman_gateway.core.api import ContextExceeded, Endpoint, parse
from pointsman_gateway.core.api.errors import ErrorFormat, redact_error

ANTHROPICS_ALONE = "Claude Code"
# What programs look for in the text of an error, of the patterns that can fit here.
LOOKED_FOR = {
    "pi-ai 0.73.1, utils/overflow.js": (
        r"prompt is too long",
        r"exceeds the context window",
        r"reduce the length of the messages",
        r"maximum context length is \d+ tokens",
        r"context[_ ]length[_ ]exceeded",
    ),
    "langchain-openai with openai 2, chat_models/base.py": (r"context_length_exceeded|prompt is too long",),
    "litellm 1.110.2, exception_mapping_utils.py": (
        r"exceed context limit",
        r"this model's maximum context length is",
        r'"code": "context_length_exceeded"',
        r"prompt is too long",
    ),
    ANTHROPICS_ALONE: (r"prompt is too long: \d+ tokens > \d+ maximum",),
}
CONTEXT = 100
TURN = {"role": "user", "content": "a"}
# vLLM 0.32: renderers/params.py, entrypoints/serve/utils/api_utils.py, entrypoints/openai/responses/serving.py.
VLLM_SAYS = (
    (
        "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=101)",
        101,
    ),
    (
        "This model's maximum context length is 100 tokens. However, your prompt contains 9000 characters (more than 800 "
        "characters, which is the upper bound for 100 input tokens). Please reduce the length of the input prompt.",
        100,
    ),
    ("Input length (140) exceeds model's maximum context length (100).", 140),
    ("The engine prompt length 120 exceeds the max_model_len 100. Please reduce prompt.", 120),
)


def refusal(endpoint: Endpoint, fields: dict[str, object]) -> str:
    body = json.dumps({"model": "m", "max_tokens": 1, **fields}).encode()
    with pytest.raises(ContextExceeded) as refused:
        parse(endpoint, body, context_of=lambda model: CONTEXT)
    return refused.value.body(ErrorFormat.ANTHROPIC if endpoint is Endpoint.MESSAGES else ErrorFormat.OPENAI).decode()


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.CHAT, {"messages": [TURN] * 120}),
        (Endpoint.RESPONSES, {"input": [TURN] * 120}),
        (Endpoint.COMPLETION, {"prompt": [1] * 120}),
        (Endpoint.MESSAGES, {"messages": [TURN] * 120}),
    ],
    ids=["chat", "responses", "completion", "messages"],
)
def test_programs_recognise_a_full_context(endpoint: Endpoint, fields: dict[str, object]) -> None:
    said = json.loads(refusal(endpoint, fields))["error"]["message"]
    for program, patterns in LOOKED_FOR.items():
        if endpoint is Endpoint.MESSAGES or program != ANTHROPICS_ALONE:
            assert any(re.search(pattern, said, re.IGNORECASE) for pattern in patterns), program


@pytest.mark.parametrize(("said", "tokens"), VLLM_SAYS)
def test_a_full_context_that_the_engine_finds_is_told_in_anthropics_words(said: str, tokens: int) -> None:
    body = json.dumps(
        {"error": {"message": said, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    ).encode()
    for format_ in (ErrorFormat.OPENAI, ErrorFormat.RESPONSES):
        error = json.loads(redact_error(format_, 400, body))["error"]
        assert (error["message"], error["code"]) == (said, "context_length_exceeded")
    anthropic = json.loads(redact_error(ErrorFormat.ANTHROPIC, 400, body))["error"]
    assert anthropic == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {tokens} tokens > 99 maximum",
    }


def test_other_errors_of_engines_keep_their_words() -> None:
    said = "max_tokens=9 cannot be greater than max_model_len=8. Please request fewer output tokens."
    body = json.dumps({"error": {"message": said}}).encode()
    assert json.loads(redact_error(ErrorFormat.ANTHROPIC, 400, body))["error"]["message"] == said
