"""Coding agents against a whole fleet: sessions of several turns with reasoning and tools, by vendors' clients and by Codex."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.clients.agent_programs import CODEX, Server, run
from tests.support.processes.emulated_fleet import MODEL, EmulatedFleet, emulated_fleet

BLOCK = 16
SYSTEM, TASK = "You are a coding agent. Use your tools, then say what you did.", "Write two lines into notes.txt."
COMMANDS = ["echo first >> notes.txt", "echo second >> notes.txt"]
# The model's answers: a text and a call, reasoning and a call, reasoning and a text. SHELL is the name of Codex's shell tool.
SHELL = "exec_command"
SCRIPT: list[dict[str, Any]] = [
    {"text": "I write the first line.", "tool_calls": [{"name": SHELL, "arguments": {"cmd": COMMANDS[0]}}]},
    {"reasoning": "One is missing.", "tool_calls": [{"name": SHELL, "arguments": {"cmd": COMMANDS[1]}}]},
    {"reasoning": "That is all.", "text": "Both lines are written."},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "The command."}},
    "required": ["cmd"],
    "additionalProperties": False,
}
FUNCTION = {"name": SHELL, "description": "Runs a command.", "parameters": SCHEMA, "strict": True}
Headers = dict[str, str]
Said = tuple[list[str], list[str], list[str]]  # texts, commands, reasoning


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedFleet]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    with emulated_fleet(folder, "--script", str(folder / "script.json")) as fleet:
        yield fleet


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(url: str, headers: Headers, stream: bool) -> Said:
    """Run a session by chat completions; return what was received."""
    texts, commands, thoughts = [], [], []
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, user(TASK)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers=headers) as client:
        for _ in SCRIPT:
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_completion_tokens": 32_000}
            asked["tools"] = [{"type": "function", "function": FUNCTION}]
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    (choice,) = events.get_final_completion().choices
            else:
                (choice,) = client.chat.completions.create(**asked).choices
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            texts.append(choice.message.content or "")
            thoughts.append((choice.message.model_extra or {}).get("reasoning") or "")
            said: list[dict[str, Any]] = [
                {"id": call.id, "type": "function", "function": call.function.to_dict()} for call in calls
            ]
            for call in said:
                call["function"].pop("parsed_arguments", None)
            messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": said})
            for call in said:
                commands.append(json.loads(call["function"]["arguments"])["cmd"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "exit status 0"})
    return texts, commands, thoughts


def responses(url: str, headers: Headers, stream: bool) -> Said:
    """Run the same session by the Responses API; output items are sent back unchanged."""
    texts, commands, thoughts = [], [], []
    items: list[Any] = [user(TASK)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers=headers) as client:
        for _ in SCRIPT:
            asked: dict[str, Any] = {"model": MODEL, "instructions": SYSTEM, "input": items, "store": False}
            asked["tools"] = [{"type": "function", **FUNCTION}]
            if stream:
                with client.responses.stream(**asked) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(**asked)
            assert answer.status == "completed"
            texts.append(answer.output_text)
            parts = [part for item in answer.output if item.type == "reasoning" for part in item.content]
            thoughts.append("".join(part.text for part in parts))
            for item in answer.output:
                kept = item.to_dict()
                kept.pop("parsed_arguments", None)
                items.append(kept)
                if item.type == "function_call":
                    commands.append(json.loads(item.arguments)["cmd"])
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "exit status 0"})
    return texts, commands, thoughts


def messages(url: str, headers: Headers, stream: bool) -> Said:
    """Run it by Anthropic's Messages API, as Claude Code does: blocks with cache_control, beta headers, a query string."""
    texts, commands, thoughts = [], [], []
    turns: list[Any] = [user([{"type": "text", "text": TASK, "cache_control": {"type": "ephemeral"}}])]
    beta = {"anthropic-beta": "prompt-caching-2024-07-31,interleaved-thinking-2025-05-14"}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, default_headers=headers | beta) as client:
        for _ in SCRIPT:
            system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 16_000, "system": system, "messages": turns}
            asked["tools"] = [{"name": SHELL, "description": "Runs a command.", "input_schema": SCHEMA}]
            asked |= {"metadata": {"user_id": "u"}, "extra_query": {"beta": "true"}}
            counted = client.messages.count_tokens(**{k: asked[k] for k in ("model", "messages", "system", "tools")})
            if stream:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            assert counted._request_id, "the request id header that this client reads is set"
            assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            texts.append("".join(block.text for block in answer.content if block.type == "text"))
            thoughts.append("".join(block.thinking for block in answer.content if block.type == "thinking"))
            turns.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            if calls:
                commands += [str(block.input["cmd"]) for block in calls]
                done = [{"type": "tool_result", "tool_use_id": block.id, "content": "exit status 0"} for block in calls]
                turns.append(user(done))
    return texts, commands, thoughts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", [chat, responses, messages])
def test_a_vendors_client_calls_tools_turn_by_turn(
    fleet: EmulatedFleet, talk: Callable[[str, Headers, bool], Said], stream: bool
) -> None:
    session = f"{talk.__name__}-{stream}"
    texts, commands, thoughts = talk(fleet.gateway_url, {"X-Session-ID": session}, stream)
    assert texts == [SCRIPT[0]["text"], "", SCRIPT[2]["text"]]
    assert commands == COMMANDS
    assert thoughts == [answer.get("reasoning", "") for answer in SCRIPT]
    assert_prefixes_grew(fleet, session)


async def test_codex_does_its_task(fleet: EmulatedFleet, tmp_path: Path) -> None:
    # The commands that Codex runs are those of SCRIPT.
    server = Server(fleet.gateway_url, model=MODEL, context=131_072)
    ended = await run(CODEX, tmp_path, server, TASK, within_s=100, enough=lambda: False)
    assert ended.status == 0, ended.printed
    assert (tmp_path / "work/notes.txt").read_text() == "first\nsecond\n"
    events = [json.loads(line) for line in ended.printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    assert said == [SCRIPT[0]["text"], SCRIPT[2]["text"]]
    ran = [item["exit_code"] for item in items if item["type"] == "command_execution"]
    assert ran == [0, 0]
    (thread,) = [event["thread_id"] for event in events if event["type"] == "thread.started"]
    assert_prefixes_grew(fleet, thread)


def assert_prefixes_grew(fleet: EmulatedFleet, session: str) -> None:
    """Check that each turn was placed by its exact tokens, and found the previous turn cached on its instance."""
    turns = fleet.decisions(len(SCRIPT), session)
    assert [turn.outcome for turn in turns] == [fleet_pb2.DECISION_OUTCOME_OK] * len(SCRIPT)
    for turn in turns:
        assert turn.input_tokens == turn.finished.prompt_tokens
        assert turn.key_count == turn.input_tokens // BLOCK > 0
        assert turn.cached_tokens <= turn.finished.cached_tokens
    predicted = []
    for before, after in pairwise(turns):
        assert after.input_tokens > before.input_tokens
        least = before.input_tokens - 2 * BLOCK
        assert after.finished.cached_tokens > least > 0, "the instance has the previous turn"
        predicted.append(after.cached_tokens > least)
    # A turn that follows within 50 ms may come before the router knows of the last one's end.
    assert any(predicted), "the prediction includes the previous turn"
