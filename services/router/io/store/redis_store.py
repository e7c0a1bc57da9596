"""Pools shared by several replicas through Redis.

Each pool has one owner, by a lease with an epoch that grows with each change of hands. Redis keeps the pool's materialised state
(open reservations, owners of sessions, the mean work) and not the log of changes: only the owner writes it, and a new owner
reads it once. Every write carries the owner's epoch, so that an owner that slept past its lease is fenced off. A placement is
told to the gateway when its reservation is kept here, so that whoever takes the pool over knows every placement ever told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import redis.asyncio
import redis.exceptions
import structlog
from msgspec.structs import replace
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.load.reservations import Reservation
from pointsman.router.core.ownership import Owner, SettledReplicas, preferred
from pointsman.router.core.prefill_curve import MeanWork
from pointsman.router.io.store import redis_scripts
from pointsman.router.io.store.store import Replica, Stored, StoreEffect, StoreEvent

T = TypeVar("T")

log = structlog.get_logger()

# One script call carries at most this many changes, so that none holds Redis up for long.
BATCH = 500
# One failure may be this process's own sleep, or a single lost reply; two in a row are Redis' absence.
FAILURES = 2


@dataclass(slots=True)
class _Pool:
    """One pool as this replica knows it. `epoch` is that of its own ownership (0: none); times on the loop's clock."""

    name: str
    lease_key: str
    # Of the epoch, the last change's number, open reservations, session owners, their expiry, mean work.
    state_keys: list[str]
    epoch: int = 0
    seen: int = 0
    owner: Owner | None = None
    held_until: float = 0.0
    free_since: float | None = None
    pending: deque[list[str] | Stored] = field(default_factory=deque)
    number: int = 1  # of the first pending change
    written: int = 0  # number of the last change that Redis is known to hold


