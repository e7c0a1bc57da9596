"""Where reservations and affinity outlive a router: nowhere (memory), or in Redis.

One replica owns a fleet's log at a time; the others stand by, refuse placements, and take over when the owner's lease ends. Redis
keeps the materialised state (open reservations, owners of sessions) and not the log of changes: only the owner writes it, and a
new owner reads it once. Every write carries the owner's epoch, so that an owner that slept past its lease is fenced off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
import redis.asyncio
import redis.exceptions
import structlog

from services.router import events as ev
from services.router.reservations import Reservation

log = structlog.get_logger()

StoreEvent = ev.Restored | ev.StoreState
StoreEffect = ev.Reserved | ev.Released | ev.OwnerSet

# One script call carries at most this many changes, so that none holds Redis up for long.
BATCH = 500

# KEYS: owner, epoch. ARGV: router id, lease in ms, the caller's own epoch. Returns {1, epoch} or {0, owner's router id}.
_ACQUIRE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return {0, owner} end
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
if not owner or epoch ~= tonumber(ARGV[3]) then
  epoch = math.max(epoch, tonumber(ARGV[3])) + 1
  redis.call('SET', KEYS[2], epoch)
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, epoch}
"""

# KEYS: epoch, open reservations, session owners, their expiry. ARGV: epoch, ttl in ms, changes as JSON. 1, or 0 when fenced.
# Applying the same changes twice leaves the same state, so a write that timed out is simply sent again.
_APPLY = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, change in ipairs(cjson.decode(ARGV[3])) do
  if change[1] == 'put' then redis.call('HSET', KEYS[2], change[2], change[3])
  elseif change[1] == 'del' then redis.call('HDEL', KEYS[2], change[2])
  elseif change[1] == 'own' then
    redis.call('HSET', KEYS[3], change[2], change[3])
    redis.call('ZADD', KEYS[4], now + tonumber(ARGV[2]), change[2])
  else redis.call('DEL', KEYS[2], KEYS[3], KEYS[4]) end
end
for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], 0, now, 'LIMIT', 0, 200)) do
  redis.call('ZREM', KEYS[4], session)
  redis.call('HDEL', KEYS[3], session)
