"""Invariants of a fleet, besides each router's own: of held requests, leases and turns of the event loop, of ill engines, and at
rest."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, log2
from typing import Any

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import OVERDUE_S, EngineLife
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.requests.place_or_hold import ENDS_PAUSE_S, TRIES_ON_TICK
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.router import TICK_S
from tests.support.virtual.engines import ANSWERED_S, DTYPES, POISON, Engine
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
# How many requests an engine that hangs may lose until it is out, and how late the router may see that a first byte is overdue,
# s: gateways tell of bytes every other second.
LOST, SEEN_WITHIN_S = 3, 3.5
# Maximum predicted time of a first byte, s. Prompts and answers take less than 2 s on a well engine that has a few.
MOST_PREDICTED_S = 20.0
# Within how many requests of its pool an engine that answers one status to everything is known, and its share of those after
# them. One request at a time is on trial besides, after pauses that double. Each other engine of the pool that answers badly
# meanwhile makes it as many more: beside its errors those of this one are likelier, and it explains none of them.
KNOWN_WITHIN, SHARE, TRIALS = 20, 0.05, 3
# The same of one that spoils its answers: first tokens come from it, so some breaks in a row are compared with those of others.
# Where the others fail a third of theirs, 12 in a row are evidence, which it has after about 40 requests in a pool of two.
SPOILT_KNOWN_WITHIN = 45
# How many engines a request may kill.
KILLED = 2
# How long after an illness or a start an engine may be put out, s.
EXCUSED_S = 15.0


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


@dataclass(slots=True)
class _Ill:
    """An engine's last illness. Times in s. `placed`: requests of its pool since the first one that came to it, while another
    engine was well, those of them at the engine. `known`: the same when KNOWN_WITHIN requests had come, with the time."""

    since: float
    hung: bool
    answers_badly: bool
    until: float = inf
    # Its life as the router knows it, and the lost requests. The life is another one after a restart, and where the instance left
    # the fleet with its agent and came back.
    lost: tuple[EngineLife | None, int] = (None, 0)
    placed: tuple[int, int] = (0, 0)
    known: tuple[int, int, float] = (0, 0, inf)
    seen: tuple[int, float] = (0, -inf)  # its process, and when that last sent a token, as of the last such request
    beside: frozenset[str] = (
        frozenset()
    )  # the other engines of its pool that have answered badly since these requests began


@dataclass
class LifeWatch:
    """Checks what routers do with ill engines, and where requests go that kill engines.

    `all_checks`: nothing befalls the fleet but illnesses of engines, requests that are the client's fault, and deaths of engines
    and agents. Otherwise only requests that kill engines are checked.
    """

    engines: Mapping[str, Engine]
    violate: Callable[[str], None]
    all_checks: bool
    agent_started_at: float = 0.0
    """When the last agent was started, s: what routers learn from it may be older."""
    _ill: dict[str, _Ill] = field(default_factory=dict)
    _killed: dict[int, set[str]] = field(default_factory=dict)
    _asked: dict[str, Any] = field(default_factory=dict)  # request -> its last placement request
    # Request -> the instance that it was placed on, until its first token or end.
    _at: dict[str, str] = field(default_factory=dict)

    def fell_ill(self, engine: Engine, *, hung: bool = False, answers_badly: bool = False) -> None:
        """Note that an engine falls ill, such that routers may put it out."""
        self._ill[engine.instance_id] = _Ill(asyncio.get_running_loop().time(), hung, answers_badly)

    def recovered(self, engine: Engine) -> None:
        """Note that an engine is well again."""
        self._ill[engine.instance_id].until = asyncio.get_running_loop().time()

    def is_well(self, engine: Engine) -> bool:
        """Return whether an engine runs and is not ill, but for lies."""
        ill = self._ill.get(engine.instance_id)
        return engine.up and (ill is None or ill.until < inf)

    def _was_ill(self, engine: Engine, now: float) -> bool:
        ill = self._ill.get(engine.instance_id)
        return ill is not None and now < ill.until + EXCUSED_S

    def arrived(self, engine: Engine, tokens: list[int]) -> None:
        """Check a request's way: no engine gets it after it killed KILLED."""
        if tokens[0] == POISON and len(killed := self._killed.get(tokens[1], set())) >= KILLED:
            self.violate(f"{engine.instance_id} got a request that had killed {sorted(killed)}")

    def died(self, engine: Engine, tokens: list[int]) -> None:
        """Note that a request has killed an engine."""
        self._killed.setdefault(tokens[1], set()).add(engine.instance_id)

    def handled(self, router: Any, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Check what a router has made of an event."""
        if not self.all_checks:
            return
        now = asyncio.get_running_loop().time()
        if isinstance(event, ev.PlaceRequested):
            self._asked[event.request.request_id] = event.request
        for effect in effects:
            match effect:
                case ev.Placed():
                    self._placed(router, effect, now)
                case ev.Refused(code="UNAVAILABLE" | "NOT_FOUND", not_serving=False):
                    # Another request's arrival or end may be what refuses one that is held.
                    asked = self._asked.get(effect.request_id)
                    if asked is not None and (could := self._could(asked, now)):
                        self.violate(f"{effect.request_id} was refused, though {could} answer: {effect.message}")
                case ev.LifeChanged(out=True):
                    self._put_out(effect, now)
        report = event.report if isinstance(event, ev.GatewayReported) else event
        if isinstance(report, ev.FirstToken | ev.Finished):
            instance_id = self._at.pop(report.request_id, "")
            if isinstance(report, ev.Finished) and report.outcome == "FAILED" and instance_id:
                self._lost(router, instance_id, now)
        if isinstance(event, ev.Tick):
            self._check_silence(router, now)
            self._check_trust(router)

    def unknown(self, model: str) -> None:
        """Check that a gateway which does not know a model need not: none of its engines has answered lately."""
        now = asyncio.get_running_loop().time()
        if self.all_checks and (answer := [engine.instance_id for engine in self._answering(model, now)]):
            self.violate(f"a request for {model} was refused, though {answer} answer")

    def _answering(self, model: str, now: float) -> Iterator[Engine]:
        """Return the engines that have been well for long, have answered lately and not only just now, and have a model or an
        adapter. One that was ill may have left the fleet, if its agent is gone, too."""
        return (
            engine
            for engine in self.engines.values()
            if model in (engine.model, *engine.traits.adapters)
            and self.is_well(engine)
            and not self._was_ill(engine, now)
            and engine.answering_since < now - TOLD_S
            and now - engine.answered_at < ANSWERED_S
        )

    def _could(self, asked: Any, now: float) -> list[str]:
        """Return the well engines that have answered lately and may have a request."""
        return [
            engine.instance_id
            for engine in self._answering(asked.model, now)
            if engine.instance_id not in asked.exclude
            and asked.context_tokens < engine.traits.context
            and asked.begun_by.dtype in ("", DTYPES[engine.traits.dialect])
        ]

    def _placed(self, router: Any, placed: ev.Placed, now: float) -> None:
        instance_id, pool = placed.step.instance_id, placed.decision.pool
        self._at[placed.request_id] = instance_id
        state = router.state.requests.placed(placed.request_id)
        if state is None or placed.step_index:
            return
        could = self._could(state.request, now)
        record = router.state.instances.get(instance_id)
        into = [name for name in could if (one := router.state.instances.get(name)) is not None and not one.life.opened]
        if into and record.life.opened and record.life.trial != placed.request_id:
            self.violate(f"{placed.request_id} was placed on {instance_id}, which is out, though {into} answer")
        bad = frozenset(
            ill_id
            for ill_id, ill in self._ill.items()
            if ill.answers_badly and ill.until == inf and self.engines[ill_id].model == pool
        )
        for ill_id in sorted(bad):
            if any(name != ill_id for name in could):
                self._count(ill_id, self._ill[ill_id], bad - {ill_id}, there=instance_id == ill_id, now=now)

    def _count(self, ill_id: str, ill: _Ill, beside: frozenset[str], *, there: bool, now: float) -> None:
        if not (there or ill.placed[1]):
            return  # Nothing can be known of it yet.
        engine = self.engines[ill_id]
        if (seen := (engine.lives, engine.answered_at)) > ill.seen:
            # It is a new process, of which nothing is known; or answers that had begun before have gone on: until they end, it
            # does not answer everything so.
            ill.seen, ill.placed, ill.known, ill.beside = seen, (0, 0), (0, 0, inf), frozenset()
        ill.beside |= beside
        every, got = ill.placed = ill.placed[0] + 1, ill.placed[1] + there
        within = (KNOWN_WITHIN if engine.ill.status else SPOILT_KNOWN_WITHIN) * (1 + len(ill.beside))
        if every == within:
            ill.known = every, got, now
        before, got_before, at = ill.known
        if every <= within or not there:
            return
        answers = engine.ill.status or engine.ill.spoils
        if got - got_before > SHARE * (every - before) + TRIALS + log2(1.0 + now - at):
            self.violate(
                f"{ill_id} answers {answers} to everything, and got {got - got_before} of the "
                f"{every - before} requests after the first {within}"
            )

    def _lost(self, router: Any, instance_id: str, now: float) -> None:
        ill, record = self._ill.get(instance_id), router.state.instances.get(instance_id)
        # What the engine sent before has arrived 1 s later.
        if ill is None or not ill.hung or ill.until < inf or now < ill.since + 1.0 or record is None:
            return
        life, before = ill.lost
        lost = before + 1 if life is record.life else 1
        ill.lost = record.life, lost
        if lost >= LOST and not record.life.opened:
            self.violate(f"{instance_id} hangs and has lost {lost} requests, and is not out")

    def _check_silence(self, router: Any, now: float) -> None:
        for instance_id, ill in self._ill.items():
            record = router.state.instances.get(instance_id)
            if not ill.hung or ill.until < inf or record is None or record.life.opened:
                continue
            for waits in (record.life.streams, record.life.wholes):
                for request_id, wait in waits.items():
                    since = max(ill.since, self.agent_started_at)
                    due = wait.placed_at + min(wait.predicted_s, MOST_PREDICTED_S), since + wait.alone_s
                    if now > max(due) + OVERDUE_S + SEEN_WITHIN_S:
                        waited = now - wait.placed_at
                        self.violate(f"{instance_id} hangs, {request_id} waits for {waited:.1f} s, and it is in")

    def _check_trust(self, router: Any) -> None:
        for engine in self.engines.values():
            record = router.state.instances.get(engine.instance_id)
            if engine.traits.silent_events and record is not None and record.trust.proven:
                self.violate(f"the events of {engine.instance_id} are trusted, and none has been sent")

    def _put_out(self, changed: ev.LifeChanged, now: float) -> None:
        engine = self.engines[changed.instance_id]
        if engine.up and now >= engine.started_at + EXCUSED_S and not self._was_ill(engine, now):
            self.violate(f"{changed.instance_id} is well, and was put out: {changed.reason}")


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
        unfit = state.views._unfit(held.request, held.pool)
        # An instance that is due for a trial since the last tick gets a held request at the next one.
        for snapshot in state.views._snapshots(members, ticked_at):
            candidate = snapshot.candidate
            free = (
                not candidate.excluded
                and not candidate.produces_only
                and candidate.instance_id not in held.request.exclude
                and not (unfit is not None and unfit(candidate.traits))
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


def check_placed_by_one(world: Any, router: Any, node: Node, effects: list[ev.Effect]) -> None:
    """Check that no two routers make placements in one pool for longer than gateways take to tell. One that would place, but that
    no gateway asks, cannot know of the other. Raises InvariantViolation."""
    now = asyncio.get_running_loop().time()
    for effect in effects:
        if not isinstance(effect, ev.Placed) or not router.store.may_place(effect.decision.pool):
            continue
        pool = effect.decision.pool
        placed_at = world.placed_at[pool]
        others = [other for other in world.live_routers() if other is not router and _places(other, pool, now)]
        if not others:
            placed_at.clear()
            world.both_since.pop(pool, None)
            continue
        # Without the time for which it was stopped, or computed: what came meanwhile is handled in its order.
        placed_at[router] = now - _blocked_s(node, world.both_since.get(pool, now), now)
        if any(other in placed_at for other in others):
            until = world.both_since.setdefault(pool, now) + TOLD_S
            both = [placing for placing in (router, *others) if placed_at.get(placing, 0.0) > until]
            if router in both and len(both) > 1:
                raise InvariantViolation(f"{[placing.settings.router_id for placing in both]} all place in {pool}")


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
        if engine.lied:
            continue
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
