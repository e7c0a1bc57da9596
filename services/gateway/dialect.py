"""The OpenAI dialect: parse a body once, say what is wrong with it, and take out what a client may not set. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_MODEL_NAME = 512

# What a client may not set, because it speaks to the engine's insides: VLLM.md's trap table.
FORBIDDEN_FIELDS = ("kv_transfer_params", "ec_transfer_params", "priority")
FORBIDDEN_XARGS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")

# Requests with these are answered by the engine as ever; only their tokens cannot be told from outside it.
OPAQUE_FIELDS = ("prompt_embeds", "truncate_prompt_tokens", "chat_template", "mm_processor_kwargs", "prompt_logprobs")

_MEDIA = ("image", "audio", "video", "input_audio", "input_image", "prompt_embeds", "file")


class Kind(enum.Enum):
    """Which of the two generating routes a body came by; the value is the path upstream."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class DialectError(Exception):
    """A request that gets an OpenAI-style error instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON answer."""
        return error_body(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, at least 1, where trying again can help."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> bytes:
    """`{"error": {...}}` with the four fields that OpenAI clients read."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def error_event(message: str, type_: str = "server_error", code: str | None = None) -> bytes:
    """One SSE event that ends a stream which cannot go on; no [DONE] follows it."""
    return b"data: " + error_body(message, type_, None, code) + b"\n\n"


@dataclass(frozen=True)
class Call:
    """One parsed request.

    `payload` is what goes upstream: the client's own bytes, or a new encoding when something had to go (`stripped` names what).
    """

    kind: Kind
    model: str
    stream: bool
    max_output_tokens: int  # 0 when open
    session_hint: str  # body session_id, else prompt_cache_key; empty when neither
    cache_salt: str
    opaque: bool  # the engine's tokens cannot be told from the body
    body: dict[str, Any]
    payload: bytes
    stripped: tuple[str, ...] = field(default=())


def parse(kind: Kind, raw: bytes, *, client_cache_salt: bool = False) -> Call:
    """Parse and sanitise one body. Raises DialectError (400) and nothing else, whatever the bytes."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "not valid JSON"
        raise DialectError(400, f"The request body is {reason}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise DialectError(400, "The request body must be a JSON object.", code="invalid_json")
    _check(kind, body)
    stripped = _strip(body, client_cache_salt)
    limit = body.get("max_completion_tokens") if kind is Kind.CHAT else None
    if limit is None:
        limit = body.get("max_tokens")
    return Call(
        kind=kind,
        model=body["model"],
        stream=body.get("stream") is True,
        max_output_tokens=limit or 0,
        session_hint=body.get("session_id") or body.get("prompt_cache_key") or "",
        cache_salt=body.get("cache_salt") or "",
        opaque=any(body.get(name) is not None for name in OPAQUE_FIELDS),
        body=body,
        payload=msgspec.json.encode(body) if stripped else raw,
        stripped=stripped,
    )


def estimated_tokens(call: Call) -> int:
    """About how many tokens a prompt has, where nobody can tell: a quarter of its text's length, or its ids where it brings
    them (of several prompts the first). At least 1. Media count nothing: their bytes say little about their tokens."""
    if call.kind is Kind.COMPLETION:
        prompt = call.body.get("prompt")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return max(1, len(prompt) if isinstance(prompt, list) else len(prompt or "") // 4)
    length = 0
    rest: list[Any] = [call.body["messages"], call.body.get("tools")]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += [inner for name, inner in value.items() if not name.startswith(_MEDIA)]
    return max(1, length // 4)


def _strip(body: dict[str, Any], client_cache_salt: bool) -> tuple[str, ...]:
    """Remove from `body` (in place) what a client may not set; the names of what was removed."""
    gone = [name for name in FORBIDDEN_FIELDS if name in body]
    if not client_cache_salt and "cache_salt" in body:
        gone.append("cache_salt")
    for name in gone:
        del body[name]
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict):
        for name in FORBIDDEN_XARGS:
            if name in xargs:
                del xargs[name]
                gone.append(f"vllm_xargs.{name}")
    return tuple(gone)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_positive(value: object) -> bool:
    # Beyond u32 a count is nonsense, and would not fit the wire to the router.
    return _is_int(value) and 0 < value < 2**31  # type: ignore[operator]


_POSITIVE = (_is_positive, "a positive integer")
_INTEGER = (_is_int, "an integer")
_NUMBER = (_is_number, "a number")
_BOOLEAN = (_is_bool, "a boolean")
_STRING = (_is_str, "a string")
_OBJECT = (_is_object, "an object")
_LIST = (_is_list, "a list")

Rule = tuple[Callable[[object], bool], str]

_COMMON: Mapping[str, Rule] = {
    "max_tokens": _POSITIVE,
    "n": _POSITIVE,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "top_k": _INTEGER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _INTEGER,
    "ignore_eos": _BOOLEAN,
    "add_special_tokens": _BOOLEAN,
    "session_id": _STRING,
    "prompt_cache_key": _STRING,
    "cache_salt": _STRING,
    "user": _STRING,
    "vllm_xargs": _OBJECT,
}
_RULES: Mapping[Kind, Mapping[str, Rule]] = {
    Kind.CHAT: {
        **_COMMON,
        "max_completion_tokens": _POSITIVE,
        "tools": _LIST,
        "documents": _LIST,
        "chat_template_kwargs": _OBJECT,
        "add_generation_prompt": _BOOLEAN,
        "continue_final_message": _BOOLEAN,
    },
    Kind.COMPLETION: {**_COMMON, "echo": _BOOLEAN},
}


def _wrong(param: str, need: str) -> DialectError:
    return DialectError(400, f"Invalid value for '{param}': {need} is needed.", param=param, code="invalid_value")


def _check(kind: Kind, body: dict[str, Any]) -> None:
    model = body.get("model")
    if not isinstance(model, str) or not model or len(model) > MAX_MODEL_NAME:
        raise _wrong("model", "the name of a model")
    for name, (good, need) in _RULES[kind].items():
        # null means "not set" to the engine too.
        if (value := body.get(name)) is not None and not good(value):
            raise _wrong(name, need)
    if kind is Kind.CHAT:
        _check_messages(body.get("messages"))
    else:
        _check_prompt(body.get("prompt"), has_embeds=body.get("prompt_embeds") is not None)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list with at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"messages[{at}]", "an object with a role")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
            raise _wrong(f"messages[{at}].content", "a string or a list of parts")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_int(token) and 0 <= token < 2**32 for token in value)


def _check_prompt(prompt: object, *, has_embeds: bool) -> None:
    if prompt is None and has_embeds:
        return
    good = (isinstance(prompt, str) and prompt) or (
        isinstance(prompt, list)
        and bool(prompt)
        and (_is_ids(prompt) or all((isinstance(one, str) and one) or _is_ids(one) for one in prompt))
    )
    if not good:
        raise _wrong("prompt", "a string, a list of strings, or a list of token ids")
