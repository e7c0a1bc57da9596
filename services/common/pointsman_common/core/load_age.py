"""The age of a load sample, as agents and routers send it. Pure."""

from __future__ import annotations

# Maximum age that its field has room for, ms: 50 days.
MAX_AGE_MS = 2**32 - 1


def age_ms(sampled_at: float, now: float) -> int:
    """Return the age at `now` of a load sampled at `sampled_at` (both monotonic s), in whole ms from 0 to MAX_AGE_MS."""
    return min(max(round((now - sampled_at) * 1e3), 0), MAX_AGE_MS)
