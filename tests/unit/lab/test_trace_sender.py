"""When a TraceSender sends the turns of sessions with sub-agents, and what it reads of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import pytest

from pointsman_lab.live import trace_sender
from pointsman_lab.live.trace_sender import TraceSender, session_headers
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.subagents import SubagentRequest
from pointsman_lab.workload.traces import TraceRequest


@dataclass(frozen=True)
class Target:
    """A target that nothing is sent to."""

    url: str = ""
    timing: str = "think"
    time_scale: float = 0.0
    max_sessions: int = 10


class Noting(TraceSender):
    """Notes when requests begin and end in place of sending them."""

    def __init__(self) -> None:
        unused: Any = None
        super().__init__(Target(), unused, "model", unused, None)
        self.noted: list[str] = []

    async def _ask(self, request: TraceRequest, parent: str) -> RequestRecord:
        self.noted.append(f"{request.session}{request.turn} of {parent or '-'}")
        await asyncio.sleep(0)
        self.noted.append(f"{request.session}{request.turn} done")
        return RequestRecord(session=request.session, turn=request.turn, status=200)


def turns(name: str, count: int) -> list[TraceRequest]:
    return [TraceRequest(session_id=name, turn=turn, **SIZES) for turn in range(1, count + 1)]


SIZES: dict[str, Any] = {
    "timestamp_ms": 0.0,
    "input_length": 16,
    "output_length": 1,
    "hash_ids": (1,),
    "block_size": 16,
}


def test_subagents_begin_with_their_parents_answer_and_its_next_turn_waits_for_them() -> None:
    child = [SubagentRequest(session_id="c", turn=1, parent="p", parent_turn=1, **SIZES), *turns("c", 2)[1:]]
    other = [SubagentRequest(session_id="d", turn=1, parent="p", parent_turn=1, **SIZES)]
    sender = Noting()
    asyncio.run(sender.send([turns("p", 2), child, other]))
    noted = sender.noted
    assert noted[:2] == ["p1 of -", "p1 done"]
    assert set(noted[2:4]) == {"c1 of p", "d1 of p"}
    assert noted[-4:] == ["c2 of p", "c2 done", "p2 of -", "p2 done"]
    assert len(sender.records) == 5


class Answer:
    """An answer whose body has these events."""

    def __init__(self, *events: str) -> None:
        self._lines = [f"data: {event}\n".encode() for event in events]

    @property
    async def content(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line


def read(*events: str) -> RequestRecord:
    record, answer = RequestRecord(session="s", turn=1), cast(aiohttp.ClientResponse, Answer(*events))
    asyncio.run(trace_sender.read_stream(answer, record, 0.0))
    return record


@pytest.mark.parametrize(
    "delta", ['{"content":"a"}', '{"reasoning":"a"}', '{"reasoning_content":"a"}', '{"tool_calls":[{"index":0}]}']
)
def test_the_first_token_may_be_one_of_reasoning_or_of_a_call(delta: str) -> None:
    chunk = '{"choices":[{"delta":%s}]}'
    assert read(chunk % '{"role":"assistant","content":""}', "[DONE]").ttft_s is None
    assert read(chunk % "null", chunk % delta, "[DONE]").ttft_s is not None


def test_an_error_may_be_a_text() -> None:
    assert read('{"error":"overloaded"}').error == "overloaded"


def test_a_subagents_requests_name_its_parent() -> None:
    assert session_headers("c", "p") == {"X-Session-ID": "c", "X-Parent-Session-Id": "p"}
    assert session_headers("p", "") == {"X-Session-ID": "p"}
