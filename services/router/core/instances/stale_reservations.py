"""An engine that says it has nothing to do contradicts reservations that nobody claims. Pure; times in s."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pointsman.router.core.load.reservations import Reservation
from pointsman.router.core.types import Load, Phase

IDLE_REPORTS = 3
STALE_AFTER_S = 30.0


@dataclass(slots=True)
class IdleReports:
    """When the last fresh reports were sampled that said running = 0 and waiting = 0, with no other in between."""

    _idle_at: deque[float] = field(default_factory=lambda: deque(maxlen=IDLE_REPORTS))
    _sampled_at: float = float("-inf")

    @property
    def since(self) -> float:
        """The first of the last `IDLE_REPORTS` idle reports; never before there were so many."""
        return self._idle_at[0] if len(self._idle_at) == IDLE_REPORTS else float("-inf")

    def observe(self, load: Load, now: float, fresh_s: float) -> bool:
        """Take a report in; whether the engine has been idle for long enough to rely on it. Mutates."""
        if not load.healthy or load.running or load.waiting or now - load.sampled_at > fresh_s:
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
    """Those of an idle instance's reservations that it cannot have: past their first token, of a gateway whose session is gone,
    open for `STALE_AFTER_S` and since before the first of its idle reports."""
    return [
        one
        for one in reservations
        if one.phase is Phase.DECODE
        and one.gateway_id
        and one.lease_until is not None
        and (opened := opened_at(one.request_id)) <= now - STALE_AFTER_S
        and opened < idle_since
    ]
