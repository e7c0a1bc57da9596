"""A simulation that is told its requests one by one, as they become known, and goes on for as long as they come. Pure."""

from __future__ import annotations

from collections.abc import Callable

from lab.clients import Turn
from lab.records import RequestRecord
from lab.simulation import Simulation
from lab.simulator import MODEL, Simulator
from lab.traces import TraceRequest
from services.router import events as ev

# What a router tells of its decisions, with the moment (s).
OnDecision = Callable[[ev.Decided | ev.Noted | ev.Closed, float], None]


class OpenSimulator(Simulator):
    """A Simulator of one pool whose requests come at their own moments, whatever became of their sessions' earlier ones: they
    were really sent then. Any of them may be followed by another turn of its session."""

    def __init__(self, asked: Simulation, on_decision: OnDecision | None = None) -> None:
        """Raises SettingError for an unknown policy or setting."""
        super().__init__([], asked)
        self._on_decision = on_decision
        self._now = 0.0
        self._begin()

    def ask(self, request: TraceRequest, moment: float, exclude: tuple[str, ...] = ()) -> None:
        """A request comes at `moment` (s), which is not before any moment that was told or advanced to; it goes to none of the
        instances in `exclude`. Mutates."""
        assert moment >= self._now, f"{moment} is over: it is {self._now}"
        self._now = moment
        self._clients.enter(Turn(request, (), MODEL, more=True, exclude=exclude), moment)

    def advance(self, until: float) -> list[RequestRecord]:
        """Let time go on to before `until` (s): what has ended. Mutates."""
        self._now = max(self._now, until)
        while self._agenda.moment < until:
            self._agenda.next()
        return self._take()

    def finish(self) -> list[RequestRecord]:
        """Let everything that was asked end: what had not ended before. Mutates."""
        while self._clients.waiting:
            self._now = max(self._now, self._agenda.moment)
            self._agenda.next()
        return self._take()

    def _take(self) -> list[RequestRecord]:
        ended, self._ended = self._ended, []
        return ended

    def _do(self, router: str, effect: ev.Effect, now: float) -> None:
        if self._on_decision is not None and isinstance(effect, ev.Decided | ev.Noted | ev.Closed):
            self._on_decision(effect, now)
        super()._do(router, effect, now)
