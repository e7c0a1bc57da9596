"""The whole state of the router: it takes events and returns effects. Pure: no I/O, no clock, no global randomness.

`RouterState.handle` is the only mutator. Choosing an instance and reserving it are one synchronous call, so two large prompts
that arrive together cannot both see the same free instance. `explain` and `what_if` run the same decision code and change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.cache_capacity import CacheCapacity
from pointsman_router.core.admission.session_admission import AdmissionSettings, SessionAdmission
from pointsman_router.core.admission_rule import AdmissionOutcome
from pointsman_router.core.agent_reports import AgentReports
from pointsman_router.core.analysis.decision_replay import redecide
from pointsman_router.core.instances.circuit_breaker import Circuit, CircuitSettings
from pointsman_router.core.instances.gone_pools import GonePools
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.load.recent_migrations import Migrations
from pointsman_router.core.load.reservations import Reservations
from pointsman_router.core.ownership import OwnedPools
from pointsman_router.core.placement_types import Decision, PlacementRequest, PoolFacts
from pointsman_router.core.policy.auto import admission_choice
from pointsman_router.core.policy.base import Policy, TakenPolicy
from pointsman_router.core.policy_views import FleetViewBuilder
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.decider import AllSaturated, Decider
from pointsman_router.core.requests.gateway_events import GatewayEvents
from pointsman_router.core.requests.held_requests import HeldRequests
from pointsman_router.core.requests.hold_queue import HoldQueue, QueueSettings
from pointsman_router.core.requests.moves import RequestMoves
from pointsman_router.core.requests.parking import PARKED, Parking
from pointsman_router.core.requests.placement_plans import PlacementPlans
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.requests.retry_after import RetryAfter
from pointsman_router.core.requests.session_owners import SessionOwners
from pointsman_router.core.requests.unfinished_work import UnfinishedWork, WorkSteps
from pointsman_router.core.startup_gate import StartupGate

# Events after which held requests are not retried. Most of them free nothing. After KeysReported the next load report or tick
# retries; after PoolTaken no request may be placed before the gateways reconnect; RetryDue itself is a retry.
EVENTS_WITHOUT_RETRY = (
    ev.PlaceRequested,
    ev.KeysReported,
    ev.GatewayLost,
    ev.StoreState,
    ev.PoolTaken,
    ev.SessionsRead,
    ev.PoolLost,
    ev.RetryDue,
)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings of a RouterState; times in s. `max_keys`: capacity of the exact index, and of that of each lower tier.
    `stale_report_s`: age up to which load reports are used. `stale_keys_s`: time since an agent's last message up to which its
    instance's keys are used."""

    affinity_ttl_s: float = 3_600.0
    gateway_lease_s: float = 15.0
    place_lease_s: float = 600.0
    lost_instance_s: float = 30.0
    retry_after_s: float = 1.0
    migration_window_s: float = 10.0
    stale_report_s: float = 5.0
    stale_keys_s: float = 10.0
    max_keys: int = 8_000_000
    limits: SaturationLimits = field(default_factory=SaturationLimits)
    queue: QueueSettings = field(default_factory=QueueSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    startup_wait_s: float = 0.0
    circuit: CircuitSettings = field(default_factory=CircuitSettings)


# Maximum number of reservations with an expired lease that one tick ends (about 20 us each). Another tick follows soon for the
# others.
ENDS_AT_ONCE = 500


class RouterState:
    """Instances, keys, requests, reservations, affinity and the policy in force. Times (`now`) are in s on one monotonic
    clock."""

    def __init__(
        self,
        policy: Policy,
        settings: StateSettings,
        *,
        router_id: str = "router",
        seed: int = 0,
        owns_all: bool = True,
    ) -> None:
        self.settings = settings
        self.router_id = router_id
        self.index = PrefixIndex(settings.max_keys)
        self.lower_tiers = LowerTiers(settings.max_keys)
        self.instances = InstanceRegistry(self.index, self.lower_tiers)
        self.reservations = Reservations()
        self.prefill_observer = PrefillObserver(self.reservations)
        self.prefix_knowledge = PrefixKnowledge(
            self.index,
            self.instances,
            settings.stale_keys_s,
            self.prefill_observer,
            lower_tiers=self.lower_tiers,
        )
        self.affinity = Affinity(settings.affinity_ttl_s)
        self.migrations = Migrations(settings.migration_window_s)
        self.views = FleetViewBuilder(
            self.instances,
            self.prefix_knowledge,
            self.reservations,
            self.affinity,
            self.migrations,
            self.prefill_observer,
            settings.limits,
            settings.stale_report_s,
        )
        self.admission = SessionAdmission(
            settings.admission,
            self.instances,
            self.index,
            self.prefill_observer,
            self.affinity,
            CacheCapacity(self.prefix_knowledge),
            self._admits,
        )
        self.requests = RequestTable(
            HoldQueue(settings.queue),
            HoldQueue(PARKED),
            self.admission,
            self.reservations,
            self.instances,
            self.prefix_knowledge,
            self.prefill_observer,
        )
        # The seed is part of every decision's id, because a decision's randomness must follow from its id.
        id_prefix = f"{router_id}.{seed}" if seed else router_id
        self._decider = Decider(policy, self.instances, self.views, settings.retry_after_s, id_prefix)
        retry_after = RetryAfter(settings.retry_after_s)
        self._plans = PlacementPlans(
            self.requests,
            self._decider,
            self.instances,
            self.prefill_observer,
            self.affinity,
            self.migrations,
            retry_after,
            settings.circuit,
            settings.place_lease_s,
        )
        self.held_requests = HeldRequests(
            self.requests,
            self._decider,
            self._plans,
            self.views,
            self.instances,
            self.reservations,
            self.prefill_observer,
            retry_after,
            settings.retry_after_s,
        )
        self.parking = Parking(
            self.requests, self.admission, self.held_requests, self.instances, settings.retry_after_s
        )
        self._reports = AgentReports(
            self.instances,
            self.index,
            self.prefix_knowledge,
            self.prefill_observer,
            self.reservations,
            self.requests,
            self._plans,
            stale_report_s=settings.stale_report_s,
            lost_instance_s=settings.lost_instance_s,
        )
        self._moves = RequestMoves(self.instances, self.requests, self.reservations, self._decider)
        self.owned = OwnedPools(everything=owns_all)
        self._sessions = SessionOwners(self.affinity, self.instances, self.owned)
        self._startup_gate = StartupGate(settings.startup_wait_s)
        self._gateways = GatewayEvents(
            self.requests,
            self.held_requests,
            self.parking,
            self._plans,
            self.instances,
            self.prefix_knowledge,
            self.views,
            self.owned,
            self._startup_gate,
            settings.gateway_lease_s,
        )
        self._gone_pools = GonePools()
        self._work = UnfinishedWork(self._pool_of_event)

    @property
    def policy(self) -> Policy:
        """The policy in force; ev.PolicySet changes it."""
        return self._decider.policy

    @property
    def degraded(self) -> bool:
        """Whether the shared store is unreachable."""
        return self._decider.degraded

    @property
    def retry_at(self) -> float | None:
        """When to send RetryDue, in s; None: not needed. Events that free something for held requests are handled together, some
        ms later; parked requests are refused at their bounds. May change with each event."""
        at = self.parking.retry_at
        held_at = self.held_requests.retry_at
        if held_at is not None and held_at < at:
            return held_at
        return at if at < inf else None

    @property
    def unfinished(self) -> bool:
        """Whether parts of earlier events are still to be applied. The caller must then send GoOn until this is False."""
        return bool(self._work)

    @property
    def store_degraded(self) -> bool:
        """Whether the shared store does not answer, so that nothing is kept for another owner."""
        return self._decider.degraded

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and return its effects. The only mutator. Never raises for anything that a peer may send.

        An event that may have freed something also answers held requests. Of an event that takes long only the first part is
        applied, and later events that depend on it wait (unfinished_work.py).
        """
        self._startup_gate.begin(now)
        effects: list[ev.Effect] = []
        if isinstance(event, ev.PoolLost):
            # Ownership ends at once, so that nothing more is placed in the pool; its requests are removed in parts, later.
            self._work.drop_taking(event.pool)
            effects = self._stop_owning(event.pool)
        if self._work.defers(event):
            return effects
        return [*effects, *(self._go_on(now) if isinstance(event, ev.GoOn) else self._handle(event, now))]

    def _go_on(self, now: float) -> list[ev.Effect]:
        effects = self._work.go_on(lambda event: self._handle(event, now))
        if not self._work and len(self.held_requests.queue):
            self.prefix_knowledge.expire(now)
            effects += self.held_requests.retry_all(now)
        if not self._work and len(self.parking.queue):
            effects += self.parking.let_in(self.parking.queue.pools(), now)
        return effects

    def _handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = self._apply(event, now)
        if len(self.held_requests.queue) and not self._work and not isinstance(event, EVENTS_WITHOUT_RETRY):
            self.prefix_knowledge.expire(now)
            effects = [*effects, *self._try_held(event, effects, now)]
        if len(self.parking.queue) and not self._work and not isinstance(event, EVENTS_WITHOUT_RETRY):
            effects = [*effects, *self._let_in(event, effects, now)]
        if not len(self.held_requests.queue):
            self.reservations.less_busy.clear()
        if not self._work and _may_let_requests_move(event):
            effects = [*effects, *self._moves.next(now)]
        return effects

    def _let_in(self, event: ev.Event, effects: Sequence[ev.Effect], now: float) -> list[ev.Effect]:
        """Let in the parked requests for which the event may have made room, after the held ones, which are under way."""
        if isinstance(event, ev.Tick):
            return [*self.parking.let_in(self.parking.queue.pools(), now), *self.parking.refuse_expired(now)]
        if isinstance(event, ev.SessionEnded) or any(isinstance(effect, ev.FleetChanged) for effect in effects):
            return self.parking.let_in(self.parking.queue.pools(), now)
        freed = {effect.pool: None for effect in effects if isinstance(effect, ev.Released)}
        return self.parking.let_in(freed, now)

    def _try_held(self, event: ev.Event, effects: Sequence[ev.Effect], now: float) -> list[ev.Effect]:
        """Retry the held requests for which the event may have freed something."""
        if isinstance(event, ev.Tick):
            return self.held_requests.tick(now)
        if isinstance(event, ev.PolicySet) or any(isinstance(effect, ev.FleetChanged) for effect in effects):
            return self.held_requests.retry_all(now)
        freed = {effect.pool: None for effect in effects if isinstance(effect, ev.Released)}
        freed |= {effect.reservation.pool: None for effect in effects if isinstance(effect, ev.Reserved)}
        if freed or not isinstance(event, ev.LoadReported):
            return self.held_requests.retry(freed, now)
        record = self.instances.get(event.instance_id)
        return self.held_requests.reported(record.info.model, event.instance_id, now) if record is not None else []

    def _apply(self, event: ev.Event, now: float) -> list[ev.Effect]:
        match event:
            case ev.AgentHello():
                return self._reports.hello(event, now)
            case ev.KeysReported():
                return self._reports.keys(event, now)
            case ev.LoadReported():
                return self._reports.load(event, now)
            case ev.AgentGoodbye() | ev.AgentLost():
                return self._reports.gone(event, now)
            case ev.GatewayHello():
                return self._work.begin(event, self._gateways.hello(event, now))
            case ev.GatewayLost():
                self._gateways.lost(event.gateway_id, now)
                return []
            case ev.PlaceRequested():
                return self._gateways.place(event, now)
            case ev.StepDone():
                return self._gateways.step_done(event, now)
            case ev.StreamOpened():
                return self._gateways.stream_opened(event, now)
            case ev.FirstToken():
                return self._plans.first_token(event, now)
            case ev.Finished():
                return self._plans.finished(event, now)
            case ev.GatewayReported(gateway_id, report):
                if self._gateways.is_anothers(report.request_id, gateway_id):
                    return [ev.ReportIgnored(report.request_id, gateway_id)]
                return self._apply(report, now)
            case ev.DrainsChanged():
                changed = self.instances.drain(event.incarnations, event.moving)
                return [ev.FleetChanged()] if changed else []
            case ev.OrdersChanged():
                return [ev.FleetChanged()] if self.instances.order(event.orders) else []
            case ev.PolicySet():
                self._decider.policy = event.policy
                return []
            case ev.StoreState():
                self._decider.degraded = event.degraded
                return []
            case ev.PoolTaken():
                return self._work.begin(event, self._pool_taken(event, now))
            case ev.SessionsRead():
                return self._sessions.read(event, now) if self.owned.owns(event.pool) else []
            case ev.SessionEnded():
                self.admission.session_ended(event.session, now)
                return self._sessions.end(event, now)
            case ev.PoolLost():
                return self._work.begin(event, self._pool_lost(event.pool, now))
            case ev.GoOn():
                return []
            case ev.RetryDue() if self._work:
                return []
            case ev.RetryDue():
                self.prefix_knowledge.expire(now)
                return [*self.held_requests.retry_due(now), *self.parking.retry_due(now)]
            case ev.Tick():
                return self._tick(now)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep of an index is in progress; sweep() must then be called again soon."""
        return self.index.sweeping or self.lower_tiers.sweeping

    def sweep(self) -> None:
        """Run one turn of the sweep of each index, as PrefixIndex.sweep. Mutates."""
        self.index.sweep()
        self.lower_tiers.sweep()

    def explain(self, request: PlacementRequest, now: float, policy: Policy | None = None) -> Decision | ev.Refused:
        """Return what would be decided on `request` now under `policy` (None: the one in force). Changes nothing.

        Return a refusal if another replica owns the pool, since only the owner knows its open requests and sessions.
        """
        if (refused := self._gateways.not_owned(request)) is not None:
            return refused
        record = self.parking.explain(request, now)
        if record is not None:
            request = replace(request, admitted=record)
            if record.verdict.outcome is not AdmissionOutcome.ADMIT:
                view = record.view
                why = (
                    f"its session would be parked: {view.size:,} tokens beside {view.weighted:,.0f} under way, "
                    f"of {view.capacity:,.0f}; {view.before} wait"
                )
                pool = self.instances.pool_of(request.model)
                return ev.Refused(request.request_id, "RESOURCE_EXHAUSTED", why, pool=pool, admission=record)
        verdict = self._decider.decide(request, now, policy)
        if (late := self.held_requests.refused_as_late(request, verdict, "")) is not None:
            return late
        if isinstance(verdict, AllSaturated):
            queue = self.held_requests.queue
            before = sum(
                queue.count(verdict.pool, priority) for priority in Priority if priority.level >= request.priority.level
            )
            why = f"it would be held or refused; {queue.count(verdict.pool)} wait, {before} of them {request.priority} or higher"
            return self.held_requests.refusal(request, verdict.pool, "", why)
        return replace(verdict, decision_id="dry-run") if isinstance(verdict, Decision) else verdict

    def pool_policy(self, pool: str, now: float) -> tuple[TakenPolicy, PoolFacts]:
        """Return the policy that decides for `pool`, and what is known of the pool, at most a second old."""
        facts = self.views.facts(pool, now)
        return self.policy.taken(facts), facts

    def _admits(self, pool: str, now: float) -> bool:
        facts = self.views.facts(pool, now)
        return admission_choice(self.policy, facts, switched_on=self.settings.admission.on).applies

    def what_if(self, decision: Decision, policy: Policy) -> Decision:
        """Return a recorded decision, made again on its recorded view under `policy`. Changes nothing."""
        return redecide(decision, policy)

    def check_invariants(self) -> None:
        """Raise AssertionError if any part of the state is inconsistent. For tests: visits the whole state."""
        self.index.check_invariants()
        self.instances.check_invariants()
        self.reservations.check_invariants()
        self.affinity.check_invariants()
        self.held_requests.queue.check_invariants()
        self.parking.queue.check_invariants()
        self.admission.check_invariants()
        self.requests.check_invariants()
        self.migrations.check_invariants()
        self.views.check_invariants()
        self.prefill_observer.check_invariants()
        for record in self.instances.records():
            assert record.info.block_size % KEY_TOKENS == 0
        for reservation in self.reservations if not self._work else ():
            assert self.owned.owns(reservation.pool), reservation
        for held in self.held_requests.queue:
            assert self.owned.owns(held.pool), held
        for decision in self.requests.decisions() if not self._work else ():
            assert self.owned.owns(decision.pool), decision

    def starting(self, now: float, pool: str = "") -> bool:
        """Return whether placements of `pool` (empty: of the whole fleet) wait for the first reports after the start."""
        return self._startup_gate.starting(pool, self.instances, now)

    # ---- operators, the store and time ----

    def _pool_taken(self, event: ev.PoolTaken, now: float) -> WorkSteps:
        why = f"{event.pool!r} was owned by another router for a moment"
        waited = [*self.held_requests.drop_pool(event.pool, why), *self.parking.drop_pool(event.pool, why)]
        self.owned.take(event.pool)
        self._sessions.pool_taken(event.pool, now)
        self.admission.forget_pool(event.pool)
        self._close_circuits(event.pool)
        self.prefill_observer.take_over(event.pool, event.mean_work)
        if event.idle_sessions is not None:
            self.admission.take_over(event.pool, event.idle_sessions, event.idle_age_s, now)
        if not self.instances.members(event.pool, event.pool):
            self._gone_pools.left((event.pool,), now)
        yield [*waited, ev.FleetChanged()]
        yield from self._forget_requests(event.pool, now)
        for reservation in event.reservations:
            if not self.owned.owns(event.pool):
                return
            # The reservation's gateway has not connected to this replica yet; the lease gives it time to.
            lease_s = self.settings.gateway_lease_s if reservation.gateway_id else self.settings.place_lease_s
            reservation = replace(reservation, lease_until=now + lease_s, pool=event.pool)
            # A request known under the same id was decided in another pool.
            ended = self._plans.cancelled(reservation.request_id, "another router has placed it", now)
            if (known := self.requests.get(reservation.request_id)) is not None:
                self.requests.forget(known, now)
            self.requests.announce(reservation, now)
            yield ended

    def _pool_of_event(self, event: ev.Event) -> str | None:
        """Return the pool of the request that an event is about; None if the event is about no request, or an unknown one."""
        asked: PlacementRequest | None = None
        match event:
            case ev.PlaceRequested():
                asked = event.request
            case ev.StreamOpened():
                asked = event.stream.request
            case ev.StepDone() | ev.FirstToken() | ev.Finished():
                request_id = event.request_id
            case ev.GatewayReported():
                request_id = event.report.request_id
            case _:
                return None
        request_id = asked.request_id if asked is not None else request_id
        if (known := self.requests.get(request_id)) is not None:
            return known.pool
        return self.instances.pool_of(asked.model) if asked is not None else None

    def _stop_owning(self, pool: str) -> list[ev.Effect]:
        self.owned.lose(pool)
        self._sessions.pool_lost(pool)
        why = f"this router does not own {pool!r} any more"
        return [*self.held_requests.drop_pool(pool, why), *self.parking.drop_pool(pool, why), ev.FleetChanged()]

    def _pool_lost(self, pool: str, now: float) -> WorkSteps:
        self._close_circuits(pool)
        self.admission.forget_pool(pool)
        yield [ev.FleetChanged()]
        yield from self._forget_requests(pool, now)

    def _forget_requests(self, pool: str, now: float) -> WorkSteps:
        remaining = self.reservations.of_pool(pool)
        while remaining:
            # Looked up again, since its lease may have ended between two parts.
            known = self.requests.placed(remaining.pop().request_id)
            if known is not None and known.pool == pool:
                self.requests.forget(known, now)
                yield []
        for _ in self.requests.forget_ended(pool):
            yield []

    def _close_circuits(self, pool: str) -> None:
        """Reset the circuits, recent migrations and sessions of a pool whose owner changes. The new owner learns its own.
        Mutates."""
        self.affinity.forget_pool(pool)
        for record in self.instances.members(pool, pool):
            self.migrations.drop(record.info.instance_id)
            record.circuit = Circuit()
            record.forget_snapshot()
            self.instances.refresh(record)

    def _tick(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for reservation in self.reservations.expired(now)[:ENDS_AT_ONCE]:
            effects += self._plans.cancelled(reservation.request_id, "its lease ended", now)
        self.sweep()
        effects += self._reports.tick(now)
        self.affinity.expire(now)
        for instance_id in self.migrations.expire(now):
            self.instances.forget_snapshot(instance_id)
        self.prefix_knowledge.expire(now)
        self.held_requests.expire(now)
        self.parking.expire(now)
        self.admission.tick(self.parking.queue.pools(), now)
        effects += self._idle_sessions(now)
        return effects + self._forget_gone_pools(now)

    def _idle_sessions(self, now: float) -> list[ev.Effect]:
        """Return what is to be stored of idle sessions for later owners of the pools, if there may be any."""
        if self.owned.everything:
            return []
        known = (
            (pool, self.admission.idle_sessions(pool, now)) for pool in self.admission.pools if self.owned.owns(pool)
        )
        return [ev.IdleSessionsSet(idle, pool) for pool, idle in known if idle is not None]

    def _forget_gone_pools(self, now: float) -> list[ev.Effect]:
        self._gone_pools.left(self.instances.pools_left(), now)
        due = self._gone_pools.due(
            lambda pool: bool(self.instances.members(pool, pool)),
            lambda pool: bool(
                self.reservations.of_pool(pool)
                or self.held_requests.queue.count(pool)
                or self.parking.queue.count(pool)
            ),
            now,
        )
        for pool in due:
            self.prefill_observer.forget_pool(pool)
            self.views.forget_pool(pool)
            self.admission.forget_pool(pool)
            self._decider.forget_pool(pool)
        return [ev.PoolForgotten(pool) for pool in due]


def _may_let_requests_move(event: ev.Event) -> bool:
    """Return whether further requests may leave the instances that operators empty after `event`. Not after the end of one that
    has left: its rest is to be placed first."""
    report = event.report if isinstance(event, ev.GatewayReported) else event
    return isinstance(report, ev.Tick | ev.DrainsChanged | ev.FirstToken)
