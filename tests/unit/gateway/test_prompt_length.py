"""Prompts longer than the context are refused by the first sufficient count: messages, ids, characters or tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pointsman_gateway.core.api import ContextExceeded, Endpoint, parse
from pointsman_gateway.core.tokens import encoders, model_tokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache
from tests.support import tokenizer_families

TURN = {"role": "user", "content": "a"}
CONTEXT = 100


def parsed(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    body = json.dumps({"model": "m", "max_tokens": 1, **fields}).encode()
    return parse(endpoint, body, context_of=lambda model: CONTEXT)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.CHAT, {"messages": [TURN] * CONTEXT}),
        (Endpoint.MESSAGES, {"messages": [TURN] * CONTEXT}),
        (Endpoint.RESPONSES, {"input": [TURN] * CONTEXT}),
        (Endpoint.COMPLETION, {"prompt": [1] * CONTEXT}),
        (Endpoint.COMPLETION, {"prompt": [[1], [1] * CONTEXT]}),
    ],
    ids=["chat", "messages", "responses", "ids", "several"],
)
def test_more_messages_than_tokens_are_refused_before_they_are_looked_at(
    endpoint: Endpoint, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(*_: object) -> None:
        raise AssertionError

    ((name, given),) = fields.items()
    fewer = given[:-1] if endpoint is not Endpoint.COMPLETION or isinstance(given[0], int) else [[1] * (CONTEXT - 1)]
    parsed(endpoint, {name: fewer})
    monkeypatch.setattr("pointsman_gateway.core.api.openai_checks.check_fields", looked_at)
    monkeypatch.setattr("pointsman_gateway.core.api.openai_responses.check_fields", looked_at)
    monkeypatch.setattr("pointsman_gateway.core.api.anthropic_messages.check_fields", looked_at)
    with pytest.raises(ContextExceeded) as refused:
        parsed(endpoint, fields)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "context_length_exceeded", name)
    assert refused.value.tokens == CONTEXT


def test_of_a_model_that_nobody_knows_nothing_is_too_long() -> None:
    parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": [TURN] * 1_000}).encode())


@pytest.mark.parametrize("library", [False, True])
def test_a_text_that_is_too_long_is_tokenised_no_further(monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    cache = TokenCache(1 << 20)
    monkeypatch.setattr(encoders.FastEncoder, "least_chars", 2_000)
    if library:
        monkeypatch.setattr(model_tokenizer, "fast_encoder_for", lambda *_: None)
    tokenizer, _ = tokenizer_families.model("qwen", cache)
    made: list[int] = []
    encode = tokenizer.encoder.encode

    def counted(piece: str) -> Any:
        made.append(len(piece))
        return encode(piece)

    monkeypatch.setattr(tokenizer.encoder, "encode", counted)
    text = "".join(f"line {at}\n{'' if at % 100 else '<|im_start|>'}" for at in range(6_800))
    call = parse(Endpoint.COMPLETION, json.dumps({"model": "m", "prompt": text}).encode())
    prompt = tokenizer.prepare(call, 5_000).tokenize()
    assert 5_000 < len(prompt.ids) == prompt.lengths[0]
    assert sum(made) < len(text) / 2
    # The computed tokens are cached, so the same prompt needs few new ones.
    misses = cache.misses
    assert len(tokenizer.prepare(call, 5_000).tokenize().ids) > 5_000
    assert cache.misses - misses < len(text) / 20
    whole = tokenizer.prepare(call).tokenize().ids
    assert whole == tokenizer.whole(text)
    assert tokenizer.prepare(call, len(whole)).tokenize().ids == whole


def test_more_characters_than_tokens_can_have_are_refused_without_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = tokenizer_families.model("qwen", TokenCache(0))
    longest = max(map(len, tokenizer._tokenizer.get_vocab()))
    monkeypatch.setattr(tokenizer, "_encode", None)

    def call(length: int) -> Any:
        return parse(Endpoint.COMPLETION, json.dumps({"model": "m", "prompt": "a" * length}).encode())

    tokenizer.prepare(call(CONTEXT * longest), CONTEXT)
    with pytest.raises(ContextExceeded) as refused:
        tokenizer.prepare(call(CONTEXT * longest + 1), CONTEXT)
    assert refused.value.tokens == CONTEXT + 1
