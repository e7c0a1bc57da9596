"""Detection of which process answers at an engine address. Pure.

An incarnation is one lifetime of an engine. vLLM's /metrics has process_start_time_seconds, which is constant for a process
and differs between processes (resolution 10 ms). With several API server processes the series is absent, and the run that the
connector package announces is the identity. Without both, a counter that fell, or KV events that start over, show a new
lifetime. A page that lacks the start time, or a counter, that earlier ones had shows nothing new. An address that answers for
process A, then B, then A again is a load balancer: a placement through this address cannot select one instance.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

# Number of consecutive scrapes with an unchanged identity after which an address no longer counts as alternating.
_STABLE_AFTER = 60
# Maximum number of earlier identities kept.
_REMEMBERED = 16
# A change is quick if the previous identity was repeated in fewer scrapes than this.
_QUICK = 5
# Number of consecutive quick changes that show a load balancer of processes that do not report their start time: they never show
# an earlier identity again, but change too fast for restarts. Processes that report it do show one; an engine that restarts
# again and again does not.
_QUICK_CHANGES = 3


def process_name(start: float) -> str:
    """Return the identity of the process that started at `start`, in seconds of the engine's wall clock."""
    return f"{start:.3f}"


class IdentityChange(Enum):
    """Result of the newest scrape of an address."""

    SAME = "same"
    NEW = "new"
    ALTERNATING = "alternating"


class ProcessIdentity:
    """Tracks the identities that one address shows, with one `observe` per scrape."""

    def __init__(self) -> None:
        self.current = ""
        """The identity of the process that answers now; empty before the first scrape."""
        self.alternating = False
        self._earlier: deque[str] = deque(maxlen=_REMEMBERED)
        self._steady = 0
        self._quick_changes = 0
        self._run = ""
        self._generation_tokens: float | None = None
        self._queries: float | None = None
        self._anonymous = 0

    def observe(
        self, process_start: float | None, generation_tokens: float | None, queries: float | None, *, run: str = ""
    ) -> IdentityChange:
        """Record one scrape and return what it shows. `process_start` is None if the process does not report its start time.
        `run` is the engine's announced id, empty without one.
        `generation_tokens` and `queries` are counters (tokens, sum of all ranks) that only a restart lowers; None if unknown.

        ALTERNATING is returned until an identity has been repeated in 60 consecutive scrapes. The last of these returns NEW.
        Mutates.
        """
        fell = _fell(self._generation_tokens, generation_tokens) or _fell(self._queries, queries)
        self._generation_tokens = self._generation_tokens if generation_tokens is None else generation_tokens
        self._queries = self._queries if queries is None else queries
        known_run = self._run
        if run or process_start is not None:
            self._run = run
        if process_start is not None:
            identity = process_name(process_start)
        elif self._named and not fell and run in ("", known_run):
            identity = self.current
        elif run:
            identity = f"run-{run}"
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
        quick = bool(self.current) and self._steady < _QUICK and process_start is None
        self._quick_changes = self._quick_changes + 1 if quick else 0
        if identity in self._earlier or self._quick_changes >= _QUICK_CHANGES:
            self.alternating = True
        if self.current and self.current not in self._earlier:
            self._earlier.append(self.current)
        self.current = identity
        self._steady = 0
        return IdentityChange.ALTERNATING if self.alternating else IdentityChange.NEW

    def unreachable(self) -> None:
        """Record a failed scrape: a restart is likely, so the next change of identity does not suggest a load balancer."""
        self._quick_changes = 0

    @property
    def _named(self) -> bool:
        """Whether the process has reported its start time."""
        return bool(self.current) and not self.current.startswith(("anonymous-", "run-"))

    @property
    def anonymous(self) -> bool:
        """True if the engine reports neither start time nor id, so that the agent numbers the identities itself."""
        return self.current.startswith("anonymous-")


def _fell(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now < before
