"""The way from agents to the router in a simulation: it takes time, and may lose reports. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from lab.agenda import Agenda
from services.router import events as ev
from services.router.sync import Bookmark, Delta

# (event, now): the router hears of something.
Tell = Callable[[ev.Event, float], None]


class Link:
    """Carries events to `tell` in their order, `delay_s` later. Of loads, deltas and bookmarks a share of `loss` (0 to 1) never
    comes, drawn from `rng`: the router sees the gap and asks for a snapshot, which does."""

    def __init__(self, agenda: Agenda, tell: Tell, delay_s: float, loss: float, rng: random.Random) -> None:
        self._agenda = agenda
        self._tell = tell
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng

    def send(self, event: ev.Event, now: float) -> None:
        """Send an event. Mutates."""
        if self._loss and _may_be_lost(event) and self._rng.random() < self._loss:
            return
        if self._delay_s:
            self._agenda.at(now + self._delay_s, partial(self._tell, event))
        else:
            self._tell(event, now)


def _may_be_lost(event: ev.Event) -> bool:
    if isinstance(event, ev.KeysReported):
        return isinstance(event.message, Delta | Bookmark)
    return isinstance(event, ev.LoadReported)
