"""Which process answers at an address, told from what it says about itself. Pure.

An incarnation is one lifetime of an engine. vLLM's /metrics carries process_start_time_seconds, fixed for a process and new
with the next (to 10 ms); with several API server processes it is absent, and then a counter that went down, or KV events that
start over, tell of a new lifetime. An address that answers for A, then B, then A again is a load balancer: no placement
through it can mean one instance.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

_STABLE_AFTER = 60
_REMEMBERED = 16
# Processes that do not tell their start time never show an old identity again; they change too fast to be restarts.
_QUICK = 5
_QUICK_CHANGES = 3


def process_name(start: float) -> str:
    """The identity of the process that started at `start`, in seconds of the engine's wall clock."""
    return f"{start:.3f}"


class IdentityChange(Enum):
    """What the newest look at an address says."""

    SAME = "same"
    NEW = "new"
    ALTERNATING = "alternating"


class ProcessIdentity:
    """Follows the identities that one address shows, one `observe` per scrape."""

    def __init__(self) -> None:
        self.current = ""
        """The identity of the process that answers now; empty before the first look."""
        self.alternating = False
        self._earlier: deque[str] = deque(maxlen=_REMEMBERED)
        self._steady = 0
        self._quick_changes = 0
        self._generation_tokens = 0.0
        self._queries = 0.0
        self._anonymous = 0

    def observe(self, process_start: float | None, generation_tokens: float, queries: float) -> IdentityChange:
        """One look: the process's start time if it tells, and two counters (tokens, all ranks) that only a restart lowers.

        ALTERNATING lasts until one identity was seen 60 times on end; that look answers NEW.
        """
        fell = generation_tokens < self._generation_tokens or queries < self._queries
        self._generation_tokens, self._queries = generation_tokens, queries
        if process_start is not None:
            identity = process_name(process_start)
        else:
            if fell or not self.current:
                self._anonymous += 1
            identity = f"anonymous-{self._anonymous}"
        if identity == self.current:
            self._steady += 1
            if not self.alternating:
                return IdentityChange.SAME
            if self._steady < _STABLE_AFTER:
                return IdentityChange.ALTERNATING
            self.alternating = False
            self._earlier.clear()
            return IdentityChange.NEW
        self._quick_changes = self._quick_changes + 1 if self.current and self._steady < _QUICK else 0
        if identity in self._earlier or self._quick_changes >= _QUICK_CHANGES:
            self.alternating = True
        if self.current and self.current not in self._earlier:
            self._earlier.append(self.current)
        self.current = identity
        self._steady = 0
        return IdentityChange.ALTERNATING if self.alternating else IdentityChange.NEW

    def unreachable(self) -> None:
        """A look that failed: what answers next may well be another process, and no load balancer."""
        self._quick_changes = 0

    @property
    def anonymous(self) -> bool:
        """True when the process does not tell its start time, so that the identity is this agent's own count."""
        return self.current.startswith("anonymous-")
