"""Clients of three APIs whose requests make an engine call tools, and what each has of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import anthropic
import openai

WITHIN_S = 300
# A tool choice: any of the tools, at least one.
ANY = "any tool"

Messages = list[dict[str, Any]]
Schemas = Mapping[str, Mapping[str, Any]]


class Turn(NamedTuple):
    """What a client has of one answer."""

    calls: tuple[tuple[str, str], ...]  # name and arguments, as JSON if the answer is whole
    text: str
    stop: str

    @property
    def whole(self) -> bool:
        """Whether all arguments are JSON: else the answer cannot be sent back."""
        try:
            return all(json.loads(arguments) is not None for _, arguments in self.calls)
        except ValueError:
            return False


@dataclass(frozen=True)
class Asked:
    """What all requests of an agent loop have."""

    model: str  # as the engine serves it
    schemas: Schemas  # of each tool's arguments, by its name
    max_tokens: int  # of an answer
    strict: bool = False  # whether the engine may call tools only as their schemas say
    parallel: bool = True  # whether it may call more than one at once
    seed: int | None = None  # of greedy answers; None: the engine's own sampling

    def sampling(self) -> dict[str, Any]:
        """Return the fields that say how to sample. A greedy answer needs no seed; it is sent as agents send it."""
        return {} if self.seed is None else {"temperature": 0, "seed": self.seed}


class Chat:
    """/v1/chat/completions by openai's client."""

    def __init__(self, url: str, asked: Asked, streamed: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S)
        self._streamed = streamed
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": asked.strict}}
            for name, schema in asked.schemas.items()
        ]
        self._fixed: dict[str, Any] = {"model": asked.model, "tools": tools, "max_tokens": asked.max_tokens}
        self._fixed |= asked.sampling() | ({} if asked.parallel else {"parallel_tool_calls": False})

    async def ask(self, messages: Messages, choice: str) -> Turn:
        """Return the answer to a conversation. `choice`: the tool to call, ANY, or empty if the engine need not call one."""
        asked = self._fixed | {"messages": messages}
        if choice:
            named = {"type": "function", "function": {"name": choice}}
            asked["tool_choice"] = "required" if choice == ANY else named
        if not self._streamed:
            [answer] = (await self._client.chat.completions.create(**asked)).choices
            calls = tuple((call.function.name, call.function.arguments) for call in answer.message.tool_calls or ())
            return Turn(calls, answer.message.content or "", answer.finish_reason)
        text, stop, parts = "", "", dict[int, list[str]]()
        async for chunk in await self._client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices:
                text, stop = text + (delta.delta.content or ""), delta.finish_reason or stop
                for call in delta.delta.tool_calls or ():
                    known = parts.setdefault(call.index, ["", ""])
                    known[0] += call.function.name or ""
                    known[1] += call.function.arguments or ""
        return Turn(tuple((name, arguments) for name, arguments in parts.values()), text, stop)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

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

    def __init__(self, url: str, asked: Asked, streamed: bool) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S)
        self._streamed = streamed
        tools = [
            {"name": name, "input_schema": schema, "strict": asked.strict} for name, schema in asked.schemas.items()
        ]
        self._fixed: dict[str, Any] = {"model": asked.model, "tools": tools, "max_tokens": asked.max_tokens}
        # The client has no argument for a temperature, and the API no seed.
        self._fixed["extra_body"] = {name: value for name, value in asked.sampling().items() if name != "seed"}
        self._serial = {} if asked.parallel else {"disable_parallel_tool_use": True}

    async def ask(self, messages: Messages, choice: str) -> Turn:
        """As Chat.ask."""
        asked = self._fixed | {"messages": messages}
        if choice:
            named = {"type": "any"} if choice == ANY else {"type": "tool", "name": choice}
            asked["tool_choice"] = named | self._serial
        if not self._streamed:
            answer = await self._client.messages.create(**asked)
            calls = tuple((block.name, _json(block.input)) for block in answer.content if block.type == "tool_use")
            text = "".join(block.text for block in answer.content if block.type == "text")
            return Turn(calls, text, answer.stop_reason or "")
        # Not the client's own sum of the events, which fails where an engine's arguments are no JSON.
        text, stop, names, parts = "", "", dict[int, str](), dict[int, str]()
        async for event in await self._client.messages.create(**asked, stream=True):
            match event.type:
                case "content_block_start" if event.content_block.type == "tool_use":
                    names[event.index], parts[event.index] = event.content_block.name, ""
                case "content_block_delta" if event.delta.type == "text_delta":
                    text += event.delta.text
                case "content_block_delta" if event.delta.type == "input_json_delta":
                    parts[event.index] += event.delta.partial_json
                case "message_delta":
                    stop = event.delta.stop_reason or stop
        return Turn(tuple((name, parts[at] or "{}") for at, name in names.items()), text, stop)

    async def close(self) -> None:
        """As Chat.close."""
        await self._client.close()

    def blocks(self, turn: Turn, number: int) -> Messages:
        """As Chat.blocks."""
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

    def __init__(self, url: str, asked: Asked, streamed: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S)
        self._streamed = streamed
        tools = [
            {"type": "function", "name": name, "parameters": schema, "strict": asked.strict}
            for name, schema in asked.schemas.items()
        ]
        self._fixed: dict[str, Any] = {"model": asked.model, "tools": tools, "max_output_tokens": asked.max_tokens}
        self._fixed |= {"store": False, "extra_body": asked.sampling()}
        self._fixed |= {} if asked.parallel else {"parallel_tool_calls": False}

    async def ask(self, messages: Messages, choice: str) -> Turn:
        """As Chat.ask."""
        asked = self._fixed | {"input": messages}
        if choice:
            asked["tool_choice"] = "required" if choice == ANY else {"type": "function", "name": choice}
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

    async def close(self) -> None:
        """As Chat.close."""
        await self._client.close()

    def blocks(self, turn: Turn, number: int) -> Messages:
        """As Chat.blocks."""
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


Client = Chat | Anthropic | Responses


class Api(NamedTuple):
    """One API, its answers streamed or whole."""

    name: str
    client: Callable[[str, Asked, bool], Client]
    streamed: bool

    def at(self, url: str, asked: Asked) -> Client:
        """Return a client of the server at `url`."""
        return self.client(url, asked, self.streamed)


APIS: Sequence[Api] = [
    Api(f"{name}, {'streamed' if streamed else 'whole'}", client, streamed)
    for name, client in (("chat completions", Chat), ("messages", Anthropic), ("responses", Responses))
    for streamed in (True, False)
]


def _json(value: object) -> str:
    # The client has parsed the arguments, so their spaces are gone, and only they.
    return json.dumps(value, ensure_ascii=False)
