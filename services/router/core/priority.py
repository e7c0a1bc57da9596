"""How urgent requests are to an operator: the classes that API keys give them. Pure."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    """The class of a request, by the API key that came with it, lowest first. It counts where requests wait for an instance
    (core/requests/fair_order.py), and nowhere else. STANDARD is also what a request without a known class has."""

    BATCH = "BATCH"
    STANDARD = "STANDARD"
    INTERACTIVE = "INTERACTIVE"

    @property
    def level(self) -> int:
        """Its place among the classes, from 0 for the lowest."""
        return _LEVELS[self]


# Lowest first.
PRIORITIES = tuple(Priority)
_LEVELS = {priority: level for level, priority in enumerate(PRIORITIES)}
