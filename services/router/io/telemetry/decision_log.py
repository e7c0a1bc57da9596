"""The newest decisions in memory, and all of them in a file when asked."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pointsman.common.io.line_file import LineWriter
from pointsman.router.core.analysis.decision_replay import inputs_digest
from pointsman.router.core.events_and_effects import Finished
from pointsman.router.core.types import Decision

OPEN = "OPEN"
DRY_RUN = "DRY_RUN"
# About what a line has: a decision's own part, each candidate of its view, and what this one has to compute.
_LINE_BYTES = 1_500
_CANDIDATE_LINE_BYTES = 800
_QUEUED_LINE_BYTES = 13
_REMAINDER_LINE_BYTES = 70
# About what the same hold in memory. An instance that did not change since the decision before shares the rest with it.
_DECISION_BYTES = 1_200
_CANDIDATE_BYTES = 280
_CHANGED_BYTES = 280
_LISTED_BYTES = 16


class LoggedDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision, when it was made (unix s), how long that took (s), and how its request ended (None while it runs). `number`
    counts the log's decisions in their order; `held_bytes`: about the memory that it takes beside the one before it."""

    decision: Decision
    unix_s: float
    decide_s: float
    finished: Finished | None = None
    dry_run: bool = False
    number: int = 0
    held_bytes: int = 0

    @property
    def outcome(self) -> str:
        """OK, CANCELLED, REJECTED, FAILED or UNKNOWN once ended; OPEN before; DRY_RUN for one that reserved nothing."""
        if self.dry_run:
            return DRY_RUN
        return self.finished.outcome if self.finished else OPEN


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Which decisions to tell; empty fields match all. `since_unix_s` and `until_unix_s` are times."""

    session_id: str = ""
    instance_id: str = ""
    route_class: str = ""
    reason: str = ""
    request_id: str = ""
    since_unix_s: float = 0.0
    until_unix_s: float = math.inf

    def matches(self, logged: LoggedDecision) -> bool:
        """Whether a decision passes all fields."""
        decision = logged.decision
        return (
            self.session_id in ("", decision.request.session_id)
            and (not self.instance_id or any(step.instance_id == self.instance_id for step in decision.result.steps))
            and self.route_class in ("", decision.route_class)
            and self.reason in ("", decision.result.reason)
            and self.request_id in ("", decision.request.request_id)
            and self.since_unix_s <= logged.unix_s <= self.until_unix_s
        )


class DecidedLine(msgspec.Struct, frozen=True, tag_field="event", tag="decided"):
    """A line of the file: a decision with all that it takes to make it again, but its request's keys. `inputs_digest` is that of
    pointsman.router.core.analysis.decision_replay."""

    unix_s: float
    decide_s: float
    decision: Decision
    inputs_digest: int


class ClosedLine(msgspec.Struct, frozen=True, tag_field="event", tag="closed"):
    """A line of the file: how a decision's request ended."""

    unix_s: float
    decision_id: str
    finished: Finished


class NotedLine(msgspec.Struct, frozen=True, tag_field="event", tag="noted"):
    """A line of the file: what became of a decision's plan while its request ran."""

    unix_s: float
    decision_id: str
    note: str


Line = DecidedLine | NotedLine | ClosedLine


class MalformedLine(ValueError):
    """A line of a decision log that cannot be read; the message names file, line and reason."""


def read_log(file: Path) -> Iterator[tuple[int, Line]]:
    """The lines of a decision log with their numbers, from 1. Raises MalformedLine, OSError."""
    decoder = msgspec.json.Decoder(Line)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, decoder.decode(line)
            except msgspec.DecodeError as error:
                raise MalformedLine(f"{file}, line {number}: {error}") from None


