"""Tool calls on the emulated engine, by vendors' clients, directly and through a gateway, as for trying out agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anthropic
import jsonschema
import openai
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_lab.emulator.emulated_engine import EmulateSettings, start
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer
from tests.support.fakes.gateway_peers import FakeRouter, Peers, fake_router, gateway_before, until_ready

MODEL = "pointsman-emulated"
TASK = "Set the points to the left, then report."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", "right"]},
        "number": {"type": "integer", "minimum": 3, "maximum": 9},
        "why": {"type": "string"},
        "speed": {"type": "number"},
    },
    "required": ["side", "number", "why"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "turn", "description": "Sets the points.", "parameters": SCHEMA}
LOOK = {"name": "look", "description": "Looks at the signal.", "parameters": {"type": "object", "properties": {}}}
SCHEMAS = {"turn": SCHEMA, "look": LOOK["parameters"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": function} for function in (FUNCTION, LOOK)]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **function} for function in (FUNCTION, LOOK)]
MESSAGE_TOOLS: list[Any] = [
    {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    for function in (FUNCTION, LOOK)
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def allowed(name: str, arguments: Any) -> Any:
    """Return the arguments, after checking them against the tool's schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(given, SCHEMAS[name])
    return given


class Place:
    """Clients of the engine's APIs, and the gateway's router if there is a gateway in front."""

    def __init__(self, url: str, router: FakeRouter | None) -> None:
        self.url, self.router = url, router
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(params=["straight", "through a gateway"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        engine = await start(EmulateSettings(port=0, speedup=50.0))
        stack.push_async_callback(engine.stop)
        url, router = engine.url, None
        if request.param != "straight":
            ref = placement_pb2.InstanceRef(instance_id="i0", url=engine.url, incarnation="1")
            pool = placement_pb2.Pool(
                model=MODEL, model_root=str(TOKENIZER_DIR), max_model_len=131_072, instances=[ref]
            )
            router = fake_router([pool])
            await router.start()
            stack.push_async_callback(router.stop)
            gateway, url = await stack.enter_async_context(gateway_before(Peers(router, [])))
            await until_ready(gateway)
        here = Place(url, router)
        stack.push_async_callback(here.openai.close)
        stack.push_async_callback(here.anthropic.close)
        yield here


async def test_chats_call_tools_whole_and_streamed(place: Place) -> None:
    chats = place.openai.chat.completions
    messages: list[Any] = [user(TASK)]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
    named: Any = {"type": "function", "function": {"name": "turn"}}
    for choice, reason, content in (("required", "tool_calls", ""), (named, "stop", ""), ("auto", "tool_calls", None)):
        chosen: dict[str, Any] = asked | {"tool_choice": choice}
        whole = await chats.create(**chosen)
        (call,) = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == (reason, content)
        arguments = allowed(call.function.name, call.function.arguments)
        assert choice != named or arguments["side"] in ("left", "right")
        chosen |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await chats.create(**chosen)]
        deltas = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
        functions = [delta.function for delta in deltas if delta.function is not None]
        assert (deltas[0].index, deltas[0].type, bool(deltas[0].id)) == (0, "function", True)
        assert [function.name for function in functions if function.name] == [call.function.name]
        assert "".join(function.arguments or "" for function in functions) == call.function.arguments
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == reason
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
    never = await chats.create(**asked, tool_choice="none")
    assert (never.choices[0].message.tool_calls or [], never.choices[0].finish_reason) == ([], "stop")
    assert never.choices[0].message.content
    # An answer of a fixed length (ignore_eos) is a text.
    fixed = await chats.create(**asked, max_completion_tokens=20, extra_body={"ignore_eos": True})
    assert fixed.usage is not None
    assert (fixed.usage.completion_tokens, fixed.choices[0].message.tool_calls or []) == (20, [])


async def test_an_agents_loop_ends_and_finds_its_prefix(place: Place) -> None:
    """A task is answered by a call, the call's result by a text, the next task by a call again."""
    messages: list[Any] = [{"role": "system", "content": "You work in a signal box. " * 8}, user(TASK)]
    reasons, cached, prompts = [], [], []
    for turn in range(3):
        answer = await place.openai.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        (choice,), usage = answer.choices, answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        reasons.append(choice.finish_reason)
        prompts.append(usage.prompt_tokens + usage.completion_tokens)
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        messages.append(choice.message.to_dict())
        calls = choice.message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        messages += [] if calls else [user("And now?")]
        assert bool(calls) == (turn != 1)
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    # Cached are the previous turn's prompt and answer, except the answer's end and the last partial block.
    assert cached[0] == 0
    assert all(now > before - 18 for now, before in zip(cached[1:], prompts, strict=False))
    if (router := place.router) is not None:
        await router.until(lambda: len(router.finished) == 3)
        assert [finish.cached_tokens for finish in router.finished] == cached


async def test_messages_call_tools_whole_and_streamed(place: Place) -> None:
    messages: list[Any] = [user(TASK)]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": MESSAGE_TOOLS}
    counted = await place.anthropic.messages.count_tokens(model=MODEL, messages=messages, tools=MESSAGE_TOOLS)
    chat = await place.openai.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    assert chat.usage is not None
    assert counted.input_tokens == chat.usage.prompt_tokens
    choices: list[dict[str, Any]] = [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "turn"}},
        {"tool_choice": {"type": "auto"}},
        {},
    ]
    for choice in choices:
        whole = await place.anthropic.messages.create(**asked, **choice)
        async with place.anthropic.messages.stream(**asked, **choice) as events:
            kinds = [event.type async for event in events]
            streamed = await events.get_final_message()
        assert [kinds[0], *kinds[-2:]] == ["message_start", "message_delta", "message_stop"]
        for answer in (whole, streamed):
            (use,) = answer.content
            assert use.type == "tool_use"
            assert isinstance(use, anthropic.types.ToolUseBlock)
            assert answer.stop_reason == "tool_use"
            allowed(use.name, use.input)
            assert use.name == "turn" or choice != choices[1]
            cached = answer.usage.cache_read_input_tokens
            assert cached == (counted.input_tokens - 1) // 16 * 16
            assert answer.usage.input_tokens == counted.input_tokens - cached
        assert streamed.content[0].to_dict() | {"id": ""} == whole.content[0].to_dict() | {"id": ""}
        assert streamed.usage.output_tokens == whole.usage.output_tokens
    never = await place.anthropic.messages.create(**asked, tool_choice={"type": "none"})
    assert ([block.type for block in never.content], never.stop_reason) == (["text"], "end_turn")
    # An agent may append text after a result, as Claude Code does.
    assert isinstance(use, anthropic.types.ToolUseBlock)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
    messages += [
        {"role": "assistant", "content": [use.to_dict()]},
        user([result, {"type": "text", "text": "A reminder."}]),
    ]
    said = await place.anthropic.messages.create(**asked)
    assert ([block.type for block in said.content], said.stop_reason) == (["text"], "end_turn")


