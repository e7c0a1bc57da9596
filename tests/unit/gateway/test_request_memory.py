"""A request takes at most RATIO times the memory of its body, whatever its values and the model's template: by tracemalloc.

Bodies of less than SMALL_BODY take at most as much as one of SMALL_BODY. What the tokenizer's library takes while it encodes is
not counted.
"""

from __future__ import annotations

import gc
import json
import tracemalloc
from contextlib import nullcontext, suppress
from datetime import datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.api import ApiCall, ApiRequestError, Endpoint, parse
from pointsman_gateway.core.api.decode_body import RATIO, SMALL_BODY, decode_light
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer, PendingPrompt
from pointsman_gateway.core.tokens.render_budget import OverBudget, Unrenderable
from tests.support import tokenizer_families

# Values that take much memory, or much of a prompt, for their bytes.
DENSE = [
    "{}",
    "[]",
    "[0]",
    '{"a":0}',
    '{"a":{}}',
    '{"a":"b"}',
    "[[[[]]]]",
    "1.5",
    "7",
    "999",
    '"a"',
    '"ab"',
    '"é"',
    "null",
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}",
    "parts": "{% for m in messages %}{{ m.role }}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endfor %}",
    "indented": "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}{{ messages[0].content }}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}",
    "macro": "{% macro all(x) %}{% for i in x or [] %}{{ i }}{% endfor %}{% endmacro %}{{ all(tools) }}{{ all(messages) }}",
    "whole": "{{ tools | tojson }}{{ messages | tojson }}",
}
SHORT = '{"role":"user","content":"a"}'


