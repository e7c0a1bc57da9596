"""Pools that several replicas share through Redis.

Each pool has one owner, by a lease with an epoch that grows with each change of the owner. Redis keeps the pool's current state
(open reservations, session owners, what the owner has learned), not a log of changes. Only the owner writes the state, and a new
owner reads it once. Every write carries the owner's epoch, so that Redis rejects the writes of an owner that slept past its
lease. A placement is sent to its gateway once Redis has its reservation, so that a new owner knows every placement that was ever
sent.

At most one router places in a pool at a time, also while Redis fails over. An owner whose lease has ended without an answer of
Redis first waits for as long as another replica could need to take the pool and to be announced by gateways. It stops when it
learns of another owner with a higher epoch, from gateways or from a Redis that only takes no writes.

A pool may have a million sessions. They are read and rewritten in pages, and leases are renewed and changes written between two
pages. The open reservations are read first and without pauses, since a new owner does not place before it has them.
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
import redis.exceptions
import structlog
from msgspec.structs import replace

from pointsman_common.io.redis_failures import redis_reason
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.idle_sessions import IdleSessions
from pointsman_router.core.load.affinity import MAX_SESSIONS
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.ownership import Owner, SettledReplicas, preferred
from pointsman_router.core.placement_types import PoolFacts
from pointsman_router.core.prefill_curve import MeanWork
from pointsman_router.io.store import redis_scripts
from pointsman_router.io.store.redis_address import RedisAddress
from pointsman_router.io.store.redis_servers import REDIS_ERRORS, RedisServers
from pointsman_router.io.store.store import Replica, Stored, StoreEffect, StoreEvent
from pointsman_router.io.store.stored_json import decoded

T = TypeVar("T")
# Owner's id, its address, epoch, number of the last change, Redis' time in ms, as ACQUIRE returns them.
_Lease: TypeAlias = tuple[str, str, int, int, int]

log = structlog.get_logger()

# Maximum number of changes in one script call, and approximate number of open reservations in one page. It bounds how long Redis
# and the event loop are blocked.
BATCH = 500
# Number of sessions that are read or rewritten at once. Placements wait for the page that is processed.
PAGE = 128
# Maximum pause between two pages, s. The pause is as long as the page took, so that half of the time is left for other work.
MAX_REST_S = 0.02
# Number of pools whose leases are renewed, or whose changes are written, concurrently, each on its own connection. One after the
# other, the leases of a thousand pools would expire in the meantime.
AT_ONCE = 16
# Time after the end of an owner's lease in which another replica may take the pool unnoticed, in leases: half a lease for the
# wait for the preferred replica, a quarter for the interval of heartbeats, the rest for reading reservations and telling
# gateways.
DOUBT_LEASES = 1.75
# Errors with which Redis may be there for other replicas, at this server or as another one. A refused connection, for instance,
# is refused to all.
_MAY_SERVE_OTHERS = (
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # and MASTERDOWN
)
# Number of consecutive failures after which Redis counts as absent. A single one may be a pause of this process or a lost reply.
FAILURES = 2


@dataclass(slots=True)
class _Reading:
    """How far the state of a newly taken pool is read. All reservations are read first: the new owner is announced to gateways
    only once it knows them. The sessions follow page by page."""

    mean_work: MeanWork | None = None  # the earlier owner's; None: none stored, or unreadable
    idle_sessions: IdleSessions | None = None  # the earlier owner's; None: none stored, or unreadable
    idle_age_s: float = 0.0  # how old `idle_sessions` are
    facts: PoolFacts | None = None  # by which the earlier owner chose the policy; None: none stored, or unreadable
    reservations: dict[str, Reservation] = field(default_factory=dict)  # read so far
    reservations_read: bool = False  # whether all are
    sessions: int = 0  # number that was read
    cursor: int = 0  # Redis' cursor of the next page; 0: the first, or none


@dataclass(slots=True)
class _Pool:
    """One pool as this replica knows it. Times are on the event loop's clock, in s."""

    name: str  # the pool's model name, as in the events
    lease_key: str  # Redis key of the lease: the owner's id and address; expires with the lease
    # Redis keys of: epoch, number of the last change, open reservations, session owners, their expiry, what the owner learned.
    state_keys: list[str]
    epoch: int = 0  # of this replica's ownership; 0: not the owner
    seen: int = 0  # the highest epoch of any owner
    owner: Owner | None = None  # None: none, or this replica until it has read the reservations
    rival: Owner | None = None  # an owner with a higher epoch that a gateway has told of
    held_until: float = 0.0  # end of this replica's lease
    free_since: float | None = None  # since when the pool has no owner
    # Changes to be written, and callbacks that wait for the changes before them.
    pending: deque[list[str] | Stored] = field(default_factory=deque)
    number: int = 1  # number of the first pending change
    written: int = 0  # number of the last change that Redis is known to hold
    reading: _Reading | None = None  # progress of reading a newly taken pool; None once all is read
    # What a rewrite has yet to write, with a None as `snapshot` yields it.
    unwritten: Iterator[StoreEffect | None] | None = None
    # Callbacks that wait until a rewrite has written the reservations; None if it has.
    after_rewrite: list[Stored] | None = None
    given_up: bool = False  # to be released and removed with the next heartbeat
    served_at: float = 0.0  # when its changes were last written, or its data read
    paged_at: float = 0.0  # when its last page was read or rewritten

    @property
    def taken(self) -> bool:
        """Whether this replica owns the pool and has read its open reservations."""
        return bool(self.epoch) and (self.reading is None or self.reading.reservations_read)


