"""Priority classes of requests, which are assigned by API key. Pure."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    """The priority class of a request's API key, lowest first. It matters only while requests are held
    (core/requests/fair_order.py). A request without a known class is STANDARD."""

    BATCH = "BATCH"
    STANDARD = "STANDARD"
    INTERACTIVE = "INTERACTIVE"

    @property
    def level(self) -> int:
        """The rank of the class; 0 is the lowest."""
        return _LEVELS[self]


# Lowest first.
PRIORITIES = tuple(Priority)
_LEVELS = {priority: level for level, priority in enumerate(PRIORITIES)}