def many(unit: str, size: int) -> str:
    return ",".join([unit] * (size // (len(unit.encode()) + 1)))


def tool(parameters: str) -> str:
    return f'{{"type":"function","function":{{"name":"f","parameters":{{"a":{parameters}}}}}}}'


def fields_of(way: str, unit: str, size: int, depth: int) -> str:
    """Return the fields of a chat of about `size` bytes, in which `unit` is a `way` many times."""
    deep = '{"a":' * depth + f"[{many(unit, size)}]" + "}" * depth
    match way:
        case "one tool":
            return f'"messages":[{SHORT}],"tools":[{tool(deep)}]'
        case "tools":
            return f'"messages":[{SHORT}],"tools":[{many(tool(unit), size)}]'
        case "names":
            names = ",".join(f'"{at:x}":{unit}' for at in range(size // (len(unit.encode()) + 8)))
            return f'"messages":[{SHORT}],"tools":[{tool(f"{{{names}}}")}]'
        case "unknown":
            return f'"messages":[{SHORT}],"x":{deep}'
        case "arguments":
            function = {"name": "f", "arguments": f'{{"a":[{many(unit, size)}]}}'}
            call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
            return f'"messages":[{json.dumps(call)}]'
        case "text parts":
            return (
                f'"messages":[{{"role":"user","content":[{many(json.dumps({"type": "text", "text": unit}), size)}]}}]'
            )
        case "wide text":
            return f'"messages":[{SHORT},{{"role":"user","content":"\N{GRINNING FACE}{"a" * size}"}}]'
        case "escaped text":
            return f'"messages":[{SHORT},{{"role":"user","content":"\\ud83d\\ude00{"a" * size}"}}]'
        case _:
            return f'"messages":[{many(json.dumps({"role": "user", "content": unit}), size)}]'


WAYS = ["one tool", "tools", "names", "unknown", "arguments", "text parts", "wide text", "escaped text", "messages"]


@pytest.fixture(scope="module")
def models() -> dict[str, ModelTokenizer]:
    tokenizer = tokenizer_families.qwen()
    made = {name: ChatTemplate(source, {}, lambda: datetime(2026, 3, 4)) for name, source in TEMPLATES.items()}
    return {name: ModelTokenizer(tokenizer, template, None) for name, template in made.items()}


def prepared(raw: bytes, endpoint: Endpoint, model: ModelTokenizer) -> tuple[ApiCall, PendingPrompt]:
    """Do with a body what the gateway does before it tokenises the prompt; a light one is tried as such first."""
    call = parse(endpoint, raw, light_body=decode_light(raw))
    if call.light:
        with suppress(OverBudget):
            return call, model.prepare(call, light=True)
    return call, model.prepare(call)


def peak_of(raw: bytes, endpoint: Endpoint, model: ModelTokenizer) -> int:
    """Return the most bytes of memory that the body takes beside its own."""
    gc.collect()
    tracemalloc.start()
    try:
        with suppress(ApiRequestError, Unrenderable):
            prepared(raw, endpoint, model)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(WAYS),
    st.lists(st.sampled_from(DENSE), min_size=1, max_size=3).map(",".join),
    st.integers(0, 110),
    st.sampled_from([1_000, 20_000, SMALL_BODY, 60_000, 150_000]),
    st.sampled_from(sorted(TEMPLATES)),
    st.sampled_from([Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES]),
)
@example("one tool", "7", 100, 30_000, "indented", Endpoint.CHAT)
@example("names", '{"a":"b"}', 0, 100_000, "whole", Endpoint.CHAT)
@example("names", '"a"', 0, 100_000, "whole", Endpoint.CHAT)
@example("tools", "999", 0, 150_000, "whole", Endpoint.CHAT)
@example("unknown", "{}", 0, 150_000, "plain", Endpoint.CHAT)
@example("arguments", "[0]", 0, 60_000, "calls", Endpoint.CHAT)
@example("messages", "a", 0, 60_000, "parts", Endpoint.CHAT)
@example("text parts", "a", 0, 60_000, "parts", Endpoint.MESSAGES)
@example("messages", "a", 0, 150_000, "plain", Endpoint.RESPONSES)
@example("messages", "7", 0, SMALL_BODY, "macro", Endpoint.MESSAGES)
@example("escaped text", "a", 0, 150_000, "whole", Endpoint.CHAT)
def test_a_request_takes_at_most_20_times_the_memory_of_its_body(
    models: dict[str, ModelTokenizer], way: str, unit: str, depth: int, size: int, template: str, endpoint: Endpoint
) -> None:
    if way in ("text parts", "messages") or ("," in unit and way in ("tools", "names")):
        unit = unit.partition(",")[0].strip('"')
    fields = fields_of(way, unit, size, depth)
    if endpoint is Endpoint.RESPONSES:
        fields = fields.replace('"messages":', '"input":', 1)
    raw = f'{{"model":"m","max_tokens":9,{fields}}}'.encode()
    models[template].chat({"messages": [{"role": "user", "content": "a"}]})  # what is made once
    most = RATIO * max(len(raw), SMALL_BODY) - len(raw)
    # What a process makes once may be counted with the first request that needs it.
    assert any(peak_of(raw, endpoint, models[template]) <= most for _ in range(2))


def test_no_long_piece_is_encoded(models: dict[str, ModelTokenizer]) -> None:
    """The library takes a hundred times its memory and more."""
    most = models["plain"].encoder.most_chars
    for length in (most, most + 1):
        raw = json.dumps({"model": "m", "prompt": "a" * length}).encode()
        call = parse(Endpoint.COMPLETION, raw, light_body=decode_light(raw))
        with nullcontext() if length == most else pytest.raises(Unrenderable):
            assert models["plain"].prepare(call).longest == length


def schema_of_an_agent(tools: int) -> list[dict[str, object]]:
    """Return tools as agents' programs have them: an object for each 60 bytes."""
    properties = {f"field_{at}": {"type": "string", "description": "What it is."} for at in range(8)}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": "read", "description": "Reads a file. " * 10, "parameters": parameters}
    return [{"type": "function", "function": function}] * tools


@pytest.mark.parametrize("template", ["indented", "whole", "parts"])
@pytest.mark.parametrize(("turns", "tools"), [(2, 4), (2, 60), (400, 60), (3_000, 10)])
def test_what_agents_send_is_rendered(models: dict[str, ModelTokenizer], template: str, turns: int, tools: int) -> None:
    """With and without an emoji, which makes each character of a text take four bytes."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "read", "arguments": json.dumps({"path": ["a.py"] * 9})},
    }
    turn = [
        {"role": "user", "content": "Set the points. " * 8},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for text in ("plain", "\N{GRINNING FACE}"):
        messages = [*turn * (turns // 2), {"role": "user", "content": text}]
        body = {"model": "m", "messages": messages, "tools": schema_of_an_agent(tools)}
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        assert prepared(raw, Endpoint.CHAT, models[template])[1].longest
