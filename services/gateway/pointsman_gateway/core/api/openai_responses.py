"""OpenAI's /v1/responses: its conversion to the chat that vLLM renders.

The conversion follows vLLM 0.32 `entrypoints/openai/responses/{protocol,utils}.py` (`construct_input_messages`) and
`tool_parsers/utils.py` (custom tools and namespaces).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pointsman_gateway.core.api.anthropic_messages import Unconvertible
from pointsman_gateway.core.api.field_checks import (
    BOOLEAN,
    COMMON,
    LIST,
    OBJECT,
    POSITIVE,
    STRING,
    Rule,
    check_fields,
    check_turns,
    invalid_parameter,
)
from pointsman_gateway.core.pauses import paced

_RULES: Mapping[str, Rule] = {
    **COMMON,
    "session_id": STRING,
    "prompt_cache_key": STRING,
    "user": STRING,
    "max_output_tokens": POSITIVE,
    "instructions": STRING,
    "previous_response_id": STRING,
    "background": BOOLEAN,
    "store": BOOLEAN,
    "tools": LIST,
    "reasoning": OBJECT,
    "text": OBJECT,
    "include": LIST,
    "chat_template_kwargs": OBJECT,
}
# Fields that refer to content that only the engine has.
_FOREIGN = ("previous_response_id", "previous_input_messages", "prompt")
_OPEN = ("in_progress", "incomplete")
# The parameters under which vLLM shows a custom tool to the model: one text.
_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def check_responses(body: dict[str, Any]) -> None:
    """Check a /v1/responses body. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, _RULES)
    given = body.get("input")
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise invalid_parameter("input", "a string or a list of items")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completions body that vLLM renders for a checked `body`. Raises Unconvertible and ApiRequestError."""
    if any(body.get(name) is not None for name in _FOREIGN) or body.get("truncation") not in (None, "disabled"):
        raise Unconvertible("a prompt that only the engine can complete or cut")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        turns: list[dict[str, Any]] = []
        for item in paced(given):
            _convert(item, turns)
        if turns:
            check_turns(turns, "input")
        messages += turns
    chat: dict[str, Any] = {"messages": messages}
    if _continues(given):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if body.get("tools"):
        chat["tools"] = list(_tools(body["tools"]))
    return chat


def _continues(given: object) -> bool:
    if not isinstance(given, list) or not given:
        return False
    return given[-1].get("type", "message") in ("message", "reasoning") and given[-1].get("status") in _OPEN


def _convert(item: Mapping[str, Any], turns: list[dict[str, Any]]) -> None:
    """Append one input item, or add it to the preceding assistant's message, as vLLM does. Mutates `turns`."""
    kind, role = item.get("type"), item.get("role")
    before = turns[-1] if turns and turns[-1].get("role") == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _function_call(item) if kind == "function_call" else _custom_call(item)
        if before is not None:
            before.setdefault("tool_calls", []).append(call)
        else:
            turns.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        _put(turns, before, "reasoning", _reasoning(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turns.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind in (None, "message") and role == "assistant":
        _put(turns, before, "content", _said(item.get("content")))
    elif kind in (None, "message") and isinstance(role, str) and "content" in item:
        turns.append({"role": role, "content": item["content"]})
    else:
        raise Unconvertible("an input item of another kind")


def _put(turns: list[dict[str, Any]], before: dict[str, Any] | None, name: str, text: str) -> None:
    if before is not None and before.get(name) is None:
        before[name] = text
    else:
        turns.append({"role": "assistant", name: text})


def _said(content: object) -> str:
    """Return an assistant's text. Of several parts vLLM keeps the first."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    if not isinstance(content, str):
        raise Unconvertible("an assistant's message that is not text")
    return content


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Unconvertible("encrypted reasoning")
    parts = item.get("content") or item.get("summary") or []
    if not parts:
        return ""
    return _said(parts)


def _function_call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments, name, namespace = item.get("arguments"), item.get("name"), item.get("namespace")
    if not isinstance(arguments, str) or not isinstance(name, str) or not isinstance(namespace, str | None):
        raise Unconvertible("a call without name or arguments")
    function = {"name": _flat_name(namespace, name) if namespace else name, "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _custom_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call of a custom tool, whose input is a text, as a function call with that text as its only argument."""
    given, name = item.get("input") or "", item.get("name")
    if not isinstance(given, str) or not isinstance(name, str):
        raise Unconvertible("a call without name or input")
    function = {"name": name, "arguments": json.dumps({"input": given}, ensure_ascii=False)}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _tools(tools: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield the tools in chat format, as vLLM's `get_function_tools` does. Custom tools become functions of one text, and tools
    of a namespace get their full names. Hosted tools are omitted: they never reach a template."""
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is None:
            raise Unconvertible("a tool without a type")
        if kind == "function":
            yield _function(tool)
        elif kind == "custom":
            yield _function(
                {"name": tool.get("name"), "description": tool.get("description"), "parameters": _TEXT_INPUT}
            )
        elif kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(part, dict) for part in inner):
                raise Unconvertible("a namespace without tools")
            for part in inner:
                if part.get("type") == "function":
                    yield _function({**part, "name": _flat_name(tool.get("name"), part.get("name"))})


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict", "defer_loading")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _flat_name(namespace: object, name: object) -> str:
    return f"{namespace}__{name}"
