"""Streams outlive their engine: another one goes on, token by token as the undisturbed run, whatever the moment of the kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.engines.chat_client import user
from tests.support.engines.cut_connections import linked
from tests.support.engines.servers import SERVED_NAME, Engine, EngineSpec, running_engines
from tests.support.engines.vllm_questions import Vllm
from tests.support.http_request import ask
from tests.support.instances import IN_STEP
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Tokens of an answer, and up to which one its engine is disturbed: it may be far ahead of a client on a busy machine.
TOKENS, EARLY = 400, 40
# The same for the many answers whose connections are cut.
SHORT, EARLY_IN_SHORT = 90, 45
HEALTHY_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def engines(model_folder: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines with the connector package."""
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    specs = [EngineSpec(name, extra_args=more, env={"PYTHONPATH": str(site)}) for name in ("a", "b")]
    with running_engines(specs, model_folder, tmp_path_factory.mktemp("continued")) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane in front of the engines."""
    with ControlPlane(engines, tmp_path_factory.mktemp("plane")).running() as plane:
        yield plane


@dataclass
class Streamed:
    """What a client has of one stream. `usage` and `ids` are those of the whole answer."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finish_reason: str = ""
    usage: tuple[int, int] = (0, 0)
    calls: dict[int, list[str]] = field(default_factory=dict)


def killed(plane: ControlPlane, engine: Engine) -> None:
    """Kill an engine with all of its processes."""
    os.killpg(engine.process.pid, signal.SIGKILL)


def moved(plane: ControlPlane, engine: Engine) -> None:
    """Order that the engine's requests leave it."""
    plane.drain(engine, move=True)


def stream(
    plane: ControlPlane,
    body: dict[str, Any],
    after: int = -1,
    disturb: Callable[[ControlPlane, Engine], None] = killed,
) -> Streamed:
    """Stream an answer; after so many chunks disturb the engine that gives it."""
    streamed = Streamed()
    chat = "messages" in body
    with plane.client() as client:
        create: Any = (client.chat.completions if chat else client.completions).with_raw_response.create
        raw = create(model=SERVED_NAME, stream=True, stream_options={"include_usage": True}, **body)
        engine = next(engine for engine in plane.engines if engine.instance_id == raw.headers["x-pointsman-instance"])
        for number, chunk in enumerate(raw.parse()):
            if number == after:
                disturb(plane, engine)
            streamed.ids.add(chunk.id)
            if chunk.usage:
                streamed.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            for choice in chunk.choices:
                _add(streamed, choice, chat=chat)
    return streamed


def _add(streamed: Streamed, choice: Any, *, chat: bool) -> None:
    streamed.finish_reason = choice.finish_reason or streamed.finish_reason
    if not chat:
        streamed.text += choice.text
        return
    streamed.roles += bool(choice.delta.role)
    streamed.text += choice.delta.content or ""
    for call in choice.delta.tool_calls or ():
        name, arguments = streamed.calls.setdefault(call.index, ["", ""])
        streamed.calls[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]


def whole_again(plane: ControlPlane) -> None:
    """Start the engines that were killed, and wait until the router knows both."""
    for engine in plane.engines:
        if not engine.process.alive:
            engine.process.kill()
            engine.start()

    def there() -> bool:
        known = plane.instances()
        return all(
            engine.instance_id in known and known[engine.instance_id].state in IN_STEP for engine in plane.engines
        )

    for engine in plane.engines:
        engine.wait_ready()
    until(there, within_s=HEALTHY_WITHIN_S, what="both engines known")


