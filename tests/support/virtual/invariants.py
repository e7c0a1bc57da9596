"""Invariants of a fleet, besides each router's own: of held requests, leases and turns of the event loop, and at rest."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import Any

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.requests.held_requests import ENDS_PAUSE_S, TRIES_ON_TICK
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.router import TICK_S
from tests.support.virtual.network import Node
from tests.support.virtual.store import NAME as REDIS

# Maximum duration of a turn of a router, s. It is the interval between two renewals of a lease.
LONGEST_TURN_S = 0.25
# Sum of the delays of late messages to and from Redis within one lease, from which on the lease may be lost, s.
LATE_S = 0.3
# Maximum time from the last fault until every pool has an owner that places, s. An agent and a router may only have started at
# the end of the fault, and a pool may be handed over.
OWNED_WITHIN_S = 10.0
# How long a router that was alone without Redis may go on to place beside a new owner, until gateways have told it, s.
TOLD_S = 0.5
# Maximum delay of a tick, s.
TICK_SLACK_S = 0.25
# How long owners may take to read or rewrite their pools' sessions, s: a million of them, in pages of 128 with pauses for others,
# takes up to 90 s, and two owners may do it one after the other (a router that returns gets its pools handed over).
PAGED_S = 240


class InvariantViolation(AssertionError):
    """An invariant of the fleet is violated."""


class Disturbances:
    """Records which nodes were disturbed from outside, and when: then leases may be lost. Times are in s of the loop's clock."""

    def __init__(self) -> None:
        self._times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.over_at = 0.0
        """When the last disturbance ends."""

    def note(self, name: str, for_s: float) -> None:
        """Record that a node, or Redis, is disturbed for `for_s` from now on."""
        now = asyncio.get_running_loop().time()
        self._times[name].append((now, now + for_s))
        self.lasts(for_s)

    def lasts(self, for_s: float) -> None:
        """Record that a fault which disturbs no lease lasts for `for_s`."""
        self.over_at = max(self.over_at, asyncio.get_running_loop().time() + for_s)

    def any(self, name: str, since: float, until: float) -> bool:
        """Return whether the node or Redis was disturbed between two times."""
        return any(
            begins <= until and ends >= since for node in (name, REDIS) for begins, ends in self._times.get(node, ())
        )


class LeaseWatch:
    """Reports each lease that a router lost or let expire although no disturbance prevented the renewal, only its own work."""

    def __init__(self, lease_s: float, disturbances: Disturbances, violate: Callable[[str], None]) -> None:
        self._lease_s, self._disturbances, self._violate = lease_s, disturbances, violate

    def watch(self, node: Node, renewed: Any) -> Any:
        """Return `renewed`, the RedisStore._renewed of the node's store, with checks of the lease before and after."""

        async def watched(pool: Any, lease: Any, asked: float, *, rewrite: bool) -> None:
            loop = asyncio.get_running_loop()
            epoch, until = pool.epoch, pool.held_until
            if epoch and asked > until and not self._excused(node, until, until):
                self._violate(f"{node.name} let its lease of {pool.name} run out: its own work took too long")
            await renewed(pool, lease, asked, rewrite=rewrite)
            if epoch and pool.epoch != epoch and not self._excused(node, until, loop.time()):
                self._violate(f"{node.name} lost its lease of {pool.name}, though nothing disturbed it")

        return watched

    def _excused(self, node: Node, held_until: float, now: float) -> bool:
        """Return whether a lease that was valid until `held_until` may be lost by `now`: its node died or was disturbed."""
        given = held_until - self._lease_s
        late_s = sum(late_s for at, late_s in node.late if given - LATE_S <= at <= now)
        return not node.alive or late_s >= LATE_S or self._disturbances.any(node.name, given, now)


