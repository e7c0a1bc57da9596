"""Anthropic messages and Responses as the chat that vLLM renders; the tests on a real vLLM hold the tokens against it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pointsman_gateway.core.api import ApiRequestError, Endpoint, parse
from pointsman_gateway.core.api.anthropic_messages import disabled_effort, merged_system, system_only_first
from tests.support.tiny_tokenizer import CHATML


def chat_of(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "m", "max_tokens": 5} if endpoint is Endpoint.MESSAGES else {"model": "m"}
    call = parse(endpoint, json.dumps(base | fields).encode())
    assert call.chat is not None, call.untokenizable
    return call.chat


def untokenizable(endpoint: Endpoint, **fields: Any) -> str:
    return parse(endpoint, json.dumps({"model": "m", **fields}).encode()).untokenizable


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_messages_become_a_chat() -> None:
    billing = "x-anthropic-billing-header: cc_version=1; cch=abc"
    turns = [
        user("Read it."),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("Sure."),
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("two")], "is_error": False},
                text("And now?"),
                {**text("Well?"), "cache_control": {"type": "ephemeral"}},
            ]
        ),
    ]
    schema = {"properties": {"path": {"type": "string"}}}
    tools = [{"name": "read", "description": "Read.", "input_schema": schema, "cache_control": {"type": "ephemeral"}}]
    chat = chat_of(Endpoint.MESSAGES, system=[text(billing), text("Be "), text("brief.")], messages=turns, tools=tools)
    call = {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        user("Read it."),
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call], "content": "Sure."},
        {"role": "tool", "tool_call_id": "t1", "content": "one\ntwo"},
        user([text("And now?"), text("Well?")]),
    ]
    function = chat["tools"][0]["function"]
    assert (function["name"], function["parameters"]) == ("read", {**schema, "type": "object"})
    assert schema == {"properties": {"path": {"type": "string"}}}


def test_a_turn_of_results_only_leaves_no_empty_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    chat = chat_of(Endpoint.MESSAGES, messages=[user("a"), {"role": "assistant", "content": "b"}, user([result])])
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool"]


def test_efforts() -> None:
    messages = [user("a")]
    assert "reasoning_effort" not in chat_of(Endpoint.MESSAGES, messages=messages, thinking={"type": "adaptive"})
    high = {"output_config": {"effort": "high"}}
    assert chat_of(Endpoint.MESSAGES, messages=messages, **high)["reasoning_effort"] == "high"
    off = chat_of(Endpoint.MESSAGES, messages=messages, thinking={"type": "disabled"}, **high)
    assert off["reasoning_effort"] == "disabled"
    assert chat_of(Endpoint.RESPONSES, input="a", reasoning={"effort": "low"})["reasoning_effort"] == "low"
    # "none" for a template that uses the effort; "low" for one that ignores it.
    assert disabled_effort(lambda chat: "same") == "low"
    assert disabled_effort(lambda chat: chat["reasoning_effort"]) == "none"
    assert disabled_effort(lambda chat: None) == "low"
    assert disabled_effort(lambda chat: "off" if chat["reasoning_effort"] == "none" else "on") == "none"


def test_late_system_messages_go_where_the_template_wants_them() -> None:
    late = [user("a"), {"role": "system", "content": [text("re"), text("mind")]}, user("b")]
    chat = chat_of(Endpoint.MESSAGES, system="S.", messages=late)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "system", "user"]
    assert merged_system(chat)["messages"] == [{"role": "system", "content": "S.remind"}, user("a"), user("b")]
    assert merged_system({"messages": late[:1]})["messages"] == late[:1]
    assert not system_only_first(CHATML)
    late_system = "m.role == 'system' and not loop.first"
    strict = (
        f"{{% for m in messages %}}{{% if {late_system} %}}{{{{ raise_exception('x') }}}}{{% endif %}}{{% endfor %}}"
    )
    assert system_only_first(strict)
    assert system_only_first("{% for")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {"type": "base64", "data": "x"}}],
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}],
        [{"type": "document"}],
        [{"type": "tool_use", "name": "x", "input": {}}],
        ["x"],
    ],
)
def test_what_only_the_engine_can_convert_is_opaque(content: Any) -> None:
    assert untokenizable(Endpoint.MESSAGES, messages=[user(content)])


def test_responses_become_a_chat() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sure."}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
    ]
    tools = [{"type": "function", "name": "read", "parameters": {}, "strict": True}, {"type": "web_search"}]
    chat = chat_of(Endpoint.RESPONSES, instructions="Be brief.", input=items, tools=tools)
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "read", "arguments": "{}"}} for call_id in ("c1", "c2")
    ]
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        user([{"type": "input_text", "text": "Read it."}]),
        {"role": "assistant", "reasoning": "Hm.", "content": "Sure.", "tool_calls": calls},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        user("Thanks."),
    ]
    assert len(chat["tools"]) == 1
    assert chat_of(Endpoint.RESPONSES, input="hi")["messages"] == [user("hi")]
    part = {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"text": "Once"}]}
    assert chat_of(Endpoint.RESPONSES, input=[items[0], part])["continue_final_message"] is True


@pytest.mark.parametrize("content", [5, True, {"a": 1}, [5], [None], [["x"]]])
@pytest.mark.parametrize("item", ["content", "output"])
def test_an_item_whose_content_is_neither_text_nor_parts_is_refused(item: str, content: Any) -> None:
    kinds = {"content": {"role": "user"}, "output": {"type": "function_call_output", "call_id": "c"}}
    with pytest.raises(ApiRequestError) as refused:
        parse(Endpoint.RESPONSES, json.dumps({"model": "m", "input": [kinds[item] | {item: content}]}).encode())
    assert (refused.value.status, refused.value.param) == (400, "input[0].content")


def test_custom_tools_and_namespaces_become_functions() -> None:
    spawn = {"type": "function", "name": "spawn", "description": "d", "parameters": {"type": "object"}, "strict": False}
    custom = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}}
    namespace = {
        "type": "namespace",
        "name": "agents",
        "description": "",
        "tools": [spawn, {**custom, "name": "not shown"}],
    }
    items = [
        user("go"),
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "é\n"},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    chat = chat_of(Endpoint.RESPONSES, input=items, tools=[custom, namespace])
    patch, spawned = (tool["function"] for tool in chat["tools"])
    assert (patch["name"], patch["description"], patch["strict"]) == ("patch", "Edit.", None)
    assert list(patch["parameters"]["properties"]) == patch["parameters"]["required"] == ["input"]
    assert spawned == {
        **{name: spawn[name] for name in spawn if name != "type"},
        "name": "agents__spawn",
        "defer_loading": None,
    }
    called = [call["function"] for call in chat["messages"][1]["tool_calls"]]
    assert called == [
        {"name": "patch", "arguments": '{"input": "é\\n"}'},
        {"name": "agents__spawn", "arguments": "{}"},
    ]
    assert chat["messages"][2] == {"role": "tool", "content": "done", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"truncation": "auto"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        {"tools": [{"name": "x"}]},
        {"tools": [{"type": "namespace", "name": "x"}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "input": "x"}]},
    ],
)
def test_what_only_the_engine_has_is_opaque(fields: dict[str, Any]) -> None:
    assert untokenizable(Endpoint.RESPONSES, **({"input": "hi"} | fields))
