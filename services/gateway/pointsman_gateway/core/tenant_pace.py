"""A maximum rate of calls by tenant, which holds beside the limits of keys. Pure; times in monotonic s."""

from __future__ import annotations

# Differences of times on a clock are rounded.
ROUNDING_S = 1e-6


class TenantPace:
    """Lets each tenant call `at_once` times at once, and `per_s` times a second after that. Where all share a rate, all are the
    tenant ""."""

    def __init__(self, per_s: float, at_once: int) -> None:
        self.per_s = per_s
        self._ahead_s = (at_once - 1) / per_s
        self._next_at: dict[str, float] = {}  # by tenant: when a call would be due that keeps to the rate

    def take(self, tenant: str, now: float) -> float:
        """Count a call and return 0. If it is too early, count nothing and return the seconds until a call may pass. Mutates."""
        due = max(self._next_at.get(tenant, now), now)
        if (wait_s := due - now - self._ahead_s) > ROUNDING_S:
            return wait_s
        self._next_at[tenant] = due + 1 / self.per_s
        return 0.0
