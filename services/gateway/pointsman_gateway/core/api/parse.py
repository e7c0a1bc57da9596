"""Parses a body into an ApiCall: checks it, and removes fields that a client may not set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from pointsman_gateway.core.api import anthropic_messages, embeddings_and_scores, openai_checks, openai_responses
from pointsman_gateway.core.api.api_call import ApiCall, ClientRules, Endpoint, with_fields
from pointsman_gateway.core.api.continuable import RECORD_FIELD, is_continuable, is_continuable_by_text
from pointsman_gateway.core.api.decode_body import Decoded, decode_body
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.api.field_checks import check_model
from pointsman_gateway.core.api.prompt_length import check_items
from pointsman_gateway.core.api.sequences import count_answers, count_prompts, prompts_of
from pointsman_gateway.core.pauses import ITEMS, pause

# Fields that a client may not set, because they control the engine's internals (docs/security.md).
FORBIDDEN_FIELDS = ("kv_transfer_params", "ec_transfer_params", "priority")
FORBIDDEN_XARGS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", RECORD_FIELD)

# Fields whose effect on the prompt's tokens is known only to the engine. Requests with them are answered, without block keys.
OPAQUE_FIELDS = ("prompt_embeds", "truncate_prompt_tokens", "chat_template", "mm_processor_kwargs", "suffix")
_OPAQUE = frozenset(OPAQUE_FIELDS)

_MEDIA = ("image", "audio", "video", "input_audio", "input_image", "prompt_embeds", "file", "source")
_CHECKS: Mapping[Endpoint, Callable[[dict[str, Any]], None]] = {
    Endpoint.CHAT: openai_checks.check_chat,
    Endpoint.COMPLETION: openai_checks.check_completion,
    Endpoint.RESPONSES: openai_responses.check_responses,
    Endpoint.MESSAGES: anthropic_messages.check_messages,
    Endpoint.COUNT_TOKENS: partial(anthropic_messages.check_messages, rules=anthropic_messages.COUNTED),
    Endpoint.EMBEDDINGS: embeddings_and_scores.check_input,
    Endpoint.RERANK: embeddings_and_scores.check_rerank,
    Endpoint.SCORE: embeddings_and_scores.check_score,
    Endpoint.POOLING: embeddings_and_scores.check_input,
    Endpoint.CLASSIFY: embeddings_and_scores.check_input,
    Endpoint.TOKENIZE: embeddings_and_scores.check_tokenize,
    Endpoint.DETOKENIZE: embeddings_and_scores.check_detokenize,
}
_TO_CHAT: Mapping[Endpoint, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    Endpoint.CHAT: dict,
    Endpoint.RESPONSES: openai_responses.to_chat,
    Endpoint.MESSAGES: anthropic_messages.to_chat,
}
# The fields of a body that contain its prompt, for estimates.
_PROMPTS: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("messages", "tools"),
    Endpoint.RESPONSES: ("instructions", "input", "tools"),
    Endpoint.MESSAGES: ("system", "messages", "tools"),
}
_LIMITS: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
}


def parse(
    endpoint: Endpoint,
    raw: bytes,
    rules: ClientRules = ClientRules(),  # noqa: B008 (frozen)
    context_of: Callable[[str], int] = lambda model: 0,
    *,
    light_body: Decoded | None = None,
) -> ApiCall:
    """Parse and sanitise one body. `context_of`: returns the context of a model in tokens, by any of its names; 0: unknown.
    `light_body`: what decode_light() returned for `raw`. Mutates it. Raises ApiRequestError (400), and no other exception for any
    bytes."""
    try:
        return _parse(endpoint, raw, rules, context_of, light_body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        half = _half_of_a_pair(raw)
        if half is not None:
            # Clients that cut texts by UTF-16 units send them; JSON parsers differ in what they make of them.
            reason = f"not valid text: half of a surrogate pair, {half[1].decode()}, at byte {half.start(1)}"
        else:
            reason = "not valid JSON"
        raise ApiRequestError(400, f"The request body is {reason}.", code="invalid_json") from None


# An escape of one half of a surrogate pair that the other half does not follow, or precede.
_HALF_OF_A_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*"
    rb"(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2}))"
)


# Maximum part of a body that is searched for it, and of one search, during which no other thread runs: 2 ms. Bytes.
_SEARCHED, _SEARCHED_AT_ONCE = 4 << 20, 64 << 10


def _half_of_a_pair(raw: bytes) -> re.Match[bytes] | None:
    for at in range(0, min(len(raw), _SEARCHED), _SEARCHED_AT_ONCE):
        end = at + _SEARCHED_AT_ONCE
        found = _HALF_OF_A_PAIR.search(raw, at, end + 2 * len(r"\u0000"))
        if found is not None and found.start(1) < end:
            return found
    return None


def _parse(
    endpoint: Endpoint, raw: bytes, rules: ClientRules, context_of: Callable[[str], int], light_body: Decoded | None
) -> ApiCall:
    body, memory = light_body or decode_body(raw)
    if not isinstance(body, dict):
        raise ApiRequestError(400, "The request body must be a JSON object.", code="invalid_json")
    check_model(body)
    requested_model = body["model"]
    model = rules.aliases.get(requested_model, requested_model)
    check_items(endpoint, body, context_of(model))
    prompts = count_prompts(endpoint, body, rules.max_sequences)
    _CHECKS[endpoint](body)
    answers = count_answers(endpoint, body, prompts, rules.max_sequences)
    session_id, cache_key = body.get("session_id"), body.get("prompt_cache_key")
    stripped = _strip(endpoint, body, rules)
    if model != requested_model:
        body["model"] = model
    hide_usage, options = _usage(endpoint, body)
    anew = stripped or model != requested_model or (hide_usage and "stream_options" in body)
    payload = msgspec.json.encode(body | options if hide_usage else body) if anew else raw
    if hide_usage and not anew:
        payload = with_fields(payload, options)
    if rules.cache_salt and endpoint.is_placed:
        payload = with_fields(payload, {"cache_salt": rules.cache_salt})
    chat, untokenizable = _prompt(endpoint, body)
    limit = next((body[name] for name in _LIMITS.get(endpoint, ("max_tokens",)) if body.get(name) is not None), None)
    return ApiCall(
        light=light_body is not None,
        decoded_bytes=memory,
        endpoint=endpoint,
        model=model,
        requested_model=requested_model,
        stream=endpoint.generates and body.get("stream") is True,
        # 0 requests only an echo, which costs a step too.
        max_output_tokens=0 if limit is None or not endpoint.generates else max(1, limit),
        session_id=session_id if isinstance(session_id, str) else "",
        prompt_cache_key=cache_key if isinstance(cache_key, str) else "",
        cache_salt=rules.cache_salt or body.get("cache_salt") or "",
        untokenizable=untokenizable,
        reads_prefix_cache=not _wants_prompt_logprobs(endpoint, body),
        body=body,
        payload=payload,
        chat=chat,
        previous_response_id=(body.get("previous_response_id") or "") if endpoint is Endpoint.RESPONSES else "",
        stripped=stripped,
        hide_usage=hide_usage,
        continuable=(continuable := is_continuable(endpoint, body)),
        continuable_by_text=continuable and is_continuable_by_text(endpoint, body),
        prompts=prompts,
        answers=answers,
    )


def chat_of(endpoint: Endpoint, payload: bytes) -> dict[str, Any]:
    """Return the prompt of a parsed call's payload as a chat completions body. `endpoint`: of an API whose prompt is one."""
    return _TO_CHAT[endpoint](decode_body(payload).body)