def continued_streams(plane: ControlPlane) -> int:
    """How many streams the gateway has had continued."""
    page = ask(f"{plane.gateway_url}/metrics").text
    found = re.search(r"^pointsman_gateway_continued_total ([\d.]+)$", page, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_a_message_goes_on_for_anthropics_client(fleet: ControlPlane) -> None:
    asked: dict[str, Any] = {
        "model": SERVED_NAME,
        "max_tokens": TOKENS,
        "messages": [user("six seven eight")],
        "extra_body": {"temperature": 0},
    }

    def message(kill_after: int = -1) -> tuple[str, str | None, int, int]:
        with (
            anthropic.Anthropic(base_url=fleet.gateway_url, api_key="none", max_retries=0) as client,
            client.messages.stream(**asked) as streamed,
        ):
            name = streamed.response.headers["x-pointsman-instance"]
            engine = next(engine for engine in fleet.engines if engine.instance_id == name)
            for number, _ in enumerate(streamed):
                if number == kill_after:
                    killed(fleet, engine)
            final = streamed.get_final_message()
        [block] = final.content
        assert block.type == "text"
        return block.text, final.stop_reason, final.usage.input_tokens, final.usage.output_tokens

    undisturbed = message()
    assert undisturbed[3] == TOKENS
    before = continued_streams(fleet)
    continued = message(kill_after=EARLY)
    # Input tokens are those that were not cached.
    assert (*continued[:2], continued[3]) == (*undisturbed[:2], undisturbed[3])
    assert continued_streams(fleet) == before + 1
    whole_again(fleet)
    fleet.wait_idle()


def test_a_response_goes_on_under_one_id(fleet: ControlPlane) -> None:
    def response(kill_after: int = -1) -> tuple[str, int, int]:
        text, items = "", set[str]()
        with fleet.client() as client:
            raw = client.responses.with_raw_response.create(
                model=SERVED_NAME, input="nine ten", stream=True, max_output_tokens=TOKENS, temperature=0
            )
            engine = next(
                engine for engine in fleet.engines if engine.instance_id == raw.headers["x-pointsman-instance"]
            )
            for number, event in enumerate(raw.parse()):
                assert event.sequence_number == number
                if number == kill_after:
                    killed(fleet, engine)
                if event.type == "response.created":
                    created = event.response.id
                elif event.type == "response.output_text.delta":
                    items.add(event.item_id)
                    text += event.delta
                elif event.type in ("response.completed", "response.incomplete"):
                    ended = event.response
        assert ended.id == created
        assert {item.id for item in ended.output} == items
        assert ended.output_text == text
        assert ended.usage is not None
        return text, ended.usage.input_tokens, ended.usage.output_tokens

    undisturbed = response()
    assert undisturbed[2] == TOKENS
    before = continued_streams(fleet)
    assert response(kill_after=EARLY) == undisturbed
    assert continued_streams(fleet) == before + 1
    whole_again(fleet)
    fleet.wait_idle()


BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [user("one two three")], "max_tokens": TOKENS, "temperature": 0},
    "completion": {"prompt": "one two three", "max_tokens": TOKENS, "temperature": 0},
    "stop strings held back": {"prompt": "four five", "max_tokens": TOKENS, "temperature": 0, "stop": ["no such end"]},
}


@pytest.mark.parametrize("name", BODIES)
def test_the_text_is_that_of_the_undisturbed_run(fleet: ControlPlane, name: str) -> None:
    body = BODIES[name]
    undisturbed = stream(fleet, body)
    assert undisturbed.usage[1] == TOKENS
    before = continued_streams(fleet)
    moment = random.Random(name).randrange(EARLY)
    continued = stream(fleet, body, after=moment)
    assert continued_streams(fleet) == before + 1
    assert len(continued.ids) == 1
    continued.ids = undisturbed.ids
    assert continued == undisturbed, f"killed after {moment} chunks"
    whole_again(fleet)
    fleet.wait_idle()


def test_at_a_hundred_moments(engines: list[Engine], tmp_path: Path) -> None:
    """Connections break, as they do when an engine is killed, but without its time to start."""
    rng = random.Random(22)
    with linked(engines) as there, ControlPlane(there, tmp_path).running() as plane:  # type: ignore[arg-type]
        before = continued_streams(plane)
        undisturbed: dict[int, Streamed] = {}
        for number in range(100):
            # One of twenty prompts, as a chat or a completion.
            at = number % 20
            body = BODIES[("chat", "completion")[at % 2]] | {"max_tokens": SHORT}
            text = f"{at} one two three {at}"
            body = body | ({"messages": [user(text)]} if at % 2 == 0 else {"prompt": text})
            if at not in undisturbed:
                undisturbed[at] = stream(plane, body)
            moment = rng.randrange(EARLY_IN_SHORT)
            continued = stream(plane, body, moment, lambda _, engine: engine.cut())  # type: ignore[attr-defined]
            assert len(continued.ids) == 1
            continued.ids = undisturbed[at].ids
            assert continued == undisturbed[at], f"{at}, cut after {moment} chunks"
        # An engine may have sent the rest before.
        assert continued_streams(plane) - before >= 80
        plane.wait_idle()


@pytest.mark.parametrize("name", BODIES)
def test_operators_move_a_stream(fleet: ControlPlane, name: str) -> None:
    """The engine goes on, and has nothing to do any more."""
    body = BODIES[name]
    undisturbed = stream(fleet, body)
    before = continued_streams(fleet)
    continued = stream(fleet, body, 5, moved)
    assert continued_streams(fleet) == before + 1
    assert len(continued.ids) == 1
    continued.ids = undisturbed.ids
    assert continued == undisturbed
    for engine in fleet.engines:
        assert engine.process.alive
        fleet.drain(engine, resume=True)
    fleet.wait_idle()


