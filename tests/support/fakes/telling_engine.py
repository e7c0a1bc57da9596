"""A scripted engine that tells its answers' token ids beside a stream, and goes on with the answers of others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from pointsman.lab.emulator.told_answers import begun_answer, with_comment
from tests.support.fakes.engine_answers import Script
from tests.support.fakes.gateway_peers import FakeEngine

# Id of an answer's first word; those of the others follow.
FIRST_ID = 500


@dataclass
class TellingEngine(FakeEngine):
    """After `words_before` words, in all, a stream waits for `go`. In mode "cut" its connection is closed there instead. With
    `tells` False it is an engine without the connector package."""

    words_before: int = 2
    tells: bool = True
    go: asyncio.Event = field(default_factory=asyncio.Event)
    ended_by_client: int = 0

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        begun = begun_answer(script.body) if self.tells else None
        _, words, after = script.events()
        there = len(begun.ids) if begun is not None else 0
        assert begun is None or list(begun.ids) == list(range(FIRST_ID, FIRST_ID + there))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if there:
            await answer.write(b":\n\n")
        for at, event in enumerate(words):
            if at == self.words_before:
                if self.mode == "cut":
                    assert request.transport is not None
                    request.transport.close()
                    return answer
                await self.go.wait()
            if at >= there:
                last = at == len(words) - 1
                await answer.write(event if begun is None else with_comment([FIRST_ID + at], event, complete=last))
        end = b"".join(after)
        await answer.write(end if begun is None else with_comment((), end, complete=True))
        return answer
