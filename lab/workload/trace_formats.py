"""The formats of traces that are read, each a function from a file's decoded lines to requests. Pure.

All readers are causal: a request follows from its line and earlier ones, so that a trace of any size is read as a stream.

| format | of | sessions |
|---|---|---|
| pointsman | this project (`pointsman.lab.workload.traces`) | named |
| mooncake | Mooncake's FAST'25 release; blocks of 512 tokens | derived by prefixes (`SessionDeriver`) |
| bailian | Alibaba's qwen-bailian usage traces; blocks of 16 tokens | the chain of chat_id and parent_chat_id |
| aiperf | NVIDIA aiperf's mooncake_trace with sessions; blocks of 512 tokens | named; later lines hold what is new |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, TypeVar

import msgspec

from pointsman.lab.workload.traces import Count, Milliseconds, TraceRequest

# (line number from 1, the line's bytes), blank lines left out.
Lines = Iterable[tuple[int, bytes]]
MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
# A later turn without a timestamp is dated by what its predecessor's answer would take on an engine without load: this and that
# for each token of output. Replays and simulations wait for the real end in any case.
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
    """A line of the FAST'25 traces. Some answers there are empty: they are read as one token, the least that engines give."""

    timestamp: Milliseconds
    input_length: Count
    output_length: Amount
    hash_ids: tuple[int, ...]


class BailianLine(msgspec.Struct, frozen=True):
    """A line of the Bailian traces; `timestamp` in s. `type` and `turn` are not needed."""

    chat_id: int
    parent_chat_id: int
    timestamp: Milliseconds
    input_length: Count
    output_length: Amount
    hash_ids: tuple[int, ...]


class AiperfLine(msgspec.Struct, frozen=True):
    """A line of aiperf's mooncake_trace; times in ms. Lines with texts are refused: they say nothing about tokens."""

    input_length: Count
    session_id: str
    output_length: Amount = 1
    hash_ids: tuple[int, ...] = ()
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None


def read_pointsman(lines: Lines) -> Iterator[TraceRequest]:
    """Requests of our own format; a turn that is there twice is refused."""
    turns: set[tuple[str, int]] = set()
    for number, request in _decoded(lines, TraceRequest):
        _check_blocks(number, request)
        if (request.session, request.turn) in turns:
            raise LineError(number, f"turn: {request.turn} of session {request.session} is there twice")
        turns.add((request.session, request.turn))
        yield request


