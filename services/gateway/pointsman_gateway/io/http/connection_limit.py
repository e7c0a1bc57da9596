"""Bounds a server's open connections. One that waits for a request gives way to a new one, the longest idle first."""

from __future__ import annotations

import enum
from typing import Protocol

# Maximum number of connections beyond the bound, which are taken to answer probes, and the others with a refusal.
SURPLUS = 256
# A connection within the bound gives way only after it has waited for so long, s: a new one's request is on its way.
GIVES_WAY_AFTER_S = 1.0


class Place(enum.Enum):
    """Whether a connection is within the bound, beyond it, or one more than is taken."""

    WITHIN = "within"
    SURPLUS = "surplus"
    NONE = "none"


class Bounded(Protocol):
    """A connection, or the TLS handshake before it."""

    def abort(self) -> None:
        """Close at once."""


class ConnectionLimit:
    """The open connections of one server, of which at most `most` are within the bound and SURPLUS beyond it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._within: set[Bounded] = set()
        self._surplus: set[Bounded] = set()
        # Connections without a request -> since when, monotonic s. The longest idle is first.
        self._waiting: dict[Bounded, float] = {}
        self._waiting_surplus: dict[Bounded, float] = {}

    @property
    def open(self) -> int:
        """Number of connections and handshakes."""
        return len(self._within) + len(self._surplus)

    def enter(self, connection: Bounded, now: float) -> Place:
        """Count a new connection, which waits for its request; close another one for it if there is no room. Mutates."""
        if len(self._within) >= self._most:
            self._close_longest(self._waiting, now - GIVES_WAY_AFTER_S)
        if len(self._within) < self._most:
            self._within.add(connection)
            self._waiting[connection] = now
            return Place.WITHIN
        # A probe sends its request at once, so any other connection beyond the bound that waits has waited for longer.
        if len(self._surplus) >= SURPLUS:
            self._close_longest(self._waiting_surplus, now)
        if len(self._surplus) < SURPLUS:
            self._surplus.add(connection)
            self._waiting_surplus[connection] = now
            return Place.SURPLUS
        return Place.NONE

    def _close_longest(self, waiting: dict[Bounded, float], until: float) -> None:
        longest = next(iter(waiting), None)
        if longest is not None and waiting[longest] <= until:
            self.leave(longest)
            longest.abort()

    def works(self, connection: Bounded) -> None:
        """Keep the connection: its request is on its way, or is answered. Mutates."""
        self._waiting.pop(connection, None)
        self._waiting_surplus.pop(connection, None)

    def waits(self, connection: Bounded, now: float) -> None:
        """Note that the connection waits for another request from now on. Mutates."""
        if connection in self._within:
            self._waiting[connection] = now

    def leave(self, connection: Bounded) -> None:
        """Count a connection no longer; one that is not counted is ignored. Mutates."""
        self.works(connection)
        self._within.discard(connection)
        self._surplus.discard(connection)
