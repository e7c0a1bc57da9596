"""Whatever enters the engine's own block hashes enters the keys: what is predicted as cached is what the engine reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engines.chat_client import (
    Answer,
    assert_agree,
    assistant,
    chat,
    complete,
    fresh_words,
    prompt_tokens,
    user,
)
from tests.support.engines.model import words
from tests.support.engines.servers import ADAPTER, SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane, client_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NAMED = {"type": "function", "function": {"name": "read_file"}}


def read_file(description: str) -> dict[str, Any]:
    path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"type": "function", "function": {"name": "read_file", "description": description, "parameters": path}}


def expected(engines: list[Engine], answer: Answer, computed: int) -> int:
    """How many of `computed` known tokens the answering engine finds: its full blocks, without the prompt's last token."""
    (block,) = (engine.spec.block_size for engine in engines if engine.instance_id == answer.instance_id)
    return min(computed, prompt_tokens(answer) - 1) // block * block


@pytest.mark.parametrize("choice", ["none", "auto", "required", NAMED], ids=["none", "auto", "required", "named"])
def test_tools_are_part_of_the_prompt_whatever_their_choice(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], choice: Any
) -> None:
    messages = [user(fresh_words(200))]
    session = f"tools-{choice}"
    tools = [read_file(f"<really>{fresh_words(50)}")]
    first = chat(client, messages, session=session, tools=tools, tool_choice="none")
    plane.wait_settled()
    again = chat(client, messages, session=session, tools=tools, tool_choice=choice)
    assert prompt_tokens(again) == prompt_tokens(first)
    assert again.instance_id == first.instance_id
    assert_agree(plane, again, expected(engines, again, prompt_tokens(first)))
    plane.wait_settled()
    # Tools come before all messages, so a prompt with other tools shares little more than the head.
    other = chat(client, messages, session=session, tools=[read_file(fresh_words(50))], tool_choice="none")
    assert other.cached_tokens <= 64
    assert_agree(plane, other, other.cached_tokens)


