"""Finds stale reservations: those that no gateway claims, on an instance whose engine reports no work. Pure; times in s."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Load, Phase

# Number of idle reports in a row after which an engine counts as idle.
IDLE_REPORTS = 3
# Minimum age of a stale reservation, s.
STALE_AFTER_S = 30.0


@dataclass(slots=True)
class IdleReports:
    """The times of the last idle reports in a row: fresh reports of a healthy engine with running = 0 and waiting = 0. A
    suspended engine's figures are those of its last step, so its reports do not count."""

    _idle_at: deque[float] = field(default_factory=lambda: deque(maxlen=IDLE_REPORTS))
    _sampled_at: float = float("-inf")

    @property
    def since(self) -> float:
        """When the first of the last `IDLE_REPORTS` idle reports was sampled; -inf if there are fewer."""
        return self._idle_at[0] if len(self._idle_at) == IDLE_REPORTS else float("-inf")

    def observe(self, load: Load, now: float, fresh_s: float) -> bool:
        """Add a report; return whether the last `IDLE_REPORTS` reports were idle. `fresh_s`: maximum age of a report. Mutates."""
        # An engine that does not report both may work.
        idle = load.running == 0 and load.waiting == 0
        if not load.healthy or load.suspended or not idle or now - load.sampled_at > fresh_s:
            self._idle_at.clear()
        elif load.sampled_at > self._sampled_at:
            self._idle_at.append(load.sampled_at)
        self._sampled_at = max(self._sampled_at, load.sampled_at)
        return len(self._idle_at) == IDLE_REPORTS


def stale_reservations(
    reservations: Iterable[Reservation],
    opened_at: Callable[[str], float],
    idle_since: float,
    now: float,
) -> list[Reservation]:
    """Return the stale reservations of an idle instance: in decode, with a lease because their gateway's session is gone, open
    for `STALE_AFTER_S`, and opened before the first of the idle reports."""
    return [
        reservation
        for reservation in reservations
        if reservation.phase is Phase.DECODE
        and reservation.gateway_id
        and reservation.lease_until is not None
        and (opened := opened_at(reservation.request_id)) <= now - STALE_AFTER_S
        and opened < idle_since
    ]
