"""Sends a trace's requests to a gateway as their sessions would, with streaming, and records each request's result."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import aiohttp
import msgspec

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.subagents import SubagentRequest
from pointsman_lab.workload.traces import TraceRequest

# Fields of a chunk's delta in which a token of the answer can come.
ANSWER_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")

OnResult = Callable[[RequestRecord], None]
Session = Sequence[TraceRequest]
# Headers of a request, from its session and the session that started it ("": none).
HeadersOf = Callable[[str, str], Mapping[str, str]]


def session_headers(session: str, parent: str) -> Mapping[str, str]:
    """Return the headers by which Pointsman's own clients name a session, and the session that started it."""
    return {"X-Session-ID": session} | ({"X-Parent-Session-Id": parent} if parent else {})


class ReplayTarget(Protocol):
    """Address and timing of the requests that a TraceSender sends."""

    @property
    def url(self) -> str:
        """Base URL of a gateway or an engine."""

    @property
    def timing(self) -> str:
        """Timing of turns: "trace" or "think"."""

    @property
    def time_scale(self) -> float:
        """Factor on timestamps and think times."""

    @property
    def max_sessions(self) -> int:
        """Maximum sessions in flight."""


class Chats(Protocol):
    """Texts and lengths of the requests that a TraceSender sends; ChatMaker is one."""

    def messages(self, request: TraceRequest) -> object:
        """Return a request's messages, or their JSON (msgspec.Raw)."""

    def tokens(self, trace_tokens: int) -> int:
        """Return the number of tokens that stands for a length of the trace."""


class TraceSender:
    """Sends the sessions of a trace, and records each request's result in `records`, in the order in which requests ended.

    A sub-agent's session starts when its parent's turn has been answered, and the parent's next turn waits for its end.
    """

    def __init__(
        self,
        target: ReplayTarget,
        http: aiohttp.ClientSession,
        model: str,
        chats: Chats,
        on_result: OnResult | None,
        headers_of: HeadersOf = session_headers,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._http = http
        self._model = model
        self._chats = chats
        self._on_result = on_result
        self._headers_of = headers_of
        # By session: its sub-agents.
        self._subagents: dict[str, list[Session]] = {}
        self._started = time.monotonic()
        self._origin_ms = 0.0

    def clock(self) -> float:
        """Seconds since the start of the replay."""
        return time.monotonic() - self._started

    async def send(self, sessions: Sequence[Session]) -> None:
        """Send all sessions to their end. If cancelled, it drops the requests in flight; `records` has those that ended."""
        self._subagents = defaultdict(list)
        for turns in sessions:
            if isinstance(turns[0], SubagentRequest):
                self._subagents[turns[0].parent].append(turns)
        free = asyncio.Semaphore(self._target.max_sessions)
        self._started = time.monotonic()
        self._origin_ms = sessions[0][0].timestamp_ms
        async with asyncio.TaskGroup() as group:
            for turns in sessions:
                if isinstance(turns[0], SubagentRequest):
                    continue
                await self._sleep_until(self._due(turns[0]))
                # A session counts as in flight from its first turn to its last. Further sessions wait in the trace's order.
                await free.acquire()
                group.create_task(self._session(turns)).add_done_callback(lambda _: free.release())

    async def _session(self, turns: Session, parent: str = "") -> None:
        for request in turns:
            if request is turns[0]:
                await self._sleep_until(0.0 if parent else self._due(request))
            elif self._target.timing == "trace":
                await self._sleep_until(self._due(request))
            else:
                await asyncio.sleep((request.think_ms or 0.0) / 1e3 * self._target.time_scale)
            record = await self._ask(request, parent)
            self.records.append(record)
            if self._on_result:
                self._on_result(record)
            async with asyncio.TaskGroup() as group:
                for child in self._subagents.get(request.session, ()):
                    if isinstance(child[0], SubagentRequest) and child[0].parent_turn == request.turn:
                        group.create_task(self._session(child, request.session))

    def _due(self, request: TraceRequest) -> float:
        return self._started + (request.timestamp_ms - self._origin_ms) / 1e3 * self._target.time_scale

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    async def _ask(self, request: TraceRequest, parent: str) -> RequestRecord:
        body = {
            "model": self._model,
            "messages": self._chats.messages(request),
            "max_tokens": self._chats.tokens(request.output_length),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", **self._headers_of(request.session, parent)}
        sent = time.monotonic()
        record = RequestRecord(session=request.session, turn=request.turn, t_send=sent - self._started)
        try:
            async with self._http.post(
                f"{self._target.url}/v1/chat/completions", data=data, headers=headers
            ) as response:
                record.status = response.status
                record.instance = response.headers.get("X-Pointsman-Instance", "")
                record.decision = response.headers.get("X-Pointsman-Decision", "")
                if response.status == 200:
                    await read_stream(response, record, sent)
                else:
                    record.error = (await response.text())[:500]
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
            record.error = f"an event of another API ({type(error).__name__}: {error})"
        record.e2e_s = time.monotonic() - sent
        return record


async def read_stream(response: aiohttp.ClientResponse, record: RequestRecord, sent: float) -> None:
    """Read a streamed answer, whose request was `sent` at that time of time.monotonic(), into its record."""
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        # Chunks between the first token and the usage are not needed, and decoding all of them would dominate the client's cost.
        if record.ttft_s is not None and b'"usage"' not in data and b'"error"' not in data:
            continue
        chunk = msgspec.json.decode(data)
        if error := chunk.get("error"):
            record.error = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        choices = chunk.get("choices") or []
        if record.ttft_s is None and choices and any(map((choices[0].get("delta") or {}).get, ANSWER_FIELDS)):
            record.ttft_s = time.monotonic() - sent
        if used := chunk.get("usage"):
            record.prompt_tokens = used["prompt_tokens"]
            record.output_tokens = used["completion_tokens"]
            record.cached_tokens = (used.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not done and not record.error:
        record.error = "the stream broke off"
