"""Whatever a template and a body are, rendering ends at its budget: by counted work, never by time."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.api import ApiRequestError, Endpoint, decode_body, parse
from pointsman_gateway.core.api.decode_body import MAX_DEPTH, decode_light
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.render_budget import (
    LIGHT_STEPS,
    LIGHT_TEXT,
    OverBudget,
    RenderLimits,
    Unrenderable,
    light_limits,
    metered,
    thread_limits,
    whole_text,
)
from tests.support.interpreter_steps import Steps

INDENTED = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"
CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson(indent=4) }}{% endfor %}{% endfor %}"
QUADRATIC = (
    "{% for m in messages %}{% for n in messages[loop.index:] %}{{ n.role[:0] }}{% endfor %}{{ m.content }}{% endfor %}"
)
ASK = [{"role": "user", "content": "a"}]
# Work that a rendering within LIMITS may be, in opcodes: a step is an iteration with all that a template of the test has in it.
LIMITS = RenderLimits(text=1_000, made=5_000, steps=200)
OPCODES = 400_000
PEAK_BYTES = 200_000


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, lambda: datetime(2026, 3, 4))


def nested(depth: int, inner: Any = "x") -> Any:
    """Return `depth` nested objects."""
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def tools(parameters: Any, count: int = 5) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}] * count


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": ASK, **fields}, separators=(",", ":")).encode()


def call_with(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    return [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]


@pytest.mark.parametrize("copies", [1, 5, 10])
@pytest.mark.parametrize(
    "fields",
    [{"tools": tools(nested(150), 1)}, {"response_format": nested(150)}, {"unknown": nested(150)}, {"unknown": "long"}],
    ids=["tools", "response_format", "unknown", "in a long body"],
)
def test_a_body_that_is_nested_too_deeply_is_refused(fields: dict[str, Any], copies: int) -> None:
    if fields == {"unknown": "long"}:
        fields = {"unknown": ["a" * 100_000, nested(600)]}
    raw = chat(**{name: [value] * copies for name, value in fields.items()})
    light = decode_light(raw)
    assert light is None
    with pytest.raises(ApiRequestError, match="nested deeper than 128") as refused:
        parse(Endpoint.CHAT, raw, light_body=light)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
def test_the_depth_is_counted_exactly(padding: int) -> None:
    text = {"text": "[" * 1_000 + "a" * padding}
    most, more = ({**text, "x": nested(depth)} for depth in (MAX_DEPTH - 1, MAX_DEPTH))
    assert decode_body.decode_body(json.dumps(most).encode()).body == most
    light = decode_light(json.dumps(most).encode())
    assert light is not None
    assert light.body == most
    assert decode_light(json.dumps(more).encode()) is None
    with pytest.raises(ApiRequestError):
        decode_body.decode_body(json.dumps(more).encode())


def test_arguments_of_tool_calls_are_counted_too() -> None:
    """They are JSON inside a string, which templates get decoded."""
    shown = template("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")
    assert shown.render({"messages": call_with(nested(MAX_DEPTH))}) == json.dumps(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 600, 100_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        body = {"messages": call_with({})}
        body["messages"][0]["tool_calls"][0]["function"]["arguments"] = arguments
        with pytest.raises(ApiRequestError, match="arguments of a tool call are nested deeper than 128"):
            shown.render(body)
    assert shown.render({"messages": call_with({"code": "[" * 1_000})}) == json.dumps({"code": "[" * 1_000})


@pytest.mark.parametrize(
    ("source", "body"),
    [
        (INDENTED, {"messages": ASK, "tools": tools(nested(MAX_DEPTH - 6, [0] * 3_000))}),
        (CALLS, {"messages": call_with(nested(MAX_DEPTH - 1, [0] * 15_000))}),
        ("{% for m in messages %}{{ messages }}{% endfor %}", {"messages": ASK * 300}),
        (
            "{% macro all() %}{% for m in messages %}{{ messages }}{% endfor %}{% endmacro %}{{ all() }}",
            {"messages": ASK * 300},
        ),
    ],
    ids=["tools", "arguments", "repeated", "in a macro"],
)
def test_a_prompt_ends_where_it_is_too_long(source: str, body: dict[str, Any]) -> None:
    assert len(template(source).render(body)) > 1_000_000
    with pytest.raises(OverBudget) as over:
        template(source).read(body, RenderLimits(text=500_000))
    assert over.value.characters > 500_000


@pytest.mark.parametrize("count", [100, 2_000])
def test_a_quadratic_template_leaves_the_event_loop(count: int) -> None:
    body, cheap = {"messages": ASK * count}, count * count < 2 * LIGHT_STEPS
    asked = light_limits(0, len(json.dumps(body)), 0)
    assert template(QUADRATIC).read(body, thread_limits(0, 0, 0)).text == "a" * count
    if cheap:
        assert template(QUADRATIC).read(body, asked).text == "a" * count
        return
    with pytest.raises(OverBudget) as over:
        template(QUADRATIC).read(body, asked)
    assert over.value.characters == 0  # it is not too long


@pytest.mark.parametrize("count", [1_000, 20_000])
def test_many_indented_values_leave_the_event_loop(count: int) -> None:
    """By their number, since each takes its time, and not by the length of their text."""
    body = {"messages": ASK, "tools": tools([0] * count, 1)}
    size = len(json.dumps(body))
    if count < LIGHT_STEPS:
        assert template(INDENTED).read(body, light_limits(0, size, 0)).text
        return
    with pytest.raises(OverBudget) as over:
        template(INDENTED).read(body, light_limits(0, size, 0))
    assert over.value.characters == 0
    assert template(INDENTED).read(body, thread_limits(0, size, 0)).text


def test_a_rendering_that_ends_early_keeps_no_values() -> None:
    """Not until garbage is collected either: there may be many."""

    class Values(list[int]):
        pass

    values = Values([0] * 1_000)
    body = {"messages": ASK, "tools": tools({"a": values}, 1)}
    gone = weakref.ref(values)
    del values
    gc.disable()
    try:
        with suppress(OverBudget):
            template(INDENTED).read(body, LIMITS)
        del body
        assert gone() is None
    finally:
        gc.enable()


# As Qwen 3's template, which asks at each message for the number of all, and drops what was thought before.
BACKWARDS = """{% for m in messages[::-1] %}{% set at = (messages|length - 1) - loop.index0 %}{{ at }}{% endfor %}
{% for m in messages %}{{ (m.content.split('</think>')|last).lstrip() }}{% endfor %}"""


@pytest.mark.parametrize(("light", "read"), [(True, 6), (False, 100)])
def test_the_event_loop_stops_at_a_prompt_for_which_there_is_no_memory(light: bool, read: int) -> None:
    """A thread goes on, and counts the characters for the client's error."""
    parts, seen = ["x" * 100] * 100, 0

    def rendered() -> Iterator[str]:
        nonlocal seen
        for part in parts:
            seen += 1
            yield part

    with metered(RenderLimits(memory=1_000, light=light)) as meter, pytest.raises(OverBudget) as over:
        whole_text(rendered(), meter)
    assert (seen, over.value.characters) == (read, 100 * read)


