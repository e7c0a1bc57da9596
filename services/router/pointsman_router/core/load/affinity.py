"""Session affinity: which instance owns a session, until a time to live ends. Pure; `now` is in s on any monotonic clock.

A pool may have a million sessions, and no change of a session may take long. So the sessions are kept twice in many small dicts:
in shards, by name, and in chunks, by the time of their last assignment. A single dict of a million entries would be copied as it
grows; an OrderedDict takes 0.08 to 0.2 s for that, in the middle of an insertion.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from zlib import crc32

import msgspec

# Maximum number of sessions of all pools.
MAX_SESSIONS = 1_000_000
# Maximum number of expired sessions, and of sessions of forgotten pools, that one expire() drops; takes some milliseconds.
DROPPED_AT_ONCE = 5_000
# Number of sessions, assigned one after another, that share a dict.
CHUNK = 1_000
SHARDS = 256
# Maximum number of ended sessions of which the time of the end is kept, oldest end dropped first.
MAX_ENDED = 10_000


class _Session(msgspec.Struct, frozen=True, gc=False):
    """A session and its owner."""

    # gc=False, because a full collection that visits a million sessions takes 0.16 s. Dicts of them are not visited either.

    name: str  # TENANT/SESSION_ID (PlacementRequest.session)
    owner: str  # instance id
    expires: float  # s
    came_back: bool  # the session had an owner before this assignment
    chunk: int  # the number of its chunk


class _PoolSessions:
    """The sessions of one pool."""

    def __init__(self) -> None:
        self.shards: dict[int, dict[str, _Session]] = {}
        # Number -> chunk. The last chunk is being filled, and none is empty. A chunk's dict keeps the order of assignment.
        self.chunks: dict[int, dict[str, _Session]] = {}
        self._filled = 0  # the number of the last chunk
        self._put = 0  # how many sessions were added to the last chunk

    def get(self, name: str) -> _Session | None:
        shard = self.shards.get(_shard_of(name))
        return None if shard is None else shard.get(name)

    def put(self, name: str, owner: str, expires: float, came_back: bool) -> None:
        """Add a session that is not present."""
        if self._put >= CHUNK:
            self._filled += 1
            self._put = 0
        self._put += 1
        known = _Session(name, owner, expires, came_back, self._filled)
        self.shards.setdefault(_shard_of(name), {})[name] = known
        self.chunks.setdefault(self._filled, {})[name] = known

    def pop(self, name: str) -> _Session | None:
        number = _shard_of(name)
        shard = self.shards.get(number, {})
        if (known := shard.pop(name, None)) is None:
            return None
        if not shard:
            del self.shards[number]
        chunk = self.chunks[known.chunk]
        del chunk[name]
        if not chunk:
            del self.chunks[known.chunk]
        return known

    def oldest(self) -> _Session:
        """Return the session whose assignment is the oldest; there must be a session."""
        return next(iter(next(iter(self.chunks.values())).values()))

    def newest(self) -> Iterator[_Session]:
        """Yield the sessions, newest assignment first. Sessions may be added and removed during the iteration; a session that is
        assigned again is not yielded again."""
        for number in reversed(list(self.chunks)):
            for known in reversed(list(self.chunks.get(number, {}).values())):
                if self.get(known.name) is known:
                    yield known


class Affinity:
    """(pool, session) -> owner instance. An entry expires `ttl_s` after its last use. At most MAX_SESSIONS, oldest dropped first.

    A session that uses two models has an owner for each. A client may end a session: then it has no owner until a later request
    gives it one. Requests that came before the end, and are placed after it, do not. For this the time of the end is kept for
    `ttl_s`, of MAX_ENDED sessions.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._pools: dict[str, _PoolSessions] = {}
        self._count = 0
        # Pool -> instance -> number of sessions that it owns.
        self._owned: dict[str, dict[str, int]] = {}
        # Session -> time of its end, in order of time.
        self._ended: OrderedDict[str, float] = OrderedDict()
        self.ended_count = 0  # sessions with an owner that their clients have ended
        # The dicts of forgotten pools. Their memory is freed in parts, since freeing it all at once would block the event loop.
        self._given_up: list[dict[str, _Session]] = []

    def __len__(self) -> int:
        return self._count

    @property
    def left_to_free(self) -> int:
        """Number of sessions of forgotten pools whose memory is still to be freed, each counted twice."""
        return sum(map(len, self._given_up))

    def owner(self, pool: str, session: str, now: float) -> str:
        """Return the instance of `pool` that owns `session`, or "" if none does, or not any more."""
        sessions = self._pools.get(pool)
        known = sessions.get(session) if sessions is not None else None
        return known.owner if known is not None and known.expires > now else ""

    def assign(self, pool: str, session: str, instance_id: str, now: float, asked_at: float = inf) -> bool:
        """Make `instance_id` the owner until now + ttl_s; return whether the session already had an owner, so that it has come
        back. Does nothing if the session has ended after `asked_at`, when the request came. Mutates."""
        if self._ended and asked_at < self._ended.get(session, -inf):
            return False
        came_back = self._forget(pool, session, now)
        self._put(pool, session, instance_id, now, came_back)
        while self._count > MAX_SESSIONS:
            self._forget(*self._oldest(), now)
        return came_back

    def recall(self, pool: str, session: str, instance_id: str, now: float) -> None:
        """Add an owner that an earlier router assigned, unless the session is known or MAX_SESSIONS is reached. Mutates."""
        sessions = self._pools.get(pool)
        if (sessions is None or sessions.get(session) is None) and self._count < MAX_SESSIONS:
            self._put(pool, session, instance_id, now, came_back=True)

    def end(self, session: str, now: float) -> list[str]:
        """End a session in all pools; return those in which it had an owner. Mutates."""
        self._ended[session] = now
        self._ended.move_to_end(session)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        owned = [pool for pool in list(self._pools) if self._forget(pool, session, now)]
        self.ended_count += bool(owned)
        return owned

    def ended_at(self, session: str) -> float:
        """Return when the session has ended last, as far as known; else -inf."""
        return self._ended.get(session, -inf)

    def expire(self, now: float) -> None:
        """Drop expired sessions, and free those of forgotten pools, about DROPPED_AT_ONCE of each at most. Mutates."""
        left = DROPPED_AT_ONCE
        for pool, sessions in list(self._pools.items()):
            while left and sessions.chunks and (known := sessions.oldest()).expires <= now:
                self._forget(pool, known.name, now)
                left -= 1
        while self._ended and next(iter(self._ended.values())) <= now - self.ttl_s:
            self._ended.popitem(last=False)
        left = DROPPED_AT_ONCE
        while self._given_up and left > 0:
            left -= len(self._given_up.pop())

    def sessions_of(self, instance_id: str) -> int:
        """Return how many sessions an instance owns."""
        return sum(owned.get(instance_id, 0) for owned in self._owned.values())

    def newest(self, now: float) -> Iterator[tuple[str, str, str, float]]:
        """Yield (pool, session, owner instance, time of assignment) of the sessions that are not expired, newest assignment
        first. Sessions may be added and removed during the iteration."""

        def of(pool: str) -> Iterator[tuple[float, str, str, str]]:
            return ((session.expires, pool, session.name, session.owner) for session in self._pools[pool].newest())

        latest_first = heapq.merge(*map(of, self._pools), key=lambda listed: listed[0], reverse=True)
        for expires, pool, session, owner in latest_first:
            if expires <= now:
                return
            yield pool, session, owner, expires - self.ttl_s

    def returning(self, pool: str) -> Iterator[tuple[str, str] | None]:
        """Yield the current (session, owner) of each session that has come back, and None after each chunk, so that the caller
        can let other work run. Sessions may be added and removed during the iteration."""
        if (sessions := self._pools.get(pool)) is None:
            return
        for chunk in list(sessions.chunks.values()):
            for name in list(chunk):
                known = sessions.get(name)
                if known is not None and known.came_back:
                    yield name, known.owner
            yield None

    def forget_pool(self, pool: str) -> None:
        """Drop the sessions of one pool. Mutates; expire() frees the memory in parts."""
        if (sessions := self._pools.pop(pool, None)) is not None:
            self._count -= sum(map(len, sessions.chunks.values()))
            del self._owned[pool]
            self._given_up += sessions.shards.values()
            self._given_up += sessions.chunks.values()

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts disagree with the sessions, or the shards with the chunks."""
        counts: dict[str, dict[str, int]] = {}
        count = 0
        for pool, sessions in self._pools.items():
            assert sessions.chunks, pool
            assert all(sessions.shards.values())
            assert all(sessions.chunks.values())
            assert list(sessions.chunks) == sorted(sessions.chunks)
            of_shards = {name: owner for shard in sessions.shards.values() for name, owner in shard.items()}
            of_chunks = {name: owner for chunk in sessions.chunks.values() for name, owner in chunk.items()}
            assert of_shards == of_chunks
            expires = [chunk.expires for chunk in of_chunks.values()]
            assert expires == sorted(expires), pool
            owned = counts.setdefault(pool, {})
            for chunk in of_chunks.values():
                owned[chunk.owner] = owned.get(chunk.owner, 0) + 1
            count += len(of_chunks)
        assert counts == self._owned
        assert self._count == count
        assert list(self._ended.values()) == sorted(self._ended.values())
        assert len(self._ended) <= MAX_ENDED

    def _put(self, pool: str, session: str, owner: str, now: float, came_back: bool) -> None:
        if (sessions := self._pools.get(pool)) is None:
            sessions = self._pools[pool] = _PoolSessions()
            self._owned[pool] = {}
        sessions.put(session, owner, now + self.ttl_s, came_back)
        owned = self._owned[pool]
        owned[owner] = owned.get(owner, 0) + 1
        self._count += 1

    def _forget(self, pool: str, session: str, now: float) -> bool:
        """Remove a session; return whether it was known and not expired."""
        sessions = self._pools.get(pool)
        if sessions is None or (known := sessions.pop(session)) is None:
            return False
        self._count -= 1
        owned = self._owned[pool]
        owned[known.owner] -= 1
        if not owned[known.owner]:
            del owned[known.owner]
        if not sessions.chunks:
            del self._pools[pool], self._owned[pool]
        return known.expires > now

    def _oldest(self) -> tuple[str, str]:
        pool, sessions = min(self._pools.items(), key=lambda pool_sessions: pool_sessions[1].oldest().expires)
        return pool, sessions.oldest().name


def _shard_of(name: str) -> int:
    # Not hash(), which differs between processes: a test by seed in virtual time must behave the same in each.
    return crc32(name.encode()) % SHARDS