def check_turn(node: Node, begun: float, seconds: float) -> str:
    """Return what is wrong with a router's turn, or ""; record the turn in `node.blocked`. Mutates."""
    node.blocked.append((begun, begun + seconds))
    if seconds <= LONGEST_TURN_S:
        return ""
    return f"a turn of {node.name} took {seconds:.2f} s: leases are to be renewed every {LONGEST_TURN_S} s"


def check_tick(state: RouterState, node: Node, before: float, now: float) -> None:
    """Check the time from a router's last tick, `before`, to this one, `now`.

    Each tick answers the held requests whose time has ended. Their answers may be late by one tick, TICK_SLACK_S, and the time in
    which the router was stopped or computed. Raises InvariantViolation.
    """
    late_s = now - before - TICK_S - TICK_SLACK_S
    if len(state.held_requests.queue) and late_s > 0.0 and late_s > _blocked_s(node, before, now):
        raise InvariantViolation(f"{node.name} answers held requests {late_s:.2f} s late")


def check_held(state: RouterState, ticked_at: float, now: float) -> None:
    """Check a router's held requests after a tick. Raises InvariantViolation.

    All whose time had ended are answered, and none waits for room while an instance that it may go to is idle.
    """
    queue = state.held_requests.queue
    # Held requests whose time has ended and that need a decision are answered a few at a time, with a pause between.
    ends_go_on = state.held_requests._ends_due <= now + ENDS_PAUSE_S and now - ticked_at <= LONGEST_TURN_S
    for held in queue if len(queue) <= TRIES_ON_TICK else ():
        if held.answer_by <= ticked_at and not ends_go_on:
            raise InvariantViolation(f"held request {held.request.request_id} is not answered by its time")
        if not held.for_room:
            continue  # its policy holds it
        members = state.instances.members(held.pool, held.request.model)
        for snapshot in state.views._snapshots(members, now):
            candidate = snapshot.candidate
            free = (
                not candidate.excluded
                and not candidate.produces_only
                and candidate.instance_id not in held.request.exclude
            )
            if free and not candidate.num_requests:
                raise InvariantViolation(
                    f"{held.request.request_id} waits for room beside {candidate.instance_id}, which is idle"
                )


def _blocked_s(node: Node, since: float, until: float) -> float:
    return sum(max(min(ends, until) - max(begins, since), 0.0) for begins, ends in node.blocked)


async def check_owned(world: Any, models: tuple[str, ...]) -> None:
    """Wait until every pool has an owner that places. Raises InvariantViolation OWNED_WITHIN_S after the last fault."""
    loop = asyncio.get_running_loop()
    by = max(world.disturbances.over_at, loop.time()) + OWNED_WITHIN_S
    waiting = set(models)
    while waiting:
        await asyncio.sleep(0.1)
        for model in list(waiting):
            if any(_places(router, model, loop.time()) for router in world.live_routers()):
                waiting.discard(model)
        if waiting and loop.time() > by:
            raise InvariantViolation(
                f"{sorted(waiting)} had no owner that places {OWNED_WITHIN_S} s after the last fault"
            )


def _places(router: Any, model: str, now: float) -> bool:
    return router.store.may_place(model) and router.state.owned.owns(model) and not router.state.starting(now, model)


def check_placed_by_one(world: Any, router: Any, effects: list[ev.Effect]) -> None:
    """Check that no other router would place in the pool of a placement that this one has just made, for longer than gateways
    take to tell. Raises InvariantViolation."""
    now = asyncio.get_running_loop().time()
    for effect in effects:
        if not isinstance(effect, ev.Placed) or not router.store.may_place(effect.decision.pool):
            continue
        pool = effect.decision.pool
        others = [other for other in world.live_routers() if other is not router and _places(other, pool, now)]
        if not others:
            world.both_since.pop(pool, None)
        elif now - world.both_since.setdefault(pool, now) > TOLD_S:
            names = [placing.settings.router_id for placing in (router, *others)]
            raise InvariantViolation(f"{names} all place in {pool}")


