"""A simulation that is told its requests one by one, as they become known, and goes on for as long as they come. Pure."""

from __future__ import annotations

from collections.abc import Callable

from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.clients import Turn
from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.simulator import MODEL, Simulator
from pointsman.lab.workload.traces import TraceRequest
from pointsman.router.core import events_and_effects as ev

# What a router tells of its decisions, with the moment (s).
OnDecision = Callable[[ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed, float], None]


class OnlineSimulator(Simulator):
    """A Simulator of one pool whose requests come at their own moments, whatever became of their sessions' earlier ones: they
    were really sent then. Any of them may be followed by another turn of its session."""

    def __init__(self, config: SimulationConfig, on_decision: OnDecision | None = None) -> None:
        """Raises SettingError for an unknown policy or setting."""
        super().__init__([], config)
        self._on_decision = on_decision
        self._now = 0.0
        self._begin()

    def submit(self, request: TraceRequest, moment: float, exclude: tuple[str, ...] = ()) -> None:
        """A request comes at `moment` (s), which is not before any moment that was told or advanced to; it goes to none of the
        instances in `exclude`. Mutates."""
        assert moment >= self._now, f"{moment} is over: it is {self._now}"
        self._now = moment
        self._clients.submit_at(Turn(request, (), MODEL, may_continue=True, exclude=exclude), moment)

    def advance(self, until: float) -> list[RequestRecord]:
        """Let time go on to before `until` (s): what has ended. Mutates."""
        self._now = max(self._now, until)
        while self._event_queue.next_time < until:
            self._event_queue.run_next()
        return self._take()

    def finish(self) -> list[RequestRecord]:
        """Let everything that was asked end: what had not ended before. Mutates."""
        while self._clients.waiting:
            self._now = max(self._now, self._event_queue.next_time)
            self._event_queue.run_next()
        return self._take()

    def _take(self) -> list[RequestRecord]:
        ended, self._ended = self._ended, []
        return ended

    def _on_effect(self, router: str, effect: ev.Effect, now: float) -> None:
        if self._on_decision is not None and isinstance(effect, ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed):
            self._on_decision(effect, now)
        super()._on_effect(router, effect, now)
