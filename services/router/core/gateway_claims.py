"""Whose a gateway's id is: who opened a session under it first, for as long as that has something to lose. Pure.

All gateways may show one token, so an id is proven by a secret that its gateway makes up and tells routers alone.
"""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Claim:
    """`until` is on the monotonic clock; infinite while a session is open."""

    secret: bytes
    until: float


class GatewayClaims:
    """The ids that gateways have, each until `lease_s` after its last session, as long as its reservations live on."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, gateway_id: str, secret: bytes, now: float) -> bool:
        """Whether a session may be opened under `gateway_id` by who shows `secret`; if so the id is its own. Mutates."""
        known = self._claims.get(gateway_id)
        if known is None or known.until <= now:
            self._claims[gateway_id] = _Claim(secret, now + self._lease_s)
            return True
        if not hmac.compare_digest(known.secret, secret):
            return False
        known.until = max(known.until, now + self._lease_s)
        return True

    def opened(self, gateway_id: str, secret: bytes, now: float) -> bool:
        """A session under a claimed id is open, unless its opening took so long that another one has the id by now. Mutates."""
        if not self.claim(gateway_id, secret, now):
            return False
        self._claims[gateway_id].until = math.inf
        return True

    def closed(self, gateway_id: str, now: float) -> None:
        """The last session under an id has ended. Mutates."""
        self._claims[gateway_id].until = now + self._lease_s

    def expire(self, now: float) -> None:
        """Forget ids that are free again. Mutates."""
        self._claims = {name: one for name, one in self._claims.items() if one.until > now}
