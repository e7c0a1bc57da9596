"""Protects gateway ids: an id belongs to the gateway that first opened a session under it, until its lease ends. Pure.

All gateways may share one token, so a gateway proves its id by a secret that it generates and sends to routers only.
"""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Claim:
    """The secret of a gateway id, and when the claim ends (s on the monotonic clock; infinite while a session is open)."""

    secret: bytes
    until: float


class GatewayClaims:
    """The claimed gateway ids. A claim ends `lease_s` after the id's last session, when the gateway's reservations end, too."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, gateway_id: str, secret: bytes, now: float) -> bool:
        """Claim or renew `gateway_id` for the caller that has `secret`; return whether the id may be used. Mutates."""
        known = self._claims.get(gateway_id)
        if known is None or known.until <= now:
            self._claims[gateway_id] = _Claim(secret, now + self._lease_s)
            return True
        if not hmac.compare_digest(known.secret, secret):
            return False
        known.until = max(known.until, now + self._lease_s)
        return True

    def opened(self, gateway_id: str, secret: bytes, now: float) -> bool:
        """Record that a session under a claimed id is open. Return False if opening took so long that another gateway has the id
        now. Mutates."""
        if not self.claim(gateway_id, secret, now):
            return False
        self._claims[gateway_id].until = math.inf
        return True

    def closed(self, gateway_id: str, now: float) -> None:
        """Record that the last session under an id has ended. Mutates."""
        self._claims[gateway_id].until = now + self._lease_s

    def expire(self, now: float) -> None:
        """Remove claims that have ended. Mutates."""
        self._claims = {name: claim for name, claim in self._claims.items() if claim.until > now}
