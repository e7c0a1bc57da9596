"""What programs have had computed lately: the order of waiting requests lets the others go first. Pure; times in s on one clock.

A program is a session with all sub-agents that name it, directly or through others. Its service is the sum of the tokens that its
requests had to have computed, each counted when it came until it leaves without a placement, plus those of its answers; it is
halved every HALF_LIFE_S (least attained service: Rai, Urvoy-Keller and Biersack, SIGMETRICS 2003; with a half-life as in
llm-d-router's program-aware fairness).

Nothing is stored for the next owner of a pool: it counts the open requests that gateways announce, and what came before is
worth little after some half-lives.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp2, log

import msgspec

from pointsman_router.core.placement_types import PlacementRequest

HALF_LIFE_S = 60.0
# Longest age that service outweighs, s. Service of p s loses at most p x ln 2 / HALF_LIFE_S of it per second, so with this limit
# never more than 1 s per second: of two requests of a program, the later one never gets ahead because the service has decayed.
MOST_S = HALF_LIFE_S / log(2.0)
# Maximum number of sessions of all pools whose programs are known, some 350 bytes each; beyond it the one that came last longest
# ago is forgotten. FORGET_S: time after which 100,000 tokens have decayed to 2. FORGET_AT_ONCE: sessions that one call forgets.
MAX_SESSIONS, FORGET_S, FORGET_AT_ONCE = 100_000, 16 * HALF_LIFE_S, 1_000


class _Service(msgspec.Struct, gc=False):
    """The service of one program, which all its sessions share."""

    tokens: float = 0.0  # as of `at`
    at: float = 0.0

    def now(self, now: float) -> float:
        return self.tokens * exp2((self.at - now) / HALF_LIFE_S)


class AttainedService:
    """The service of programs, by pool and session. `on`: whether it is counted, since some order asks for it. Memory:
    O(MAX_SESSIONS)."""

    def __init__(self, *, on: bool = True, max_sessions: int = MAX_SESSIONS) -> None:
        self.on = on
        self._max = max_sessions
        # (pool, session) -> its program's service; the session that came last longest ago first.
        self._of: OrderedDict[tuple[str, str], _Service] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def tokens(self, pool: str, request: PlacementRequest, now: float) -> float:
        """Return the service of a request's program, in tokens; 0 without a session."""
        found = self._of.get((pool, request.session)) or self._of.get((pool, request.started_by))
        return found.now(now) if found is not None else 0.0

    def add(self, pool: str, request: PlacementRequest, tokens: float, now: float) -> None:
        """Count tokens of a request with its program. Mutates."""
        if not self.on or not request.session:
            return
        service = self._service(pool, request)
        service.tokens, service.at = service.now(now) + tokens, max(now, service.at)
        while len(self._of) > self._max:
            self._of.popitem(last=False)

    def take_back(self, pool: str, request: PlacementRequest, tokens: float, added_at: float) -> None:
        """Count no longer what `add` counted of a request at `added_at`, since it was not placed. Mutates."""
        if (service := self._of.get((pool, request.session))) is not None:
            service.tokens = max(service.tokens - tokens * exp2((added_at - service.at) / HALF_LIFE_S), 0.0)

    def expire(self, now: float) -> None:
        """Forget sessions whose programs have had nothing for long. Mutates."""
        for _ in range(FORGET_AT_ONCE):
            if not self._of or next(iter(self._of.values())).at + FORGET_S > now:
                return
            self._of.popitem(last=False)

    def _service(self, pool: str, request: PlacementRequest) -> _Service:
        key, parent = (pool, request.session), request.started_by
        service = self._of.get(key)
        if parent:
            above = self._of.get((pool, parent))
            service = service or above or _Service()
            # The parent's own next request finds it, however long its sub-agents take.
            self._of[pool, parent] = above or service
            self._of.move_to_end((pool, parent))
        self._of[key] = service = service or _Service()
        self._of.move_to_end(key)
        return service