def test_calls_and_results_of_tools_continue_a_conversation(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a/ü.py"}'}}
    tools = [read_file("Read a file.")]
    messages = [user(fresh_words(150))]
    messages.append({"role": "assistant", "content": fresh_words(10), "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": fresh_words(100)})
    first = chat(client, messages, session="calls", tools=tools, tool_choice="none", max_tokens=40)
    plane.wait_settled()
    messages += [assistant(first.text), user(fresh_words(20))]
    second = chat(client, messages, session="calls", tools=tools, tool_choice="none")
    assert second.instance_id == first.instance_id
    assert_agree(plane, second, expected(engines, second, prompt_tokens(first) + 39))


def test_text_in_parts_is_the_text_that_the_engine_joins(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    one, two = fresh_words(100), fresh_words(100)
    parts = [{"type": "text", "text": one}, {"type": "text", "text": two}]
    first = chat(client, [user(f"{one}\n{two}")], session="parts")
    plane.wait_settled()
    again = chat(client, [{"role": "user", "content": parts}], session="parts")
    assert (again.text, again.instance_id) == (first.text, first.instance_id)
    assert_agree(plane, again, expected(engines, again, prompt_tokens(first)))


def test_an_adapters_blocks_are_its_own(plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]) -> None:
    text = fresh_words(200)
    base = complete(client, text)
    plane.wait_settled()
    red = complete(client, text, model=ADAPTER)
    assert red.text != base.text
    assert_agree(plane, red, 0)
    plane.wait_settled()
    for model, earlier in ((ADAPTER, red), (SERVED_NAME, base)):
        again = complete(client, text, model=model)
        assert (again.text, again.instance_id) == (earlier.text, earlier.instance_id)
        assert_agree(plane, again, expected(engines, again, 200))
        plane.wait_settled()


def test_an_adapters_chat_with_tools_and_parts_is_its_own(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    parts = [{"type": "text", "text": fresh_words(60)} for _ in range(3)]
    messages = [{"role": "system", "content": parts[:1]}, {"role": "user", "content": parts[1:]}]
    more: dict[str, Any] = {"tools": [read_file(fresh_words(30))], "tool_choice": "none"}
    for model in (SERVED_NAME, ADAPTER):
        first = chat(client, messages, session=f"parts-{model}", model=model, **more)
        assert first.cached_tokens <= 64  # what all prompts with tools begin with
        assert_agree(plane, first, first.cached_tokens)
        plane.wait_settled()
    for model in (SERVED_NAME, ADAPTER):
        again = chat(client, messages, session=f"parts-{model}", model=model, **more)
        assert_agree(plane, again, expected(engines, again, prompt_tokens(again)))
        plane.wait_settled()


def test_each_tenants_salt_is_its_own(plane: ControlPlane, engines: list[Engine], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k-red cache_salt=ruby\nblue:k-blue cache_salt=sapphire\nplain:k-plain\n")
    text, keys = fresh_words(200), ("k-red", "k-blue", "k-plain")
    with plane.another_gateway("tenants", api_keys_file=file) as url, client_of(url) as anyone:
        for known in (0, 200):
            for key in keys:
                answer = complete(anyone.with_options(api_key=key), text)
                assert_agree(plane, answer, expected(engines, answer, known))
                plane.wait_settled()
        # A client cannot reach another tenant's cache by a salt.
        other = fresh_words(200)
        complete(anyone.with_options(api_key="k-red"), other)
        plane.wait_settled()
        spy = complete(anyone.with_options(api_key="k-blue"), other, extra_body={"cache_salt": "ruby"})
        assert_agree(plane, spy, 0)


def test_what_is_salted_is_shared_under_its_salt_only(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    text = fresh_words(200)
    plain = complete(client, text)
    plane.wait_settled()
    for salt in ("green", "blue"):
        assert_agree(plane, complete(client, text, extra_body={"cache_salt": salt}), 0)
        plane.wait_settled()
    for more in ({"cache_salt": "green"}, {"cache_salt": "blue"}, {}):
        again = complete(client, text, extra_body=more)
        assert again.text == plain.text
        assert_agree(plane, again, expected(engines, again, 200))
        plane.wait_settled()


def test_an_adapter_and_a_salt_go_together(plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]) -> None:
    text = fresh_words(100)
    for known in (0, 100):
        answer = complete(client, text, model=ADAPTER, extra_body={"cache_salt": "green"})
        assert_agree(plane, answer, expected(engines, answer, known))
        plane.wait_settled()


@pytest.mark.parametrize(
    ("more", "reads"),
    [
        ({"extra_body": {"prompt_logprobs": 0}}, False),
        ({"echo": True, "logprobs": 0}, False),
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
    ],
    ids=["prompt-logprobs", "echo-with-logprobs", "echo", "logprobs"],
)
def test_a_prompt_that_is_computed_anew_is_predicted_so(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], more: dict[str, Any], reads: bool
) -> None:
    text = fresh_words(100)
    complete(client, text, max_tokens=1)
    plane.wait_settled()
    again = complete(client, text, max_tokens=1, **more)
    assert_agree(plane, again, expected(engines, again, 100) if reads else 0)
    plane.wait_settled()
    # The prompt was computed into the cache nevertheless, on whichever engine.
    last = complete(client, text, max_tokens=1)
    assert_agree(plane, last, expected(engines, last, 100))


def test_a_chats_echo_is_computed_anew(plane: ControlPlane, client: openai.OpenAI) -> None:
    messages = [user(fresh_words(100))]
    chat(client, messages, session="echo", max_tokens=1)
    plane.wait_settled()
    echo = chat(client, messages, session="echo", max_tokens=1, extra_body={"echo": True, "top_logprobs": None})
    assert_agree(plane, echo, 0)


def test_long_texts_are_cut_and_still_counted_as_the_engine_counts(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """Some 1,300 tokens of lines and special tokens' names, which the gateway splits into pieces at newlines."""
    lines = "".join(f"{words(8, 77 + at)}.\n{'#' * (at % 3)}<|im_start|>\n\n  if x_{at}:\r\n" for at in range(50))
    with client_of(engines[0].url) as direct:
        own = chat(direct, [user(lines)], max_tokens=1)
    answer = chat(client, [user(lines)], session="lines", max_tokens=1)
    decision = plane.finished_decision(answer.decision_id)
    assert decision.input_tokens == decision.finished.prompt_tokens == prompt_tokens(own) > 1_200
