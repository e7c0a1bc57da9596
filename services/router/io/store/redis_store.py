"""Pools shared by several replicas through Redis.

Each pool has one owner, by a lease with an epoch that grows with each change of hands. Redis keeps the pool's materialised state
(open reservations, owners of sessions, the mean work) and not the log of changes: only the owner writes it, and a new owner
reads it once. Every write carries the owner's epoch, so that an owner that slept past its lease is fenced off. A placement is
told to the gateway when its reservation is kept here, so that whoever takes the pool over knows every placement ever told.

A pool may have a million sessions. It is read and rewritten in pages, and between two of them leases are renewed and changes
written: what a lease may not wait for is only the open reservations, without which a new owner does not place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from typing import TypeAlias, TypeVar

import msgspec
import redis.asyncio
import redis.exceptions
import structlog
from msgspec.structs import replace
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.load.affinity import MAX_SESSIONS
from pointsman.router.core.load.reservations import Reservation
from pointsman.router.core.ownership import Owner, SettledReplicas, preferred
from pointsman.router.core.prefill_curve import MeanWork
from pointsman.router.io.store import redis_scripts
from pointsman.router.io.store.store import Replica, Stored, StoreEffect, StoreEvent

T = TypeVar("T")
# Owner's id, its address, epoch, number of the last change; as ACQUIRE tells them.
_Lease: TypeAlias = tuple[str, str, int, int]

log = structlog.get_logger()

# One script call carries at most this many changes, and a page of open reservations about so many, so that none holds Redis or
# the loop up for long.
BATCH = 500
# Sessions read or rewritten at once: placements wait for the page before them. Between two pages the router rests for as long as
# a page has taken, at most for MAX_REST_S, so that it has half of its time for others.
PAGE = 128
MAX_REST_S = 0.02
# Leases asked for at once, each on a connection of its own: those of a thousand pools, one after the other, would run out
# meanwhile.
RENEWED_AT_ONCE = 16
# One failure may be this process's own sleep, or a single lost reply; two in a row are Redis' absence.
FAILURES = 2


@dataclass(slots=True)
class _Reading:
    """How far a pool that was taken is read. Its reservations are gathered first: gateways must not hear of the new owner, nor it
    of them, before it knows all. The sessions follow page by page."""

    mean_work: MeanWork | None = None
    reservations: dict[str, Reservation] = field(default_factory=dict)
    reservations_read: bool = False
    sessions: int = 0
    cursor: int = 0


@dataclass(slots=True)
class _Pool:
    """One pool as this replica knows it. `epoch` is that of its own ownership (0: none); times on the loop's clock.

    `reading`: what is not known yet of a pool that was taken. `unwritten`: what a rewrite has not written yet, with None as
    `snapshot` gives it; `told_after`: whom to tell when its reservations are written (None: they are).
    """

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
    reading: _Reading | None = None
    unwritten: Iterator[StoreEffect | None] | None = None
    told_after: list[Stored] | None = None
    given_up: bool = False  # it is to be left, and forgotten
    paged_at: float = 0.0  # when its last page was read or rewritten

    @property
    def taken(self) -> bool:
        """Whether this replica owns it and knows what is open in it."""
        return bool(self.epoch) and (self.reading is None or self.reading.reservations_read)


class RedisStore:
    """The pools of one fleet. `on_event` gets what the state must know, `on_owners` is called when an owner changes, and
    `snapshot` gives all that this replica knows of a pool, while it goes on: None after the reservations, and where others may
    have a turn. `merge_config` makes one of two of operators' configurations, this replica's and the one in Redis, both made from
    what Redis had before, which comes first; the one in Redis as it is where that has all.

    Degraded: Redis does not answer, or does not take writes, which are counted apart. Then placements are told at once and
    nothing is recorded. When it answers again each pool is rewritten; once that has begun well, placements wait for it again."""

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
        snapshot: Callable[[str], Iterator[StoreEffect | None]],
        merge_config: Callable[[str, str, str], str],
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
        self._give_up = self._redis.register_script(redis_scripts.GIVE_UP)
        self._leave = self._redis.register_script(redis_scripts.LEAVE)
        self._set_config = self._redis.register_script(redis_scripts.SET_CONFIG)
        self._fleet = fleet
        names = ("replicas", "addresses", "replica_info", "config", "lost", "joined")
        self._fleet_keys = {name: f"pointsman:{{{fleet}}}:{name}" for name in names}
        self._merge_config = merge_config
        self._config = ""  # this replica's, with all that it could not write
        self._kept_config = (0, "")  # what Redis keeps, as far as known, with its version
        self._kept_digest = sha1(b"").hexdigest()
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
        self._write_failures = 0
        self._degraded = False
        self._returning = False  # degraded, and the rewrite is on its way
        self._next_page_at = 0.0  # when the next page of sessions may be read or written
        self._replicas: list[Replica] = []
        self._lost_replicas: list[Replica] = []
        self.answered_at: float | None = None
        self.address = ""
        self.replica_info: Callable[[], str] = str
        self.on_operator_config: Callable[[str], None] = lambda config: None

    def replicas(self) -> list[Replica]:
        """The live replicas by id, as of Redis' last answer."""
        return self._replicas

    def lost_replicas(self) -> list[Replica]:
        """Those that ended without taking leave and were not replaced, as of that answer."""
        return self._lost_replicas

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""
        return max((pool.epoch for pool in self._pools.values()), default=0)

    def owner(self, pool: str) -> Owner | None:
        """Who owns `pool`, as far as known; None when nobody does."""
        known = self._pools.get(pool)
        return known.owner if known else None

    def may_place(self, pool: str) -> bool:
        """Whether this replica owns the pool, knows what is open in it, and its lease has not run out, unless Redis is away and
        nobody can take it."""
        known = self._pools.get(pool)
        if known is None or not known.taken:
            return False
        return self._degraded or asyncio.get_running_loop().time() < known.held_until

    def compete_for(self, pools: Iterable[str]) -> None:
        """Take part in the ownership of these pools. A pool once wanted stays so until it is given up."""
        for pool in pools:
            if (known := self._pools.get(pool)) is not None:
                known.given_up = False
            else:
                # The braces keep all keys of a pool on one node of a Redis cluster.
                key = f"pointsman:{{{self._fleet}:{pool}}}:"
                names = ("epoch", "number", "open", "affinity", "affinity_expiry", "mean_work")
                self._pools[pool] = _Pool(pool, key + "lease", [key + name for name in names])
                self._poll_at = 0.0
                self._wake.set()

    def give_up(self, pool: str) -> None:
        """Leave the pool with the next heartbeat. What Redis keeps of it ends after `affinity_ttl_s`, unless another owns it."""
        if (known := self._pools.get(pool)) is not None:
            known.given_up = True

    def record(self, effects: list[StoreEffect]) -> None:
        """Take changes to be written; while Redis is away only the newest state is kept, by a rewrite on its return."""
        if not self._writing:
            return
        for effect in effects:
            pool = self._pools.get(effect.reservation.pool if isinstance(effect, ev.Reserved) else effect.pool)
            if pool is not None and pool.taken:
                pool.pending.append(_change(effect))
                self._wake.set()

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored` with True when what is recorded of `pool` is written, with False when it never will be."""
        known = self._pools.get(pool)
        if known is None or not known.taken:
            stored(False)
        elif self._degraded or not known.pending:
            stored(True)
        else:
            known.pending.append(stored)

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Give all replicas what `change` makes of operators' configuration: each takes it with its next heartbeat. Without Redis
        it is this replica's alone, and is merged into what Redis has with the first heartbeat on its return."""
        while True:
            changed = change(self._config)
            try:
                version, kept = await self._set_config(
                    keys=[self._fleet_keys["config"]], args=[self._kept_config[0], changed]
                )
            except (redis.exceptions.RedisError, OSError):
                self._have_config(change(self._config))
                return False
            self._keeps_config(int(version), kept)
            if kept == changed:
                return True

    def _keeps_config(self, version: int, kept: str) -> None:
        """Redis keeps this configuration: have what is in it, too."""
        before = self._kept_config[1]
        self._kept_config = (version, kept)
        self._kept_digest = sha1(kept.encode()).hexdigest()
        if kept != self._config:
            self._have_config(self._merge_config(before, self._config, kept))

    def _have_config(self, config: str) -> None:
        if config != self._config:
            self._config = config
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
                except (redis.exceptions.RedisError, OSError) as error:
                    self._failures += 1
                    self._failed(error)
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                began = loop.time()
                paged = self._next_paged() if began >= self._next_page_at else None
                try:
                    for pool in list(self._pools.values()):
                        await self._read_on(pool, page=pool is paged)
                        await self._flush(pool, self._poll_at, page=pool is paged)
                except (redis.exceptions.RedisError, OSError) as error:
                    self._write_failures += 1
                    self._failed(error)
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                # All pools' together: one whose writes all fail must not be hidden by another's.
                self._write_failures = 0
                if self._returning and all(pool.told_after is None for pool in self._pools.values()):
                    self._returned()
                now = loop.time()
                if paged is not None:
                    paged.paged_at = now
                    self._next_page_at = now + min(now - began, MAX_REST_S)
                goes_on_at = now if self._urgent() else self._poll_at
                if self._next_paged() is not None:
                    goes_on_at = min(goes_on_at, self._next_page_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(max(goes_on_at, now)):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._give_back()

    async def _poll(self) -> None:
        self._poll_at = asyncio.get_running_loop().time() + self._lease_s / 4
        told, version, config, known, lost = await self._heartbeat(
            keys=list(self._fleet_keys.values()),
            args=[
                self._router_id,
                self.address,
                int(self._lease_s * 1e3),
                self.replica_info(),
                self._kept_config[0],
                self._kept_digest,
            ],
        )
        live = self._met(told, lost)
        if config or int(version) != self._kept_config[0]:
            self._keeps_config(int(version), config)
        while self._config != self._kept_config[1]:
            # Set here while Redis was away, or what Redis has lost.
            self._keeps_config(
                *await self._set_config(keys=[self._fleet_keys["config"]], args=[self._kept_config[0], self._config])
            )
        if not known:
            # Newly come, or Redis has lost its data between two polls: others may live, and own what seems to be free.
            live = []
            self._forget_free()
        # What happens from here on follows each pool's rewrite, that of the first while the others wait for theirs.
        self._returning = self._degraded
        await self._renew_all(live)
        self._failures = 0
        await self._forget_given_up()
        now = asyncio.get_running_loop().time()
        self._settled.seen(live, now)
        for pool in self._pools.values():
            if pool.reading or pool.unwritten:
                continue
            if pool.epoch and (successor := self._settled.successor(pool.name, self._router_id, now)):
                await self._hand_over(pool, successor)
                break  # One at a time: gateways ask again for all that waits in it.

    def _met(self, told: list[list[str | int]], lost: list[list[str | int]]) -> list[str]:
        """Remember the live and the lost replicas as HEARTBEAT tells them; returns the ids of the live ones."""
        self.answered_at = now = asyncio.get_running_loop().time()
        self._replicas = sorted(
            (
                Replica(str(router_id), str(address), now - int(silent_ms) / 1e3, str(replica_info))
                for router_id, address, silent_ms, replica_info in told
            ),
            key=lambda one: one.router_id,
        )
        self._lost_replicas = [Replica(str(router_id), "", now - int(silent_ms) / 1e3) for router_id, silent_ms in lost]
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

    async def _renew_all(self, live: list[str]) -> None:
        pools = list(self._pools.values())
        for first in range(0, len(pools), RENEWED_AT_ONCE):
            asked = [(pool, self._ask_for(pool, live)) for pool in pools[first : first + RENEWED_AT_ONCE]]
            now = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(answer for _, answer in asked), return_exceptions=True)
            for (pool, _), answer in zip(asked, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                await self._renewed(pool, answer, now, rewrite=self._returning)

    async def _renew(self, pool: _Pool) -> None:
        now = asyncio.get_running_loop().time()
        await self._renewed(pool, await self._ask_for(pool, []), now, rewrite=False)

    async def _ask_for(self, pool: _Pool, live: list[str]) -> _Lease:
        args: list[str | int] = [self._router_id, self.address, int(self._lease_s * 1e3), pool.epoch, pool.seen]
        args.append(self._take(pool, live, asyncio.get_running_loop().time()))
        lease: _Lease = await self._acquire(keys=[pool.lease_key, *pool.state_keys], args=args)
        return lease

    async def _renewed(self, pool: _Pool, lease: _Lease, now: float, *, rewrite: bool) -> None:
        """Go on by what ACQUIRE, asked at `now`, has answered."""
        router_id, address, epoch, written = lease
        before = pool.owner
        if router_id == self._router_id:
            pool.held_until = now + self._lease_s
            await self._own(pool, epoch, rewrite=rewrite or written < pool.written)
        elif pool.epoch:
            self._stand_by(pool, router_id)
        if router_id:
            pool.free_since = None
            pool.seen = max(pool.seen, epoch)
            reads = router_id == self._router_id and not pool.taken
            pool.owner = None if reads else Owner(router_id, address, epoch)
        else:
            pool.free_since = now if pool.free_since is None else pool.free_since
            pool.owner = None
        if pool.owner != before:
            self._on_owners()

    async def _own(self, pool: _Pool, epoch: int, *, rewrite: bool) -> None:
        if epoch == pool.epoch:
            if rewrite and pool.taken:
                waiting = [*(pool.told_after or []), *(item for item in pool.pending if callable(item))]
                self._forget_changes(pool)
                # Sessions that are not read yet stay there.
                pool.pending.append(["clear_open" if pool.reading else "clear"])
                pool.unwritten, pool.told_after = self._snapshot(pool.name), waiting
            return
        kept = await self._redis.hgetall(pool.state_keys[-1])
        self._drop_pending(pool, kept=False)
        if pool.epoch:
            # Another router owned it for a while: what is known here counts no more, from before it is read.
            pool.epoch = 0
            self._on_event(ev.PoolLost(pool.name))
        pool.epoch, pool.owner, pool.written = epoch, None, 0
        pool.reading = _Reading(_read(kept["work"], MeanWork) if "work" in kept else None)
        if kept.get("incomplete"):
            log.warning("the pool's owner before had not written all that it knew", pool=pool.name)

    def _stand_by(self, pool: _Pool, owner: str) -> None:
        log.warning("another router owns a pool now", pool=pool.name, owner=owner)
        pool.epoch, pool.reading = 0, None
        self._drop_pending(pool, kept=False)
        self._on_event(ev.PoolLost(pool.name))

    async def _forget_given_up(self) -> None:
        for pool in [one for one in self._pools.values() if one.given_up]:
            if pool.reading or pool.unwritten:
                continue
            if pool.epoch:
                log.info("a pool without instances is given up", pool=pool.name)
                await self._leave_pool(pool)
            await self._give_up(keys=[pool.lease_key, *pool.state_keys], args=[self._ttl_ms])
            if pool.given_up:  # it may have come back meanwhile
                del self._pools[pool.name]

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
            pool.epoch, pool.owner, pool.reading = 0, None, None
            self._drop_pending(pool, kept=False)
            self._on_owners()
        await self._release(keys=[pool.lease_key], args=[self._router_id])

    async def _read_on(self, pool: _Pool, *, page: bool) -> None:
        """Read the next page of a pool that was taken; of its sessions only if `page`."""
        reading = pool.reading
        if reading is None or not self._writing or (reading.reservations_read and not page):
            return
        key, count = (pool.state_keys[3], PAGE) if reading.reservations_read else (pool.state_keys[2], BATCH)
        reading.cursor, found = await self._redis.hscan(key, reading.cursor, count=count)
        assert isinstance(found, dict)
        values = {str(name): str(value) for name, value in found.items()}
        if reading.reservations_read:
            reading.sessions += len(values)
            self._on_event(ev.SessionsRead(pool.name, values))
            if not reading.cursor:
                pool.reading = None
                log.info("the pool's sessions are read", pool=pool.name, sessions=reading.sessions)
            return
        opened = {name: _read(value, Reservation) for name, value in values.items()}
        reading.reservations |= {name: one for name, one in opened.items() if one is not None}
        if not reading.cursor:
            self._take_over(pool, reading)

    def _take_over(self, pool: _Pool, reading: _Reading) -> None:
        """All reservations of a pool that was taken are known: from now on it is placed in."""
        reading.reservations_read = True
        opened, reading.reservations = tuple(reading.reservations.values()), {}
        log.info("this router owns a pool", pool=pool.name, epoch=pool.epoch, open=len(opened))
        self._on_event(ev.PoolTaken(pool.name, opened, reading.mean_work))
        pool.owner = Owner(self._router_id, self.address, pool.epoch)
        self._on_owners()

    def _urgent(self) -> bool:
        """Whether reservations are still to be read, or rewritten: placements wait for them."""
        return self._writing and any(
            pool.epoch and (not pool.taken or pool.told_after is not None) for pool in self._pools.values()
        )

    def _next_paged(self) -> _Pool | None:
        """The pool whose sessions are to be read or rewritten next: each in its turn."""
        if not self._writing:
            return None
        paged = [pool for pool in self._pools.values() if pool.epoch and (pool.reading or pool.unwritten)]
        return min(paged, key=lambda pool: pool.paged_at, default=None)

    @property
    def _writing(self) -> bool:
        """Whether Redis is there, or has just come back and is tried."""
        return self._returning or not self._degraded

    def _next_page(self, pool: _Pool) -> None:
        """Put the next page of a rewrite behind what is pending: each is as it is now, so that nothing newer is undone."""
        assert pool.unwritten is not None
        for number, effect in enumerate(pool.unwritten, 1):
            if effect is None:
                break
            pool.pending.append(_change(effect))
            if number == (PAGE if pool.told_after is None else BATCH):
                return
        else:
            pool.unwritten = None
            pool.pending.append(["complete"])
        if pool.told_after is not None:
            pool.pending.extend(pool.told_after)
            pool.told_after = None

    async def _flush(self, pool: _Pool, until: float = math.inf, *, page: bool = True) -> None:
        """Write what is pending by now, for so long, and if `page` one of what a rewrite has left. What comes meanwhile waits for
        the next turn, which under a full load it does without end: leases are to be renewed, and other pools' changes written, in
        between."""
        loop = asyncio.get_running_loop()
        if pool.unwritten is not None and len(pool.pending) < BATCH and (page or pool.told_after is not None):
            self._next_page(pool)
        left = len(pool.pending)
        while left and pool.epoch and self._writing:
            batch = [pool.pending[index] for index in range(min(left, BATCH))]
            changes = [item for item in batch if isinstance(item, list)]
            if changes and not await self._apply(
                keys=pool.state_keys,
                args=[pool.epoch, self._ttl_ms, msgspec.json.encode(changes), pool.number, MAX_SESSIONS],
            ):
                await self._renew(pool)
                left = len(pool.pending)
                continue
            left -= len(batch)
            pool.number += len(changes)
            pool.written = pool.number - 1 if changes else pool.written
            for item in batch:
                pool.pending.popleft()
                if not isinstance(item, list):
                    item(True)
            if loop.time() >= until:
                return

    def _forget_changes(self, pool: _Pool) -> deque[list[str] | Stored]:
        """Empty `pending` and return what was in it. What may be on its way to Redis keeps its number for good."""
        dropped, pool.pending, pool.unwritten = pool.pending, deque(), None
        pool.number += sum(isinstance(item, list) for item in dropped)
        dropped.extend(pool.told_after or ())
        pool.told_after = None
        return dropped

    def _drop_pending(self, pool: _Pool, *, kept: bool) -> None:
        for item in self._forget_changes(pool):
            if not isinstance(item, list):
                item(kept)

    def _forget_free(self) -> None:
        for pool in self._pools.values():
            pool.free_since = None

    def _failed(self, error: Exception) -> None:
        self._poll_at = 0.0
        self._forget_free()
        if not self._degraded:
            if max(self._failures, self._write_failures) < FAILURES:
                return
            self._degraded = True
            kind = type(error).__name__
            log.warning("the shared store does not answer; placing on this router's own view", error=kind)
            self._on_event(ev.StoreState(True))
        self._returning = False
        for pool in self._pools.values():
            self._drop_pending(pool, kept=True)

    def _returned(self) -> None:
        """What was known has been written, or is on its way page by page."""
        self._degraded = self._returning = False
        log.info("the shared store answers again")
        self._on_event(ev.StoreState(False))

    async def _give_back(self) -> None:
        for pool in list(self._pools.values()):
            if pool.epoch:
                with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
                    async with asyncio.timeout(self._lease_s):
                        while pool.unwritten is not None and self._writing:
                            await self._flush(pool)
                            await asyncio.sleep(0)
                pool.unwritten = None
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    await self._leave_pool(pool)
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            keys = [self._fleet_keys[name] for name in ("replicas", "addresses", "replica_info", "joined")]
            await self._leave(keys=keys, args=[self._router_id])
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
