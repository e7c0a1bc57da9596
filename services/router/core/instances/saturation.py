"""When an instance has enough to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman.router.core.types import Load

SATURATED = "saturated"


@dataclass(frozen=True, slots=True)
class SaturationLimits:
    """What makes an instance saturated: requests open on it as the router counts them, or its own report that its KV is full
    and requests wait. 0 switches a limit off."""

    max_requests: int = 0
    max_kv_usage: float = 0.0

    def saturated(self, num_requests: int, load: Load | None) -> bool:
        """Whether an instance with so many open requests and this report (None: no fresh one) should get no more."""
        if self.max_requests and num_requests >= self.max_requests:
            return True
        if not self.max_kv_usage or load is None:
            return False
        # A full cache alone is a good cache: only requests that wait show that its blocks are in use.
        return load.kv_usage >= self.max_kv_usage and load.waiting > 0
