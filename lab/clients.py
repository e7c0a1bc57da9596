"""The clients of a simulation: they ask the turns of their sessions, one after the other. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lab.agenda import Agenda
from lab.draws import Session
from lab.simulation import Simulation
from lab.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """A request whose time has come, the session's turns after it, and the pool that the session asks. With `more` there may be
    further turns that nobody knows yet. It must not go to the instances that it `exclude`s."""

    request: TraceRequest
    rest: Session
    pool: str
    more: bool = False
    exclude: tuple[str, ...] = ()


# (turn, now): a client asks.
Ask = Callable[[Turn, float], None]


class Clients:
    """All clients. `sessions` come in the order of their starts and are taken one by one as their time comes; they are dealt to
    `pools` in turn."""

    def __init__(
        self, sessions: Iterator[Session], asked: Simulation, pools: Sequence[str], agenda: Agenda, ask: Ask
    ) -> None:
        self._sessions = sessions
        self._asked = asked
        self._pools = pools
        self._agenda = agenda
        self._ask = ask
        self._origin_ms: float | None = None
        self._started = 0
        self._all_started = False
        # Sessions in flight, and those whose time has come but not their turn.
        self._in_flight = 0
        self._kept_out: deque[Turn] = deque()

    @property
    def done(self) -> bool:
        """Whether all sessions have ended."""
        return self._all_started and not self._in_flight

    def start(self) -> None:
        """Await the next session; to be called once. Mutates."""
        turns = next(self._sessions, None)
        if turns is None:
            self._all_started = True
            return
        if self._origin_ms is None:
            self._origin_ms = turns[0].timestamp_ms
        turn = Turn(turns[0], turns[1:], self._pools[self._started % len(self._pools)])
        self._started += 1
        self._agenda.at(self._due(turns[0]), partial(self._begin, turn))

    def enter(self, turn: Turn, moment: float) -> None:
        """A request that comes at `moment`, whatever became of its session's others. Mutates."""
        self._in_flight += 1
        self._agenda.at(moment, partial(self._ask, turn))

    @property
    def waiting(self) -> bool:
        """Whether answers are still to come."""
        return self._in_flight > 0

    def answered(self, turn: Turn, now: float) -> None:
        """A turn has ended, however it did: its session goes on, or another one may begin. Mutates."""
        if turn.rest:
            think_s = (turn.rest[0].think_ms or 0.0) / 1e3 * self._asked.time_scale
            due = now + think_s if self._asked.timing == "think" else max(now, self._due(turn.rest[0]))
            self._agenda.at(due, partial(self._ask, Turn(turn.rest[0], turn.rest[1:], turn.pool)))
            return
        self._in_flight -= 1
        if self._kept_out:
            self._ask(self._kept_out.popleft(), now)

    def _begin(self, turn: Turn, now: float) -> None:
        self._in_flight += 1
        if self._asked.max_sessions and self._in_flight > self._asked.max_sessions:
            self._kept_out.append(turn)
        else:
            self._ask(turn, now)
        self.start()

    def _due(self, request: TraceRequest) -> float:
        return (request.timestamp_ms - (self._origin_ms or 0.0)) / 1e3 * self._asked.time_scale
