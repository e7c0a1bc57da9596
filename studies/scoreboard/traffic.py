"""The scoreboard's traffic: which sessions a cell sends in a round, and how they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from msgspec.structs import replace

from pointsman_lab.live.trace_sender import HeadersOf, TraceSender, session_headers
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.forks import Forks, with_forks
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.synthetic_trace import AGENTIC, SMALL, SessionShape, generate, shape_with
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TraceRequest, by_session
from studies import TRACES

# The recorded traces are beside the repository on the machines where the project is developed.
AGENTIC_TRACE, CHAT_TRACE = "agentic_coding_1214.jsonl.gz", "mooncake_conversation.jsonl.gz"
# Longest pause between two turns, s of the engines' time: a round has some minutes.
PAUSE_LIMIT_S = 8.0
# Number of a session's turns that are sent, its first ones.
TURN_LIMIT = 5
CHAT_SHAPE = shape_with(SMALL, {"system_tokens": 512, "context_tokens": 6_000, "context_spread": 1.2, "growth_tokens": 400,
                                "output_tokens": 300, "mean_turns": 1.5, "tool_s": 20.0})  # fmt: skip
# Short sessions, for tests.
TINY_SHAPE = shape_with(SMALL, {"system_tokens": 512, "context_tokens": 600, "growth_tokens": 120, "output_tokens": 24,
                                "mean_turns": 4.0, "tool_s": 1.5, "max_tokens": 3_500, "block_size": 64})  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Sessions of one cell. Times in s of the engines' time.

    `kind`: "agentic", "chat" or "tiny". `sessions` start evenly drawn over `span_s`; `burst` more of them start within `burst_s`
    from half of the span on. A chat takes `share` of what the trace has in `span_s`, at the trace's times.
    """

    kind: str
    span_s: float
    sessions: int = 0
    burst: int = 0
    burst_s: float = 5.0
    share: float = 1.0
    forks: Forks = field(default_factory=Forks)  # default: none

    @property
    def timing(self) -> str:
        """When a turn is sent: "think" (a pause after the answer before it) or "trace" (at its time, if that answer is there)."""
        return "trace" if self.kind == "chat" else "think"


@dataclass(frozen=True)
class Draw:
    """The sessions of one cell in one round, in the order of their starts, and a description of their source."""

    sessions: Sequence[Session]
    source: str


def draw(load: Load, name: str, recorded: Path = TRACES) -> Draw:
    """Return the sessions of the draw `name`, from the traces in the folder `recorded`, or generated if there are none. Equal
    arguments give equal draws."""
    rng = random.Random(f"scoreboard {load.kind} {name}")
    if load.kind == "chat":
        return _chat(load, rng, recorded)
    count = load.sessions + load.burst
    if load.kind == "agentic" and (file := recorded / AGENTIC_TRACE).exists():
        sessions, source = rng.sample(list(by_session(load_trace(file)).values()), count), file.name
    else:
        sessions, source = _generated(AGENTIC if load.kind == "agentic" else TINY_SHAPE, count, rng.getrandbits(32))
    starts = sorted(rng.uniform(0, load.span_s) for _ in range(load.sessions))
    starts += sorted(load.span_s / 2 + rng.uniform(0, load.burst_s) for _ in range(load.burst))
    first = min(starts)
    moved = [_starting(turns, (start - first) * 1e3) for turns, start in zip(sessions, starts, strict=True)]
    ordered = sorted(moved, key=lambda turns: turns[0].timestamp_ms)
    return Draw(with_forks(ordered, load.forks, rng.getrandbits(32)), source)


def _chat(load: Load, rng: random.Random, recorded: Path) -> Draw:
    if (file := recorded / CHAT_TRACE).exists():
        requests, source = load_trace(file), file.name
        span_ms = load.span_s * 1e3
        begin = rng.uniform(requests[0].timestamp_ms, requests[-1].timestamp_ms - span_ms)
        requests = [request for request in requests if begin <= request.timestamp_ms < begin + span_ms]
    else:
        # As many requests per second as the recorded trace has.
        sessions, source = _generated(CHAT_SHAPE, round(load.span_s * 2.2), rng.getrandbits(32), load.span_s)
        requests = [request for turns in sessions for request in turns]
    taken = [turns for turns in by_session(requests).values() if rng.random() < load.share]
    first = min(turns[0].timestamp_ms for turns in taken)
    moved = [[replace(request, timestamp_ms=request.timestamp_ms - first) for request in turns] for turns in taken]
    return Draw(sorted(moved, key=lambda turns: turns[0].timestamp_ms), source)