async def check_at_rest(world: Any, models: tuple[str, ...]) -> None:
    """Check that nothing is open, some time after the last fault and the last request. Raises InvariantViolation."""
    await _read_and_written(world)
    for gateway in world.gateways.values():
        assert gateway.client is not None
        _equal(gateway.client.open_count, 0, f"open requests of {gateway.name}")
        _equal(len(gateway.client._requests), 0, f"remembered requests of {gateway.name}")
    for model in models:
        owners = [router for router in world.live_routers() if router.state.owned.owns(model)]
        names = [router.settings.router_id for router in owners]
        if len(owners) != 1:
            raise InvariantViolation(f"{model} is owned by {names or 'nobody'}")
        _equal(world.redis.hash(f"pointsman:{{default:{model}}}:open"), {}, f"reservations kept of {model}")
        pool = owners[0].store._pools[model]
        _check_ended(world, owners[0], model)
        _equal((pool.reading, pool.unwritten), (None, None), f"what {names[0]} has not read or written of {model}")
    for router in world.live_routers():
        _check_router(world, router)
    await _check_circuits(world)


def _check_ended(world: Any, owner: Any, model: str) -> None:
    """Check that no session has an owner: all have ended, in the owner's memory and in Redis."""
    known = {session.partition("/")[2] for session in world.redis.hash(f"pointsman:{{default:{model}}}:affinity")}
    known |= {session.partition("/")[2] for pool, session, *_ in owner.state.affinity.newest(-inf) if pool == model}
    known = {session for session in known if session.startswith(("s", "last-"))}
    _equal(known - world.lost_ends, set(), f"sessions of {model} that have ended, and have an owner")


async def _read_and_written(world: Any) -> None:
    """Wait at most PAGED_S for owners that still read or rewrite their pools' sessions."""
    for _ in range(PAGED_S):
        pools = [pool for router in world.live_routers() for pool in router.store._pools.values()]
        if not any(pool.reading or pool.unwritten for pool in pools):
            break
        await asyncio.sleep(1.0)


def _check_router(world: Any, router: Any) -> None:
    state, name = router.state, router.settings.router_id
    _equal(state.degraded, False, f"{name} degraded")
    _equal([reservation.request_id for reservation in state.reservations], [], f"reservations of {name}")
    _equal(len(state.held_requests.queue), 0, f"held requests of {name}")
    for engine in world.engines.values():
        record = state.instances.get(engine.instance_id)
        if record is None or record.info.incarnation != engine.incarnation:
            raise InvariantViolation(f"{name} does not know {engine.incarnation}")
        _equal(record.state, InstanceState.READY, f"{engine.instance_id} at {name}")
        missing = [key for key in engine.cached_keys() if not state.index.holds(engine.instance_id, key)]
        _equal(missing, [], f"blocks of {engine.instance_id} that {name} does not know")
        _equal(state.index.count(engine.instance_id), len(engine.cache), f"blocks of {engine.instance_id} at {name}")


async def _check_circuits(world: Any) -> None:
    """Check that no instance stays excluded: after the time of its open circuit requests may be placed on it again."""
    loop = asyncio.get_running_loop()
    records = [record for router in world.live_routers() for record in router.state.instances.records()]
    left_s = max((record.life.until - loop.time() for record in records), default=0.0)
    for router in world.live_routers():
        if left_s > router.state.settings.life.max_open_s:
            raise InvariantViolation(f"a circuit stays open for {left_s:.0f} s more")
    await asyncio.sleep(max(left_s, 0.0) + 0.01)
    for router in world.live_routers():
        now = loop.time()
        for snapshot in router.state.views._snapshots(router.state.instances.records(), now):
            candidate = snapshot.candidate
            _equal(candidate.excluded, "", f"why {candidate.instance_id} stays excluded at {router.settings.router_id}")


def _equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise InvariantViolation(f"{what}: {found}, not {wanted}")