def read_mooncake(lines: Lines) -> Iterator[TraceRequest]:
    """Requests of a trace without sessions, which must be in the order of time; sessions as `SessionDeriver` says."""
    chains = SessionDeriver()
    last_ms = 0.0
    for number, line in _decoded(lines, MooncakeLine):
        if line.timestamp < last_ms:
            raise LineError(number, f"timestamp: {line.timestamp:g} is before the previous line's {last_ms:g}")
        last_ms = line.timestamp
        session, turn = chains.add(line.hash_ids[: line.input_length // MOONCAKE_BLOCK], line.input_length)
        yield _request(number, line, line.timestamp, session, turn, MOONCAKE_BLOCK)


def read_bailian(lines: Lines) -> Iterator[TraceRequest]:
    """Requests of the Bailian traces.

    A chat continues its parent's session where it is the first to do so; another child of the same parent, and one whose parent
    is not in the file before it, opens a session named after itself.
    """
    last_of: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    for number, line in _decoded(lines, BailianLine):
        if line.chat_id in seen:
            raise LineError(number, f"chat_id: {line.chat_id} is there twice")
        seen.add(line.chat_id)
        session, turn = last_of.pop(line.parent_chat_id, (str(line.chat_id), 0))
        last_of[line.chat_id] = (session, turn + 1)
        yield _request(number, line, line.timestamp * 1e3, session, turn + 1, BAILIAN_BLOCK)


@dataclass
class _AiperfSession:
    """An aiperf session so far: whole blocks, tokens with the last answer, and when that answer would be there."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    turn: int = 0
    answered_ms: float = 0.0


def read_aiperf(lines: Lines) -> Iterator[TraceRequest]:
    """Requests of aiperf's sessions, whose later lines hold only what is new after the answer.

    The first line's ids are kept. What follows belongs to the session alone, and is cut into blocks anew, because the answers
    shift it: its ids are negative, and new for each block.
    """
    sessions: dict[str, _AiperfSession] = {}
    fresh = count(-1, -1)
    for number, line in _decoded(lines, AiperfLine):
        told = sessions.setdefault(line.session_id, _AiperfSession())
        if told.turn and line.timestamp is None and line.delay is None:
            raise LineError(number, "delay: missing in a later turn without timestamp")
        if line.hash_ids and len(line.hash_ids) not in _blocks_of(line.input_length, MOONCAKE_BLOCK):
            raise LineError(number, _wrong_blocks(len(line.hash_ids), line.input_length, MOONCAKE_BLOCK))
        told.tokens += line.input_length
        told.turn += 1
        if told.turn == 1:
            told.blocks += line.hash_ids[: line.input_length // MOONCAKE_BLOCK]
        told.blocks += (next(fresh) for _ in range(told.tokens // MOONCAKE_BLOCK - len(told.blocks)))
        at_ms = line.timestamp if line.timestamp is not None else told.answered_ms + (line.delay or 0.0)
        output = max(line.output_length, 1)
        yield TraceRequest(
            timestamp_ms=at_ms,
            session_id=line.session_id,
            turn=told.turn,
            input_length=told.tokens,
            output_length=output,
            hash_ids=tuple(told.blocks),
            block_size=MOONCAKE_BLOCK,
            think_ms=line.delay if told.turn > 1 else 0.0,
        )
        told.tokens += output
        told.answered_ms = at_ms + ANSWER_MS + ANSWER_TOKEN_MS * output


class SessionDeriver:
    """Derives sessions from prefixes alone.

    A request continues the one session that has seen the deepest of its known blocks, provided that it is longer than that
    session's last input and keeps more than half of its blocks. Otherwise it opens a session, and the blocks that it shares with
    others belong to none from then on: a shared system prompt joins two requests at most, and only when the first of them was
    hardly more than it.
    """

    def __init__(self) -> None:
        # Blocks by the one before them and their id (so ids need not stand for a whole prefix): number, and the session or None.
        self._numbers: dict[tuple[int, int], int] = {}
        self._session_of: list[int | None] = []
        # Of each session: the last input's tokens and blocks, and the turns.
        self._lengths: list[tuple[int, int]] = []
        self._turns: list[int] = []

    def add(self, blocks: tuple[int, ...], length: int) -> tuple[int, int]:
        """The session (from 0) and turn (from 1) of a request of `length` tokens with these whole blocks. Mutates."""
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
# The fields that tell a format, tried in this order.
DISTINCTIVE_FIELDS = {
    "pointsman": {"timestamp_ms"},
    "bailian": {"chat_id"},
    "aiperf": {"session_id", "input_length"},
    "mooncake": {"timestamp", "input_length", "hash_ids"},
}


def format_of(number: int, line: bytes) -> str:
    """The format of a trace by its first line. Raises LineError when its fields are those of none."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LineError(number, str(error)) from error
    for name, distinctive in DISTINCTIVE_FIELDS.items():
        if distinctive <= fields.keys():
            return name
    raise LineError(
        number, f"its fields ({', '.join(sorted(fields)) or 'none'}) are of no format known: {', '.join(READERS)}"
    )


def _decoded(lines: Lines, kind: type[T]) -> Iterator[tuple[int, T]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except msgspec.DecodeError as error:
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
    """How many ids an input may have: of its whole blocks, or with the last partial one."""
    whole, rest = divmod(length, block_size)
    return whole, whole + bool(rest)


def _wrong_blocks(ids: int, length: int, block_size: int) -> str:
    return f"hash_ids: {ids} for input_length {length} in blocks of {block_size}"
