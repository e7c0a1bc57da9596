"""Tokens and chat templates: what the engine would see, or Unrenderable, never a guess."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pointsman_gateway.core.api import ApiRequestError, Endpoint, parse
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import PendingPrompt
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.io.tokenizer_files import TokenizerNotFound, find_tokenizer, load_tokenizer
from tests.support.tiny_tokenizer import CHATML, make_tokenizer


def template(source: str, **specials: str) -> ChatTemplate:
    return ChatTemplate(source, specials, lambda: datetime(2026, 3, 4))


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f"}}


def test_chatml_is_rendered_as_models_expect_it() -> None:
    messages = [{"role": "system", "content": "S"}, *user("U")["messages"]]
    assert template(CHATML).render({"messages": messages}) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_written_in_the_engines_order_with_null_for_what_is_absent() -> None:
    text = template("{{ tools[0] | tojson }}").render(user("x", tools=[TOOL]))
    assert (
        text == '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}}}'
    )


@pytest.mark.parametrize(
    ("form", "clock", "steady"),
    [
        ("%d %b %Y", "12:00", True),
        ("%d %b %Y", "23:45", True),
        ("%d %b %Y", "23:55", False),
        ("%d %b %Y", "00:05", False),
        ("%d %b %Y", "00:15", True),
        ("%H", "12:30", True),
        ("%H", "12:55", False),
        ("%p", "11:55", False),
        ("%H:%M", "12:30", False),
        ("%M", "12:30", False),
        ("%S", "12:30", False),
        ("%f", "12:30", False),
        ("%s", "12:30", False),
    ],
)
def test_a_prompt_that_shows_the_clock_is_steady_while_the_clock_shows_the_same(
    form: str, clock: str, steady: bool
) -> None:
    now = datetime.fromisoformat(f"2026-03-04T{clock}:30")
    made = ChatTemplate("{% if messages[0].content == 'when' %}{{ strftime_now(form) }}{% endif %}", {}, lambda: now)
    assert made.read(user("when", chat_template_kwargs={"form": form})).steady is steady
    # A prompt counts as steady if it did not use the clock itself, whatever an earlier one did.
    assert made.read(user("x", chat_template_kwargs={"form": form})).steady


def test_a_clock_that_is_asked_in_a_macro_is_seen() -> None:
    asked = "{% macro today(m) %}{{ strftime_now('%M') }}{% endmacro %}{{ today(messages) }}"
    assert not template(asked).read(user("x")).steady


def test_arguments_of_tool_calls_become_objects() -> None:
    def call(arguments: Any) -> str:
        tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
        return template("{{ messages[0].tool_calls[0].function.arguments | tojson }}").render({"messages": [message]})

    assert call('{"b": 1, "a": "ü"}') == '{"b": 1, "a": "ü"}'
    assert [call(""), call("not json"), call("[1]"), call(None)] == ["{}"] * 4


def test_tool_calls_are_written_in_the_engines_order() -> None:
    tool_call = {"type": "function", "x": 1, "function": {"name": "f", "arguments": '{"k": 1}'}, "id": "1"}
    text = template("{{ messages[0].tool_calls | tojson }}").render(
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [tool_call]}]}
    )
    assert text == '[{"id": "1", "function": {"arguments": {"k": 1}, "name": "f"}, "type": "function"}]'


@pytest.mark.parametrize(
    ("source", "as_dicts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True),
        (
            "{% macro r(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ r(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro r(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}{{ r(messages[0].content) }}",
            True,
        ),
        ("{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}", False),
    ],
)
def test_templates_that_walk_through_parts_get_parts(source: str, as_dicts: bool) -> None:
    assert template(source).parts_as_dicts is as_dicts


def test_parts_are_joined_by_newlines_where_the_template_wants_text() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}, {"type": "text", "text": ""}]
    assert template("{{ messages[0].content }}").render(user(parts)) == "a\nb\nc"


def test_the_environment_is_transformers_own() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(user("x")) == "04 Mar 2026"
    assert template("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>").render(user("x")) == "<s>x"
    assert template("{{ {'a': '<ü>'} | tojson }}").render(user("x")) == '{"a": "<ü>"}'
    assert (
        template("{% generation %}g{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}").render(user("x"))
        == "g"
    )
    with pytest.raises(Unrenderable):
        template("{{ raise_exception('no') }}").render(user("x"))
    with pytest.raises(Unrenderable):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(user("x"))


def test_kwargs_reach_the_template_and_reserved_ones_do_not() -> None:
    source = "{{ enable_thinking }} {{ reasoning_effort }} {{ documents }}"
    assert template(source).render(user("x", chat_template_kwargs={"enable_thinking": False})) == "False  None"
    assert template(source).render(user("x", reasoning_effort="low", documents=[1])) == "True low [1]"
    with pytest.raises(Unrenderable):
        template(source).render(user("x", chat_template_kwargs={"messages": []}))


def test_a_message_to_be_continued_stays_open() -> None:
    messages = [*user("U")["messages"], {"role": "assistant", "content": "Once  "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert template(CHATML).render(body).endswith("<|im_start|>assistant\nOnce  ")
    with pytest.raises(Unrenderable):
        template(CHATML).render(body | {"add_generation_prompt": True})


def test_developer_messages_become_one_system_message_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "system", "content": "S"}, *user("U")["messages"], {"role": "developer", "content": "D"}]
    text = template("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}").render({"messages": messages})
    assert text == "[system:S\n\nD][user:U]"


def test_a_billing_header_of_a_client_is_dropped_as_the_engine_does() -> None:
    messages = [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nS"}]
    assert template("{{ messages[0].content }}").render({"messages": messages}) == "S"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a", "uuid": "1"}, {}]
)
def test_what_is_not_text_cannot_be_rendered(part: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        template(CHATML).render(user([part]))


def test_rendering_leaves_the_body_as_it_was() -> None:
    tool_call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [tool_call]}]
    body = {"messages": messages, "tools": [TOOL], "continue_final_message": True, "add_generation_prompt": False}
    before = json.dumps(body)
    for source in (CHATML, "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"):
        template(source).render(body)
    assert json.dumps(body) == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_ids_are_those_of_tokenizers(folder: Path) -> None:
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    text = template(CHATML).render(user("naïve 你好 🚂"))
    assert ours.chat(user("naïve 你好 🚂")) == reference.encode(text, add_special_tokens=False).ids
    call = parse(Endpoint.COMPLETION, json.dumps({"model": "m", "prompt": ["each train", "a"]}).encode())
    prompt = ours.prompt(call)
    assert prompt.ids.tolist() == reference.encode("each train").ids
    assert prompt.lengths == (len(prompt.ids), 1)
    given = parse(Endpoint.COMPLETION, b'{"model":"m","prompt":[[1,2],[1,2,3]]}')
    assert (ours.prompt(given).ids.tolist(), ours.prompt(given).lengths) == ([1, 2], (2, 3))


@pytest.mark.parametrize(("context", "computes"), [(0, False), (40, False), (10, True)])
def test_tokens_for_which_there_is_no_memory_are_not_kept(folder: Path, context: int, computes: bool) -> None:
    """A prompt that is too long for the context is refused for that, so its tokens need not be complete."""
    tokenizer = load_tokenizer(folder)
    text = tokenizer._text("each train " * 20, add_special_tokens=True)
    count = len(PendingPrompt(tokenizer, [text], 0, 100).tokenize().ids)
    assert 20 < count < 100
    pending = PendingPrompt(tokenizer, [text], context and context * count // 20, 20)
    with nullcontext() if computes else pytest.raises(Unrenderable, match="memory"):
        assert len(pending.tokenize().ids) > context


def test_opaque_calls_have_no_tokens(folder: Path) -> None:
    call = parse(Endpoint.COMPLETION, b'{"model":"m","prompt":"x","truncate_prompt_tokens":5}')
    with pytest.raises(Unrenderable):
        load_tokenizer(folder).prompt(call)


@pytest.mark.parametrize(
    ("endpoint", "fields", "reads"),
    [
        (Endpoint.CHAT, {}, True),
        (Endpoint.CHAT, {"top_logprobs": 3, "logprobs": True}, True),
        (Endpoint.CHAT, {"prompt_logprobs": 0}, False),
        (Endpoint.CHAT, {"echo": True}, False),
        (Endpoint.CHAT, {"echo": True, "top_logprobs": None}, False),
        (Endpoint.COMPLETION, {"echo": True}, True),
        (Endpoint.COMPLETION, {"logprobs": 1}, True),
        (Endpoint.COMPLETION, {"echo": True, "logprobs": 0}, False),
        (Endpoint.COMPLETION, {"prompt_logprob_token_ids": [1]}, False),
    ],
)
def test_it_is_known_when_the_engine_computes_a_prompt_anew(
    endpoint: Endpoint, fields: dict[str, Any], reads: bool
) -> None:
    prompt = user("x") if endpoint is Endpoint.CHAT else {"prompt": "x"}
    call = parse(endpoint, json.dumps({"model": "m", **prompt, **fields}).encode())
    assert (call.reads_prefix_cache, call.untokenizable) == (reads, "")


def test_template_files_win_over_the_config(folder: Path, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat(user("x")) == load_tokenizer(tmp_path).text("file", add_special_tokens=False)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerNotFound):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(TokenizerNotFound):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerNotFound):
        load_tokenizer(tmp_path)


def test_places_are_folders_or_hub_ids_in_the_local_cache(tmp_path: Path) -> None:
    assert find_tokenizer(str(tmp_path)) == tmp_path
    for nowhere in ("", "/no/such/folder", "a/b/c", "no-such-org/no-such-model", "bad id!!"):
        with pytest.raises(TokenizerNotFound):
            find_tokenizer(nowhere)


def test_a_broken_template_is_said_at_once() -> None:
    with pytest.raises(jinja2.TemplateError):
        template("{% for %}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "x"]), inner)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "odd"])},
        optional={"content": JSON, "tool_calls": JSON, "reasoning": JSON, "name": JSON, "tool_call_id": JSON},
    ),
    max_size=4,
)
OPEN = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{{ m.tool_calls }}{% endfor %}"


@settings(max_examples=200)
@given(
    MESSAGES,
    JSON,
    st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    st.booleans(),
    st.sampled_from([CHATML, OPEN]),
)
def test_whatever_passes_the_dialect_renders_or_is_unrenderable(
    messages: list[Any], tools: Any, kwargs: dict[str, Any], final: bool, source: str
) -> None:
    body = {"model": "m", "messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    body |= {"continue_final_message": final, "add_generation_prompt": not final}
    try:
        call = parse(Endpoint.CHAT, json.dumps(body).encode())
        text = template(source).render(call.body)
    except (ApiRequestError, Unrenderable):
        return
    assert isinstance(text, str)
