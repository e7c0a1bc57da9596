"""A simulation that receives its requests one by one, as they become known, without an end. Pure."""

from __future__ import annotations

from collections.abc import Callable

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.clients import Turn
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import MODEL, Simulator
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev

# (event, now): receives a router's events about decisions.
OnDecision = Callable[[ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed, float], None]


class OnlineSimulator(Simulator):
    """A Simulator of one pool whose requests arrive at given times, because they were really sent then. They do not wait for
    earlier requests of their sessions. Every request may be followed by another turn of its session."""

    def __init__(self, config: SimulationConfig, on_decision: OnDecision | None = None) -> None:
        """Start a simulation without requests. Raises SettingError for an unknown policy or setting."""
        super().__init__([], config)
        self._on_decision = on_decision
        self._now = 0.0
        self._begin()

    def submit(self, request: TraceRequest, moment: float, exclude: tuple[str, ...] = ()) -> None:
        """Submit a request at `moment` (s), which must not be before an earlier moment or `until`. It is placed on none of the
        instances in `exclude`. Mutates."""
        assert moment >= self._now, f"{moment} is in the past: it is {self._now}"
        self._now = moment
        self._clients.submit_at(Turn(request, (), MODEL, may_continue=True, exclude=exclude), moment)

    def advance(self, until: float) -> list[RequestRecord]:
        """Run all events before `until` (s); return the requests that have ended. Mutates."""
        self._now = max(self._now, until)
        while self._event_queue.next_time < until:
            self._event_queue.run_next()
        return self._take()

    def finish(self) -> list[RequestRecord]:
        """Run until all requests have ended; return those that had not been returned. Mutates."""
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
