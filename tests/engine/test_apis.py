"""Anthropic messages and Responses through the vendors' own clients: prompts, streams, tools, stored responses and errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.api.anthropic_messages import merged_system, system_only_first
from pointsman_gateway.core.request.transfer_params import prefill_request, transfer_obstacle
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.engines.chat_client import fresh_words, user
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.engines.vllm_questions import Vllm
from tests.support.http_request import ask
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Anthropic's client no longer has a temperature argument; the engine still accepts it.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"side": {"enum": ["left"]}}, "required": ["side"]}
TOOL = {"name": "turn", "description": "Set the points.", "input_schema": SCHEMA, "strict": True}
FUNCTION = {"type": "function", "name": "turn", "description": "Set the points.", "parameters": SCHEMA, "strict": True}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


_USE = {"type": "tool_use", "id": "t1", "name": "turn", "input": {"side": "left", "n": 3}}
_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("two")]}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("hi there")]},
    "system": {"system": "S", "messages": [user("hi"), assistant("yo"), user([text("a"), text("b")])]},
    "billing": {"system": [text("x-anthropic-billing-header: a"), text("Be"), text("brief")], "messages": [user("hi")]},
    "late system": {"messages": [user("hi"), {"role": "system", "content": [text("late")]}, user("x")]},
    "tools": {
        "messages": [
            user("r"),
            assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, text("ok"), _USE]),
            user([_RESULT, text("go")]),
        ],
        "tools": [{**TOOL, "input_schema": {"properties": {}}}],
    },
    "no tools": {"messages": [user("hi")], "tools": [], "tool_choice": {"type": "none"}},
    "not thinking": {"messages": [user("hi")], "thinking": {"type": "disabled"}},
    "effort": {"messages": [user("hi")], "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    "answer begun": {"messages": [user("hi"), assistant("Once")]},
}


def _part(said: str) -> dict[str, Any]:
    return {"type": "input_text", "text": said}


_CALLS = [
    {"type": "function_call", "call_id": call_id, "name": "turn", "arguments": '{"a": 1}'} for call_id in ("c1", "c2")
]
_OUTPUTS = [{"type": "function_call_output", "call_id": call_id, "output": "done"} for call_id in ("c1", "c2")]
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "hi"},
    "instructions": {"instructions": "Be", "input": [user("hi"), assistant("yo"), {"type": "message", **user("a")}]},
    "developer": {"input": [{"role": "developer", "content": "dev"}, user("hi")]},
    "tools": {
        "input": [
            user("r"),
            {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", **assistant([{"type": "output_text", "text": "ok"}])},
            *_CALLS,
            *_OUTPUTS,
            assistant("x"),
            assistant("y"),
            {"role": "user", "content": [{"type": "input_text", "text": "z"}]},
        ],
        "tools": [FUNCTION, {"type": "web_search"}],
    },
    "effort": {"input": "hi", "reasoning": {"effort": "low"}, "tools": [FUNCTION], "tool_choice": "none"},
    # As Codex writes them: several parts, tools of a namespace, tools that take a text.
    "agent": {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "id": "m1", "role": "developer", "content": [_part("sandboxed"), _part("no network")]},
            {"type": "message", "id": "m2", "role": "developer", "content": [_part("skills")]},
            {"type": "message", "id": "m3", "role": "user", "content": [_part("fix"), _part("it")]},
            {"type": "function_call", "call_id": "c1", "name": "turn", "namespace": "agents", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": '*** "é"\n'},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [_part("done"), _part("too")]},
        ],
        "tools": [
            FUNCTION,
            {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}},
            {
                "type": "namespace",
                "name": "agents",
                "description": "",
                "tools": [FUNCTION, {"type": "custom", "name": "x"}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "k"},
    },
    "answer begun": {
        "input": [
            user("hi"),
            {
                "type": "message",
                "id": "msg_1",
                "status": "incomplete",
                **assistant([{"type": "output_text", "text": "Once", "annotations": []}]),
            },
        ]
    },
}


@pytest.fixture
def claude(plane: ControlPlane) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, pointed at the gateway."""
    with (
        anthropic.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        anthropic.Anthropic(base_url=plane.gateway_url, api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (kind, fields)
        for kind, every in ((Endpoint.MESSAGES, MESSAGES), (Endpoint.RESPONSES, RESPONSES))
        for fields in every.values()
    ],
    ids=[f"{api} {name}" for api, every in (("messages", MESSAGES), ("responses", RESPONSES)) for name in every],
)
def test_the_engine_renders_the_very_tokens(
    engines: list[Engine], model_folder: Path, kind: Endpoint, fields: dict[str, Any]
) -> None:
    body = {"model": SERVED_NAME, **({"max_tokens": 5} if kind is Endpoint.MESSAGES else {}), **fields}
    call = parse(kind, json.dumps(body).encode())
    assert not call.untokenizable
    rendered = engines[0].ask(f"{kind.value}/render", body)
    assert rendered.status == 200, rendered.text
    assert load_tokenizer(model_folder).prompt(call).ids.tolist() == rendered.json()["token_ids"]


