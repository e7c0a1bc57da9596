"""The clients of a simulation. Each sends the turns of its session one after the other. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xxhash import xxh3_64_intdigest

from pointsman_lab.simulation.config import SimulationConfig, Tenant
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.subagents import SubagentRequest
from pointsman_lab.workload.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """A request to be sent."""

    request: TraceRequest  # of a sub-agent's first turn a SubagentRequest
    later_turns: Session  # the session's turns after it
    pool: str  # the session's
    may_continue: bool = False  # the session may have further turns that are not known yet
    exclude: tuple[str, ...] = ()  # the instances that the request must not be placed on
    named: bool = True  # whether the request names its session
    tenant: Tenant = field(default_factory=Tenant)  # whose session it is
    parent: str = ""  # the session that waits for this one; empty for none
    names_parent: bool = False  # whether the request names it


# (turn, now): sends a client's request.
Ask = Callable[[Turn, float], None]


class Clients:
    """All clients. `sessions` are in the order of their starts and are read one by one when they start; sub-agents follow their
    parent directly. Sessions are assigned to `pools` in turn, sub-agents to their parent's pool and tenant."""

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
        self._top_level = 0  # number of those that were asked and are nobody's sub-agents
        # First turns of sessions that wait because of max_sessions.
        self._turns_over_the_cap: deque[Turn] = deque()
        # By session: its sub-agents that have not started.
        self._subagents: dict[str, list[Session]] = {}
        # By session that waits for sub-agents: number of those that run, and the turn that waits.
        self._running_subagents: dict[str, int] = {}
        self._waiting_turns: dict[str, Turn] = {}

    @property
    def done(self) -> bool:
        """Whether all sessions have started and ended."""
        return self._all_started and not self._in_flight

    def start(self) -> None:
        """Schedule the next session; to be called once. Mutates."""
        turns = next(self._sessions, None)
        while turns is not None and isinstance(turns[0], SubagentRequest):
            self._subagents.setdefault(turns[0].parent, []).append(turns)
            turns = next(self._sessions, None)
        if turns is None:
            self._all_started = True
            return
        first = turns[0]
        if self._origin_ms is None:
            self._origin_ms = first.timestamp_ms
        pool = self._pools[self._started % len(self._pools)]
        self._started += 1
        named = self._chance(first, "named") >= self._config.unnamed_share
        turn = Turn(first, turns[1:], pool, named=named, tenant=self._tenant(first))
        self._event_queue.schedule(self._due(first), partial(self._begin, turn))

    def submit_at(self, turn: Turn, moment: float) -> None:
        """Schedule a request at `moment`, independent of its session's other requests. Mutates."""
        self._in_flight += 1
        self._top_level += 1
        self._event_queue.schedule(moment, partial(self._ask, turn))

    @property
    def waiting(self) -> bool:
        """Whether any session is in flight."""
        return self._in_flight > 0

    def answered(self, turn: Turn, now: float, *, ok: bool = True) -> None:
        """Handle the end of a turn, successful or not: schedule its session's next turn, or start a waiting session. A session
        that gives up ends with a turn that failed. Mutates."""
        session = turn.request.session
        if not turn.later_turns or (not ok and self._config.gives_up):
            self._ended(turn, now)
            return
        later = turn.later_turns
        following = replace(turn, request=later[0], later_turns=later[1:])
        waiting = self._subagents.get(session, [])
        children = [child for child in waiting if _parent_turn(child) <= turn.request.turn]
        if not children:
            self._schedule(following, now)
            return
        self._subagents[session] = [child for child in waiting if child not in children]
        self._running_subagents[session] = len(children)
        self._waiting_turns[session] = following
        self._in_flight += len(children)
        for turns in children:
            first = turns[0]
            assert isinstance(first, SubagentRequest)
            names_parent = turn.named and first.names_parent
            child = replace(turn, request=first, later_turns=turns[1:], parent=session, names_parent=names_parent)
            self._event_queue.schedule(now, partial(self._ask, child))

    def _ended(self, turn: Turn, now: float) -> None:
        self._in_flight -= 1
        self._subagents.pop(turn.request.session, None)
        if turn.parent:
            self._running_subagents[turn.parent] -= 1
            if not self._running_subagents[turn.parent]:
                del self._running_subagents[turn.parent]
                self._schedule(self._waiting_turns.pop(turn.parent), now)
            return
        # A sub-agent is no session of its own that would make room for another one under the cap.
        self._top_level -= 1
        if self._turns_over_the_cap:
            self._top_level += 1
            self._ask(self._turns_over_the_cap.popleft(), now)

    def _schedule(self, turn: Turn, now: float) -> None:
        think_s = (turn.request.think_ms or 0.0) / 1e3 * self._config.time_scale
        due = now + think_s if self._config.timing == "think" else max(now, self._due(turn.request))
        self._event_queue.schedule(due, partial(self._ask, turn))

    def _begin(self, turn: Turn, now: float) -> None:
        self._in_flight += 1
        if self._config.max_sessions and self._top_level >= self._config.max_sessions:
            self._turns_over_the_cap.append(turn)
        else:
            self._top_level += 1
            self._ask(turn, now)
        self.start()

    def _due(self, request: TraceRequest) -> float:
        return (request.timestamp_ms - (self._origin_ms or 0.0)) / 1e3 * self._config.time_scale

    def _tenant(self, first: TraceRequest) -> Tenant:
        """Return the session's tenant, at random by the tenants' shares of the sessions."""
        tenants = self._config.tenants
        chance = self._chance(first, "tenant") * sum(tenant.sessions for tenant in tenants)
        for tenant in tenants[:-1]:
            chance -= tenant.sessions
            if chance < 0:
                return tenant
        return tenants[-1]

    def _chance(self, first: TraceRequest, purpose: str) -> float:
        """Return a random number in 0 to below 1 that depends on the seed and the session alone, so that cells stay paired."""
        return xxh3_64_intdigest(f"{self._config.seed} {purpose} {first.session}".encode()) / 2**64


def _parent_turn(turns: Session) -> int:
    assert isinstance(turns[0], SubagentRequest)
    return turns[0].parent_turn
