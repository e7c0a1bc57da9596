"""Which instance a session belongs to, for a while. Pure; `now` is in s on any clock that only grows."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

MAX_SESSIONS = 1_000_000
# Of a pool that was given up so many sessions are freed at once, which takes about a millisecond.
FREED_AT_ONCE = 10_000
LOOKED_AT = 1_000


class _Session(msgspec.Struct, frozen=True, gc=False):
    """`came_back`: it had an owner already when it was assigned this one."""

    # gc=False: a full collection that looks at a million of them takes 0.16 s.

    owner: str
    expires: float
    came_back: bool


class Affinity:
    """(pool, session) -> owner instance, forgotten `ttl_s` after its last use, bounded to MAX_SESSIONS (oldest go first).

    A session that speaks to two models has an owner for each.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        # Pool -> session -> owner, the lately assigned last.
        self._pools: dict[str, OrderedDict[str, _Session]] = {}
        self._count = 0
        # Pool -> instance -> how many sessions it owns.
        self._owned: dict[str, dict[str, int]] = {}
        self._given_up: list[OrderedDict[str, _Session]] = []

    def __len__(self) -> int:
        return self._count

    def owner(self, pool: str, session: str, now: float) -> str:
        """The instance of `pool` that owns `session`, or "" when none does any more."""
        sessions: Mapping[str, _Session] = self._pools.get(pool, {})
        known = sessions.get(session)
        return known.owner if known is not None and known.expires > now else ""

    def assign(self, pool: str, session: str, instance_id: str, now: float) -> bool:
        """Make `instance_id` the owner until now + ttl; returns whether the session had one already, and so was here before.
        Mutates."""
        came_back = self._forget(pool, session)
        self._put(pool, session, _Session(instance_id, now + self.ttl_s, came_back))
        while self._count > MAX_SESSIONS:
            self._forget(*self._oldest())
        return came_back

    def recall(self, pool: str, session: str, instance_id: str, now: float) -> None:
        """What an earlier router knew, unless the session has been assigned since. Mutates."""
        if session not in self._pools.get(pool, {}) and self._count < MAX_SESSIONS:
            self._put(pool, session, _Session(instance_id, now + self.ttl_s, came_back=True))

    def expire(self, now: float) -> None:
        """Drop what is past its time. Mutates."""
        for pool, sessions in list(self._pools.items()):
            while sessions and sessions[session := next(iter(sessions))].expires <= now:
                self._forget(pool, session)
        if self._given_up:
            sessions = self._given_up[-1]
            for _ in range(min(FREED_AT_ONCE, len(sessions))):
                sessions.popitem()
            if not sessions:
                self._given_up.pop()

    def sessions_of(self, instance_id: str) -> int:
        """How many sessions an instance owns."""
        return sum(owned.get(instance_id, 0) for owned in self._owned.values())

    def newest(self, now: float) -> Iterator[tuple[str, str, str, float]]:
        """(pool, session, owner instance, when it was assigned), the lately assigned first, those past their time left out."""

        def of(pool: str) -> Iterator[tuple[float, str, str, str]]:
            return ((one.expires, pool, session, one.owner) for session, one in reversed(self._pools[pool].items()))

        latest_first = heapq.merge(*map(of, self._pools), key=lambda one: one[0], reverse=True)
        for expires, pool, session, owner in latest_first:
            if expires <= now:
                return
            yield pool, session, owner, expires - self.ttl_s

    def returning(self, pool: str) -> Iterator[tuple[str, str] | None]:
        """(session, owner) of those that have come back, as each is when it is its turn; sessions may come and go meanwhile. None
        after every LOOKED_AT sessions: others may have a turn."""
        sessions: dict[str, _Session] = self._pools.get(pool) or {}
        # By dict's own keys, in whatever order: those of an OrderedDict take 0.3 s for a million.
        for number, session in enumerate(list(dict.keys(sessions)), 1):
            known = sessions.get(session)
            if known is not None and known.came_back:
                yield session, known.owner
            if not number % LOOKED_AT:
                yield None

    def forget_pool(self, pool: str) -> None:
        """Drop the sessions of one pool. Mutates; the memory is freed a part at a time, by expire()."""
        if (sessions := self._pools.pop(pool, None)) is not None:
            del self._owned[pool]
            self._count -= len(sessions)
            self._given_up.append(sessions)

    def check_invariants(self) -> None:
        """Raise AssertionError when the counts disagree with the sessions."""
        counts: dict[str, dict[str, int]] = {}
        for pool, sessions in self._pools.items():
            assert sessions, pool
            owned = counts.setdefault(pool, {})
            for one in sessions.values():
                owned[one.owner] = owned.get(one.owner, 0) + 1
        assert counts == self._owned
        assert self._count == sum(map(len, self._pools.values()))

    def _put(self, pool: str, session: str, known: _Session) -> None:
        self._pools.setdefault(pool, OrderedDict())[session] = known
        owned = self._owned.setdefault(pool, {})
        owned[known.owner] = owned.get(known.owner, 0) + 1
        self._count += 1

    def _forget(self, pool: str, session: str) -> bool:
        sessions = self._pools.get(pool)
        if sessions is None or (known := sessions.pop(session, None)) is None:
            return False
        self._count -= 1
        owned = self._owned[pool]
        owned[known.owner] -= 1
        if not owned[known.owner]:
            del owned[known.owner]
        if not sessions:
            del self._pools[pool], self._owned[pool]
        return True

    def _oldest(self) -> tuple[str, str]:
        def expires(pool: str) -> float:
            return next(iter(self._pools[pool].values())).expires

        pool = min(self._pools, key=expires)
        return pool, next(iter(self._pools[pool]))
