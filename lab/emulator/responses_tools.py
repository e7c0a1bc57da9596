"""Tools of /v1/responses: which one a request chooses, and the items that tell of calls, as vLLM's. Pure.

A chat knows functions only. There a custom tool is a function of one text, and a namespace's function has the namespace before
its name; an answer's items tell them apart again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pointsman.lab.emulator.openai_api import ApiError, call_id

_NAMED = ("function", "custom")


def chat_tool_choice(body: Mapping[str, Any], functions: object) -> str | dict[str, Any]:
    """The tool_choice of a chat that has `functions` for tools. Raises ApiError 400. Where a hosted tool is chosen, or some of
    the tools are allowed, the model is free: `auto`."""
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict) and choice.get("type") in _NAMED:
        return {"type": "function", "function": {"name": _full_name(choice.get("name"), body.get("tools"))}}
    if choice == "required" and not functions:
        raise ApiError(400, "Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if not functions:
        return "none"
    if isinstance(choice, dict):
        return "auto"
    if choice not in ("none", "auto", "required"):
        raise ApiError(400, f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
    return str(choice)


class _Tool(NamedTuple):
    """A tool as its client knows it."""

    kind: str
    name: str
    namespace: str | None = None


class CalledTools:
    """Makes the output items of calls from the names that a chat has for a request's tools."""

    def __init__(self, tools: object) -> None:
        self._tools = dict(_named_tools(tools))

    def is_custom(self, name: str) -> bool:
        """Whether the tool takes a text."""
        return name in self._tools and self._tools[name].kind == "custom"

    def item(self, request_id: str, number: int, name: str, arguments: str) -> dict[str, Any]:
        """The item of call `number`; `arguments` may be cut short."""
        tool = self._tools.get(name, _Tool("function", name))
        called: dict[str, Any] = {"call_id": call_id(request_id, number), "name": tool.name}
        if tool.kind == "custom":
            head = {"id": f"ctc_{request_id}_{number}", "type": "custom_tool_call"}
            return head | called | {"input": custom_input(arguments)}
        head = {"id": f"fc_{request_id}_{number}", "type": "function_call", "status": "completed"}
        more = {} if tool.namespace is None else {"namespace": tool.namespace}
        return head | called | more | {"arguments": arguments}


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets; of arguments that are no such object, themselves, as in vLLM."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _named_tools(tools: object) -> Iterator[tuple[str, _Tool]]:
    for tool in tools if isinstance(tools, list) else []:
        name = str(tool.get("name"))
        if tool.get("type") == "namespace":
            for inner in tool["tools"]:
                if inner.get("type") == "function":
                    yield f"{name}__{inner.get('name')}", _Tool("function", str(inner.get("name")), name)
        elif tool.get("type") in _NAMED:
            yield name, _Tool(tool["type"], name)


def _full_name(name: object, tools: object) -> str:
    """The chat's name of a tool that is chosen by its full name, or by its own where only one namespace has it."""
    known = dict(_named_tools(tools))
    if isinstance(name, str) and name in known:
        return name
    within = [full for full, tool in known.items() if tool.namespace is not None and tool.name == name]
    if len(within) == 1:
        return within[0]
    if within:
        message = (
            f"Tool choice '{name}' is ambiguous: it is defined in more than one namespace ({', '.join(within)}). "
            "Select it by its full '<namespace>__<name>' name."
        )
        raise ApiError(400, message, "tool_choice")
    raise ApiError(400, "Tool choice 'function' not found in 'tools' parameter.", "tool_choice")