class RedisStore:
    """The store of the pools of one fleet in Redis.

    `on_event` receives the events for the router's state. `on_owners` is called when a pool's owner changes. `snapshot(pool)`
    yields all that this replica knows of a pool while the state may change: None follows the reservations, and marks points where
    the reader may pause. `merge_config(before, own, stored)` merges this replica's operator config with the one in Redis, both
    changed from what Redis had before; it returns `stored` itself if that has all.

    The store is degraded while Redis does not answer or does not accept writes; the two kinds of failures are counted apart. Then
    placements are sent at once and nothing is recorded. When Redis answers again, each pool is rewritten. Once the rewrite has
    begun successfully, placements wait for their writes again."""

    kind = "redis"

    def __init__(
        self,
        address: RedisAddress,
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
        self._servers = RedisServers(address, lease_s / 2)
        self._heartbeat = self._servers.script(redis_scripts.HEARTBEAT)
        self._acquire = self._servers.script(redis_scripts.ACQUIRE)
        self._apply = self._servers.script(redis_scripts.APPLY)
        self._release = self._servers.script(redis_scripts.RELEASE)
        self._give_up = self._servers.script(redis_scripts.GIVE_UP)
        self._leave = self._servers.script(redis_scripts.LEAVE)
        self._set_config = self._servers.script(redis_scripts.SET_CONFIG)
        self._fleet = fleet
        names = ("replicas", "addresses", "replica_info", "config", "lost", "joined")
        self._fleet_keys = {name: f"pointsman:{{{fleet}}}:{name}" for name in names}
        self._merge_config = merge_config
        self._config = ""  # this replica's operator config, with changes that could not be written
        self._kept_config = (0, "")  # version and text of the config that Redis is known to have
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
        self._tried_at = 0.0  # when the current attempt to reach Redis began
        self._failed_from = 0.0  # when the last one that failed began
        self._degraded = False
        self._logged: type[Exception] | None = None  # the kind of error that was logged last while degraded
        self._returning = False  # degraded, and the rewrite after Redis' return has begun
        self._returned_at = -math.inf  # when Redis last answered a degraded replica, or was left for another server
        self._may_serve_others = False  # whether other replicas may reach Redis, though this one does not
        self._server = ""  # the server that was logged last; empty: log it after the next success
        self._server_moved = False  # whether Sentinels name another server than the one in use
        self._next_page_at = 0.0  # time from which the next page of sessions may be read or written
        self._replicas: list[Replica] = []
        self._lost_replicas: list[Replica] = []
        self.answered_at: float | None = None
        self.address = ""
        self.replica_info: Callable[[], str] = str
        self.on_operator_config: Callable[[str], None] = lambda config: None

    def replicas(self) -> list[Replica]:
        """Return the live replicas ordered by id, as of Redis' last answer."""
        return self._replicas

    def lost_replicas(self) -> list[Replica]:
        """Return the replicas that ended without deregistering and were not replaced, as of Redis' last answer."""
        return self._lost_replicas

    @property
    def epoch(self) -> int:
        """The highest epoch of this replica's ownerships; 0 while it owns nothing."""
        return max((pool.epoch for pool in self._pools.values()), default=0)

    def owner(self, pool: str) -> Owner | None:
        """Return the owner of `pool`; None if it has none, or none is known."""
        known = self._pools.get(pool)
        return known.owner if known else None

    def may_place(self, pool: str) -> bool:
        """Return whether this replica owns the pool, has read its open reservations, and has a valid lease. While Redis is away,
        the lease need not be valid, unless another replica may have taken the pool."""
        known = self._pools.get(pool)
        if known is None or not known.taken:
            return False
        return self._leased(known) or (self._degraded and not self._in_doubt(known))

    def claimed(self, pool: str, owner: Owner) -> None:
        """Note that another replica claims to own the pool, as a gateway tells. It counts if its epoch is higher, and this
        replica's lease has ended: a valid lease shows that the claim is wrong."""
        if (known := self._pools.get(pool)) is not None and known.epoch and owner.epoch > known.epoch:
            known.rival = owner
            self._yield_to_rival(known)

    @staticmethod
    def _leased(pool: _Pool) -> bool:
        return asyncio.get_running_loop().time() < pool.held_until

    def _in_doubt(self, pool: _Pool) -> bool:
        """Return whether another replica may own the pool by now, since this one's lease has ended."""
        if self._leased(pool):
            return False
        if pool.rival is not None or asyncio.get_running_loop().time() - self._failed_from > 2 * self._lease_s:
            # Or this process has slept, and has not tried to reach Redis since.
            return True
        until = pool.held_until + DOUBT_LEASES * self._lease_s
        return self._may_serve_others and len(self._replicas) > 1 and self._failed_from < until

    def _yield_to_rival(self, pool: _Pool) -> None:
        """Stop owning the pool if the lease has ended and another owner is known."""
        if pool.rival is not None and not self._leased(pool):
            rival = pool.rival
            self._stand_by(pool, rival.router_id)
            pool.owner = rival if rival.router_id else None
            self._on_owners()

    def compete_for(self, pools: Iterable[str]) -> None:
        """Compete for the ownership of these pools, each until it is given up."""
        for pool in pools:
            if (known := self._pools.get(pool)) is not None:
                known.given_up = False
            else:
                # The braces keep all keys of a pool on one node of a Redis cluster.
                key = f"pointsman:{{{self._fleet}:{pool}}}:"
                # "mean_work" has all that the owner has learned. Another name would need another fleet at an upgrade.
                names = ("epoch", "number", "open", "affinity", "affinity_expiry", "mean_work")
                self._pools[pool] = _Pool(pool, key + "lease", [key + name for name in names])
                self._poll_at = 0.0
                self._wake.set()

    def give_up(self, pool: str) -> None:
        """Release the pool with the next heartbeat. Its state in Redis expires after `affinity_ttl_s`, unless another replica
        owns it."""
        if (known := self._pools.get(pool)) is not None:
            known.given_up = True

    def record(self, effects: list[StoreEffect]) -> None:
        """Queue changes to be written. While Redis is away they are dropped: the rewrite on its return writes the state."""
        if not self._writing:
            return
        for effect in effects:
            pool = self._pools.get(effect.reservation.pool if isinstance(effect, ev.Reserved) else effect.pool)
            if pool is not None and pool.taken:
                pool.pending.append(_change(effect))
                self._wake.set()

    def when_stored(self, pool: str, stored: Stored) -> None:
        """Call `stored(True)` once all recorded changes of `pool` are written, or at once if degraded. Call `stored(False)` if
        they will not be written, because this replica does not own the pool."""
        known = self._pools.get(pool)
        if known is None or not known.taken:
            stored(False)
        elif (self._degraded and not self._in_doubt(known)) or not (self._degraded or known.pending):
            stored(True)
        else:
            known.pending.append(stored)

    async def change_operator_config(self, change: Callable[[str], str]) -> bool:
        """Replace the operator config by `change(config)`; the other replicas receive it with their next heartbeat. If Redis does
        not answer, only this replica has it, and return False; it is merged into Redis' config with the first heartbeat after
        Redis' return."""
        while True:
            changed = change(self._config)
            try:
                version, kept = await self._set_config(
                    keys=[self._fleet_keys["config"]], args=[self._kept_config[0], changed]
                )
            except REDIS_ERRORS:
                self._have_config(change(self._config))
                return False
            self._keeps_config(int(version), kept)
            if kept == changed:
                return True

    def _keeps_config(self, version: int, kept: str) -> None:
        """Record that Redis has this operator config, and merge it into this replica's."""
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
        """Keep ownership and write changes until cancelled, then release the pools."""
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow_sentinels()) if self._servers.has_sentinels else None
                try:
                    await self._keep_pools()
                finally:
                    if following is not None:
                        following.cancel()
        finally:
            await self._servers.aclose()

    async def _follow_sentinels(self) -> None:
        """Leave the server in use as soon as Sentinels name another one. After a planned failover the old master takes writes for
        ten seconds more, until a Sentinel makes it a replica, and a router that connects meanwhile is at the new one."""
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # a lost cancellation, as in _keep_pools()
            await asyncio.sleep(self._lease_s / 4)
            with contextlib.suppress(*REDIS_ERRORS):
                if await self._servers.moved():
                    self._server_moved, self._poll_at = True, 0.0
                    self._wake.set()

    async def _keep_pools(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            # redis-py writes by asyncio.wait_for(). Before Python 3.12 that loses a cancellation that arrives as the write ends.
            while not task.cancelling():
                self._tried_at = loop.time()
                if self._server_moved:
                    await self._servers.connect_anew()
                    self._server_moved = False
                    # An owner has a lease to follow. Until then it holds its lease at the old server, which this one cannot see.
                    self._returned_at = loop.time()
                    self._forget_data()
                try:
                    if loop.time() >= self._poll_at:
                        await self._poll()
                except REDIS_ERRORS as error:
                    self._failures += 1
                    await self._failed(error)
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                began = loop.time()
                paged = self._next_paged() if began >= self._next_page_at else None
                try:
                    await self._read_and_write(paged)
                except REDIS_ERRORS as error:
                    self._write_failures += 1
                    await self._failed(error)
                    await asyncio.sleep(self._lease_s / 8)
                    continue
                # Reset only after all pools were written: one pool's success must not hide that another's writes always fail.
                self._write_failures = 0
                if self._returning and all(pool.after_rewrite is None for pool in self._pools.values()):
                    self._returned()
                elif not self._degraded and self._servers.server != self._server:
                    if self._server:
                        # Connections that were in use as the first one to this server was made lead to the one before.
                        await self._servers.connect_anew()
                        self._forget_data()
                    self._server = self._servers.server
                    log.info("connected to the shared store", server=self._server)
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

    async def _read_and_write(self, paged: _Pool | None) -> None:
        """Read and write what is due of all pools, and a page of `paged`. Several pools at once: a Redis that answers late must
        not make each pool wait for those before it."""
        due = [pool for pool in self._pools.values() if pool.reading or pool.pending or pool.unwritten is not None]
        due.sort(key=lambda pool: pool.served_at)
        if len(due) == 1:
            # The usual case. A task of its own would make its answers later.
            await self._read_and_write_one(due[0], page=due[0] is paged)
            return
        for first in range(0, len(due), AT_ONCE):
            done = await asyncio.gather(
                *(self._read_and_write_one(pool, page=pool is paged) for pool in due[first : first + AT_ONCE]),
                return_exceptions=True,
            )
            for failed in done:
                if isinstance(failed, BaseException):
                    raise failed
            if asyncio.get_running_loop().time() >= self._poll_at:
                break

    async def _read_and_write_one(self, pool: _Pool, *, page: bool) -> None:
        pool.served_at = asyncio.get_running_loop().time()
        await self._read_on(pool, page=page)
        await self._flush(pool, self._poll_at, page=page)

    async def _poll(self) -> None:
        self._poll_at = asyncio.get_running_loop().time() + self._lease_s / 4
        live_replies, version, config, known, lost = await self._heartbeat(
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
        live = self._met(live_replies, lost)
        if config or int(version) != self._kept_config[0]:
            self._keeps_config(int(version), config)
        while self._config != self._kept_config[1]:
            # Write what was set at this replica while Redis was away, or what Redis has lost.
            self._keeps_config(
                *await self._set_config(keys=[self._fleet_keys["config"]], args=[self._kept_config[0], self._config])
            )
        if not known:
            # This replica is new, or Redis has lost its data between two polls. Other replicas may live without being registered,
            # and own pools that seem to be free.
            live = []
            self._forget_data()
        # Set before the leases are renewed: a pool that is rewritten then queues further changes behind its rewrite, while other
        # pools still wait for theirs. A rewrite that has begun goes on over heartbeats: it may take longer than their interval.
        begins, self._returning = self._degraded and not self._returning, self._degraded
        if self._returning:
            self._returned_at = self.answered_at or 0.0
        await self._renew_all(live, rewrite=begins)
        self._failures, self._may_serve_others = 0, False
        await self._forget_given_up()
        now = asyncio.get_running_loop().time()
        self._settled.seen(live, now)
        for pool in self._pools.values():
            if pool.reading or pool.unwritten:
                continue
            if pool.epoch and (successor := self._settled.successor(pool.name, self._router_id, now)):
                await self._hand_over(pool, successor)
                break  # One pool at a time, since gateways repeat all requests that the pool holds.

    def _met(self, live: list[list[str | int]], lost: list[list[str | int]]) -> list[str]:
        """Record the live and the lost replicas that HEARTBEAT returned. Return the ids of the live ones."""
        self.answered_at = now = asyncio.get_running_loop().time()
        self._replicas = sorted(
            (
                Replica(str(router_id), str(address), now - int(silent_ms) / 1e3, str(replica_info))
                for router_id, address, silent_ms, replica_info in live
            ),
            key=lambda replica: replica.router_id,
        )
        self._lost_replicas = [Replica(str(router_id), "", now - int(silent_ms) / 1e3) for router_id, silent_ms in lost]
        return [replica.router_id for replica in self._replicas]

    def _take(self, pool: _Pool, live: list[str], now: float) -> int:
        """Return the `take` argument of ACQUIRE. The preferred replica takes a free pool at once, the others half a lease later.
        When Redis has been away, its owner, which may have gone on to place, has a lease to return. A pool whose data Redis has
        lost is left to its owner, which still knows the data, for one more lease."""
        if pool.epoch:
            return 2
        free_s = now - pool.free_since if pool.free_since is not None else 0.0
        delay_s = 0.0 if preferred(pool.name, live) == self._router_id else self._lease_s / 2
        if now - self._returned_at < 2 * self._lease_s:
            delay_s = self._lease_s
        if free_s >= delay_s + self._lease_s:
            return 2
        return 1 if free_s >= delay_s else 0

    async def _renew_all(self, live: list[str], *, rewrite: bool) -> None:
        pools = list(self._pools.values())
        for first in range(0, len(pools), AT_ONCE):
            asked = [(pool, self._ask_for(pool, live)) for pool in pools[first : first + AT_ONCE]]
            now = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(answer for _, answer in asked), return_exceptions=True)
            for (pool, _), answer in zip(asked, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                await self._renewed(pool, answer, now, rewrite=rewrite)

    async def _renew(self, pool: _Pool) -> None:
        now = asyncio.get_running_loop().time()
        await self._renewed(pool, await self._ask_for(pool, []), now, rewrite=False)

    async def _ask_for(self, pool: _Pool, live: list[str]) -> _Lease:
        args: list[str | int] = [self._router_id, self.address, int(self._lease_s * 1e3), pool.epoch, pool.seen]
        args.append(self._take(pool, live, asyncio.get_running_loop().time()))
        lease: _Lease = await self._acquire(keys=[pool.lease_key, *pool.state_keys], args=args)
        return lease

    async def _renewed(self, pool: _Pool, lease: _Lease, now: float, *, rewrite: bool) -> None:
        """Apply the result of an ACQUIRE call that was made at `now`."""
        router_id, address, epoch, written, redis_ms = lease
        before = pool.owner
        if router_id == self._router_id:
            pool.held_until, pool.rival = now + self._lease_s, None
            await self._own(pool, epoch, redis_ms, rewrite=rewrite or written < pool.written)
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

    async def _own(self, pool: _Pool, epoch: int, redis_ms: int, *, rewrite: bool) -> None:
        if epoch == pool.epoch:
            if rewrite and pool.taken:
                waiting = [*(pool.after_rewrite or []), *(item for item in pool.pending if callable(item))]
                self._forget_changes(pool)
                # Sessions in Redis that are not read yet must not be cleared.
                pool.pending.append(["clear_open" if pool.reading else "clear"])
                pool.unwritten, pool.after_rewrite = self._snapshot(pool.name), waiting
            return
        kept = await self._servers.client.hgetall(pool.state_keys[-1])
        self._drop_pending(pool, kept=False)
        if pool.epoch:
            # Another router owned the pool in between, so this replica's state of it is obsolete. Drop it before reading.
            pool.epoch = 0
            self._on_event(ev.PoolLost(pool.name))
        pool.epoch, pool.owner, pool.written = epoch, None, 0
        idle_at = _read(kept["idle_at"], float) if "idle_at" in kept else None
        pool.reading = _Reading(
            _read(kept["work"], MeanWork) if "work" in kept else None,
            _read(kept["idle"], IdleSessions) if "idle" in kept else None,
            (redis_ms - idle_at) / 1e3 if idle_at is not None else 0.0,
            _read(kept["facts"], PoolFacts) if "facts" in kept else None,
        )
        if kept.get("incomplete"):
            log.warning("the previous owner of a pool did not finish its rewrite", pool=pool.name)

    def _stand_by(self, pool: _Pool, owner: str) -> None:
        log.warning("another router has taken a pool", pool=pool.name, owner=owner)
        pool.epoch, pool.reading, pool.rival = 0, None, None
        self._drop_pending(pool, kept=False)
        self._on_event(ev.PoolLost(pool.name))

    async def _forget_given_up(self) -> None:
        for pool in [pool for pool in self._pools.values() if pool.given_up]:
            if pool.reading or pool.unwritten:
                continue
            if pool.epoch:
                log.info("gave up a pool without instances", pool=pool.name)
                await self._leave_pool(pool)
            await self._give_up(keys=[pool.lease_key, *pool.state_keys], args=[self._ttl_ms])
            if pool.given_up:  # compete_for may have been called meanwhile
                del self._pools[pool.name]

    async def _hand_over(self, pool: _Pool, successor: str) -> None:
        """Release the pool for the preferred replica, which started later: stop placing, and write all changes first."""
        log.info("handing over a pool", pool=pool.name, to=successor)
        self._settled.offered(pool.name, successor)
        await self._leave_pool(pool)

    async def _leave_pool(self, pool: _Pool) -> None:
        self._on_event(ev.PoolLost(pool.name))
        try:
            await self._flush(pool)
        finally:
            # If the write failed, the next poll reads the pool's state from Redis, or finds another owner.
            pool.epoch, pool.owner, pool.reading = 0, None, None
            self._drop_pending(pool, kept=False)
            self._on_owners()
        await self._release(keys=[pool.lease_key], args=[self._router_id])

    async def _read_on(self, pool: _Pool, *, page: bool) -> None:
        """Read the next page of a newly taken pool: of its reservations, or, only if `page`, of its sessions."""
        reading = pool.reading
        if reading is None or not self._writing or (reading.reservations_read and not page):
            return
        key, count = (pool.state_keys[3], PAGE) if reading.reservations_read else (pool.state_keys[2], BATCH)
        reading.cursor, found = await self._servers.client.hscan(key, reading.cursor, count=count)
        assert isinstance(found, dict)
        values = {str(name): str(value) for name, value in found.items()}
        if reading.reservations_read:
            reading.sessions += len(values)
            self._on_event(ev.SessionsRead(pool.name, values, last=not reading.cursor))
            if not reading.cursor:
                pool.reading = None
                log.info("read all sessions of a pool", pool=pool.name, sessions=reading.sessions)
            return
        opened = {name: _read(value, Reservation) for name, value in values.items()}
        reading.reservations |= {name: reservation for name, reservation in opened.items() if reservation is not None}
        if not reading.cursor:
            self._take_over(pool, reading)

    def _take_over(self, pool: _Pool, reading: _Reading) -> None:
        """Begin to place a newly taken pool's requests, since all its reservations are read."""
        reading.reservations_read = True
        opened, reading.reservations = tuple(reading.reservations.values()), {}
        log.info("took ownership of a pool", pool=pool.name, epoch=pool.epoch, open=len(opened))
        pool.owner = Owner(self._router_id, self.address, pool.epoch)
        known = reading.mean_work, reading.idle_sessions, reading.idle_age_s, reading.facts
        self._on_event(ev.PoolTaken(pool.name, opened, *known))
        self._on_owners()

    def _urgent(self) -> bool:
        """Return whether any pool's reservations are still to be read or rewritten. Placements wait for this."""
        return self._writing and any(
            pool.epoch and (not pool.taken or pool.after_rewrite is not None) for pool in self._pools.values()
        )

    def _next_paged(self) -> _Pool | None:
        """Return the pool whose next page is to be read or rewritten, round robin; None if there is none."""
        if not self._writing:
            return None
        paged = [pool for pool in self._pools.values() if pool.epoch and (pool.reading or pool.unwritten)]
        return min(paged, key=lambda pool: pool.paged_at, default=None)

    @property
    def _writing(self) -> bool:
        """Whether changes are written: Redis answers, or the rewrite after its return has begun."""
        return self._returning or not self._degraded

    def _next_page(self, pool: _Pool) -> None:
        """Append the next page of a rewrite to the pending changes. Each item is the current state, so that it undoes no newer
        change."""
        assert pool.unwritten is not None
        for number, effect in enumerate(pool.unwritten, 1):
            if effect is None:
                break
            pool.pending.append(_change(effect))
            if number == (PAGE if pool.after_rewrite is None else BATCH):
                return
        else:
            pool.unwritten = None
            pool.pending.append(["complete"])
        if pool.after_rewrite is not None:
            pool.pending.extend(pool.after_rewrite)
            pool.after_rewrite = None

    async def _flush(self, pool: _Pool, until: float = math.inf, *, page: bool = True) -> None:
        """Write the changes that are pending now, at most until `until`, and, if `page`, the next page of a rewrite. Changes that
        are recorded meanwhile wait for the next call. Under full load there are always some, and leases and other pools' changes
        must not wait for them."""
        loop = asyncio.get_running_loop()
        if pool.unwritten is not None and len(pool.pending) < BATCH and (page or pool.after_rewrite is not None):
            self._next_page(pool)
        left = len(pool.pending)
        while left and pool.epoch and self._writing:
            pending = pool.pending
            batch = [pending[index] for index in range(min(left, BATCH))]
            changes = [item for item in batch if isinstance(item, list)]
            if changes and not await self._apply(
                keys=pool.state_keys,
                args=[pool.epoch, self._ttl_ms, msgspec.json.encode(changes), pool.number, MAX_SESSIONS],
            ):
                await self._renew(pool)
                left = len(pool.pending)
                continue
            if pool.pending is not pending:
                return  # The changes were dropped meanwhile, with their numbers and callbacks.
            left -= len(batch)
            pool.number += len(changes)
            pool.written = pool.number - 1 if changes else pool.written
            for _ in batch:
                pending.popleft()
            for item in batch:
                if not isinstance(item, list):
                    item(True)
            if loop.time() >= until:
                return

    def _forget_changes(self, pool: _Pool) -> deque[list[str] | Stored]:
        """Empty `pending`, end a rewrite, and return the dropped changes and the callbacks. The numbers of the changes are not
        used again, since some changes may be on the way to Redis."""
        dropped, pool.pending, pool.unwritten = pool.pending, deque(), None
        pool.number += sum(isinstance(item, list) for item in dropped)
        dropped.extend(pool.after_rewrite or ())
        pool.after_rewrite = None
        return dropped

    def _drop_pending(self, pool: _Pool, *, kept: bool) -> None:
        for item in self._forget_changes(pool):
            if not isinstance(item, list):
                item(kept)

    def _forget_data(self) -> None:
        """Forget what another server, or the same one after a restart, may not know: since when pools are free, and the cursors
        of pages, each of which is a place in one server's table. What is read twice changes nothing."""
        for pool in self._pools.values():
            pool.free_since = None
            if pool.reading:
                pool.reading.cursor = pool.reading.sessions = 0

    async def _failed(self, error: Exception) -> None:
        if isinstance(error, redis.exceptions.ReadOnlyError):
            await self._look_for_owners()
        await self._servers.failed(error)
        self._server = ""  # a new master may be at the same name or address
        self._poll_at, self._failed_from = 0.0, self._tried_at
        self._may_serve_others |= isinstance(error, _MAY_SERVE_OTHERS)
        self._forget_data()
        if not self._degraded:
            if max(self._failures, self._write_failures) < FAILURES:
                return
            self._degraded, self._logged = True, None
            self._on_event(ev.StoreState(True))
        if self._logged is not type(error):
            # Another kind of error has another cause, for example the new master's.
            self._logged = type(error)
            log.warning(
                "the shared store does not answer or takes no writes; placements use this router's own view",
                asked=self._servers.asked,
                error=redis_reason(error),
            )
        self._returning = False
        for pool in list(self._pools.values()):
            self._yield_to_rival(pool)
            waiting = [item for item in self._forget_changes(pool) if not isinstance(item, list)]
            if self._in_doubt(pool):
                pool.pending.extend(waiting)
                continue
            for stored in waiting:
                stored(True)

    async def _look_for_owners(self) -> None:
        """Read at a replica of Redis whether its master has other owners of this router's pools."""
        client, owned = self._servers.client, [pool for pool in self._pools.values() if pool.epoch]
        with contextlib.suppress(*REDIS_ERRORS):
            asked = client.pipeline(transaction=False)  # to each node of a cluster that has keys of these pools
            for pool in owned:
                asked.get(pool.state_keys[0])
                asked.hmget(pool.lease_key, "id", "address")
            answers = await asked.execute()
            for pool, epoch, (router_id, address) in zip(owned, answers[::2], answers[1::2], strict=True):
                self.claimed(pool.name, Owner(router_id or "", address or "", int(epoch or 0)))

    def _returned(self) -> None:
        """End the degraded state: each pool's reservations are rewritten, and the sessions follow page by page."""
        self._degraded = self._returning = False
        self._server = self._servers.server
        log.warning("the shared store answers again", server=self._server)
        self._on_event(ev.StoreState(False))

    async def _give_back(self) -> None:
        for pool in list(self._pools.values()):
            if pool.epoch:
                with contextlib.suppress(*REDIS_ERRORS):
                    async with asyncio.timeout(self._lease_s):
                        while pool.unwritten is not None and self._writing:
                            await self._flush(pool)
                            await asyncio.sleep(0)
                pool.unwritten = None
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._leave_pool(pool)
        with contextlib.suppress(*REDIS_ERRORS):
            keys = [self._fleet_keys[name] for name in ("replicas", "addresses", "replica_info", "joined")]
            await self._leave(keys=keys, args=[self._router_id])


def _read(value: str | bytes, kind: type[T]) -> T | None:
    """Decode a stored value; None if it cannot be read, because a router of another version wrote it. That is no lasting loss:
    gateways report open requests again, and the rest is learned again."""
    try:
        return decoded(value, kind)
    except msgspec.MsgspecError as error:
        log.error("a value in Redis cannot be read", kind=kind.__name__, error=str(error))
        return None


def _change(effect: StoreEffect) -> list[str]:
    match effect:
        case ev.Reserved(reservation):
            # The end of a lease is a time of this process's clock. A new owner sets a new one.
            kept = replace(reservation, lease_until=None)
            return ["put", reservation.request_id, msgspec.json.encode(kept).decode()]
        case ev.Released(request_id):
            return ["del", request_id]
        case ev.SessionOwnerSet(session, instance_id):
            return ["own", session, instance_id]
        case ev.SessionDisowned(session):
            return ["disown", session]
        case ev.MeanWorkSet(mean_work):
            return ["learned", "work", msgspec.json.encode(mean_work).decode()]
        case ev.IdleSessionsSet(idle_sessions):
            return ["learned", "idle", msgspec.json.encode(idle_sessions).decode()]
        case ev.PoolFactsSet(facts):
            return ["learned", "facts", msgspec.json.encode(facts).decode()]