TEMPLATES = {
    "anything": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "first only": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}"
    "{% endif %}{% endfor %}",
    "alternating": "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('x') }}{% endif %}{% endfor %}",
    "the date": "{{ strftime_now('%d') }}",
    "a generation block": "{% generation %}{% endgeneration %}",
    "broken": "{% for",
}
_ASK_VLLM = """
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as serving
request = AnthropicMessagesRequest(**asked["body"])
chat = serving.to_chat_completion_request(request, merge_inline_system=True)
found = {name: serving._detect_merge_inline_system(source) for name, source in asked["templates"].items()}
answer = {"found": found, "messages": chat.model_dump()["messages"]}
"""


def test_vllm_moves_late_system_messages_where_we_say_it_does(vllm: Vllm) -> None:
    late = {"role": "system", "content": [text("re"), text("mind")]}
    body = {
        "model": "m",
        "max_tokens": 5,
        "system": "S.",
        "messages": [user("a"), late, assistant("b"), late, user("c")],
    }
    theirs = vllm.ask(_ASK_VLLM, {"body": body, "templates": TEMPLATES})
    assert {name: system_only_first(source) for name, source in TEMPLATES.items()} == theirs["found"]
    call = parse(Endpoint.MESSAGES, json.dumps(body).encode())
    assert call.chat is not None
    assert merged_system(call.chat)["messages"] == theirs["messages"]


# What of the bodies vLLM accepts.
_ACCEPTED = """
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

def accepts(path, body):
    kind = ChatCompletionRequest if "chat" in path else CompletionRequest
    try:
        kind.model_validate(body).to_sampling_params(100, {})
    except Exception:
        return False
    return True

answer = [accepts(path, body) for path, body in asked]
"""
# Values of the fields of which one may demand or exclude another.
_FIELDS: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_tokens": 5,
    "stop": ["x"],
    "ignore_eos": True,
    "logprobs": 1,
    "top_logprobs": 2,
    "logprob_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "logit_bias": {"5": 1.0},
    "use_beam_search": True,
    "echo": True,
    "temperature": 0.0,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "truncate_prompt_tokens": 5,
    "return_token_ids": True,
}


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETION])
def test_a_prefills_body_is_accepted_where_the_clients_own_is(vllm: Vllm, endpoint: Endpoint) -> None:
    prompt: dict[str, Any] = {"messages": [user("a")]} if endpoint is Endpoint.CHAT else {"prompt": "a"}
    own = [
        {"model": "m", **prompt, **{name: _FIELDS[name] for name in names}}
        for count in (1, 2, 3)
        for names in itertools.combinations(_FIELDS, count)
    ]
    accepted = vllm.ask(_ACCEPTED, [(endpoint.value, body) for body in own])
    calls = [parse(endpoint, json.dumps(body).encode()) for body, good in zip(own, accepted, strict=True) if good]
    prefills = [prefill_request(call, {}) for call in calls if not transfer_obstacle(call)]
    assert len(prefills) > len(own) / 4
    sent = [(path, json.loads(body)) for path, body in prefills]
    refused = [body for (_, body), good in zip(sent, vllm.ask(_ACCEPTED, sent), strict=True) if not good]
    assert not refused, refused[:3]


def test_messages_are_the_engines_own_and_placed_by_exact_tokens(
    claude: anthropic.Anthropic, plane: ControlPlane, engines: list[Engine]
) -> None:
    turns: list[Any] = [user(fresh_words(150))]
    body: dict[str, Any] = {"model": SERVED_NAME, "max_tokens": 20}
    raw = claude.messages.with_raw_response.create(**body, **GREEDY, messages=turns)
    first = raw.parse()
    own = engines[0].ask("/v1/messages", {**body, "temperature": 0, "messages": turns}).json()
    assert [block.text for block in first.content] == [block["text"] for block in own["content"]]
    assert claude.messages.count_tokens(model=SERVED_NAME, messages=turns).input_tokens == _prompt(first.usage)
    plane.wait_settled()
    turns += [assistant(first.content[0].text), user(fresh_words(20))]
    with claude.messages.with_streaming_response.create(**body, **GREEDY, messages=turns, stream=True) as streamed:
        decision_id = streamed.headers["X-Pointsman-Decision"]
        assert streamed.headers["X-Pointsman-Instance"] == raw.headers["X-Pointsman-Instance"]
        events = list(streamed.parse())
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    usage = next(event.usage for event in events if event.type == "message_delta")
    decision = plane.finished_decision(decision_id)
    assert decision.input_tokens == decision.finished.prompt_tokens == _prompt(usage)
    assert decision.key_count == decision.input_tokens // 16
    assert decision.cached_tokens == decision.finished.cached_tokens == usage.cache_read_input_tokens >= 128
    assert decision.finished.output_tokens == usage.output_tokens == 20