class DecisionWatch:
    """The log's news that match, for one reader, who may be slow: so many that it has not read yet wait for it, and of more the
    oldest are dropped, and counted."""

    def __init__(self, wanted: Callable[[LoggedDecision], bool], most: int = 1_000) -> None:
        self._wanted = wanted
        self._most = most
        self._waiting: deque[LoggedDecision] = deque()
        self._some = asyncio.Event()
        self._dropped = 0

    def put(self, logged: LoggedDecision) -> None:
        """Keep for the reader what it wants."""
        if not self._wanted(logged):
            return
        if len(self._waiting) == self._most:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(logged)
        self._some.set()

    async def next(self) -> tuple[LoggedDecision, int]:
        """The oldest that waits, and how many before it were dropped since the one that was read last; waits for one."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft(), self._take_dropped()

    def read_all(self) -> tuple[list[LoggedDecision], int]:
        """All that wait, the oldest first, and how many before them were dropped."""
        news = list(self._waiting)
        self._waiting.clear()
        return news, self._take_dropped()

    def _take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped


class DecisionLog:
    """Bounded memory, append-only file, live watchers. The file gets a line when a decision is made, when
    something becomes of it, and when it ends.

    Memory holds `size` decisions, and fewer of a large fleet: they hold about `max_bytes` together.
    """

    def __init__(
        self, size: int, file: Path | None = None, max_file_bytes: int = 0, max_bytes: int = 140_000_000
    ) -> None:
        """`max_file_bytes`: the file is rotated before it is larger; 0: never. Raises OSError for one that cannot be opened."""
        self._size = size
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._by_id: OrderedDict[str, LoggedDecision] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._decided = 0
        self._watchers: set[DecisionWatch] = set()
        self._file = LineWriter(file, max_file_bytes) if file is not None else None

    @property
    def lost(self) -> int:
        """Lines that the file's disk did not take."""
        return self._file.lost if self._file is not None else 0

    def __len__(self) -> int:
        return len(self._by_id)

    def decided(self, decision: Decision, unix_s: float, decide_s: float) -> LoggedDecision:
        """Remember a new decision."""
        self._decided += 1
        held = _held_bytes(decision, next(reversed(self._by_id.values()), None))
        logged = LoggedDecision(decision, unix_s, decide_s, number=self._decided, held_bytes=held)
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
        """Add a note to a decision; of decisions that left the log only the file hears."""
        self._write(NotedLine(unix_s, decision_id, note))
        if (logged := self._by_id.get(decision_id)) is not None:
            decision = replace(logged.decision, notes=(*logged.decision.notes, note))
            self._by_id[decision_id] = logged = replace(logged, decision=decision)
            self._publish(logged)

    def closed(self, decision_id: str, finished: Finished, unix_s: float) -> None:
        """Note how a decision's request ended, for those on the earlier parts of its plan, too; decisions that left the log are
        only written to the file."""
        self._write(ClosedLine(unix_s, decision_id, finished))
        while (logged := self._by_id.get(decision_id)) is not None:
            self._by_id[decision_id] = logged = replace(logged, finished=finished)
            self._publish(logged)
            # The earlier parts of its plan ended with it.
            decision_id = logged.decision.previous_id

    def get(self, either_id: str) -> LoggedDecision | None:
        """A decision by its own id or its request's."""
        return self._by_id.get(self._by_request.get(either_id, either_id))

    def newest(self, wanted: Callable[[LoggedDecision], bool], before: int | None = None) -> Iterator[LoggedDecision]:
        """Matching decisions, newest first; with `before`, those made before the one of that number."""
        return (
            logged
            for logged in reversed(self._by_id.values())
            if (before is None or logged.number < before) and wanted(logged)
        )

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watchers)

    def watch(self, wanted: Callable[[LoggedDecision], bool] = lambda _: True) -> DecisionWatch:
        """Every new and every ended decision that matches from now on, until `unwatch`."""
        watch = DecisionWatch(wanted)
        self._watchers.add(watch)
        return watch

    def unwatch(self, watch: DecisionWatch) -> None:
        """Stop feeding a watch."""
        self._watchers.discard(watch)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _publish(self, logged: LoggedDecision) -> None:
        for watch in self._watchers:
            watch.put(logged)

    def _write(self, line: NotedLine | ClosedLine) -> None:
        if self._file is not None:
            self._file.append(partial(msgspec.json.encode, line), _LINE_BYTES)


def decided_line(logged: LoggedDecision) -> bytes:
    """The file's line on a decision."""
    decision = logged.decision
    return msgspec.json.encode(DecidedLine(logged.unix_s, logged.decide_s, decision, inputs_digest(decision)))


def line_bytes(decision: Decision) -> int:
    """About the length of the file's line on a decision, without making it."""
    backlogs = [one.prefill_backlog for one in decision.view.candidates]
    return (
        _LINE_BYTES
        + _CANDIDATE_LINE_BYTES * len(backlogs)
        + _QUEUED_LINE_BYTES * sum([len(one.queue) for one in backlogs])
        + _REMAINDER_LINE_BYTES * sum([len(one.remainders) for one in backlogs])
    )


def _held_bytes(decision: Decision, before: LoggedDecision | None) -> int:
    """About the memory that a decision takes beside the one `before` it: what is seen of an instance is made anew when that one
    changes (policy_views.py), and its backlog with it."""
    known = {id(one.prefill_backlog) for one in before.decision.view.candidates} if before is not None else set()
    backlogs = [one.prefill_backlog for one in decision.view.candidates]
    changed = [one for one in backlogs if id(one) not in known]
    listed = sum([len(one.queue) + len(one.remainders) for one in changed])
    return _DECISION_BYTES + _CANDIDATE_BYTES * len(backlogs) + _CHANGED_BYTES * len(changed) + _LISTED_BYTES * listed