end
return 1
"""

# KEYS: owner. ARGV: router id.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"


class Store(Protocol):
    """What the router needs of a store."""

    @property
    def epoch(self) -> int:
        """The epoch of this replica's ownership; 0 while it stands by."""

    @property
    def owner(self) -> str:
        """The router id of the owner as far as known; empty when nobody is."""

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be kept; never blocks."""

    async def run(self) -> None:
        """Keep ownership and write changes until cancelled."""


class MemoryStore:
    """The embedded default: one replica, which owns everything and forgets it when it ends."""

    def __init__(self, router_id: str) -> None:
        self.epoch = 1
        self.owner = router_id

    def record(self, effects: list[StoreEffect]) -> None:
        """Nothing to keep."""

    async def run(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()


class RedisStore:
    """State shared by the replicas of one fleet. `on_event` gets what the state must know; `snapshot` gives all of it."""

    def __init__(
        self,
        url: str,
        *,
        router_id: str,
        fleet: str,
        lease_s: float,
        affinity_ttl_s: float,
        on_event: Callable[[StoreEvent], None],
        snapshot: Callable[[], list[StoreEffect]],
    ) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=lease_s / 2, socket_connect_timeout=lease_s / 2, decode_responses=True
        )
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._apply = self._redis.register_script(_APPLY)
        self._release = self._redis.register_script(_RELEASE)
        # The braces keep all keys of a fleet on one node of a Redis cluster.
        name = f"pointsman:{{{fleet}}}:"
        self._owner_key, self._epoch_key = name + "owner", name + "epoch"
        self._state_keys = [name + "open", name + "affinity", name + "affinity_expiry"]
        self._router_id = router_id
        self._lease_s = lease_s
        self._ttl_ms = int(affinity_ttl_s * 1e3)
        self._on_event = on_event
        self._snapshot = snapshot
        self._pending: deque[list[str]] = deque()
        self._wake = asyncio.Event()
        self._degraded = False
        self.epoch = 0
        self.owner = ""

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be written; while Redis is away only the newest state is kept, by a rewrite on its return."""
        if self.epoch and effects and not self._degraded:
            self._pending.extend(map(_change, effects))
            self._wake.set()

    async def run(self) -> None:
        """Keep ownership and write changes until cancelled; then give the ownership back."""
        loop = asyncio.get_running_loop()
        renew_at = 0.0
        try:
            while True:
                try:
                    if loop.time() >= renew_at:
                        await self._renew()
                        renew_at = loop.time() + self._lease_s / 4
                    await self._flush()
                except (redis.exceptions.RedisError, OSError) as error:
                    self._set_degraded(True, error)
                    renew_at = 0.0
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(renew_at - loop.time(), 0.0))
                self._wake.clear()
        finally:
            await self._give_back()

    async def _renew(self) -> None:
        got, value = await self._acquire(
            keys=[self._owner_key, self._epoch_key], args=[self._router_id, int(self._lease_s * 1e3), self.epoch]
        )
        if not got:
            self._stand_by(str(value))
            return
        before, self.owner = self.epoch, self._router_id
        came_back = self._degraded
        self._set_degraded(False)
        if int(value) == before:
            if came_back:
                self._rewrite()
            return
        self.epoch = int(value)
        if before and self.epoch == before + 1:
            # The lease ended, or Redis lost its data, but nobody else owned the log in between: what is here is newest.
            self._rewrite()
        else:
            await self._load()
        log.info("this router owns the fleet's log", epoch=self.epoch)

    def _rewrite(self) -> None:
        self._pending = deque([["clear"], *map(_change, self._snapshot())])

    def _stand_by(self, owner: str) -> None:
        self._set_degraded(False)
        if self.epoch:
            log.warning("another router owns the fleet's log now", owner=owner)
            self._pending.clear()
            self.epoch = 0
            self._on_event(ev.Restored((), {}))
        self.owner = owner

    async def _load(self) -> None:
        reservations, affinity, _ = self._state_keys
        opened = await self._redis.hgetall(reservations)
        owners = await self._redis.hgetall(affinity)
        self._pending.clear()
        self._on_event(
            ev.Restored(
                tuple(msgspec.json.decode(value, type=Reservation) for value in opened.values()),
                {str(session): str(owner) for session, owner in owners.items()},
            )
        )

    async def _flush(self) -> None:
        while self._pending and self.epoch:
            batch = [self._pending[index] for index in range(min(len(self._pending), BATCH))]
            applied = await self._apply(
                keys=[self._epoch_key, *self._state_keys],
                args=[self.epoch, self._ttl_ms, msgspec.json.encode(batch)],
            )
            if not applied:
                await self._renew()
                continue
            for _ in batch:
                self._pending.popleft()

    def _set_degraded(self, degraded: bool, error: Exception | None = None) -> None:
        if degraded is self._degraded:
            return
        self._degraded = degraded
        if degraded:
            self._pending.clear()
            log.warning(
                "the shared store does not answer; placing on this router's own view", error=type(error).__name__
            )
        else:
            log.info("the shared store answers again")
        self._on_event(ev.StoreState(degraded))

    async def _give_back(self) -> None:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await self._flush()
            await self._release(keys=[self._owner_key], args=[self._router_id])
        await self._redis.aclose()


def _change(effect: StoreEffect) -> list[str]:
    match effect:
        case ev.Reserved(reservation):
            # Leases are this process's clock; a new owner gives new ones.
            kept = replace(reservation, lease_until=None)
            return ["put", reservation.request_id, msgspec.json.encode(kept).decode()]
        case ev.Released(request_id):
            return ["del", request_id]
        case ev.OwnerSet(session, instance_id):
            return ["own", session, instance_id]
