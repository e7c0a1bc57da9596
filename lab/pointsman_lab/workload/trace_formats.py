"""Readers of trace formats: each is a function from a file's lines to requests. Pure.

All readers are causal: a request depends only on its line and earlier lines, so a trace of any size can be read as a stream.

| format | source | sessions |
|---|---|---|
| pointsman | this project (`pointsman_lab.workload.traces`) | named |
| mooncake | Mooncake's FAST'25 release; blocks of 512 tokens | derived by prefixes (`SessionDeriver`) |
| bailian | Alibaba's qwen-bailian usage traces; blocks of 16 tokens | the chain of chat_id and parent_chat_id |
| aiperf | NVIDIA aiperf's mooncake_trace with sessions; blocks of 512 tokens | named; later lines hold only new tokens |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, TypeVar

import msgspec

from pointsman_lab.workload.traces import UNREADABLE, Count, Milliseconds, TraceRequest

# (line number from 1, the line's bytes), without blank lines.
Lines = Iterable[tuple[int, bytes]]
# Where the formats are described, for messages.
PAGE = "lab/README.md (Traces) describes the formats"
# Block size of Mooncake's and aiperf's traces, tokens.
MOONCAKE_BLOCK = 512
# Block size of Bailian's traces, tokens.
BAILIAN_BLOCK = 16
# Assumed duration of an answer on an engine without load, ms: a constant part, and a part for each output token. A later turn
# without a timestamp is dated by its predecessor's assumed end. Replays and simulations wait for the real end in any case.
ANSWER_MS = 500.0
ANSWER_TOKEN_MS = 10.0


class LineError(ValueError):
    """A line that cannot be used; the message names the field. `number` counts from 1."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


Amount = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the FAST'25 traces. Some answers there are empty; they are read as one token, the minimum of an engine."""

    timestamp: Milliseconds
    input_length: Count
    output_length: Amount
    hash_ids: tuple[int, ...]


class BailianLine(msgspec.Struct, frozen=True):
    """A line of the Bailian traces; `timestamp` in s. The fields `type` and `turn` are not needed."""

    chat_id: int  # occurs once in a file
    parent_chat_id: int  # the chat that this one continues; if it is not earlier in the file, this one opens a session
    timestamp: Milliseconds
    input_length: Count  # of the whole prompt, tokens
    output_length: Amount  # tokens; 0 is read as 1
    hash_ids: tuple[int, ...]  # of the prompt's blocks of BAILIAN_BLOCK tokens; a last partial block may have one


class AiperfLine(msgspec.Struct, frozen=True):
    """A line of aiperf's mooncake_trace; times in ms. Lines with texts are rejected, because they contain no token counts."""

    input_length: Count  # tokens; in a later line of a session only those after the last answer
    session_id: str  # as the file names it
    output_length: Amount = 1  # tokens; 0 is read as 1
    # Of the input's blocks of MOONCAKE_BLOCK tokens; only those of a session's first line are used; empty: not given.
    hash_ids: tuple[int, ...] = ()
    timestamp: Milliseconds | None = None  # None: dated by delay and the assumed end of the last answer
    delay: Milliseconds | None = None  # pause since the end of the last answer; of a first line since 0


def read_pointsman(lines: Lines) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in the pointsman format. A turn that occurs twice is rejected."""
    turns: set[tuple[str, int]] = set()
    for number, request in _decoded(lines, TraceRequest):
        _check_blocks(number, request)
        if (request.session, request.turn) in turns:
            raise LineError(number, f"turn: {request.turn} of session {request.session} occurs twice")
        turns.add((request.session, request.turn))
        yield request


def read_mooncake(lines: Lines) -> Iterator[TraceRequest]:
    """Yield the requests of a trace without sessions, which must be in time order. `SessionDeriver` derives the sessions."""
    chains = SessionDeriver()
    last_ms = 0.0
    for number, line in _decoded(lines, MooncakeLine):
        if line.timestamp < last_ms:
            raise LineError(number, f"timestamp: {line.timestamp:g} is before the previous line's {last_ms:g}")
        last_ms = line.timestamp
        session, turn = chains.add(line.hash_ids[: line.input_length // MOONCAKE_BLOCK], line.input_length)
        yield _request(number, line, line.timestamp, session, turn, MOONCAKE_BLOCK)


def read_bailian(lines: Lines) -> Iterator[TraceRequest]:
    """Yield the requests of a Bailian trace.

    A chat continues its parent's session if it is the first to do so. Another child of the same parent opens a session named
    after itself, and so does a chat whose parent is not earlier in the file.
    """
    last_of: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    for number, line in _decoded(lines, BailianLine):
        if line.chat_id in seen:
            raise LineError(number, f"chat_id: {line.chat_id} occurs twice")
        seen.add(line.chat_id)
        session, turn = last_of.pop(line.parent_chat_id, (str(line.chat_id), 0))
        last_of[line.chat_id] = (session, turn + 1)
        yield _request(number, line, line.timestamp * 1e3, session, turn + 1, BAILIAN_BLOCK)


@dataclass
class _AiperfSession:
    """An aiperf session so far: whole blocks, tokens including the last answer, and the assumed end of that answer in ms."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    turn: int = 0
    answered_ms: float = 0.0