async def test_responses_call_tools_whole_and_streamed(place: Place) -> None:
    items: list[Any] = [user(TASK)]
    asked: dict[str, Any] = {"model": MODEL, "input": items, "tools": RESPONSE_TOOLS, "store": False}
    named: Any = {"type": "function", "name": "turn"}
    for choice in ("required", named, "auto"):
        chosen: dict[str, Any] = asked | {"tool_choice": choice}
        whole = await place.openai.responses.create(**chosen)
        async with place.openai.responses.stream(**chosen) as events:
            kinds = [event.type async for event in events]
            streamed = await events.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 1
        (call,) = whole.output
        assert call.type == "function_call"
        allowed(call.name, call.arguments)
        assert call.name == "turn" or choice != named
        (same,) = streamed.output
        assert same.type == "function_call"
        assert (same.name, same.arguments) == (call.name, call.arguments)
        assert [tool.type for tool in whole.tools] == ["function", "function"]
    never = await place.openai.responses.create(**asked, tool_choice="none")
    assert [item.type for item in never.output] == ["message"]
    items += [
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    said = await place.openai.responses.create(**asked)
    assert [item.type for item in said.output] == ["message"]
    assert said.status == "completed"


async def test_responses_tell_custom_tools_and_namespaces_apart(place: Place) -> None:
    """As Codex sends them."""
    custom: Any = {"type": "custom", "name": "patch", "description": "Edits files."}
    inner: Any = {"type": "function", "name": "turn", "parameters": SCHEMA}
    space: Any = {"type": "namespace", "name": "box", "description": "", "tools": [inner]}
    asked: dict[str, Any] = {"model": MODEL, "input": TASK, "tools": [custom, space]}
    patch: Any = {"type": "custom", "name": "patch"}
    whole = (await place.openai.responses.create(**asked, tool_choice=patch)).output[0]
    assert whole.type == "custom_tool_call"
    assert (whole.name, whole.input.split()[0]) == ("patch", "emulated")
    events = [event async for event in await place.openai.responses.create(**asked, tool_choice=patch, stream=True)]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == whole.input
    call = (await place.openai.responses.create(**asked, tool_choice={"type": "function", "name": "turn"})).output[0]
    assert call.type == "function_call"
    assert (call.name, call.to_dict()["namespace"]) == ("turn", "box")
    allowed(call.name, call.arguments)


TURN = {"type": "function", "function": {"name": "turn"}}
BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": "sometimes", "tools": CHAT_TOOLS}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": {"type": "function"}, "tools": CHAT_TOOLS}, "tool_choice.function"),
    ("/v1/chat/completions", {"tool_choice": TURN, "tools": CHAT_TOOLS[1:]}, "tool_choice"),
    ("/v1/chat/completions", {"tools": []}, "tools"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools"),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "stop"}, "tools": MESSAGE_TOOLS}, None),
    ("/v1/messages", {"tool_choice": {"type": []}, "tools": MESSAGE_TOOLS}, None),
    ("/v1/responses", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/responses", {"tool_choice": {"type": "function", "name": "stop"}, "tools": RESPONSE_TOOLS}, "tool_choice"),
    ("/v1/responses", {"tool_choice": ["auto"], "tools": RESPONSE_TOOLS}, "tool_choice"),
]


@pytest.mark.parametrize("place", ["straight"], indirect=True)
async def test_a_choice_that_cannot_be_is_refused_as_vllm_does(place: Place) -> None:
    async with aiohttp.ClientSession() as http:
        for path, body, param in BAD:
            whole = {"model": MODEL, "messages": [user("hi")], "input": "hi", "max_tokens": 5, **body}
            async with http.post(place.url + path, json=whole) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["type"]) == (400, "BadRequestError"), (path, body, answer)
                assert answer["error"].get("param") == param, (path, body, answer)
                assert (answer.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("place", ["straight"], indirect=True)
async def test_an_answer_fits_its_tokens(place: Place) -> None:
    """A call costs the tokens that it is written with; another seed gives another call."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [user(TASK)], "tools": CHAT_TOOLS, "tool_choice": TURN}
    answer = await place.openai.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    written = f'<tool_call>\n{{"name": "turn", "arguments": {call.function.arguments}}}\n</tool_call>'
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ChatTokenizer().encode(written)) + 1
    cut = await place.openai.chat.completions.create(**asked, max_completion_tokens=5)
    assert cut.usage is not None
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5)
    other = await start(EmulateSettings(port=0, speedup=50.0, seed=1))
    try:
        async with openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key="none") as client:
            (differs,) = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls or []
    finally:
        await other.stop()
    assert differs.type == "function"
    assert differs.function.arguments != call.function.arguments
