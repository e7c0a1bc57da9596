"""The clients of a simulation: they ask the turns of their sessions, one after the other. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.event_queue import EventQueue
from pointsman.lab.workload.session_starts import Session
from pointsman.lab.workload.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """A request whose time has come, the session's turns after it, and the pool that the session asks. With `may_continue` there
    may be further turns that nobody knows yet. It must not go to the instances that it `exclude`s."""

    request: TraceRequest
    later_turns: Session
    pool: str
    may_continue: bool = False
    exclude: tuple[str, ...] = ()


# (turn, now): a client asks.
Ask = Callable[[Turn, float], None]


class Clients:
    """All clients. `sessions` come in the order of their starts and are taken one by one as their time comes; they are dealt to
    `pools` in turn."""

    def __init__(
        self,
        sessions: Iterator[Session],
        config: SimulationConfig,
        pools: Sequence[str],
        event_queue: EventQueue,
        ask: Ask,
    ) -> None:
        self._sessions = sessions
        self._config = config
        self._pools = pools
        self._event_queue = event_queue
        self._ask = ask
        self._origin_ms: float | None = None
        self._started = 0
        self._all_started = False
        # Sessions in flight, and those whose time has come but not their turn.
        self._in_flight = 0
        self._turns_over_the_cap: deque[Turn] = deque()

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
        self._event_queue.schedule(self._due(turns[0]), partial(self._begin, turn))

    def submit_at(self, turn: Turn, moment: float) -> None:
        """A request that comes at `moment`, whatever became of its session's others. Mutates."""
        self._in_flight += 1
        self._event_queue.schedule(moment, partial(self._ask, turn))

    @property
    def waiting(self) -> bool:
        """Whether answers are still to come."""
        return self._in_flight > 0

    def answered(self, turn: Turn, now: float) -> None:
        """A turn has ended, however it did: its session goes on, or another one may begin. Mutates."""
        if turn.later_turns:
            think_s = (turn.later_turns[0].think_ms or 0.0) / 1e3 * self._config.time_scale
            due = now + think_s if self._config.timing == "think" else max(now, self._due(turn.later_turns[0]))
            self._event_queue.schedule(
                due, partial(self._ask, Turn(turn.later_turns[0], turn.later_turns[1:], turn.pool))
            )
            return
        self._in_flight -= 1
        if self._turns_over_the_cap:
            self._ask(self._turns_over_the_cap.popleft(), now)

    def _begin(self, turn: Turn, now: float) -> None:
        self._in_flight += 1
        if self._config.max_sessions and self._in_flight > self._config.max_sessions:
            self._turns_over_the_cap.append(turn)
        else:
            self._ask(turn, now)
        self.start()

    def _due(self, request: TraceRequest) -> float:
        return (request.timestamp_ms - (self._origin_ms or 0.0)) / 1e3 * self._config.time_scale
