"""The decision log: the newest decisions in memory and, if configured, all decisions in a file."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pointsman_common.io.line_file import LineWriter
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.analysis.decision_replay import inputs_digest
from pointsman_router.core.events_and_effects import Finished, Refused
from pointsman_router.core.placement_types import Decision, PrefillBacklog

OPEN = "OPEN"
DRY_RUN = "DRY_RUN"
# Estimated bytes in a line of the file: of the decision without its candidates,
_LINE_BYTES = 1_500
# of each candidate without its prefill backlog,
_CANDIDATE_LINE_BYTES = 800
# of each queued prefill of a candidate's backlog,
_QUEUED_LINE_BYTES = 13
# and of each remainder of a candidate's backlog.
_REMAINDER_LINE_BYTES = 70
# Estimated bytes in memory: of the decision without its candidates,
_DECISION_BYTES = 1_200
# of each candidate,
_CANDIDATE_BYTES = 280
# of each candidate that changed since the decision before; the others share this part with that decision,
_CHANGED_BYTES = 280
# and of each entry of a changed candidate's backlog.
_LISTED_BYTES = 16


class LoggedDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision as the log has it."""

    decision: Decision  # without block keys, unless `dry_run`; notes may be added later
    unix_s: float  # when it was made
    decide_s: float  # how long deciding took
    finished: Finished | None = None  # how its request ended; None while it runs
    dry_run: bool = False  # whether nothing was placed by it
    number: int = 0  # the decision's position in the log, from 1
    held_bytes: int = 0  # estimate of the memory that it adds to that of the decision before it
    epoch: int = 0  # of the router's ownership of the pool; 0: unknown

    @property
    def outcome(self) -> str:
        """The outcome of the request (OK, CANCELLED, REJECTED, FAILED or UNKNOWN), OPEN before its end, or DRY_RUN."""
        if self.dry_run:
            return DRY_RUN
        return self.finished.outcome if self.finished else OPEN


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """A filter of decisions; an empty field matches all."""

    session_id: str = ""  # without the tenant, so sessions of several tenants may match
    instance_id: str = ""  # of any step
    route_class: str = ""  # LIGHT, MEDIUM or HEAVY, as decided
    reason: str = ""  # that of the result, not of a step
    request_id: str = ""  # more than one matches if the plan was decided in parts
    outcome: str = ""  # as LoggedDecision.outcome
    tenant: str = ""  # of the request
    model: str = ""  # name of the pool
    since_unix_s: float = 0.0  # inclusive
    until_unix_s: float = math.inf  # inclusive

    def matches(self, logged: LoggedDecision) -> bool:
        """Return whether a decision matches all fields."""
        decision = logged.decision
        return (
            self.session_id in ("", decision.request.session_id)
            and (not self.instance_id or any(step.instance_id == self.instance_id for step in decision.result.steps))
            and self.route_class in ("", decision.route_class)
            and self.reason in ("", decision.result.reason)
            and self.request_id in ("", decision.request.request_id)
            and self.outcome in ("", logged.outcome)
            and self.tenant in ("", decision.request.tenant)
            and self.model in ("", decision.pool)
            and self.since_unix_s <= logged.unix_s <= self.until_unix_s
        )


class DecidedLine(msgspec.Struct, frozen=True, tag_field="event", tag="decided"):
    """A line of the file: a decision with everything that is needed to make it again except its request's block keys.
    `inputs_digest` is computed by pointsman_router.core.analysis.decision_replay. `epoch`: of the router's ownership of the pool,
    which grows with each change of the owner; 0: unknown."""

    unix_s: float  # when it was made
    decide_s: float  # as in LoggedDecision
    decision: Decision  # as first made; later notes have lines of their own
    inputs_digest: int
    epoch: int = 0


class ClosedLine(msgspec.Struct, frozen=True, tag_field="event", tag="closed"):
    """A line of the file: how a decision's request ended."""

    unix_s: float
    decision_id: str
    finished: Finished


class NotedLine(msgspec.Struct, frozen=True, tag_field="event", tag="noted"):
    """A line of the file: a note on what happened to a decision's plan while its request ran."""

    unix_s: float
    decision_id: str
    note: str


class RefusedLine(msgspec.Struct, frozen=True, tag_field="event", tag="refused"):
    """A line of the file: a new session that was parked and then refused, with all that the refusal was decided on."""

    unix_s: float
    request_id: str
    pool: str
    admission: AdmissionRecord