_CUT = "import vllm_continued_answers\nanswer = vllm_continued_answers.cut_everywhere(asked)"
_ARGUMENTS = '{"city": "Z\u00fcrich", "days": [1, 2], "text": "a \\"b\\" </x>"}'
_CALL = f'<tool_call>\n{{"name": "get", "arguments": {_ARGUMENTS}}}\n</tool_call>'
SCRIPTS: dict[str, dict[str, Any]] = {
    "text": {"text": "Gr\u00fcezi mitenand \U0001f600 and goodbye."},
    "held back": {"text": "one two three four", "stop": ["never", "so long a text"]},
    "reasoning": {"text": "<think>\nFirst this.\n</think>\n\nThen that.", "reasoning_parser": "qwen3"},
    "tool call": {"text": f"I look.\n{_CALL}", "tool_parser": "hermes"},
    "two tool calls": {"text": f"{_CALL}\n{_CALL}", "tool_parser": "hermes"},
    "reasoning and a tool call": {
        "text": f"<think>\nWhich city?\n</think>\n\n{_CALL}",
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
    },
}


@pytest.mark.parametrize(
    ("sizes", "intervals"),
    [([1], (1, 1)), ([2, 1, 3], (1, 1)), ([1], (3, 1)), ([1], (1, 3))],
    ids=["a token at a time", "several tokens at a time", "an event for three tokens", "then one for three"],
)
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_what_parsers_make_of_an_answer_does_not_depend_on_where_it_is_cut(
    vllm: Vllm, name: str, sizes: list[int], intervals: tuple[int, int], api: str
) -> None:
    """Nor on the intervals at which the two engines put out tokens."""
    asked = {"stop": [], "tool_parser": None, "reasoning_parser": None, "sizes": sizes, "api": api}
    asked |= SCRIPTS[name] | {"intervals": intervals}
    answer = vllm.ask(_CUT, asked)
    whole = answer["whole"]
    assert len(answer["joined"]) > 2
    assert whole["roles"] == 1
    told_apart = "tool" in name, "reasoning" in name
    if api == "messages":
        kinds = [kind for kind, _, _ in whole["blocks"].values()]
        assert ("tool_use" in kinds, "thinking" in kinds) == told_apart
    elif api == "responses":
        kinds = [kind for kind, *_ in whole["items"].values()]
        assert ("function_call" in kinds, "reasoning" in kinds) == told_apart
        assert [item[4]["id"] for item in whole["items"].values()] == [item["id"] for item in whole["output"]]
    else:
        if told_apart[0]:
            assert json.loads(whole["calls"]["0"][1])["days"] == [1, 2]
            assert whole["finish"] == "tool_calls"
        assert bool(whole["reasoning"].strip()) == told_apart[1]
    for events, joined in enumerate(answer["joined"], 1):
        # Pieces that are told together may be told apart, and the comment of a continued stream is in between.
        joined["told"] = whole["told"]
        assert joined == whole, f"cut after {events} events"


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_an_answer_that_its_engine_s_own_defaults_keep_from_going_on_is_not_recorded(vllm: Vllm, api: str) -> None:
    """It begins with a comment, as those of engines with the package do, so that the gateway does not go by its text either."""
    events = vllm.ask("import vllm_continued_answers\nanswer = vllm_continued_answers.untold(asked)", {"api": api})
    lines = "".join(events).split("\n")
    assert lines[0].startswith(":")
    assert not any(
        character.isdigit() for line in lines if line.startswith(":") for character in line.partition("x")[0]
    )
    assert any("two" in line or '"o"' in line for line in lines)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("xlam", '[{"name": "get", "arguments": {"x": 1, "y": "two"}}]'),
        ("hunyuan_a13b", '<tool_calls>[{"name": "get", "arguments": {"x": 1, "y": "two"}}]</tool_calls>'),
    ],
)
def test_a_call_has_one_id_also_if_its_parser_draws_it(vllm: Vllm, parser: str, text: str) -> None:
    asked: dict[str, Any] = {
        "api": "responses",
        "stop": [],
        "tool_parser": parser,
        "reasoning_parser": None,
        "text": text,
    }
    answer = vllm.ask(_CUT, asked | {"sizes": [1], "intervals": (1, 1)})
    for joined in answer["joined"]:
        calls = [item for item in joined["items"].values() if item[0] == "function_call"]
        assert calls
        for _, _, call_id, _, done in calls:
            assert done["call_id"] == call_id
        assert [call[2] for call in calls] == [
            item["call_id"] for item in joined["output"] if item["type"] == "function_call"
        ]