def _generated(shape: SessionShape, count: int, seed: int, span_s: float = 1.0) -> tuple[list[list[TraceRequest]], str]:
    """Return `count` generated sessions. Sub-agents count as sessions of their own; what is too many is left out."""
    sessions = list(by_session(generate(count, span_s, seed, shape)).values())
    return sessions[:count], "generated"


def _starting(turns: Sequence[TraceRequest], start_ms: float) -> Session:
    """Return the first turns of a session, which starts at `start_ms`, with pauses of at most PAUSE_LIMIT_S."""
    shift = start_ms - turns[0].timestamp_ms
    limit_ms = PAUSE_LIMIT_S * 1e3
    return [
        replace(turn, timestamp_ms=turn.timestamp_ms + shift, think_ms=min(turn.think_ms or 0.0, limit_ms))
        for turn in turns[:TURN_LIMIT]
    ]


class PreparedChats:
    """The messages of a draw as JSON, made once for all routers of a round: making them while requests are sent takes CPU time
    from what is measured."""

    def __init__(self, sessions: Sequence[Session], words: Sequence[str]) -> None:
        requests = [request for turns in sessions for request in turns]
        chats = ChatMaker(requests, words)
        self._messages = {
            (request.session, request.turn): msgspec.Raw(msgspec.json.encode(chats.messages(request)))
            for request in requests
        }

    def messages(self, request: TraceRequest) -> msgspec.Raw:
        """Return the messages of a request of the draw."""
        return self._messages[request.session, request.turn]

    def tokens(self, trace_tokens: int) -> int:
        """Return a length in tokens: the trace's."""
        return trace_tokens


@dataclass(frozen=True)
class Target:
    """Where a draw is sent, and how: TraceSender's target. `time_scale` is the inverse of the engines' speed-up.

    `final_headers`: of the request by which a client says that its session has ended; None: no client says so.
    """

    url: str  # of a router, without a path
    model: str  # as the engines serve it
    timing: str  # as Load.timing
    time_scale: float
    headers_of: HeadersOf = session_headers  # by which clients name sessions
    final_headers: Callable[[str], Mapping[str, str]] | None = None  # from the session's name
    max_sessions: int = 100_000  # in flight: no limit


async def send(drawn: Draw, chats: PreparedChats, target: Target, timeout_s: float) -> list[RequestRecord]:
    """Send a draw to `target`; return a record of each of its requests. What is not answered within `timeout_s` has failed."""
    no_limit = aiohttp.ClientTimeout(total=None)
    last = {turns[0].session: turns[-1].turn for turns in drawn.sessions}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_limit) as http:
        ends: set[asyncio.Task[None]] = set()

        def ended(record: RequestRecord) -> None:
            if target.final_headers is not None and record.turn == last[record.session]:
                task = asyncio.create_task(_say_final(http, target, target.final_headers(record.session)))
                ends.add(task)
                task.add_done_callback(ends.discard)

        sender = TraceSender(target, http, target.model, chats, ended, target.headers_of)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await sender.send(drawn.sessions)
        for task in list(ends):
            task.cancel()
    done = {(record.session, record.turn) for record in sender.records}
    asked = [(turn.session, turn.turn) for turns in drawn.sessions for turn in turns]
    late = [RequestRecord(session=name, turn=turn, error="Late: not answered in the trial's time")
            for name, turn in asked if (name, turn) not in done]  # fmt: skip
    return sender.records + late


async def _say_final(http: aiohttp.ClientSession, target: Target, headers: Mapping[str, str]) -> None:
    body = {"model": target.model, "messages": [{"role": "user", "content": "end"}], "max_tokens": 1}
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(f"{target.url}/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