Line = DecidedLine | NotedLine | ClosedLine | RefusedLine


class MalformedLine(ValueError):
    """Raised for a line of a decision log that cannot be read. The message names the file, the line and the reason."""


def read_log(file: Path) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a decision log with their numbers, from 1. Raises MalformedLine or OSError."""
    decoder = msgspec.json.Decoder(Line)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, decoder.decode(line)
            except msgspec.DecodeError as error:
                raise MalformedLine(f"{file}, line {number}: {error}") from None


class DecisionWatch:
    """A bounded queue of the new and changed decisions that match, for one reader. It holds at most `most` unread decisions;
    beyond that the oldest are dropped and counted."""

    def __init__(self, wanted: Callable[[LoggedDecision], bool], most: int = 1_000) -> None:
        self._wanted = wanted
        self._most = most
        self._waiting: deque[LoggedDecision] = deque()
        self._some = asyncio.Event()
        self._dropped = 0

    def put(self, logged: LoggedDecision) -> None:
        """Queue a decision if it matches. Drops the oldest unread one if the queue is full."""
        if not self._wanted(logged):
            return
        if len(self._waiting) == self._most:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(logged)
        self._some.set()

    async def next(self) -> tuple[LoggedDecision, int]:
        """Wait for a decision. Return the oldest unread one, and how many were dropped since the last read."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft(), self._take_dropped()

    def read_all(self) -> tuple[list[LoggedDecision], int]:
        """Return all unread decisions, oldest first, and how many were dropped since the last read. Does not wait."""
        news = list(self._waiting)
        self._waiting.clear()
        return news, self._take_dropped()

    def _take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped


class DecisionLog:
    """The decisions of one router: bounded memory, an append-only file, and live watchers. The file gets a line when a decision
    is made, for each note on it, when its request ends, and when a parked session is refused.

    Memory holds at most `size` decisions and about `max_bytes`, whichever is reached first. A large fleet's decisions are larger.
    """

    def __init__(
        self, size: int, file: Path | None = None, max_file_bytes: int = 0, max_bytes: int = 140_000_000
    ) -> None:
        """`max_file_bytes`: size above which the file is rotated; 0: never. Raises OSError if the file cannot be opened."""
        self._size = size
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._newest_backlogs: frozenset[int] = frozenset()  # ids of the backlogs of the decision that was logged last
        self._by_id: OrderedDict[str, LoggedDecision] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._decided = 0
        self._watchers: set[DecisionWatch] = set()
        self._file = LineWriter(file, max_file_bytes) if file is not None else None

    @property
    def lost(self) -> int:
        """Number of lines that could not be written to the file."""
        return self._file.lost if self._file is not None else 0

    def __len__(self) -> int:
        return len(self._by_id)

    def decided(self, decision: Decision, unix_s: float, decide_s: float, epoch: int = 0) -> LoggedDecision:
        """Add a new decision, write it to the file, notify the watchers, and return its log entry. `epoch`: that of the router's
        ownership of the pool."""
        self._decided += 1
        backlogs = [candidate.prefill_backlog for candidate in decision.view.candidates]
        ids = frozenset(map(id, backlogs))
        held = _held_bytes(backlogs, ids - self._newest_backlogs)
        self._newest_backlogs = ids
        logged = LoggedDecision(decision, unix_s, decide_s, number=self._decided, held_bytes=held, epoch=epoch)
        self._by_id[decision.decision_id] = logged
        self._by_request[decision.request.request_id] = decision.decision_id
        self._held_bytes += held
        while len(self._by_id) > self._size or (self._held_bytes > self._max_bytes and len(self._by_id) > 1):
            self._forget_oldest()
        if self._file is not None:
            self._file.append(partial(decided_line, logged), line_bytes(decision))
        self._publish(logged)
        return logged

    def _forget_oldest(self) -> None:
        decision_id, oldest = self._by_id.popitem(last=False)
        self._held_bytes -= oldest.held_bytes
        request_id = oldest.decision.request.request_id
        if self._by_request.get(request_id) == decision_id:
            del self._by_request[request_id]

    def noted(self, decision_id: str, note: str, unix_s: float) -> None:
        """Add a note to a decision. If memory no longer holds the decision, the note is only written to the file."""
        self._write(NotedLine(unix_s, decision_id, note))
        if (logged := self._by_id.get(decision_id)) is not None:
            decision = replace(logged.decision, notes=(*logged.decision.notes, note))
            self._by_id[decision_id] = logged = replace(logged, decision=decision)
            self._publish(logged)

    def admission_refused(self, refused: Refused, unix_s: float) -> None:
        """Write the refusal of a parked session to the file."""
        if refused.admission is not None:
            self._write(RefusedLine(unix_s, refused.request_id, refused.pool, refused.admission))

    def closed(self, decision_id: str, finished: Finished, unix_s: float) -> LoggedDecision | None:
        """Record how a decision's request ended, also for the decisions on the earlier parts of its plan. Return the decision. If
        memory does not hold it, the end is only written to the file; return None. A request that was placed before a restart may
        have the decision id of another one, if the router's id is fixed."""
        self._write(ClosedLine(unix_s, decision_id, finished))
        newest = None
        while (logged := self._by_id.get(decision_id)) is not None:
            if logged.decision.request.request_id != finished.request_id:
                break
            self._by_id[decision_id] = logged = replace(logged, finished=finished)
            self._publish(logged)
            newest, decision_id = newest or logged, logged.decision.previous_id
        return newest

    def get(self, either_id: str) -> LoggedDecision | None:
        """Return the decision with this decision id, or the newest one with this request id; None if memory holds neither."""
        return self._by_id.get(self._by_request.get(either_id, either_id))

    def newest(self, wanted: Callable[[LoggedDecision], bool]) -> Iterator[LoggedDecision]:
        """Return an iterator of matching decisions, newest first. No decision may be added before its end."""
        return filter(wanted, reversed(self._by_id.values()))

    def all(self) -> list[LoggedDecision]:
        """Return all decisions as they are now, newest first: 1 ms for 10,000. Matching these with a filter takes 10 ms, so
        services do that in turns."""
        return list(reversed(self._by_id.values()))

    @property
    def watched(self) -> bool:
        """Whether there are watchers."""
        return bool(self._watchers)

    def watch(self, wanted: Callable[[LoggedDecision], bool] = lambda _: True) -> DecisionWatch:
        """Return a queue that receives each matching decision when it is made, noted or ended, until `unwatch`."""
        watch = DecisionWatch(wanted)
        self._watchers.add(watch)
        return watch

    def unwatch(self, watch: DecisionWatch) -> None:
        """Stop a watch: it receives no more decisions."""
        self._watchers.discard(watch)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _publish(self, logged: LoggedDecision) -> None:
        for watch in self._watchers:
            watch.put(logged)

    def _write(self, line: NotedLine | ClosedLine | RefusedLine) -> None:
        if self._file is not None:
            self._file.append(partial(msgspec.json.encode, line), _LINE_BYTES)


def decided_line(logged: LoggedDecision) -> bytes:
    """Return the file's line for a new decision."""
    decision = logged.decision
    line = DecidedLine(logged.unix_s, logged.decide_s, decision, inputs_digest(decision), logged.epoch)
    return msgspec.json.encode(line)


def line_bytes(decision: Decision) -> int:
    """Estimate the length of the file's line for a decision without encoding it, in bytes."""
    backlogs = [candidate.prefill_backlog for candidate in decision.view.candidates]
    return (
        _LINE_BYTES
        + _CANDIDATE_LINE_BYTES * len(backlogs)
        + _QUEUED_LINE_BYTES * sum([len(backlog.queue) for backlog in backlogs])
        + _REMAINDER_LINE_BYTES * sum([len(backlog.remainders) for backlog in backlogs])
    )


def _held_bytes(backlogs: Sequence[PrefillBacklog], new: Set[int]) -> int:
    """Estimate the memory that a decision on instances with these backlogs adds to that of the decision before it, in bytes.
    `new`: the ids of the backlogs that are not among that decision's. The snapshot of an instance, with its backlog, is a new
    object only if the instance changed in between (fleet_view_builder.py)."""
    changed = [backlog for backlog in backlogs if id(backlog) in new] if new else []
    listed = sum([len(backlog.queue) + len(backlog.remainders) for backlog in changed])
    return _DECISION_BYTES + _CANDIDATE_BYTES * len(backlogs) + _CHANGED_BYTES * len(changed) + _LISTED_BYTES * listed