def test_the_length_of_a_list_costs_nothing() -> None:
    body = {"messages": ASK * 2_000}
    assert template(BACKWARDS).read(body, light_limits(0, len(json.dumps(body)), 0)).text


def test_a_text_that_the_template_drops_does_not_make_a_prompt_too_long() -> None:
    body = {"messages": [{"role": "assistant", "content": "a" * 5_000 + "</think>b"}]}
    assert template(BACKWARDS).read(body, thread_limits(4_096, 6_000, 0)).text.endswith("b")
    with pytest.raises(OverBudget) as over:
        template("{{ messages[0].content }}").read(body, thread_limits(4_096, 6_000, 0))
    assert over.value.characters > 4_096


def test_limits_are_those_of_the_context_and_of_the_body() -> None:
    assert thread_limits(0, 0, 0).text == thread_limits(1 << 40, 0, 0).text == 1 << 25
    assert thread_limits(4_096 * 16, 0, 0).text == light_limits(4_096 * 16, 100_000, 0).text == 4_096 * 16
    assert light_limits(0, 1_000, 0).text == LIGHT_TEXT
    small, dense, large = thread_limits(0, 1_000, 0), thread_limits(0, 1_000, 100_000), thread_limits(0, 100_000, 0)
    assert 0 < dense.memory < small.memory < large.memory
    assert light_limits(0, 1_000, 1_000).quick
    assert not light_limits(0, 1_000, dense.memory + 150_000).quick


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' + messages[0].content + 'b' ~ 1 ~ none }}{{ ('a' + 'b') + ('c' + messages[0].role) }}",
        "{{ [1] + [2] + messages[0:0] }}{{ (messages[0].content | safe) + '<' }}{{ '<' + (messages[0].content | safe) }}",
        "{{ 'ab' * 3 }}{{ 3 * [1] }}{{ 2 * 3 + 1.5 }}{{ messages[0].content * -1 }}",
        "{% for m in messages if m.role != 'x' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}",
        "{% for m in [[1, [2]], 3] recursive %}{{ m if m is number else loop(m) }}{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}{% set x %}{{ 1 }}{% endset %}{{ x ~ 'y' }}",
        "{{ messages | map(attribute='role') | join('+') }}{{ 'a' in messages[0].content }}{{ 'z' not in 'abc' }}",
        "{{ messages[::-1] | length }}{{ messages[0].content[1:] }}{{ 'x' if messages[1:] else 'y' }}",
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{% call f(1) %}{{ 'q' }}{% endcall %}",
        "{{ 'a' + missing }}",
        "{{ 1 + 'a' }}",
        "{{ [1] + 'ab' }}",
    ],
)
def test_what_is_counted_is_rendered_as_transformers_does(source: str) -> None:
    import jinja2.ext
    import jinja2.sandbox

    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    body = {"messages": [{"role": "user", "content": "a<"}, {"role": "assistant", "content": "b"}]}
    try:
        expected: str | None = plain.from_string(source).render(body)
    except Exception:
        expected = None
    try:
        rendered: str | None = template(source).render(body)
    except Unrenderable:
        rendered = None
    assert rendered == expected


