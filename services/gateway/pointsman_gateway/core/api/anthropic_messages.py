"""Anthropic's /v1/messages and /v1/messages/count_tokens, and their conversion to the chat that vLLM renders.

The conversion follows vLLM 0.32 `entrypoints/anthropic/serving.py` (`to_chat_completion_request`). Two further changes depend on
the chat template: vLLM merges late system messages if the template refuses them, and turns `thinking: disabled` into an effort.
`merged_system` and `disabled_effort` are these changes; `core/tokens/model_tokenizer.py` applies them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from pointsman_gateway.core.api.field_checks import (
    COMMON,
    LIST,
    OBJECT,
    POSITIVE,
    Rule,
    check_fields,
    check_turns,
    invalid_parameter,
)
from pointsman_gateway.core.pauses import paced

COUNTED: Mapping[str, Rule] = {
    "thinking": OBJECT,
    "output_config": OBJECT,
    "tools": LIST,
    "tool_choice": OBJECT,
    "chat_template_kwargs": OBJECT,
}
_RULES: Mapping[str, Rule] = {
    **COMMON,
    **COUNTED,
    "max_tokens": POSITIVE,
    "metadata": OBJECT,
    "stop_sequences": LIST,
}
_BILLING_HEADER = "x-anthropic-billing-header"
# reasoning_effort of a converted chat with "thinking disabled": which effort that means depends on the template.
DISABLED = "disabled"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Unconvertible(Exception):
    """The engine's conversion of this body cannot be reproduced outside the engine."""


def check_messages(body: dict[str, Any], rules: Mapping[str, Rule] = _RULES) -> None:
    """Check a body of /v1/messages, or by COUNTED of count_tokens. Raises ApiRequestError. Mutates `body` (check_fields)."""
    check_fields(body, rules)
    system = body.get("system")
    if not isinstance(system, str | list | None):
        raise invalid_parameter("system", "a string or a list of blocks")
    if system and body.get("messages") == []:
        return  # vLLM renders a system prompt alone
    check_turns(body.get("messages"), "messages", content_needed=True)


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completions body that vLLM renders for `body`, which must be checked. Raises Unconvertible.

    Late system messages keep their places, and `reasoning_effort` may be DISABLED.
    """
    messages: list[dict[str, Any]] = []
    if system := _system_text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for turn in paced(body["messages"]):
        _convert_turn(turn, messages)
    chat: dict[str, Any] = {"messages": messages}
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    effort = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") == "disabled":
        effort = DISABLED
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    return chat


def merged_system(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat` with all its system messages merged into one at the front, as vLLM does for templates that accept no later
    one."""
    texts = [message["content"] for message in chat["messages"] if message["role"] == "system"]
    others = [message for message in chat["messages"] if message["role"] != "system"]
    return {**chat, "messages": [{"role": "system", "content": "".join(texts)}, *others] if texts else others}


def system_only_first(template: str) -> bool:
    """Whether vLLM finds that `template` accepts a system message only at the front.

    As vLLM does, this renders a system message in the middle, in an environment without transformers' helpers. So a template that
    calls raise_exception fails too.
    """
    turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    try:
        environment.from_string(template).render(messages=turns, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    return False


def disabled_effort(render: Callable[[dict[str, Any]], str | None]) -> str:
    """Return the effort that vLLM sends for `thinking: disabled`: "none", or "low" if the template refuses or ignores "none".
    `render` returns the text of a chat, None if the template fails."""

    def probe(effort: str) -> str | None:
        return render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})

    none = probe("none")
    return "low" if none is None or any(probe(effort) == none for effort in _EFFORTS) else "none"


def _system_text(content: object) -> str:
    """Return the text of a system prompt or message without Claude Code's per-request header; "" for none."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else []:
        if not isinstance(block, dict) or block.get("type") in ("tool_addition", "tool_removal"):
            raise Unconvertible("a system block that changes the tools")
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str) and not text.startswith(_BILLING_HEADER):
            texts.append(text)
    return "".join(texts)


def _convert_turn(turn: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """Append the converted `turn` to `messages`. Mutates `messages`."""
    role, content = turn["role"], turn["content"]
    if role == "system":
        text = _system_text(content)
        if text and not (isinstance(content, str) and text.startswith(_BILLING_HEADER)):
            messages.append({"role": "system", "content": text})
        return
    message: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        message["content"] = content
    else:
        _convert_blocks(content, message, messages)
    if role != "user" or "content" in message:
        messages.append(message)


def _convert_blocks(blocks: list[Any], message: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            if text := _text(block.get("text")):
                parts.append({"type": "text", "text": text})
        elif kind == "thinking":
            if block.get("thinking") is not None:
                thoughts.append(_text(block["thinking"]))
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "tool_result" and message["role"] == "user":
            messages.append(_tool_result(block))
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise Unconvertible("a content block that is not text")
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(parts) == 1:
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unconvertible("a text block without text")
    return value


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict) or not block.get("id"):
        # Without an id the engine generates one from its clock, and templates may show it.
        raise Unconvertible("a tool use without id or input")
    function = {"name": _text(block.get("name")), "arguments": json.dumps(arguments)}
    return {"id": block["id"], "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") in ("image", "tool_reference"):
                raise Unconvertible("a tool result that is not text")
            if part.get("type") == "text":
                texts.append(_text(part.get("text")))
        content = "\n".join(texts)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _text(content)}


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise Unconvertible("a tool without a schema")
    schema = tool["input_schema"]
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
