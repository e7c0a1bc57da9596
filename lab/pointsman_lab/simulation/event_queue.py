"""A queue of actions in virtual time. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

# Called with its scheduled time, in s.
Action = Callable[[float], None]


class EventQueue:
    """Actions by time (s). Actions of the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Action]] = []
        self._entered = 0

    def schedule(self, moment: float, action: Action) -> None:
        """Schedule an action at `moment` (s). Mutates."""
        self._entered += 1
        heapq.heappush(self._due, (moment, self._entered, action))

    @property
    def next_time(self) -> float:
        """Time of the next action, s. Raises IndexError if there is none."""
        return self._due[0][0]

    def run_next(self) -> None:
        """Run the next action, which may schedule more. Raises IndexError if there is none. Mutates."""
        moment, _, action = heapq.heappop(self._due)
        action(moment)