LEAVES = st.sampled_from(
    [
        "{{ m.content }}",
        "{{ m | tojson }}",
        "{{ tools | tojson(indent=4) }}",
        "{{ [messages] | tojson(indent=1) | length }}",
        "{{ '<' + m.content + '>' }}",
        "{{ m.content ~ m.role }}",
        "{% set ns.text = ns.text + m.content %}",
        "{% set ns.text = ns.text ~ ns.text ~ 'a' %}",
        "{% set ns.all = ns.all + [m] + ns.all %}",
        "{{ ns.text }}",
        "{{ ns.all }}",
        "{% if m.content in ns.text %}yes{% endif %}",
        "{{ messages | map(attribute='content') | join('-') }}",
        "{% set ns.text = m.content.replace('a', 'bbb').split('b') | join('aa') %}",
        "{% set ns.text = (ns.text or 'a') * 9 %}",
        "{% set block %}{{ m.content }}{{ m.content }}{% endset %}{{ block }}",
        "{{ 'text' }}",
    ]
)
HEADS = [
    "messages",
    "messages[1:]",
    "messages[-loop_at:]",
    "messages | list",
    "ns.all",
    "messages if m.content",
    "range(90)",
]


def loop_over(head: str, inner: str) -> str:
    return f"{{% for m in {head} %}}{{% set loop_at = loop.index %}}{inner}{{% endfor %}}"


def macro_of(inner: str) -> str:
    return f"{{% macro shown(m, loop_at) %}}{inner}{{% endmacro %}}{{{{ shown(m, 2) }}}}{{{{ shown(m, 1) }}}}"


def around(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    loops = st.builds(loop_over, st.sampled_from(HEADS), inner)
    nested_loops = st.builds(loop_over, st.sampled_from(HEADS), loops)
    return loops | nested_loops | inner.map(macro_of) | st.lists(inner, min_size=2, max_size=3).map("".join)


TEMPLATES = around(st.recursive(LEAVES, around, max_leaves=6))
TREES = st.recursive(
    st.none() | st.integers() | st.text('a[{"\n', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(TEMPLATES, TREES, st.integers(0, 60), st.integers(1, 40), st.integers(0, 60))
def test_no_template_and_no_body_take_more_than_the_budget(
    source: str, tree: Any, depth: int, messages: int, length: int
) -> None:
    made = template("{% set ns = namespace(text='', all=[]) %}{% set m = messages[0] %}{% set loop_at = 1 %}" + source)
    turns = [{"role": "user", "content": "a" * length}] * messages
    body = {"messages": turns, "tools": tools(nested(depth, [tree] * 3))}
    made.parts_as_dicts = False
    assert_within(made, body)


def assert_within(made: ChatTemplate, body: dict[str, Any]) -> None:
    text, too_long = "", None
    tracemalloc.start()
    try:
        with Steps() as work:
            try:
                text = made.read(body, LIMITS).text
            except OverBudget as over:
                too_long = over.characters
            except Unrenderable:
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) <= LIMITS.text
    assert not too_long or too_long > LIMITS.text
    assert work.count < OPCODES
    assert peak < PEAK_BYTES