def estimated_tokens(call: ApiCall) -> int:
    """Estimate the number of tokens of all prompts of a request: a quarter of their texts' length, or the number of token ids. At
    least 1. Media are not counted: their size says little about their tokens."""
    if call.endpoint is Endpoint.COMPLETION:
        prompts = prompts_of(call.body)
        return max(1, sum(max(1, len(text) // 4 if isinstance(text, str) else len(text)) for text in prompts))
    length = 0
    fields = _PROMPTS.get(call.endpoint)
    rest: list[Any] = [call.body] if fields is None else [call.body.get(name) for name in fields]
    while rest:
        value = rest.pop()
        if not len(rest) % ITEMS:
            pause()
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, int):
            length += 4
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += [inner for name, inner in value.items() if not name.startswith(_MEDIA)]
    return max(1, length // 4)


def _usage(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether the gateway must request a stream's usage because the client did not, and the field that requests it."""
    wanted = body.get("stream_options") or {}
    if (
        endpoint not in (Endpoint.CHAT, Endpoint.COMPLETION)
        or body.get("stream") is not True
        or wanted.get("include_usage")
    ):
        return False, {}
    # An engine ignores continuous_usage_stats without include_usage, but would use it with the gateway's include_usage.
    ours = {"include_usage": True} | ({"continuous_usage_stats": False} if "continuous_usage_stats" in wanted else {})
    return True, {"stream_options": {**wanted, **ours}}


def _wants_prompt_logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether a request needs prompt logprobs, for which vLLM computes the whole prompt anew
    (SamplingParams.skip_reading_prefix_cache). An echo implies them: for a completion with logprobs, and for every chat, since
    its top_logprobs are at least 0."""
    if body.get("prompt_logprobs") is not None or body.get("prompt_logprob_token_ids") is not None:
        return True
    implied = endpoint is Endpoint.CHAT or (endpoint is Endpoint.COMPLETION and body.get("logprobs") is not None)
    return bool(body.get("echo")) and implied


def _prompt(endpoint: Endpoint, body: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the prompt as a chat (None: there is none), and why its tokens cannot be computed ("": they can)."""
    if not _OPAQUE.isdisjoint(body) and any(body.get(name) is not None for name in OPAQUE_FIELDS):
        return None, "a field that changes the prompt inside the engine"
    if endpoint not in _TO_CHAT:
        return None, ""
    try:
        return _TO_CHAT[endpoint](body), ""
    except anthropic_messages.Unconvertible as reason:
        return None, str(reason)


def _strip(endpoint: Endpoint, body: dict[str, Any], rules: ClientRules) -> tuple[str, ...]:
    """Remove fields that a client may not set; return the names of the removed fields. Mutates `body`."""
    forbidden = [*FORBIDDEN_FIELDS]
    if not rules.client_cache_salt or rules.cache_salt:
        forbidden.append("cache_salt")
    if not rules.own_session:
        forbidden.append("session_id")
    if endpoint is Endpoint.RESPONSES:
        forbidden.append("request_id")  # it would become the response's id
    gone = [name for name in forbidden if name in body]
    for name in gone:
        del body[name]
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict):
        inner = FORBIDDEN_XARGS if rules.own_session else (*FORBIDDEN_XARGS, "session_id")
        for name in inner:
            if name in xargs:
                del xargs[name]
                gone.append(f"vllm_xargs.{name}")
    return tuple(gone)