class RedisStore:
    """The pools of one fleet. `on_event` gets what the state must know, `on_owners` is called when an owner changes, and
    `snapshot` gives all that this replica knows of a pool."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        router_id: str,
        fleet: str,
        lease_s: float,
        settle_s: float,
        affinity_ttl_s: float,
        on_event: Callable[[StoreEvent], object],
        on_owners: Callable[[], None],
        snapshot: Callable[[str], list[StoreEffect]],
    ) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=lease_s / 2,
            socket_connect_timeout=lease_s / 2,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
        )
        self._heartbeat = self._redis.register_script(redis_scripts.HEARTBEAT)
        self._acquire = self._redis.register_script(redis_scripts.ACQUIRE)
        self._apply = self._redis.register_script(redis_scripts.APPLY)
        self._release = self._redis.register_script(redis_scripts.RELEASE)
        self._leave = self._redis.register_script(redis_scripts.LEAVE)
        self._set_config = self._redis.register_script(redis_scripts.SET_CONFIG)
        self._fleet = fleet
        self._replica_keys = [f"pointsman:{{{fleet}}}:{name}" for name in ("replicas", "addresses", "replica_info")]
        self._config_key = f"pointsman:{{{fleet}}}:config"
        self._config = (0, "")  # the newest that are known, with their version
        self._router_id = router_id
        self._lease_s = lease_s
        self._ttl_ms = int(affinity_ttl_s * 1e3)
        self._on_event = on_event
        self._on_owners = on_owners
        self._snapshot = snapshot
        self._settled = SettledReplicas(settle_s)
        self._pools: dict[str, _Pool] = {}
        self._wake = asyncio.Event()
        self._poll_at = 0.0
        self._failures = 0
        self._degraded = False
        self._replicas: list[Replica] = []
        self.answered_at: float | None = None
        self.address = ""
        self.replica_info: Callable[[], str] = str
        self.on_operator_config: Callable[[str], None] = lambda config: None

    def replicas(self) -> list[Replica]:
        """The live replicas by id, as of Redis' last answer."""
        return self._replicas

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""
        return max((pool.epoch for pool in self._pools.values()), default=0)

    def owner(self, pool: str) -> Owner | None:
        """Who owns `pool`, as far as known; None when nobody does."""
        known = self._pools.get(pool)
        return known.owner if known else None

    def may_place(self, pool: str) -> bool:
        """Whether this replica owns the pool and its lease has not run out, unless Redis is away and nobody can take it."""
        known = self._pools.get(pool)
        if known is None or not known.epoch:
            return False
        return self._degraded or asyncio.get_running_loop().time() < known.held_until

    def compete_for(self, pools: Iterable[str]) -> None:
        """Take part in the ownership of these pools. A pool once wanted stays so for the process's life."""
        for pool in pools:
            if pool not in self._pools:
                # The braces keep all keys of a pool on one node of a Redis cluster.
                key = f"pointsman:{{{self._fleet}:{pool}}}:"
                names = ("epoch", "number", "open", "affinity", "affinity_expiry", "mean_work")
                self._pools[pool] = _Pool(pool, key + "lease", [key + name for name in names])
                self._poll_at = 0.0
                self._wake.set()

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be written; while Redis is away only the newest state is kept, by a rewrite on its return."""
        if self._degraded:
            return
        for effect in effects:
            pool = self._pools.get(effect.reservation.pool if isinstance(effect, ev.Reserved) else effect.pool)
            if pool is not None and pool.epoch:
                pool.pending.append(_change(effect))
                self._wake.set()

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored` with True when what is recorded of `pool` is written, with False when it never will be."""
        known = self._pools.get(pool)
        if known is None or not known.epoch:
            stored(False)
        elif not known.pending:
            stored(True)
        else:
            known.pending.append(stored)

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Give all replicas what `change` makes of operators' configuration: each takes it with its next heartbeat. Without Redis
        it goes there with this replica's first heartbeat on its return, unless it was changed elsewhere as often."""
        while True:
            seen, config = self._config
            changed = change(config)
            try:
                version, kept = await self._set_config(keys=[self._config_key], args=[seen, changed])
            except (redis.exceptions.RedisError, OSError):
                seen, config = self._config
                self._take_config(seen + 1, change(config))
                return False
            self._take_config(int(version), kept)
            if (int(version), kept) == (seen + 1, changed):
                return True

    def _take_config(self, version: int, config: str) -> None:
        if (version, config) != self._config and version >= self._config[0]:
            self._config = (version, config)
            self.on_operator_config(config)

    async def run(self) -> None:
        """Keep ownership and write changes until cancelled; then give the pools back."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            # redis-py writes by asyncio.wait_for(), which before Python 3.12 loses a cancellation that comes as the write ends.
            while not task.cancelling():
                try:
                    if loop.time() >= self._poll_at:
                        await self._poll()
                    for pool in list(self._pools.values()):
                        await self._flush(pool)
                except (redis.exceptions.RedisError, OSError) as error:
                    self._failed(error)
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(max(self._poll_at, loop.time())):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._give_back()

    async def _poll(self) -> None:
        self._poll_at = asyncio.get_running_loop().time() + self._lease_s / 4
        told, version, config, known = await self._heartbeat(
            keys=[*self._replica_keys, self._config_key],
            args=[self._router_id, self.address, int(self._lease_s * 1e3), self.replica_info(), *self._config],
        )
        live = self._met(told)
        self._take_config(int(version), config)
        if not known:
            # Newly come, or Redis has lost its data between two polls: others may live, and own what seems to be free.
            live = []
            self._forget_free()
        came_back, self._degraded = self._degraded, False
        # What happens from here on follows each pool's rewrite, that of the first while the others wait for theirs.
        for pool in list(self._pools.values()):
            await self._renew(pool, live, rewrite=came_back)
        self._failures = 0
        if came_back:
            log.info("the shared store answers again")
            self._on_event(ev.StoreState(False))
        now = asyncio.get_running_loop().time()
        self._settled.seen(live, now)
        for pool in self._pools.values():
            if pool.epoch and (successor := self._settled.successor(pool.name, self._router_id, now)):
                await self._hand_over(pool, successor)
                break  # One at a time: gateways ask again for all that waits in it.

    def _met(self, told: list[list[str | int]]) -> list[str]:
        """Remember the live replicas as HEARTBEAT tells them; returns their ids."""
        self.answered_at = now = asyncio.get_running_loop().time()
        self._replicas = sorted(
            (
                Replica(str(router_id), str(address), now - int(silent_ms) / 1e3, str(replica_info))
                for router_id, address, silent_ms, replica_info in told
            ),
            key=lambda one: one.router_id,
        )
        return [one.router_id for one in self._replicas]

    def _take(self, pool: _Pool, live: list[str], now: float) -> int:
        """How much this replica wants the pool, as ACQUIRE means it: the preferred one at once, the others a little later;
        and a pool whose data Redis has lost is left to its owner, who still knows it, for one lease longer."""
        if pool.epoch:
            return 2
        free_s = now - pool.free_since if pool.free_since is not None else 0.0
        delay_s = 0.0 if preferred(pool.name, live) == self._router_id else self._lease_s / 2
        if free_s >= delay_s + self._lease_s:
            return 2
        return 1 if free_s >= delay_s else 0

    async def _renew(self, pool: _Pool, live: list[str], *, rewrite: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        router_id, address, epoch, written = await self._acquire(
            keys=[pool.lease_key, *pool.state_keys[:2]],
            args=[
                self._router_id,
                self.address,
                int(self._lease_s * 1e3),
                pool.epoch,
                pool.seen,
                self._take(pool, live, now),
            ],
        )
        before = pool.owner
        if router_id == self._router_id:
            pool.held_until = now + self._lease_s
            await self._own(pool, epoch, rewrite=rewrite or written < pool.written)
        elif pool.epoch:
            self._stand_by(pool, router_id)
        if router_id:
            pool.free_since = None
            pool.seen = max(pool.seen, epoch)
            pool.owner = Owner(router_id, address, epoch)
        else:
            pool.free_since = now if pool.free_since is None else pool.free_since
            pool.owner = None
        if pool.owner != before:
            self._on_owners()

    async def _own(self, pool: _Pool, epoch: int, *, rewrite: bool) -> None:
        if epoch == pool.epoch:
            if rewrite:
                waiting = [item for item in pool.pending if callable(item)]
                self._forget_changes(pool)
                pool.pending = deque([["clear"], *map(_change, self._snapshot(pool.name)), *waiting])
            return
        event = await self._load(pool)
        self._drop_pending(pool, kept=False)
        pool.epoch, pool.owner, pool.written = epoch, Owner(self._router_id, self.address, epoch), 0
        log.info("this router owns a pool", pool=pool.name, epoch=epoch, open=len(event.reservations))
        self._on_event(event)

    def _stand_by(self, pool: _Pool, owner: str) -> None:
        log.warning("another router owns a pool now", pool=pool.name, owner=owner)
        pool.epoch = 0
        self._drop_pending(pool, kept=False)
        self._on_event(ev.PoolLost(pool.name))

    async def _hand_over(self, pool: _Pool, successor: str) -> None:
        """Let the preferred replica, which came later, take the pool: nothing more is placed here, all that was is written."""
        log.info("this router hands a pool over", pool=pool.name, to=successor)
        self._settled.offered(pool.name, successor)
        await self._leave_pool(pool)

    async def _leave_pool(self, pool: _Pool) -> None:
        self._on_event(ev.PoolLost(pool.name))
        try:
            await self._flush(pool)
        finally:
            # Where the write failed, the next poll reads what is kept, or finds another owner.
            pool.epoch, pool.owner = 0, None
            self._drop_pending(pool, kept=False)
            self._on_owners()
        await self._release(keys=[pool.lease_key], args=[self._router_id])

    async def _load(self, pool: _Pool) -> ev.PoolTaken:
        _, _, reservations, affinity, _, work = pool.state_keys
        opened = await self._redis.hgetall(reservations)
        owners = await self._redis.hgetall(affinity)
        mean_work = await self._redis.hgetall(work)
        return ev.PoolTaken(
            pool.name,
            tuple(one for value in opened.values() if (one := _read(value, Reservation)) is not None),
            {str(session): str(owner) for session, owner in owners.items()},
            _read(mean_work["work"], MeanWork) if mean_work else None,
        )

    async def _flush(self, pool: _Pool) -> None:
        """Write what is pending by now. What comes meanwhile waits for the next turn, which under a full load it does without
        end: leases are to be renewed, and other pools' changes written, in between."""
        left = len(pool.pending)
        while left and pool.epoch and not self._degraded:
            batch = [pool.pending[index] for index in range(min(left, BATCH))]
            changes = [item for item in batch if isinstance(item, list)]
            if changes and not await self._apply(
                keys=pool.state_keys, args=[pool.epoch, self._ttl_ms, msgspec.json.encode(changes), pool.number]
            ):
                await self._renew(pool, [])
                left = len(pool.pending)
                continue
            left -= len(batch)
            pool.number += len(changes)
            pool.written = pool.number - 1 if changes else pool.written
            for item in batch:
                pool.pending.popleft()
                if not isinstance(item, list):
                    item(True)

    def _forget_changes(self, pool: _Pool) -> deque[list[str] | Stored]:
        """Empty `pending` and return what was in it. What may be on its way to Redis keeps its number for good."""
        dropped, pool.pending = pool.pending, deque()
        pool.number += sum(isinstance(item, list) for item in dropped)
        return dropped

    def _drop_pending(self, pool: _Pool, *, kept: bool) -> None:
        for item in self._forget_changes(pool):
            if not isinstance(item, list):
                item(kept)

    def _forget_free(self) -> None:
        for pool in self._pools.values():
            pool.free_since = None

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._poll_at = 0.0
        self._forget_free()
        if self._degraded or self._failures < FAILURES:
            return
        self._degraded = True
        log.warning("the shared store does not answer; placing on this router's own view", error=type(error).__name__)
        self._on_event(ev.StoreState(True))
        for pool in self._pools.values():
            self._drop_pending(pool, kept=True)

    async def _give_back(self) -> None:
        for pool in self._pools.values():
            if pool.epoch:
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    await self._leave_pool(pool)
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await self._leave(keys=self._replica_keys, args=[self._router_id])
        await self._redis.aclose()


def _read(value: str | bytes, kind: type[T]) -> T | None:
    """None for what a router of another version wrote: a gateway tells anew of an open request, and mean work is learned."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        log.error("a value in Redis cannot be read", kind=kind.__name__, error=str(error))
        return None


def _change(effect: StoreEffect) -> list[str]:
    match effect:
        case ev.Reserved(reservation):
            # Leases are this process's clock; a new owner gives new ones.
            kept = replace(reservation, lease_until=None)
            return ["put", reservation.request_id, msgspec.json.encode(kept).decode()]
        case ev.Released(request_id):
            return ["del", request_id]
        case ev.SessionOwnerSet(session, instance_id):
            return ["own", session, instance_id]
        case ev.MeanWorkSet(mean_work):
            return ["mean_work", msgspec.json.encode(mean_work).decode()]