def read_aiperf(lines: Lines) -> Iterator[TraceRequest]:
    """Yield the requests of aiperf's sessions. Their later lines hold only what is new after the answer.

    The first line's ids are kept. Later tokens belong to the session alone. They are cut into blocks anew, because the answers
    shift them; the ids of these blocks are negative and unique.
    """
    sessions: dict[str, _AiperfSession] = {}
    fresh = count(-1, -1)
    for number, line in _decoded(lines, AiperfLine):
        session = sessions.setdefault(line.session_id, _AiperfSession())
        if session.turn and line.timestamp is None and line.delay is None:
            raise LineError(number, "delay: missing in a later turn without timestamp")
        if line.hash_ids and len(line.hash_ids) not in _blocks_of(line.input_length, MOONCAKE_BLOCK):
            raise LineError(number, _wrong_blocks(len(line.hash_ids), line.input_length, MOONCAKE_BLOCK))
        session.tokens += line.input_length
        session.turn += 1
        if session.turn == 1:
            session.blocks += line.hash_ids[: line.input_length // MOONCAKE_BLOCK]
        session.blocks += (next(fresh) for _ in range(session.tokens // MOONCAKE_BLOCK - len(session.blocks)))
        at_ms = line.timestamp if line.timestamp is not None else session.answered_ms + (line.delay or 0.0)
        output = max(line.output_length, 1)
        yield TraceRequest(
            timestamp_ms=at_ms,
            session_id=line.session_id,
            turn=session.turn,
            input_length=session.tokens,
            output_length=output,
            hash_ids=tuple(session.blocks),
            block_size=MOONCAKE_BLOCK,
            think_ms=line.delay if session.turn > 1 else 0.0,
        )
        session.tokens += output
        session.answered_ms = at_ms + ANSWER_MS + ANSWER_TOKEN_MS * output


class SessionDeriver:
    """Derives sessions from prefixes alone.

    A request continues the one session that has seen the deepest of its known blocks, if the request is longer than that
    session's last input and keeps more than half of its blocks. Otherwise the request opens a session, and the blocks that it
    shares with others belong to no session from then on. So a shared system prompt joins at most two requests, and only if the
    first of them was hardly longer than it.
    """

    def __init__(self) -> None:
        # By the number of the block before and the id: a block's number. Ids need not identify a whole prefix.
        self._numbers: dict[tuple[int, int], int] = {}
        # By block number: its session, or None.
        self._session_of: list[int | None] = []
        # By session: tokens and blocks of the last input.
        self._lengths: list[tuple[int, int]] = []
        # By session: number of turns.
        self._turns: list[int] = []

    def add(self, blocks: tuple[int, ...], length: int) -> tuple[int, int]:
        """Return the session (from 0) and turn (from 1) of a request of `length` tokens with these whole blocks. Mutates."""
        path: list[int] = []
        known = 0
        before = -1
        for block in blocks:
            number = self._numbers.get((before, block))
            if number is None:
                number = self._numbers[before, block] = len(self._session_of)
                self._session_of.append(None)
            else:
                known += 1
            path.append(number)
            before = number
        session = self._session_of[path[known - 1]] if known else None
        if session is None or not self._continues(session, known, length):
            for number in path[:known]:
                self._session_of[number] = None
            session = len(self._turns)
            self._turns.append(0)
            self._lengths.append((0, 0))
        for number in path[known:]:
            self._session_of[number] = session
        self._lengths[session] = (length, len(blocks))
        self._turns[session] += 1
        return session, self._turns[session]

    def _continues(self, session: int, known: int, length: int) -> bool:
        last_length, last_blocks = self._lengths[session]
        return length > last_length and known * 2 > last_blocks


Reader = Callable[[Lines], Iterator[TraceRequest]]
READERS: dict[str, Reader] = {
    "pointsman": read_pointsman,
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "aiperf": read_aiperf,
}
# Fields that identify a format, tried in this order.
DISTINCTIVE_FIELDS = {
    "pointsman": {"timestamp_ms"},
    "bailian": {"chat_id"},
    "aiperf": {"session_id", "input_length"},
    "mooncake": {"timestamp", "input_length", "hash_ids"},
}


def format_of(number: int, line: bytes) -> str:
    """Return the format of a trace by its first line. Raises LineError if its fields match no format."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE as error:
        raise LineError(number, f"{error}; {PAGE}") from error
    for name, distinctive in DISTINCTIVE_FIELDS.items():
        if distinctive <= fields.keys():
            return name
    raise LineError(
        number,
        f"its fields ({', '.join(sorted(fields)) or 'none'}) match no known format: {', '.join(READERS)}; "
        f"{PAGE}, and `pointsman trace convert` makes a trace of requests or of an access log",
    )


def _decoded(lines: Lines, kind: type[T]) -> Iterator[tuple[int, T]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except UNREADABLE as error:
            raise LineError(number, str(error)) from error


def _request(
    number: int, line: MooncakeLine | BailianLine, timestamp_ms: float, session: str | int, turn: int, block_size: int
) -> TraceRequest:
    request = TraceRequest(
        timestamp_ms=timestamp_ms,
        session_id=session,
        turn=turn,
        input_length=line.input_length,
        output_length=max(line.output_length, 1),
        hash_ids=line.hash_ids,
        block_size=block_size,
    )
    _check_blocks(number, request)
    return request


def _check_blocks(number: int, request: TraceRequest) -> None:
    if len(request.hash_ids) not in _blocks_of(request.input_length, request.block_size):
        raise LineError(number, _wrong_blocks(len(request.hash_ids), request.input_length, request.block_size))


def _blocks_of(length: int, block_size: int) -> tuple[int, int]:
    """Return the numbers of ids that an input may have: of its whole blocks, or with the last partial one."""
    whole, rest = divmod(length, block_size)
    return whole, whole + bool(rest)


def _wrong_blocks(ids: int, length: int, block_size: int) -> str:
    return f"hash_ids: {ids} for input_length {length} in blocks of {block_size}"
