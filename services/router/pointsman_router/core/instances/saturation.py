"""Decides whether an instance is saturated. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman_router.core.placement_types import Load

SATURATED = "saturated"


@dataclass(frozen=True, slots=True)
class SaturationLimits:
    """Limits at which an instance is saturated. `max_requests`: open requests, as the router counts them. `max_kv_usage`: KV
    cache usage (0 to 1) in its report, while requests wait there; an engine that does not report both is not limited by it. 0:
    unlimited."""

    max_requests: int = 0
    max_kv_usage: float = 0.0

    def saturated(self, num_requests: int, load: Load | None) -> bool:
        """Return whether an instance with this number of open requests and this report (None: no fresh one) is saturated."""
        if self.max_requests and num_requests >= self.max_requests:
            return True
        if not self.max_kv_usage or load is None or load.kv_usage is None or load.waiting is None:
            return False
        # A full cache alone is good: it may hold prefixes for reuse. Only waiting requests show that its blocks are in use.
        return load.kv_usage >= self.max_kv_usage and load.waiting > 0
