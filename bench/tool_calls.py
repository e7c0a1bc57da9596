"""Writes docs/tool_calls.md: whether agents get the same tool calls through the gateway as from the engine itself.

`python -m bench.tool_calls [CALLS [SEED]]` (by default 2,000 calls). Agent loops by the clients of OpenAI and Anthropic are run
twice: against an emulated engine, and through a gateway in front of three. Exits with status 1 if a call was lost or changed.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai

from bench.judged_fleet import emulated

PAGE = Path("docs/tool_calls.md")
ENGINES = 3
TURNS = 10  # of an agent loop
AT_ONCE = 16  # loops
MAX_TOKENS = 3_000
INTRO = """# Tool calls with and without the gateway

Written by `python -m bench.tool_calls`; not by hand.

Agent loops of {turns} turns, each run twice: against an emulated engine directly, and through a gateway in front of {engines}
of them. The answers are drawn: one to four calls at once, with a text before them or none, arguments with nested values, all of
JSON's escapes, text of many scripts, long strings and numbers; each fifth turn names a tool, whose arguments the engine draws
from its schema. Each call's result goes into the next turn. Clients: openai {openai}, anthropic {anthropic}. A turn is the same
if names, arguments (byte by byte where the API sends them as text), their order, the text and the reason of the end are the same.

