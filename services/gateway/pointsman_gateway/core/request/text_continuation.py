"""Continues the text of an answer whose engine tells no token ids: the other engine gets it as the beginning of its answer. Pure.

Only plain text is continued, and only if the other engine's prompt is certain: the gateway has the engine's tokenizer and
template, and the prompt with the text must have the tokens of the prompt, and then tokens that are the text. A template that
writes or strips anything else around a message that is to be continued fails this test.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pointsman_gateway.core.api import ApiCall, ApiRequestError, ClientRules, Endpoint
from pointsman_gateway.core.api.parse import parse
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.token_cache import TokenIds

# Tokens of the prompt that are decoded with those of the text: what a token stands for may depend on the one before it.
LAST_TOKENS = 8
# Fields of a chunk's delta in which there is nothing but text.
_TEXT_FIELDS = frozenset({"role", "content"})


class TextContinuation(NamedTuple):
    """`payload`: body of the request that asks for the rest. `prompt_tokens`: number of tokens of the client's prompt. `ids`:
    those of the answer so far, as the other engine's prompt has them."""

    payload: bytes
    prompt_tokens: int
    ids: TokenIds


def continued_text(
    endpoint: Endpoint, payload: bytes, events: bytes, tokenizer: ModelTokenizer
) -> TextContinuation | None:
    """Return the continuation of an answer, None if it cannot be continued. `payload`: the body of its request. `events`: whole
    events of its stream; what precedes their "choices" may be absent. Takes as long as tokenising the prompt."""
    text = text_of(endpoint, events)
    if not text:
        return None
    try:
        asked = parse(endpoint, payload, ClientRules(client_cache_salt=True))
        longer = _with_text(endpoint, asked.body, text)
        after = _tokens(parse(endpoint, msgspec.json.encode(longer)), tokenizer)
        before = _tokens(asked, tokenizer)
    except (Unrenderable, ApiRequestError):
        return None
    ids, last = after[len(before) :], before[-LAST_TOKENS:]
    # Without special tokens, too: what the client sees never comes from one, but a text may spell one.
    if after[: len(before)] != before or any(
        tokenizer.decode(last + ids, special=special) != tokenizer.decode(last, special=special) + text
        for special in (True, False)
    ):
        return None
    for name in ("max_tokens", "max_completion_tokens"):
        if longer.get(name) is not None:
            longer[name] -= len(ids)
            if longer[name] <= 0:
                return None
    return TextContinuation(msgspec.json.encode(longer), len(before), ids)


def text_of(endpoint: Endpoint, events: bytes) -> str | None:
    """Return the text of a stream's events; None if they have anything else, tokens without a text, or the answer's end."""
    texts: list[str] = []
    silent = False  # a token has had no text: it may begin a character that is not ASCII
    for event in events.split(b"\n\n")[:-1]:
        try:
            chunk = msgspec.json.decode(b"{" + event[event.index(b'"choices"') :])
            [choice] = chunk["choices"]
            if choice["finish_reason"] is not None or choice.get("logprobs") is not None:
                return None
            if endpoint is Endpoint.COMPLETION:
                role, text = None, choice["text"]
            else:
                delta = {name: value for name, value in choice["delta"].items() if value is not None}
                if not delta.keys() <= _TEXT_FIELDS:
                    return None
                role, text = delta.get("role"), delta.get("content", "")
            if not isinstance(text, str) or (silent and text[:1].isascii() and text):
                return None
            silent = not text and role is None
            texts.append(text)
        except (msgspec.MsgspecError, RecursionError, ValueError, LookupError, TypeError, AttributeError):
            return None
    return None if silent else "".join(texts)


def _with_text(endpoint: Endpoint, body: Mapping[str, Any], text: str) -> dict[str, Any]:
    if endpoint is Endpoint.COMPLETION:
        return {**body, "prompt": body["prompt"] + text}
    begun = {"role": "assistant", "content": text}
    return {
        **body,
        "messages": [*body["messages"], begun],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def _tokens(call: ApiCall, tokenizer: ModelTokenizer) -> TokenIds:
    if call.untokenizable:
        raise Unrenderable(call.untokenizable)
    return array("I", tokenizer.prompt(call).ids)
