"""What happens when, in virtual time. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

# Called with the moment it was due at, in s.
Action = Callable[[float], None]


class EventQueue:
    """Actions by moment (s); of one moment in the order in which they were entered."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Action]] = []
        self._entered = 0

    def schedule(self, moment: float, action: Action) -> None:
        """Enter an action. Mutates."""
        self._entered += 1
        heapq.heappush(self._due, (moment, self._entered, action))

    @property
    def next_time(self) -> float:
        """When the next action is due. IndexError when none is."""
        return self._due[0][0]

    def run_next(self) -> None:
        """Do what is due next, which may enter more. IndexError when nothing is. Mutates."""
        moment, _, action = heapq.heappop(self._due)
        action(moment)
