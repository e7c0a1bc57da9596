"""Tools of /v1/responses: the tool choice of a request, and the output items of calls, as in vLLM. Pure.

A chat has functions only. In it a custom tool is a function with one text argument, and a function of a namespace has the
namespace before its name. The output items of an answer distinguish them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pointsman_lab.emulator.openai_api import ApiError, call_id

_NAMED = ("function", "custom")


def chat_tool_choice(body: Mapping[str, Any], functions: object) -> str | dict[str, Any]:
    """Return the tool_choice of a chat whose tools are `functions`. Raises ApiError 400.

    If a hosted tool is chosen, or only some tools are allowed, the model may choose: "auto".
    """
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
    """A tool under the client's names."""

    kind: str
    name: str
    namespace: str | None = None


class CalledTools:
    """Makes the output items of calls from the names that a request's tools have in the chat."""

    def __init__(self, tools: object) -> None:
        self._tools = dict(_named_tools(tools))

    def is_custom(self, name: str) -> bool:
        """Return whether the tool takes a text instead of JSON arguments."""
        return name in self._tools and self._tools[name].kind == "custom"

    def item(self, request_id: str, number: int, name: str, arguments: str) -> dict[str, Any]:
        """Return the item of call `number`; `arguments` may be truncated."""
        tool = self._tools.get(name, _Tool("function", name))
        called: dict[str, Any] = {"call_id": call_id(request_id, number), "name": tool.name}
        if tool.kind == "custom":
            head = {"id": f"ctc_{request_id}_{number}", "type": "custom_tool_call"}
            return head | called | {"input": custom_input(arguments)}
        head = {"id": f"fc_{request_id}_{number}", "type": "function_call", "status": "completed"}
        more = {} if tool.namespace is None else {"namespace": tool.namespace}
        return head | called | more | {"arguments": arguments}


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool gets. As in vLLM, arguments without a text in "input" are returned unchanged."""
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
    """Return the chat's name of a chosen tool. `name` is its full name, or its name in a namespace if only one namespace has it.
    Raises ApiError 400."""
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
