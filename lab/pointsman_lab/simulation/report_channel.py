"""The channel from agents to a router in a simulation. It delays reports, and may lose some. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pointsman_common.core.key_report_types import ConsistencyCheck, Delta
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_router.core import events_and_effects as ev

# (event, now): delivers an event to the router.
Deliver = Callable[[ev.Event, float], None]


class ReportChannel:
    """Delivers events to `deliver` in their order, `delay_s` later. A share of `loss` (0 to 1) of loads, deltas and checks is
    lost, drawn from `rng`. The router detects the gap and requests a snapshot, which is never lost."""

    def __init__(
        self, event_queue: EventQueue, deliver: Deliver, delay_s: float, loss: float, rng: random.Random
    ) -> None:
        self._event_queue = event_queue
        self._deliver = deliver
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng

    def send(self, event: ev.Event, now: float) -> None:
        """Send an event. Mutates."""
        if self._loss and _may_be_lost(event) and self._rng.random() < self._loss:
            return
        if self._delay_s:
            self._event_queue.schedule(now + self._delay_s, partial(self._deliver, event))
        else:
            self._deliver(event, now)


def _may_be_lost(event: ev.Event) -> bool:
    if isinstance(event, ev.KeysReported):
        return isinstance(event.message, Delta | ConsistencyCheck)
    return isinstance(event, ev.LoadReported)
