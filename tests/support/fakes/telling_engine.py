"""A scripted engine that tells its answers' token ids beside a stream, and goes on with the answers of others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web

from pointsman_lab.emulator.answer_records import begun_answer, with_comment
from tests.support.fakes.engine_answers import Script
from tests.support.fakes.gateway_peers import FakeEngine

# Id of an answer's first word; those of the others follow.
FIRST_ID = 500


@dataclass
class TellingEngine(FakeEngine):
    """After `words_before` words, in all, a stream waits for `go`. In mode "cut" its connection is closed there instead, in mode
    "cut after the end" behind its last event. With `tells` False it is an engine without the connector package."""

    words_before: int = 2
    tells: bool = True
    keeps_alive: bool = False  # whether comments precede the words, as with vLLM's --sse-keep-alive-interval
    go: asyncio.Event = field(default_factory=asyncio.Event)
    continued_texts: list[str] = field(default_factory=list)

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        begun = begun_answer(script.body) if self.tells else None
        _, words, after = script.events()
        there = len(begun.ids) if begun is not None else 0
        if script.body.get("continue_final_message"):
            text = script.body["messages"][-1]["content"]
            there = next(at for at in range(len(self.words) + 1) if "".join(self.words[:at]) == text)
            self.continued_texts.append(text)
            # As an engine does that has the text in its prompt.
            rest = Script(script.kind, script.body, self.words[there:], script.prompt)
            _, _, after = rest.events()
        assert begun is None or list(begun.ids) == list(range(FIRST_ID, FIRST_ID + there))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if self.keeps_alive:
            await answer.write(b": keep-alive\n\n")
        if begun is not None and there:
            await answer.write(b":\n\n")
        if begun is None:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            await answer.write(b"data: " + json.dumps(role).encode() + b"\n\n")
        for at, event in enumerate(words):
            if at == self.words_before:
                if self.mode == "cut":
                    assert request.transport is not None
                    request.transport.close()
                    return answer
                await self.go.wait()
            if self.keeps_alive:
                await answer.write(b": keep-alive\n\n")
            if at >= there:
                last = at == len(words) - 1
                await answer.write(event if begun is None else with_comment([FIRST_ID + at], event, complete=last))
        end = b"".join(after)
        await answer.write(end if begun is None else with_comment((), end, complete=True))
        if self.mode == "cut after the end":
            assert request.transport is not None
            request.transport.close()
        return answer
