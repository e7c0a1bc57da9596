"""Requests at the boundaries of vLLM's APIs, to be sent to an engine and through the gateway.

Each has a name, a path and what it changes of the path's plain body. `own` says that the gateway refuses the request itself,
before it is placed: with the engine's status, in words of its own. Where even the status differs `differs` has the gateway's and
why. Both are listed in services/gateway/README.md.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.engines.chat_client import ONE_MESSAGE
from tests.support.engines.model import words
from tests.support.engines.servers import SERVED_NAME

CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOKENIZE, COUNT = "/tokenize", "/v1/messages/count_tokens"
CONTEXT = 4_096  # tokens, of the test's engines
JSON = "application/json"
LEFT_OUT: Any = object()  # in place of a field's value: the plain body without it


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


HI = [user(" left or right?")]
PLAIN: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 6, "temperature": 0, "seed": 1},
    COMPLETION: {"prompt": " left or right?", "max_tokens": 6, "temperature": 0, "seed": 1},
    MESSAGES: {"messages": HI, "max_tokens": 6, "temperature": 0},
    RESPONSES: {"input": " left or right?", "max_output_tokens": 6, "temperature": 0, "store": False},
    TOKENIZE: {"prompt": " left or right?"},
    COUNT: {"messages": HI},
}
# The field that limits an answer.
LIMIT = {CHAT: "max_tokens", COMPLETION: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
GENERATING = tuple(LIMIT)


@dataclass(frozen=True)
class Differs:
    """The gateway's own status, and why it is another than the engine's."""

    status: int
    why: str


@dataclass(frozen=True)
class Case:
    """One request. vLLM's CPU build dies of a prompt's scores where it serves an adapter and computes more than one request: what
    may ask for them is sent `alone`."""

    name: str
    path: str
    body: bytes
    own: bool = False
    differs: Differs | None = None
    content_type: str = JSON
    streamed: bool = False
    alone: bool = False


NO_MODEL = Differs(400, "a gateway serves several models: a request names its own")
NOT_JSON = Differs(400, "RFC 8259 is what two parsers agree on; Python's reads more")
NOT_TEXT = Differs(400, "half a surrogate pair is no text, and nothing else between client and engine reads it alike")
MEDIA_TYPE = Differs(415, "known from the head: the body is not read")


def case(name: str, path: str, own: bool = False, differs: Differs | None = None, **fields: Any) -> Case:
    """A case whose body is the plain one with these fields."""
    body = {"model": SERVED_NAME, **PLAIN[path], **fields}
    kept = {key: value for key, value in body.items() if value is not LEFT_OUT}
    streamed, alone = bool(fields.get("stream")), not fields.keys().isdisjoint(("echo", "prompt_logprobs"))
    return Case(f"{path} {name}", path, json.dumps(kept).encode(), own, differs, streamed=streamed, alone=alone)


def field(name: str, value: Any) -> dict[str, Any]:
    """One field of a body, whose name is known when the test runs."""
    return {name: value}


def raw(
    name: str, path: str, body: bytes, *, own: bool = True, differs: Differs | None = None, type_: str = JSON
) -> Case:
    """A case that is no more than its bytes."""
    return Case(f"{path} {name}", path, body, own, differs, type_)


def both(name: str, path: str, **fields: Any) -> Iterable[Case]:
    """A case, and the same as a stream."""
    yield case(name, path, **fields)
    yield case(f"{name}, streamed", path, stream=True, **fields)


def prompt_of(path: str, tokens: int) -> dict[str, Any]:
    """The fields of a prompt with so many tokens."""
    text = words(tokens if path == COMPLETION else tokens - ONE_MESSAGE, seed=tokens)
    return (
        {"prompt": text} if path == COMPLETION else {"input": text} if path == RESPONSES else {"messages": [user(text)]}
    )


def lengths() -> Iterable[Case]:
    """The context nearly full, and limits of every kind."""
    for path, limit in LIMIT.items():
        nearly, last = prompt_of(path, CONTEXT - 40), prompt_of(path, CONTEXT - 1)
        yield from both("40 tokens of room, many more asked for", path, **nearly, **field(limit, 3_000))
        yield case("40 tokens of room, as many as the context asked for", path, **nearly, **field(limit, CONTEXT))
        too_many = field(limit, CONTEXT + 1)
        yield case("40 tokens of room, more than the context asked for", path, own=True, **nearly, **too_many)
        if path != MESSAGES:
            yield case("7 tokens of room, no limit", path, **prompt_of(path, CONTEXT - 7), **field(limit, LEFT_OUT))
        yield from both("1 token of room", path, **last)
        for more in (0, 1, 700):
            yield case(f"{more} tokens too long", path, own=True, **prompt_of(path, CONTEXT + more))
        for value, own in (
            (0, path in (MESSAGES, RESPONSES)),
            (-1, True),
            (10**9, True),
            (10**30, True),
            ("many", True),
            ("5", False),
            (5.0, False),
            (5.5, True),
            (True, False),
            ([5], True),
        ):
            yield case(f"limit {json.dumps(value)}", path, own=own, **field(limit, value))
        yield case("limit left out", path, **(prompt_of(path, CONTEXT - 7) | {limit: LEFT_OUT}))
        yield case("limit null", path, **(prompt_of(path, CONTEXT - 7) | {limit: None}))
    for first, second in ((3, 6), (6, 3), (None, 3), (0, 3)):
        yield case(
            f"max_completion_tokens {first} beside max_tokens {second}",
            CHAT,
            max_completion_tokens=first,
            max_tokens=second,
        )
    for path in (CHAT, COMPLETION):
        yield case("min_tokens below", path, min_tokens=3)
        yield case("min_tokens above", path, min_tokens=7)
        yield case("truncated", path, truncate_prompt_tokens=4)
        yield case("echo", path, echo=True)
        yield case("echo of nothing more", path, echo=True, max_tokens=0)
        yield case(
            "echo of nothing more, 1 token of room", path, echo=True, max_tokens=0, **prompt_of(path, CONTEXT - 1)
        )
    yield case(
        "echo of nothing more, no room", COMPLETION, own=True, echo=True, max_tokens=0, **prompt_of(COMPLETION, CONTEXT)
    )
    yield case("echo with logprobs", COMPLETION, echo=True, logprobs=1)
    yield case("echo with logprobs, no more", COMPLETION, echo=True, logprobs=1, max_tokens=0)
    yield case("echo, streamed", COMPLETION, echo=True, stream=True)


SIDE = {
    "type": "object",
    "properties": {"side": {"enum": ["left"]}},
    "required": ["side"],
    "additionalProperties": False,
}
FUNCTION = {"name": "turn", "description": "Set the points.", "parameters": SIDE, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat_tools() -> Iterable[Case]:
    """Tools of a chat."""
    tools: dict[str, Any] = {"tools": [TOOL], "max_tokens": 60}
    yield from both("named tool", CHAT, **tools, tool_choice=named("turn"))
    yield from both("required tool", CHAT, **tools, tool_choice="required")
    yield from both("no tool", CHAT, **tools | {"max_tokens": 6}, tool_choice="none")
    yield from both("tool if wanted", CHAT, **tools | {"max_tokens": 6}, tool_choice="auto")
    yield case("tools without a choice", CHAT, tools=[TOOL], parallel_tool_calls=False)
    called = {
        "structured_outputs": {"choice": ['<tool_call>\n{"name": "turn", "arguments": {"side": "left"}}\n</tool_call>']}
    }
    yield from both("tool called of its own accord", CHAT, **tools, tool_choice="auto", **called)
    yield case("unknown tool named", CHAT, **tools, tool_choice=named("stop"))
    yield case("choice without tools", CHAT, tool_choice="auto")
    yield case("named choice without tools", CHAT, tool_choice=named("turn"))
    yield case("no choice, null tools", CHAT, tools=None, tool_choice="none")
    yield case("empty tools", CHAT, tools=[])
    yield case("tools no list", CHAT, own=True, tools={"turn": TOOL})
    yield case("unknown choice", CHAT, **tools, tool_choice="sometimes")
    yield case("choice without function", CHAT, **tools, tool_choice={"type": "function"})
    yield case("tool without function", CHAT, tools=[{"type": "function"}])
    yield case("tool without name", CHAT, tools=[{"type": "function", "function": {"parameters": SIDE}}])
    yield case("tool of another type", CHAT, tools=[{**TOOL, "type": "custom"}])
    odd = {**TOOL, "function": {**FUNCTION, "name": "turn it, now!"}}
    yield case("tool with an odd name", CHAT, tools=[odd], tool_choice=named("turn it, now!"), max_tokens=60)
    yield case(
        "tool with a broken schema",
        CHAT,
        tools=[{**TOOL, "function": {**FUNCTION, "parameters": {"type": 5}}}],
        tool_choice="required",
    )
    turns = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "turn", "arguments": '{"side": "left"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": " done"},
    ]
    yield from both("result of a tool", CHAT, messages=turns, tools=[TOOL])
    broken = json.loads(json.dumps(turns))
    broken[1]["tool_calls"][0]["function"]["arguments"] = "{"
    yield case("arguments that are no JSON", CHAT, messages=broken, tools=[TOOL])


def other_tools() -> Iterable[Case]:
    """Tools of messages and responses."""
    tool = {"name": "turn", "description": "Set the points.", "input_schema": SIDE, "strict": True}
    tools: dict[str, Any] = {"tools": [tool], "max_tokens": 60}
    yield from both("tool named", MESSAGES, **tools, tool_choice={"type": "tool", "name": "turn"})
    yield from both("any tool", MESSAGES, **tools, tool_choice={"type": "any"})
    yield case(
        "tool if wanted",
        MESSAGES,
        **tools | {"max_tokens": 6},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    yield case("no tool", MESSAGES, **tools | {"max_tokens": 6}, tool_choice={"type": "none"})
    yield case("unknown tool named", MESSAGES, **tools, tool_choice={"type": "tool", "name": "stop"})
    yield case("choice without name", MESSAGES, **tools, tool_choice={"type": "tool"})
    yield case("choice without tools", MESSAGES, tool_choice={"type": "any"})
    yield case("tool without schema", MESSAGES, tools=[{"name": "turn"}])
    yield case("choice as text", MESSAGES, own=True, **tools, tool_choice="any")
    use = {"type": "tool_use", "id": "t1", "name": "turn", "input": {"side": "left"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": " done"}],
        "cache_control": {"type": "ephemeral"},
    }
    turns = [*HI, {"role": "assistant", "content": [use]}, user([result])]
    yield from both("result of a tool", MESSAGES, messages=turns, tools=[tool])
    function = {"type": "function", **FUNCTION}
    tools = {"tools": [function], "max_output_tokens": 60}
    yield from both("required tool", RESPONSES, **tools, tool_choice="required")
    yield from both("tool named", RESPONSES, **tools, tool_choice={"type": "function", "name": "turn"})
    yield case("tool if wanted", RESPONSES, **tools | {"max_output_tokens": 6}, parallel_tool_calls=False)
    yield case("unknown tool named", RESPONSES, **tools, tool_choice={"type": "function", "name": "stop"})
    yield case("choice without tools", RESPONSES, tool_choice="required")
    yield case("tool without name", RESPONSES, tools=[{"type": "function"}])
    yield case("tool of no type", RESPONSES, tools=[{"name": "turn"}])
    custom = {"type": "custom", "name": "patch", "description": "Edit."}
    yield case("tool that takes a text", RESPONSES, tools=[custom])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    yield case("tool with a grammar", RESPONSES, tools=[{**custom, "format": grammar}])
    namespace = {"type": "namespace", "name": "agents", "description": "", "tools": [function]}
    yield from both("tool of a namespace", RESPONSES, tools=[namespace], tool_choice="required", max_output_tokens=60)
    yield case("hosted tool", RESPONSES, tools=[{"type": "web_search"}])
    items = [
        *HI,
        {"type": "function_call", "call_id": "c1", "name": "turn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": " done"},
    ]
    yield from both("result of a tool", RESPONSES, input=items, tools=[function])


def formats() -> Iterable[Case]:
    """Answers in a given form, reasoning and scores."""
    schema = {"type": "json_schema", "json_schema": {"name": "side", "schema": SIDE, "strict": True}}
    for path in (CHAT, COMPLETION):
        yield from both("schema", path, response_format=schema, max_tokens=60)
        yield case("any JSON", path, response_format={"type": "json_object"})
        yield case("text", path, response_format={"type": "text"})
        yield case("unknown format", path, response_format={"type": "yaml"})
        yield case("schema without schema", path, response_format={"type": "json_schema"})
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        yield case("schema that is none", path, response_format=wrong)
        for name, constraint in {
            "regex": {"regex": "[ab]{3}"},
            "broken regex": {"regex": "("},
            "choice": {"choice": ["left", "right"]},
            "empty choice": {"choice": []},
            "grammar": {"grammar": 'root ::= "yes"'},
            "broken grammar": {"grammar": "root ::="},
            "two constraints": {"regex": "a", "choice": ["a"]},
            "unknown constraint": {"rhyme": True},
        }.items():
            yield case(name, path, structured_outputs=constraint, max_tokens=60)
        yield case("no object as constraint", path, structured_outputs="regex")
        # Several greedy answers vLLM refuses; at random its CPU build dies of a seed where a prompt is computed in two steps.
        several = {"temperature": 0.9, "seed": LEFT_OUT, "structured_outputs": {"choice": ["x"]}}
        yield from both("n 2", path, n=2, **several)
        for n, own in ((1, False), (0, True), (-1, True), (None, False), ("2", False), (10**10, True)):
            yield case(f"n {json.dumps(n)}", path, own=own, n=n, max_tokens=2)
        yield case("n 200", path, n=200, **several)
        yield case("n 2, greedy", path, n=2)
        yield case("beams", path, use_beam_search=True, n=2, max_tokens=3)
        for name, stop in {
            "text": " r",
            "list": [" r", " l"],
            "empty": "",
            "empty list": [],
            "null": None,
            "number": 5,
            "many": ["x"] * 20,
        }.items():
            yield case(f"stop {name}", path, stop=stop)
        yield case("stop tokens", path, stop_token_ids=[300, 301, 302])
        yield case("stop tokens as text", path, stop_token_ids="300")
        yield case("prompt logprobs", path, prompt_logprobs=1)
        yield case("prompt logprobs, streamed", path, prompt_logprobs=1, stream=True)
        yield case("token ids", path, return_token_ids=True)
        yield case("bad words", path, bad_words=[" "])
        yield case("logit bias", path, logit_bias={"300": 100})
        yield case("logit bias of no token", path, logit_bias={"x": 1})
    for value in (True, "true", "yes", None, 1):
        yield from both(f"logprobs {json.dumps(value)}", CHAT, logprobs=value)
    for top in (0, 3, 1_000, -2, "3", None):
        yield case(f"top_logprobs {json.dumps(top)}", CHAT, logprobs=True, top_logprobs=top)
    yield case("top_logprobs alone", CHAT, top_logprobs=3)
    for top in (0, 3, 1_000, -2, "3", True):
        yield case(f"logprobs {json.dumps(top)}", COMPLETION, logprobs=top)
    for effort in ("low", "none", "extreme", None):
        yield case(f"effort {effort}", CHAT, reasoning_effort=effort)
        yield case(f"effort {effort}", RESPONSES, reasoning={"effort": effort})
    for path in (CHAT, RESPONSES):
        yield case("reasoning left out", path, include_reasoning=False)
        yield case("reasoning left out in words", path, include_reasoning="perhaps")
    yield case("thinking budget", CHAT, thinking_token_budget=5)
    yield case("template arguments", CHAT, chat_template_kwargs={"enable_thinking": False})
    yield case("template arguments no object", CHAT, own=True, chat_template_kwargs="x")
    yield case("template of its own", CHAT, chat_template="{{ messages }}")
    yield case("reasoning as text", RESPONSES, own=True, reasoning="high")
    for name, thinking in {
        "enabled": {"type": "enabled", "budget_tokens": 1_024},
        "small budget": {"type": "enabled", "budget_tokens": 5},
        "disabled": {"type": "disabled"},
        "adaptive": {"type": "adaptive"},
        "unknown": {"type": "deep"},
    }.items():
        yield case(
            f"thinking {name}", MESSAGES, thinking=thinking, max_tokens=1_030 if name == "enabled" else 6, **SHORT
        )
        yield case(f"thinking {name}", COUNT, thinking=thinking)
    yield case("schema", MESSAGES, output_config={"format": {"type": "json_schema", "schema": SIDE}}, max_tokens=60)
    yield case(
        "schema",
        RESPONSES,
        text={"format": {"type": "json_schema", "name": "side", "schema": SIDE}},
        max_output_tokens=60,
    )
    yield case("logprobs", RESPONSES, include=["message.output_text.logprobs"], top_logprobs=2)
    yield case("unknown include", RESPONSES, include=["everything"])
    yield case("stop sequences", MESSAGES, stop_sequences=[" r"])
    yield case("stop sequences as text", MESSAGES, own=True, stop_sequences=" r")


SHORT: Mapping[str, Any] = {"stop_sequences": [" "]}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()


def image(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " left?"}]


def contents() -> Iterable[Case]:
    """Messages of every kind, media for a model that sees none, and prompts that are none."""
    urls = {
        "image": f"data:image/png;base64,{PIXEL}",
        "image that is none": "data:image/png;base64,AAAA",
        "image in no base64": "data:image/png,<png>",
        "image in bad base64": "data:image/png;base64,?",
        "image elsewhere": "http://127.0.0.1:9/x.png",
        "image in a file": "file:///etc/passwd",
        "image without URL": "",
    }
    for name, url in urls.items():
        yield case(name, CHAT, messages=[user(image(url))])
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    yield case("image", MESSAGES, messages=[user([{"type": "image", "source": source}])])
    yield case("image", RESPONSES, input=[user([{"type": "input_image", "image_url": urls["image"]}])])
    for path in (CHAT, MESSAGES, COUNT, TOKENIZE):
        without = {"prompt": LEFT_OUT} if path == TOKENIZE else {}
        for name, messages, own in (
            ("no message", [], True),
            ("messages null", None, True),
            ("messages as text", "hi", True),
            ("message as text", ["hi"], True),
            ("message without role", [{"content": "hi"}], True),
            ("unknown role", [{"role": "robot", "content": " hi"}], False),
            ("parts", [user([{"type": "text", "text": " one"}, {"type": "text", "text": " two"}])], False),
            ("no part", [user([])], False),
            ("unknown part", [user([{"type": "smell", "smell": "x"}])], False),
            ("part without text", [user([{"type": "text"}])], False),
            ("content a number", [user(5)], True),
            ("content null", [user(None)], path in (MESSAGES, COUNT)),
            ("content left out", [{"role": "user"}], path in (MESSAGES, COUNT)),
            ("answer begun", [*HI, {"role": "assistant", "content": " left"}], False),
            ("system late", [*HI, {"role": "system", "content": " brief"}, *HI], False),
        ):
            yield case(name, path, own=own, messages=messages, **without)
        yield case("messages left out", path, own=True, messages=LEFT_OUT, **without)
    blocks = [
        {"type": "text", "text": " Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " brief."},
    ]
    for path in (MESSAGES, COUNT):
        yield case("system in blocks", path, system=blocks)
        yield case("system a number", path, own=True, system=5)
        yield case("a system prompt alone", path, system=blocks, messages=[])
        yield case("an empty system prompt alone", path, system="", messages=[], own=True)
    yield case("developer", CHAT, messages=[{"role": "developer", "content": " brief"}, *HI])
    yield case(
        "continued",
        CHAT,
        messages=[*HI, {"role": "assistant", "content": " left"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    yield case("continued and begun", CHAT, messages=HI, continue_final_message=True, add_generation_prompt=True)
    for name, prompt, own in (
        ("texts", [" one", " two"], False),
        ("token ids", [300, 301], False),
        ("several token ids", [[300], [301, 302]], False),
        ("empty", "", True),
        ("no texts", [], True),
        ("empty text", [""], True),
        ("no token ids", [[]], True),
        ("null", None, True),
        ("a number", 5, True),
        ("negative ids", [-1], True),
        ("unknown ids", [10**6], False),
        ("mixed", [" a", 5], True),
    ):
        yield case(f"prompt {name}", COMPLETION, own=own, prompt=prompt)
    yield case("suffix", COMPLETION, suffix=" end")
    for name, given, own in (
        ("empty", "", False),
        ("no item", [], False),
        ("null", None, True),
        ("texts", ["hi"], True),
        ("a number", 5, True),
        ("unknown role", [{"role": "robot", "content": "hi"}], False),
        ("unknown item", [{"type": "smell"}], False),
        ("parts", [user([{"type": "input_text", "text": " one"}, {"type": "input_text", "text": " two"}])], False),
        ("developer", [{"role": "developer", "content": " brief"}, *HI], False),
    ):
        yield case(f"input {name}", RESPONSES, own=own, input=given)
    yield case("input left out", RESPONSES, own=True, input=LEFT_OUT)
    yield case("instructions", RESPONSES, instructions=" Be brief.")
    yield case("unknown response", RESPONSES, own=True, previous_response_id="resp_1")
    yield case("prompt as list", TOKENIZE, own=True, prompt=["hi"])
    yield case("strings of tokens", TOKENIZE, return_token_strs=True)
    yield case("prompt too long", TOKENIZE, prompt=words(CONTEXT + 10, 1))


def bodies() -> Iterable[Case]:
    """JSON of every kind, unknown models and fields, streams."""
    for path, plain in PLAIN.items():
        whole = {"model": SERVED_NAME, **plain}
        text = json.dumps(whole).encode()
        yield case("plain", path)
        yield case("no model", path, own=True, differs=None if path in (MESSAGES, COUNT) else NO_MODEL, model=LEFT_OUT)
        yield case("model null", path, own=True, differs=None if path in (MESSAGES, COUNT) else NO_MODEL, model=None)
        yield case("model empty", path, own=True, differs=None if path in (MESSAGES, COUNT) else NO_MODEL, model="")
        yield case("model a number", path, own=True, model=5)
        yield case("unknown model", path, own=True, model="gpt-9")
        yield case(
            "unknown fields", path, metadata={"a": "b"}, zebra=[1, {"x": None}], betas=["x"], service_tier="auto"
        )
        for name, body in {
            "cut off": text[:-1],
            "with more behind it": text + b"{}",
            "a list": b"[1, 2]",
            "a text": b'"hi"',
            "null": b"null",
            "empty": b"",
            "blank": b" ",
            "not UTF-8": text.replace(b"right", b"\xff"),
            "nested": text[:-1] + b', "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
            "with a comma too many": text[:-1] + b",}",
            "in single quotes": b"{'model': 'tiny'}",
        }.items():
            yield raw(name, path, body)
        yield raw("twice the same name", path, b'{"model": "gpt-9", ' + text[1:], own=False)
        yield raw("blanks around", path, b" \r\n" + text + b"\t\n", own=False)
        yield raw("a number of 40 digits", path, text[:-1] + b', "x": ' + b"9" * 40 + b"}", own=False)
        yield raw("a number of 5,000 digits", path, text[:-1] + b', "x": ' + b"9" * 5_000 + b"}")
        yield raw("behind a byte order mark", path, b"\xef\xbb\xbf" + text, differs=NOT_JSON)
        yield raw("NaN", path, text[:-1] + b', "x": NaN}', differs=NOT_JSON)
        yield raw("half a surrogate pair", path, text[:-1] + b', "x": "\\ud800"}', differs=NOT_TEXT)
        yield raw("as text", path, text, type_="text/plain", differs=MEDIA_TYPE)
        yield raw("as a form", path, text, type_="application/x-www-form-urlencoded", differs=MEDIA_TYPE)
        yield raw("with a character set", path, text, type_="Application/JSON; charset=utf-8", own=False)
    for path in GENERATING:
        yield case("streamed", path, stream=True)
        for value in (None, False, "true", 1):
            yield case(f"stream {json.dumps(value)}", path, stream=value)
        wrong: tuple[Any, ...] = ("perhaps", 2, [])
        for value in wrong:
            yield case(f"stream {json.dumps(value)}", path, own=True, stream=value)
        for name, value in (("temperature", "0"), ("top_p", "1"), ("top_k", "1")):
            yield case(f"{name} in words", path, own=True, **field(name, "hot"))
            yield case(f"{name} as text", path, **field(name, value))
            yield case(f"{name} -5", path, **field(name, -5))
        yield case("cache salt a number", path, own=True, cache_salt=5)
        yield case("cache salt empty", path, cache_salt="")
        yield case("session a number", path, own=path != MESSAGES, session_id=5)
        yield case("cache key", path, prompt_cache_key="k")
    for path in (CHAT, COMPLETION):
        for name, options in {
            "null": None,
            "empty": {},
            "usage": {"include_usage": True},
            "no usage": {"include_usage": False},
            "usage null": {"include_usage": None},
            "usage as text": {"include_usage": "true"},
            "all along": {"include_usage": True, "continuous_usage_stats": True},
            "all along without usage": {"continuous_usage_stats": True},
            "unknown": {"zebra": 1},
        }.items():
            yield case(f"stream options {name}", path, stream=True, stream_options=options)
        yield case("stream options wrong", path, stream=True, stream_options={"include_usage": "perhaps"})
        yield case("stream options as text", path, own=True, stream=True, stream_options="usage")
        yield case("stream options without a stream", path, stream_options={"include_usage": True})
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"):
            yield case(f"{name} 9", path, **field(name, 9))
        for seed, own in ((2**70, False), ("x", True), (None, False)):
            yield case(f"seed {seed}", path, own=own, seed=seed)
        yield case("ignore_eos null", path, ignore_eos=None)
        yield case("user a number", path, own=True, user=5)
    yield case("stored", RESPONSES, store=True)
    yield case("background, not stored", RESPONSES, background=True)
    yield case("truncation auto", RESPONSES, truncation="auto")
    yield case("unknown truncation", RESPONSES, truncation="some")


CASES = [*lengths(), *chat_tools(), *other_tools(), *formats(), *contents(), *bodies()]
assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
