"""A gateway as the endpoint picker of a real Envoy, before real vLLM: the vendors' clients get what they get of a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import (
    ONE_MESSAGE,
    assert_agree,
    assistant,
    chat,
    complete,
    fresh_words,
    open_chat,
    user,
)
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane, client_of
from tests.support.processes.envoy import EnvoySettings, envoy
from tests.support.processes.process import free_port
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# A random model ends a call only if there is one way to write it.
TURN = {
    "name": "turn",
    "description": "Set the points.",
    "parameters": {
        "type": "object",
        "properties": {"side": {"type": "string", "enum": ["left"]}},
        "required": ["side"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def picked(
    running_plane: ControlPlane, engines: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of an Envoy whose picker is a second gateway of the control plane."""
    port = free_port()
    endpoints = [engine.url.removeprefix("http://") for engine in engines]
    with (
        running_plane.another_gateway("picker", **{"--ext-proc-listen": f"127.0.0.1:{port}"}),
        envoy(EnvoySettings(endpoints, [port], retries=2), tmp_path_factory.mktemp("envoy")) as url,
    ):
        yield url


@pytest.fixture
def through_envoy(plane: ControlPlane, picked: str) -> Iterator[openai.OpenAI]:
    with client_of(picked) as client:
        yield client


def test_turns_are_placed_by_what_is_cached_and_counted(plane: ControlPlane, through_envoy: openai.OpenAI) -> None:
    messages = [user(fresh_words(600 - ONE_MESSAGE))]
    first = chat(through_envoy, messages, session="picked", max_tokens=40)
    assert_agree(plane, first, 0)
    plane.wait_settled()
    messages += [assistant(first.text), user(fresh_words(100))]
    second = chat(through_envoy, messages, session="picked", max_tokens=40)
    assert second.instance_id == first.instance_id
    assert second.cached_tokens >= 512
    assert_agree(plane, second, second.cached_tokens)
    decision = plane.finished_decision(second.decision_id)
    assert (decision.session_id, decision.outcome) == ("picked", fleet_pb2.DECISION_OUTCOME_OK)


def test_answers_are_those_of_a_gateway(client: openai.OpenAI, through_envoy: openai.OpenAI) -> None:
    messages = [user(fresh_words(60))]
    own, other = (chat(caller, messages, max_tokens=32) for caller in (client, through_envoy))
    assert (own.text, own.finish_reason) == (other.text, other.finish_reason)
    with open_chat(through_envoy, messages, max_tokens=32) as streamed:
        assert streamed.read_all() == own.text
    prompt = fresh_words(50)
    assert complete(client, prompt).text == complete(through_envoy, prompt).text


def test_tools_are_called(through_envoy: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": SERVED_NAME,
        "max_tokens": 200,
        "temperature": 0,
        "messages": [user("left or right?")],
        "tools": [{"type": "function", "function": TURN}],
        "tool_choice": "required",
    }
    (call,) = through_envoy.chat.completions.create(**asked).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("turn", {"side": "left"})
    arguments = ""
    for chunk in through_envoy.chat.completions.create(**asked, stream=True):
        for part in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            arguments += part.function.arguments or ""
    assert json.loads(arguments) == {"side": "left"}


def test_anthropics_client_streams(picked: str, plane: ControlPlane) -> None:
    asked: Any = {"model": SERVED_NAME, "max_tokens": 24, "messages": [user("Set the points.")]}
    with (
        anthropic.Anthropic(base_url=picked, api_key="none", max_retries=0) as client,
        client.messages.stream(**asked) as stream,
    ):
        text = "".join(stream.text_stream)
        assert text
        assert stream.get_final_message().usage.output_tokens > 0


def test_a_client_that_leaves_ends_the_work(
    plane: ControlPlane, through_envoy: openai.OpenAI, engines: list[Engine]
) -> None:
    with open_chat(
        through_envoy, [user(fresh_words(40))], max_tokens=1_500, extra_body={"ignore_eos": True}
    ) as streamed:
        streamed.read(3)
        decision_id = streamed.decision_id
    until(lambda: not any(engine.running() for engine in engines), within_s=60, what="no engine works any more")
    assert plane.finished_decision(decision_id).outcome == fleet_pb2.DECISION_OUTCOME_CANCELLED