def test_responses_are_stored_streamed_and_continued_where_they_are(client: openai.OpenAI, plane: ControlPlane) -> None:
    asked: dict[str, Any] = {"model": SERVED_NAME, "max_output_tokens": 20, "temperature": 0}
    raw = client.responses.with_raw_response.create(**asked, input=fresh_words(120))
    first, here = raw.parse(), raw.headers["X-Pointsman-Instance"]
    assert first.usage is not None
    decision = plane.finished_decision(raw.headers["X-Pointsman-Decision"])
    assert decision.input_tokens == decision.finished.prompt_tokens == first.usage.input_tokens
    assert decision.key_count == decision.input_tokens // 16
    # A gateway keeps no state of responses, so one that has just started finds them, too.
    plane.gateway.stop()
    plane.start_gateway()
    plane.wait_settled()
    assert client.responses.retrieve(first.id).output_text == first.output_text
    for _ in range(3):
        raw = client.responses.with_raw_response.create(**asked, input="more", previous_response_id=first.id)
        assert raw.headers["X-Pointsman-Instance"] == here
        again = raw.parse()
        assert again.previous_response_id == first.id
        assert again.usage is not None
        assert again.usage.input_tokens > first.usage.input_tokens
    events = list(client.responses.create(**asked, input="on", previous_response_id=first.id, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert events[-1].response.id.startswith(first.id[:25])
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id[:-1] + ("0" if first.id[-1] != "0" else "1"))
    plane.wait_idle()


def test_a_background_response_is_read_and_cancelled(client: openai.OpenAI, plane: ControlPlane) -> None:
    made = client.responses.create(model=SERVED_NAME, input="go on", background=True, max_output_tokens=3_000)
    assert made.status == "queued"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    plane.wait_idle()


def test_tools_are_called_on_every_api(claude: anthropic.Anthropic, client: openai.OpenAI, plane: ControlPlane) -> None:
    asked: dict[str, Any] = {"model": SERVED_NAME, "tools": [TOOL], **GREEDY}
    messages: list[Any] = [user("left or right?")]
    called = claude.messages.create(**asked, max_tokens=200, messages=messages, tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("turn", {"side": "left"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
    messages += [assistant(called.to_dict()["content"]), user([result])]
    headers = claude.messages.with_raw_response.create(**asked, max_tokens=5, messages=messages).headers
    decision = plane.finished_decision(headers["X-Pointsman-Decision"])
    assert decision.key_count > 0
    assert decision.input_tokens == decision.finished.prompt_tokens

    with claude.messages.stream(**asked, max_tokens=200, messages=messages[:1], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"side": "left"}]

    asked["tools"] = [FUNCTION]
    items: list[Any] = [user("left or right?")]
    made = client.responses.create(**asked, max_output_tokens=200, input=items, tool_choice="required")
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("turn", {"side": "left"})
    items += [item.to_dict() for item in made.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    headers = client.responses.with_raw_response.create(**asked, max_output_tokens=5, input=items).headers
    decision = plane.finished_decision(headers["X-Pointsman-Decision"])
    assert decision.key_count > 0
    assert decision.input_tokens == decision.finished.prompt_tokens


CHOICES: dict[str, dict[str, Any]] = {
    "named": {"tool_choice": {"type": "function", "function": {"name": "turn"}}},
    "required": {"tool_choice": "required"},
    # A text that a random model would never write by itself, and in which the engine's parser must find the call.
    "auto": {
        "tool_choice": "auto",
        "extra_body": {
            "structured_outputs": {
                "choice": ['<tool_call>\n{"name": "turn", "arguments": {"side": "left"}}\n</tool_call>']
            }
        },
    },
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_a_chats_tools_are_called_whole_and_in_a_stream(
    client: openai.OpenAI, plane: ControlPlane, choice: dict[str, Any]
) -> None:
    function = {key: value for key, value in FUNCTION.items() if key != "type"}
    messages: list[Any] = [user("left or right?")]
    asked: dict[str, Any] = {
        "model": SERVED_NAME,
        "max_tokens": 200,
        "temperature": 0,
        "tools": [{"type": "function", "function": function}],
        **choice,
    }
    (call,) = client.chat.completions.create(**asked, messages=messages).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("turn", {"side": "left"})
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(**asked, messages=messages, stream=True):
        (streamed,) = chunk.choices
        reason = streamed.finish_reason or reason
        for delta in streamed.delta.tool_calls or []:
            assert delta.function is not None
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, json.loads(arguments)) == ("turn", {"side": "left"})
    assert reason in ("tool_calls", "stop")
    # The call's result is sent back, and the prompt's tokens are counted exactly.
    messages.append({"role": "assistant", "content": "", "tool_calls": [call.to_dict()]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    raw = client.chat.completions.with_raw_response.create(
        **{**asked, "tool_choice": "none", "extra_body": {}, "max_tokens": 5}, messages=messages
    )
    decision = plane.finished_decision(raw.headers["X-Pointsman-Decision"])
    assert decision.key_count > 0
    assert decision.input_tokens == decision.finished.prompt_tokens


def test_responses_call_tools_in_a_stream(client: openai.OpenAI, plane: ControlPlane) -> None:
    asked: dict[str, Any] = {"model": SERVED_NAME, "max_output_tokens": 200, "input": "left or right?", **GREEDY}
    asked["tools"] = [FUNCTION]
    events = list(client.responses.create(**asked, tool_choice="required", stream=True))
    (event,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(event.arguments) == {"side": "left"}
    assert [item.type for item in events[-1].response.output] == ["function_call"]


def test_errors_reach_openais_client_on_responses_as_on_chat(client: openai.OpenAI, plane: ControlPlane) -> None:
    good: dict[str, Any] = {"model": SERVED_NAME, "max_output_tokens": 5, "input": "hi"}
    refused: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.NotFoundError, {"previous_response_id": "resp_unknown"}),
        (openai.BadRequestError, {"max_output_tokens": -1}),
        (openai.BadRequestError, {"input": fresh_words(4_200)}),
        # An error that only the engine detects.
        (openai.BadRequestError, {"input": [{"role": "robot", "content": "hi"}]}),
    ]
    for error, change in refused:
        for stream in (False, True):
            with pytest.raises(error) as seen:
                client.responses.create(**{**good, **change}, stream=stream)
            assert str(seen.value)
    assert client.responses.create(**good).status in ("completed", "incomplete")


def test_errors_reach_anthropics_client_as_its_own(claude: anthropic.Anthropic, engines: list[Engine]) -> None:
    good: dict[str, Any] = {"model": SERVED_NAME, "max_tokens": 5, "messages": [user("hi")]}
    refused: list[tuple[type[anthropic.APIStatusError], dict[str, Any]]] = [
        (anthropic.NotFoundError, {"model": "gpt-9"}),
        (anthropic.BadRequestError, {"max_tokens": 5_000}),
        (anthropic.BadRequestError, {"messages": [user(fresh_words(4_200))]}),
        # Errors that only the engine detects, in OpenAI's format and in Anthropic's.
        (anthropic.BadRequestError, {"messages": [{"role": "robot", "content": "hi"}]}),
        (anthropic.BadRequestError, {"tools": [{"name": "x"}]}),
    ]
    for error, change in refused:
        with pytest.raises(error) as seen:
            claude.messages.create(**{**good, **change})
        body = seen.value.body
        assert isinstance(body, dict)
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert not any(str(engine.port) in body["error"]["message"] for engine in engines)
    assert claude.messages.create(**good).usage.output_tokens == 5


def test_what_the_model_does_not_serve_is_said(client: openai.OpenAI, plane: ControlPlane) -> None:
    with pytest.raises(openai.NotFoundError, match="does not serve this API"):
        client.embeddings.create(model=SERVED_NAME, input="a")
    assert ask(plane.gateway_url + "/rerank", {"model": SERVED_NAME, "query": "a", "documents": ["b"]}).status == 404
    assert client.models.retrieve(SERVED_NAME).id == SERVED_NAME


def test_tokens_go_to_text_and_back(plane: ControlPlane) -> None:
    words = fresh_words(12)
    tokens = ask(plane.gateway_url + "/tokenize", {"model": SERVED_NAME, "prompt": words}).json()["tokens"]
    back = ask(plane.gateway_url + "/detokenize", {"model": SERVED_NAME, "tokens": tokens})
    assert back.json() == {"prompt": words}


def _prompt(usage: Any) -> int:
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return int(usage.input_tokens + cached)
