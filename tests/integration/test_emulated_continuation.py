"""An emulated engine continues another one's answer as a real engine with the connector package does."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from pointsman_lab.emulator.emulated_engine import EmulateSettings, start

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "parameters": {"type": "object", "properties": {"why": {"type": "string"}}, "required": ["why"]},
        },
    }
]
CHAT = {"messages": [{"role": "user", "content": "Set the points."}], "max_tokens": 40}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", {"prompt": "Set the points.", "max_tokens": 40}),
    "tool calls": ("/v1/chat/completions", CHAT | {"tools": TOOLS}),
}


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Two engines."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(2):
            engine = await start(EmulateSettings(port=0, speedup=2.0))
            stack.push_async_callback(engine.stop)
            found.append(engine.url)
        yield found


async def stream(url: str, path: str, body: dict[str, Any], begun: str) -> list[str]:
    """The blocks of an answer."""
    asked = {"stream": True, "stream_options": {"include_usage": True}, "vllm_xargs": {"pointsman_answer": begun}}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}{path}", json=body | asked, headers={"X-Request-ID": "r"}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return [block for block in (await answer.text()).split("\n\n") if block]


def answered_in(blocks: list[str]) -> str:
    return "".join(block.partition("x")[0] for block in blocks if block.startswith(":"))


def ids_in(answer: str) -> list[str]:
    return re.findall(r"\d+", answer)


def gist(blocks: list[str]) -> dict[str, Any]:
    """What a client has of these blocks."""
    ids: set[str] = set()
    text, calls, roles, finish, usage = "", dict[int, str](), 0, "", None
    for block in blocks:
        if not block.startswith("data: {"):
            continue
        chunk = json.loads(block[6:])
        ids.add(chunk["id"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})
            roles += "role" in delta
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                known = calls.get(call["index"], "")
                calls[call["index"]] = known + call["function"].get("name", "") + call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    assert usage is not None
    return {"text": text, "calls": calls, "roles": roles, "finish": finish, "usage": usage, "ids": ids}


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_goes_on_wherever_it_was_cut(urls: list[str], name: str) -> None:
    path, body = BODIES[name]
    whole = await stream(urls[0], path, body, "")
    undisturbed = gist(whole)
    undisturbed["usage"].pop("prompt_tokens_details")
    cuts = [*[at for at, block in enumerate(whole) if block.startswith(":")][1:], len(whole) - 2]
    assert len(cuts) > 3
    for cut in cuts:
        rest = await stream(urls[1], path, body, answered_in(whole[:cut]))
        assert rest[0].startswith(":")
        joined = gist(whole[:cut] + rest)
        joined["usage"].pop("prompt_tokens_details")
        assert joined == undisturbed
        assert ids_in(answered_in(whole[:cut] + rest)) == ids_in(answered_in(whole))


async def test_a_text_that_is_no_recorded_answer_is_refused(urls: list[str]) -> None:
    body = CHAT | {"stream": True, "vllm_xargs": {"pointsman_answer": ":5; drop"}}
    async with aiohttp.ClientSession() as http, http.post(f"{urls[0]}/v1/chat/completions", json=body) as answer:
        assert answer.status == 400
