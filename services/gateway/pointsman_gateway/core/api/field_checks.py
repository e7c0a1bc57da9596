"""Checks the values of known fields, with error messages in words. Unknown fields are never checked.

Numbers and booleans are read as vLLM reads them: by pydantic, which accepts 16.0 and "16" as 16, and "true" as true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pydantic import TypeAdapter, ValidationError

from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.pauses import paced

MAX_MODEL_NAME = 512


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for a field's value; `need` says in words what is valid. A value for which `holds` is false may hold after
    pydantic has converted it by `form`."""

    holds: Callable[[object], bool]
    need: str
    form: TypeAdapter[Any] | None = None


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_ids(value: object) -> bool:
    """Whether `value` is a list of at least one token id."""
    # By C loops: a prompt may have a million of them.
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32


_INTEGER = TypeAdapter[Any](int)
# Larger counts make no sense, and would not fit the fields of the router's protocol (uint32).
POSITIVE = Rule(lambda value: is_int(value) and 0 < value < 2**31, "a positive integer", _INTEGER)
COUNT = Rule(lambda value: is_int(value) and 0 <= value < 2**31, "an integer that is not negative", _INTEGER)
INTEGER = Rule(is_int, "an integer", _INTEGER)
NUMBER = Rule(lambda value: isinstance(value, float) or is_int(value), "a number", TypeAdapter(float))
BOOLEAN = Rule(lambda value: isinstance(value, bool), "a boolean", TypeAdapter(bool))
STRING = Rule(lambda value: isinstance(value, str), "a string")
OBJECT = Rule(lambda value: isinstance(value, dict), "an object")
LIST = Rule(lambda value: isinstance(value, list), "a list")

# Fields that several APIs share, by vLLM's names.
COMMON: Mapping[str, Rule] = {
    "stream": BOOLEAN,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "cache_salt": STRING,
    "vllm_xargs": OBJECT,
}
# Further fields that /v1/chat/completions and /v1/completions share.
SAMPLING: Mapping[str, Rule] = {
    **COMMON,
    # 0 is valid: with an echo only the prompt is returned. Otherwise vLLM refuses it itself.
    "max_tokens": COUNT,
    "n": POSITIVE,
    "session_id": STRING,
    "user": STRING,
    "echo": BOOLEAN,
    "stream_options": OBJECT,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "seed": INTEGER,
    "ignore_eos": BOOLEAN,
    "add_special_tokens": BOOLEAN,
}


def invalid_parameter(param: str, need: str) -> ApiRequestError:
    """Return the error for a field `param` whose value must be `need`."""
    return ApiRequestError(400, f"Invalid value for '{param}': {need} is needed.", param=param, code="invalid_value")


def check_model(body: Mapping[str, Any]) -> None:
    """Raises ApiRequestError unless `body` has a model name."""
    model = body.get("model")
    if not isinstance(model, str) or not model or len(model) > MAX_MODEL_NAME:
        raise invalid_parameter("model", "the name of a model")


def check_fields(body: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises ApiRequestError for the first field that violates its rule. As for the engine, null means "not set". Mutates `body`:
    numbers and booleans in other forms are replaced by the converted values."""
    for name, value in body.items():
        if value is not None and (rule := rules.get(name)) is not None and not rule.holds(value):
            body[name] = _read(name, value, rule)


def _read(name: str, value: object, rule: Rule) -> Any:
    try:
        read = rule.form.validate_python(value) if rule.form is not None else None
    except ValidationError:
        read = None
    if read is None or not rule.holds(read):
        raise invalid_parameter(name, rule.need)
    return read


def check_turns(turns: object, param: str, *, content_needed: bool = False) -> None:
    """Raises ApiRequestError unless `turns` is a list of objects with a role and a content of text or parts. `content_needed`: a
    message without content is an error too."""
    if not isinstance(turns, list) or not turns:
        raise invalid_parameter(param, "a list with at least one message")
    for at, turn in enumerate(paced(turns)):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise invalid_parameter(f"{param}[{at}]", "an object with a role")
        content = turn.get("content")
        if isinstance(content, str) or (content is None and not content_needed):
            continue
        if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
            raise invalid_parameter(f"{param}[{at}].content", "a string or a list of parts")
