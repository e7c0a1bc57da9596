"""The clients of a simulation. Each sends the turns of its session one after the other. Pure."""

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
    """A request to be sent, the session's turns after it, and the session's pool. With `may_continue` the session may have
    further turns that are not known yet. The request must not be placed on the instances in `exclude`."""

    request: TraceRequest
    later_turns: Session
    pool: str
    may_continue: bool = False
    exclude: tuple[str, ...] = ()


# (turn, now): sends a client's request.
Ask = Callable[[Turn, float], None]


class Clients:
    """All clients. `sessions` are in the order of their starts and are read one by one when they start. They are assigned to
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
        # Number of sessions in flight, including those in _turns_over_the_cap.
        self._in_flight = 0
        # First turns of sessions that wait because of max_sessions.
        self._turns_over_the_cap: deque[Turn] = deque()

    @property
    def done(self) -> bool:
        """Whether all sessions have started and ended."""
        return self._all_started and not self._in_flight

    def start(self) -> None:
        """Schedule the next session; to be called once. Mutates."""
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
        """Schedule a request at `moment`, independent of its session's other requests. Mutates."""
        self._in_flight += 1
        self._event_queue.schedule(moment, partial(self._ask, turn))

    @property
    def waiting(self) -> bool:
        """Whether any session is in flight."""
        return self._in_flight > 0

    def answered(self, turn: Turn, now: float) -> None:
        """Handle the end of a turn, successful or not: schedule its session's next turn, or start a waiting session. Mutates."""
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
