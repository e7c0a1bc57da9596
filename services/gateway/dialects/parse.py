"""A body's one parse: what is wrong with it, what a client may not set, and the call that is left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.gateway.dialects import messages, openai, pooling, responses
from services.gateway.dialects.call import Call, Kind, Rules, with_fields
from services.gateway.dialects.checks import check_model
from services.gateway.dialects.errors import DialectError

# What a client may not set, because it speaks to the engine's insides: VLLM.md's trap table.
FORBIDDEN_FIELDS = ("kv_transfer_params", "ec_transfer_params", "priority")
FORBIDDEN_XARGS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")

# Requests with these are answered by the engine as ever; only their tokens cannot be told from outside it.
OPAQUE_FIELDS = ("prompt_embeds", "truncate_prompt_tokens", "chat_template", "mm_processor_kwargs")
_OPAQUE = frozenset(OPAQUE_FIELDS)

_MEDIA = ("image", "audio", "video", "input_audio", "input_image", "prompt_embeds", "file", "source")
_CHECKS: Mapping[Kind, Callable[[Mapping[str, Any]], None]] = {
    Kind.CHAT: openai.check_chat,
    Kind.COMPLETION: openai.check_completion,
    Kind.RESPONSES: responses.check_responses,
    Kind.MESSAGES: messages.check_messages,
    Kind.COUNT_TOKENS: messages.check_messages,
    Kind.EMBEDDINGS: pooling.check_input,
    Kind.RERANK: pooling.check_rerank,
    Kind.SCORE: pooling.check_score,
    Kind.POOLING: pooling.check_input,
    Kind.CLASSIFY: pooling.check_input,
    Kind.TOKENIZE: pooling.check_tokenize,
    Kind.DETOKENIZE: pooling.check_detokenize,
}
_TO_CHAT: Mapping[Kind, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    Kind.CHAT: dict,
    Kind.RESPONSES: responses.to_chat,
    Kind.MESSAGES: messages.to_chat,
}
# The body's fields that are its prompt, for estimates.
_PROMPTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.CHAT: ("messages", "tools"),
    Kind.RESPONSES: ("instructions", "input", "tools"),
    Kind.MESSAGES: ("system", "messages", "tools"),
}
_LIMITS: Mapping[Kind, tuple[str, ...]] = {
    Kind.CHAT: ("max_completion_tokens", "max_tokens"),
    Kind.RESPONSES: ("max_output_tokens",),
}


def parse(kind: Kind, raw: bytes, rules: Rules = Rules()) -> Call:  # noqa: B008 (frozen)
    """Parse and sanitise one body. Raises DialectError (400) and nothing else, whatever the bytes."""
    try:
        return _parse(kind, raw, rules)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "not valid JSON"
        raise DialectError(400, f"The request body is {reason}.", code="invalid_json") from None


def _parse(kind: Kind, raw: bytes, rules: Rules) -> Call:
    body = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        raise DialectError(400, "The request body must be a JSON object.", code="invalid_json")
    check_model(body)
    _CHECKS[kind](body)
    hint = body.get("session_id") or body.get("prompt_cache_key") or ""
    stripped = _strip(kind, body, rules)
    asked = body["model"]
    model = rules.aliases.get(asked, asked)
    if model != asked:
        body["model"] = model
    usage_is_ours, options = _usage(kind, body)
    anew = stripped or model != asked or (usage_is_ours and "stream_options" in body)
    payload = msgspec.json.encode(body | options if usage_is_ours else body) if anew else raw
    if usage_is_ours and not anew:
        payload = with_fields(payload, options)
    if rules.cache_salt and kind.placed:
        payload = with_fields(payload, {"cache_salt": rules.cache_salt})
    chat, opaque = _prompt(kind, body)
    limit = next((body[name] for name in _LIMITS.get(kind, ("max_tokens",)) if body.get(name) is not None), 0)
    return Call(
        kind=kind,
        model=model,
        asked=asked,
        stream=kind.generates and body.get("stream") is True,
        max_output_tokens=limit if kind.generates else 0,
        session_hint=hint if isinstance(hint, str) else "",
        cache_salt=rules.cache_salt or body.get("cache_salt") or "",
        opaque=opaque,
        reads_cache=not _wants_prompt_logprobs(kind, body),
        body=body,
        payload=payload,
        chat=chat,
        previous=(body.get("previous_response_id") or "") if kind is Kind.RESPONSES else "",
        stripped=stripped,
        usage_is_ours=usage_is_ours,
    )


def estimated_tokens(call: Call) -> int:
    """About how many tokens a prompt has, where nobody can tell: a quarter of its text's length, or its ids where it brings
    them (of several prompts the first; of texts to embed or to score all). At least 1. Media count nothing: their bytes say
    little about their tokens."""
    if call.kind is Kind.COMPLETION:
        prompt = call.body.get("prompt")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return max(1, len(prompt) if isinstance(prompt, list) else len(prompt or "") // 4)
    length = 0
    rest: list[Any] = [call.body.get(name) for name in _PROMPTS[call.kind]] if call.kind in _PROMPTS else [call.body]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, int):
            length += 4
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += [inner for name, inner in value.items() if not name.startswith(_MEDIA)]
    return max(1, length // 4)


def _usage(kind: Kind, body: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a stream's usage has to be asked for because the client did not, and the field that asks."""
    wanted = body.get("stream_options") or {}
    if kind not in (Kind.CHAT, Kind.COMPLETION) or body.get("stream") is not True or wanted.get("include_usage"):
        return False, {}
    # Without include_usage an engine ignores continuous_usage_stats; beside ours it would not.
    ours = {"include_usage": True} | ({"continuous_usage_stats": False} if "continuous_usage_stats" in wanted else {})
    return True, {"stream_options": {**wanted, **ours}}


def _wants_prompt_logprobs(kind: Kind, body: Mapping[str, Any]) -> bool:
    """vLLM computes the whole prompt anew for them (SamplingParams.skip_reading_prefix_cache), also where an echo implies them:
    for a completion with logprobs, for a chat always, as its top_logprobs are 0 at least."""
    if body.get("prompt_logprobs") is not None or body.get("prompt_logprob_token_ids") is not None:
        return True
    implied = kind is Kind.CHAT or (kind is Kind.COMPLETION and body.get("logprobs") is not None)
    return bool(body.get("echo")) and implied


def _prompt(kind: Kind, body: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The prompt as a chat, and why its tokens cannot be told."""
    if not _OPAQUE.isdisjoint(body) and any(body.get(name) is not None for name in OPAQUE_FIELDS):
        return None, "a field that changes the prompt inside the engine"
    if kind not in _TO_CHAT:
        return None, ""
    try:
        return _TO_CHAT[kind](body), ""
    except messages.Unconvertible as reason:
        return None, str(reason)


def _strip(kind: Kind, body: dict[str, Any], rules: Rules) -> tuple[str, ...]:
    """Remove from `body` (in place) what a client may not set; the names of what was removed."""
    forbidden = [*FORBIDDEN_FIELDS]
    if not rules.client_cache_salt or rules.cache_salt:
        forbidden.append("cache_salt")
    if not rules.own_session:
        forbidden.append("session_id")
    if kind is Kind.RESPONSES:
        forbidden.append("request_id")  # it would be the response's id
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