| API | turns | calls | lost | changed | turns that differ otherwise |
|---|---|---|---|---|---|
"""


class Turn(NamedTuple):
    """What a client has of one answer."""

    calls: tuple[tuple[str, str], ...]  # name and arguments as JSON
    text: str
    stop: str


Messages = list[dict[str, Any]]


# ---- what is drawn ----


def _text(rng: random.Random) -> str:
    alphabets = (
        string.ascii_letters + " ", string.printable, 'äöüßéñçøłž "', "日本語中文字한국어",
        "😀👩‍👩‍👧🇩🇪", "\u2028\u2029\u200b\ufeff\x7f\x01",
        '\\"/\b\f\n\r\t', "<tool_call></tool_call>{}[]",
    )  # fmt: skip
    return "".join(rng.choices(rng.choice(alphabets), k=rng.choice([0, 1, 5, 20, 20, 60, 400])))


def _value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(9 if depth < 4 else 6):
        case 0:
            return rng.choice([True, False, None])
        case 1:
            return rng.choice([0, -1, 2**53, -(2**63), rng.randrange(10**9)])
        case 2:
            return rng.choice([0.1, -1e-7, 1.5e300, rng.random()])
        case 3 | 4 | 5:
            return _text(rng)
        case 6:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            return {_text(rng)[:40]: _value(rng, depth + 1) for _ in range(rng.randrange(5))}


def _script(rng: random.Random) -> list[dict[str, Any]]:
    """Return the scripted answers of one engine, one for each turn."""
    return [
        {
            "text": rng.choice(["", "I look at it. ", _text(rng)]),
            "tool_calls": [
                {
                    "name": rng.choice(NAMES),
                    "arguments": {_text(rng)[:20] or "a": _value(rng) for _ in range(rng.randrange(4))},
                }
                for _ in range(rng.randint(1, 4))
            ],
        }
        for _ in range(TURNS)
    ]


NAMES = ("read_file", "edit-file", "run", "mcp__tickets__search", "A" * 64)
SCHEMAS: Mapping[str, dict[str, Any]] = {
    name: {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
            "kind": {"enum": ["file", "Verzeichnis ä", "目录", 'a "quoted" one']},
            "options": {"type": "object", "properties": {"deep": {"type": "boolean"}, "ratio": {"type": "number"}}},
        },
        "required": ["path", "kind", "options"],
    }
    for name in NAMES
}


# ---- the three APIs ----


class Chat:
    """/v1/chat/completions by openai's client."""

    def __init__(self, url: str, model: str, streamed: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._streamed = streamed
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
        ]
        self._fixed: dict[str, Any] = {"model": model, "tools": tools, "max_tokens": MAX_TOKENS}

    async def ask(self, messages: Messages, named: str) -> Turn:
        """Return the answer to a conversation; with `named`, a call of this tool."""
        asked = self._fixed | {"messages": messages}
        if named:
            asked["tool_choice"] = {"type": "function", "function": {"name": named}}
        if not self._streamed:
            [choice] = (await self._client.chat.completions.create(**asked)).choices
            calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
            return Turn(calls, choice.message.content or "", choice.finish_reason)
        text, stop, parts = "", "", dict[int, list[str]]()
        async for chunk in await self._client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                text, stop = text + (choice.delta.content or ""), choice.finish_reason or stop
                for call in choice.delta.tool_calls or ():
                    known = parts.setdefault(call.index, ["", ""])
                    known[0] += call.function.name or ""
                    known[1] += call.function.arguments or ""
        return Turn(tuple((name, arguments) for name, arguments in parts.values()), text, stop)

    def blocks(self, turn: Turn, number: int) -> Messages:
        """Return the messages that an answer and its calls' results add to the conversation."""
        calls = [
            {"id": f"call_{number}_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(turn.calls)
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"} for call in calls]
        return [{"role": "assistant", "content": turn.text or None, "tool_calls": calls}, *results]


class Anthropic:
    """/v1/messages by anthropic's client."""

    def __init__(self, url: str, model: str, streamed: bool) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
        self._streamed = streamed
        tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        self._fixed: dict[str, Any] = {"model": model, "tools": tools, "max_tokens": MAX_TOKENS}

    async def ask(self, messages: Messages, named: str) -> Turn:
        """As Chat.ask."""
        asked = self._fixed | {"messages": messages}
        if named:
            asked["tool_choice"] = {"type": "tool", "name": named}
        if self._streamed:
            async with self._client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await self._client.messages.create(**asked)
        calls = tuple((block.name, _json(block.input)) for block in answer.content if block.type == "tool_use")
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Turn(calls, text, answer.stop_reason or "")

    def blocks(self, turn: Turn, number: int) -> Messages:
        """As Chat.told."""
        called: Messages = [{"type": "text", "text": turn.text}] if turn.text.strip() else []
        results = []
        for at, (name, arguments) in enumerate(turn.calls):
            called.append(
                {"type": "tool_use", "id": f"call_{number}_{at}", "name": name, "input": json.loads(arguments)}
            )
            results.append({"type": "tool_result", "tool_use_id": f"call_{number}_{at}", "content": f"result {number}"})
        return [{"role": "assistant", "content": called}, {"role": "user", "content": results}]


class Responses:
    """/v1/responses by openai's client."""

    def __init__(self, url: str, model: str, streamed: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._streamed = streamed
        tools = [
            {"type": "function", "name": name, "parameters": schema, "strict": False}
            for name, schema in SCHEMAS.items()
        ]
        limits = {"store": False, "max_output_tokens": MAX_TOKENS}
        self._fixed: dict[str, Any] = {"model": model, "tools": tools, **limits}

    async def ask(self, messages: Messages, named: str) -> Turn:
        """As Chat.ask."""
        asked = self._fixed | {"input": messages}
        if named:
            asked["tool_choice"] = {"type": "function", "name": named}
        if not self._streamed:
            answer = await self._client.responses.create(**asked)
            calls = tuple((item.name, item.arguments) for item in answer.output if item.type == "function_call")
            return Turn(calls, answer.output_text, answer.status or "")
        text, stop, names, parts = "", "", dict[int, str](), dict[int, str]()
        async for event in await self._client.responses.create(**asked, stream=True):
            match event.type:
                case "response.output_text.delta":
                    text += event.delta
                case "response.output_item.added" if event.item.type == "function_call":
                    names[event.output_index], parts[event.output_index] = event.item.name, ""
                case "response.function_call_arguments.delta":
                    parts[event.output_index] += event.delta
                case "response.completed" | "response.incomplete" | "response.failed":
                    stop = event.type
        return Turn(tuple((name, parts[at]) for at, name in names.items()), text, stop)

    def blocks(self, turn: Turn, number: int) -> Messages:
        """As Chat.told."""
        blocks: Messages = [{"role": "assistant", "content": turn.text}] if turn.text else []
        for at, (name, arguments) in enumerate(turn.calls):
            blocks.append(
                {"type": "function_call", "call_id": f"call_{number}_{at}", "name": name, "arguments": arguments}
            )
        blocks += [
            {"type": "function_call_output", "call_id": f"call_{number}_{at}", "output": f"result {number}"}
            for at in range(len(turn.calls))
        ]
        return blocks


Api = Chat | Anthropic | Responses
APIS: Sequence[tuple[str, Callable[[str, str, bool], Api], bool]] = [
    (f"{name}, {'streamed' if streamed else 'whole'}", made, streamed)
    for name, made in (("chat completions", Chat), ("messages", Anthropic), ("responses", Responses))
    for streamed in (True, False)
]


def _json(value: object) -> str:
    # The client has parsed the arguments, so their spaces are gone, and only they.
    return json.dumps(value, ensure_ascii=False)


# ---- the comparison ----


async def loop(direct: Api, through: Api, rng: random.Random, name: str) -> Counter[str]:
    """Run an agent loop on both; return what was counted."""
    found: Counter[str] = Counter()
    messages: Messages = [{"role": "user", "content": f"Task {name}: {rng.getrandbits(64):x}"}]
    for number in range(TURNS):
        named = rng.choice(NAMES) if number % 5 == 4 else ""
        try:
            one, other = await asyncio.gather(direct.ask(messages, named), through.ask(messages, named))
        except (openai.APIError, anthropic.APIError) as error:
            raise RuntimeError(f"{name}, turn {number}: {error}") from error
        found["turns"] += 1
        found["calls"] += len(one.calls)
        found["lost"] += max(len(one.calls) - len(other.calls), 0)
        changed = sum(a != b for a, b in zip(one.calls, other.calls, strict=False)) + max(
            len(other.calls) - len(one.calls), 0
        )
        found["changed"] += changed
        found["otherwise"] += one[1:] != other[1:]
        if one != other:
            print(f"{name}, turn {number}:\n  {one}\n  {other}", file=sys.stderr)
        messages += direct.blocks(one, number)
    return found


async def compared(calls: int, seed: int) -> dict[str, Counter[str]]:
    """Compare until each API has made its share of the calls; return by API what was counted."""
    rng, room = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    found = {name: Counter[str]() for name, _, _ in APIS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(_script(rng)))
        async with emulated(ENGINES, "--script", str(script)) as judged:

            async def run(name: str, made: Callable[[str, str, bool], Api], streamed: bool, number: int) -> None:
                async with room:
                    apis = made(judged.engine, judged.model, streamed), made(judged.gateway, judged.model, streamed)
                    found[name] += await loop(*apis, random.Random(f"{seed} {name} {number}"), f"{name} {number}")

            number = 0
            while left := [each for each in APIS if found[each[0]]["calls"] * len(APIS) < calls]:
                number += 1
                await asyncio.gather(*(run(*each, number) for each in left))
    return found


def main(calls: int = 2_000, seed: int = 1) -> int:
    """Compare, write the page, and return the process's exit status."""
    found = asyncio.run(compared(calls, seed))
    total = sum(found.values(), Counter[str]())
    rows = [*found.items(), ("all", total)]
    columns = ("turns", "calls", "lost", "changed", "otherwise")
    table = "".join(f"| {name} | {' | '.join(f'{counted[key]:,}' for key in columns)} |\n" for name, counted in rows)
    intro = INTRO.format(turns=TURNS, engines=ENGINES, openai=version("openai"), anthropic=version("anthropic"))
    PAGE.write_text(intro + table)
    print(table)
    return int(any(total[key] for key in columns[2:]))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
