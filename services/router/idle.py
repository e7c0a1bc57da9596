"""An engine that says it has nothing to do contradicts reservations that nobody claims. Pure; times in s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.router.domain import Load, Phase
from services.router.reservations import Reservation

IDLE_REPORTS = 3
UNCLAIMED_AFTER_S = 30.0


@dataclass(slots=True)
class IdleStreak:
    """How many fresh reports in a row said running = 0 and waiting = 0, and when the first of them was sampled."""

    reports: int = 0
    since: float = 0.0
    _sampled_at: float = float("-inf")

    def heard(self, load: Load, now: float, fresh_s: float) -> bool:
        """Take a report in; whether the engine has been idle for long enough to be believed. Mutates."""
        if not load.healthy or load.running or load.waiting or now - load.sampled_at > fresh_s:
            self.reports = 0
        elif load.sampled_at > self._sampled_at:
            self.reports += 1
            if self.reports == 1:
                self.since = load.sampled_at
        self._sampled_at = max(self._sampled_at, load.sampled_at)
        return self.reports >= IDLE_REPORTS


def unclaimed(
    reservations: Iterable[Reservation],
    instance_id: str,
    opened_at: Callable[[str], float],
    idle_since: float,
    now: float,
) -> list[Reservation]:
    """Reservations that an idle instance cannot have: past their first token, of a gateway whose session is gone, open for
    `UNCLAIMED_AFTER_S` and since before the instance became idle."""
    return [
        one
        for one in reservations
        if one.instance_id == instance_id
        and one.phase is Phase.DECODE
        and one.gateway_id
        and one.lease_until is not None
        and (opened := opened_at(one.request_id)) <= now - UNCLAIMED_AFTER_S
        and opened < idle_since
    ]
