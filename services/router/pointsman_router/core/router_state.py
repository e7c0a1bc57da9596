"""The whole state of the router: it takes events and returns effects. Pure: no I/O, no clock, no global randomness.

`RouterState.handle` is the only mutator. Choosing an instance and reserving it are one synchronous call, so two large prompts
that arrive together cannot both see the same free instance. `explain` and `what_if` run the same decision code and change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.cache_capacity import CacheCapacity
from pointsman_router.core.admission.session_admission import AdmissionSettings, SessionAdmission
from pointsman_router.core.admission_rule import AdmissionOutcome
from pointsman_router.core.analysis.decision_replay import redecide
from pointsman_router.core.apply_agent_reports import AgentReports
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.instances.engine_life import LifeSettings
from pointsman_router.core.instances.gone_pools import GonePools
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.learning.fetches import Fetches
from pointsman_router.core.learning.pool_facts import PoolChoice, PoolChoices, PoolFactsCounter
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.load.recent_migrations import Migrations
from pointsman_router.core.load.reservations import Reservations
from pointsman_router.core.ownership import OwnedPools
from pointsman_router.core.placement_types import Decision, PlacementRequest
from pointsman_router.core.policy.auto import admission_choice
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.prefix.computed_prompts import ComputedPrompts
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.decider import AllSaturated, Decider
from pointsman_router.core.requests.gateway_events import GatewayEvents
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.life_evidence import LifeEvidence
from pointsman_router.core.requests.moves import RequestMoves
from pointsman_router.core.requests.parked_requests import PARKED, ParkedRequests
from pointsman_router.core.requests.place_or_hold import HeldRequests
from pointsman_router.core.requests.placement_plans import PlacementPlans
from pointsman_router.core.requests.refusals import Refusals
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.requests.session_owners import SessionOwners
from pointsman_router.core.requests.unfinished_work import UnfinishedWork, WorkSteps
from pointsman_router.core.requests.waiting_room import WaitingRoom
from pointsman_router.core.startup_gate import StartupGate
from pointsman_router.core.turn import Turn


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings of a RouterState; times in s. `max_keys`: capacity of the exact index, and of that of each lower tier.
    `stale_report_s`: age up to which load reports are used. `stale_keys_s`: time since an agent's last message up to which its
    instance's keys are used."""

    affinity_ttl_s: float = 3_600.0  # after its last use a session keeps its owner for so long
    gateway_lease_s: float = 15.0  # how long requests of a gateway without a stream stay open
    place_lease_s: float = 600.0  # how long a placement of the unary form stays open without a report
    lost_instance_s: float = 30.0  # least time that an instance is kept after its agent's stream has ended
    retry_after_s: float = 1.0  # least retry time that is told where no instance, or no room, was found
    migration_window_s: float = 10.0  # how long an offload counts as a recent migration
    stale_report_s: float = 5.0
    stale_keys_s: float = 10.0
    max_keys: int = 8_000_000
    limits: SaturationLimits = field(default_factory=SaturationLimits)  # of an instance; default: none
    queue: QueueSettings = field(default_factory=QueueSettings)  # of held requests; parked ones: PARKED
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)  # how long new sessions wait for cache room
    startup_wait_s: float = 0.0  # maximum wait for instances' reports, from the first event on; 0: none
    life: LifeSettings = field(default_factory=LifeSettings)  # when failing engines get no requests for a while


# Pause between two turns in which waiting requests leave, s.
LEAVE_PAUSE_S = 0.001
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
        self._turn = Turn()
        self._now = 0.0  # when the last event came
        self.router_id = router_id
        self.index = PrefixIndex(settings.max_keys)
        self.lower_tiers = LowerTiers(settings.max_keys)
        self.instances = InstanceRegistry(self.index, self.lower_tiers)
        self.reservations = Reservations(self._turn)
        self.prefill_observer = PrefillObserver(self.reservations)
        self.prefix_knowledge = PrefixKnowledge(
            self.index,
            self.instances,
            settings.stale_keys_s,
            self.prefill_observer,
            self._turn,
            computed_prompts=ComputedPrompts(settings.max_keys),
            lower_tiers=self.lower_tiers,
        )
        self.affinity = Affinity(settings.affinity_ttl_s)
        self.migrations = Migrations(settings.migration_window_s)
        self.fetches = Fetches()
        room = WaitingRoom(settings.queue, PARKED)
        self.pool_choices = PoolChoices(
            PoolFactsCounter(self.instances, self.prefix_knowledge, self.prefill_observer).of,
            lambda facts: self.policy.taken(facts),
        )
        self.views = FleetViewBuilder(
            self.instances,
            self.prefix_knowledge,
            self.reservations,
            self.affinity,
            self.migrations,
            self.prefill_observer,
            self.pool_choices,
            self.fetches,
            room.held.held_for,
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
            self.views.least_new,
        )
        self.requests = RequestTable(
            room,
            self.admission,
            self.reservations,
            self.instances,
            self.prefix_knowledge,
            self.prefill_observer,
            self.fetches,
        )
        # The seed is part of every decision's id, because a decision's randomness must follow from its id.
        id_prefix = f"{router_id}.{seed}" if seed else router_id
        self._decider = Decider(policy, self.instances, self.views, settings.retry_after_s, id_prefix)
        self._evidence = LifeEvidence(self.instances, self._turn, settings.life)
        self._refusals = Refusals(settings.retry_after_s)
        self._plans = PlacementPlans(
            self.requests,
            self._decider,
            self.instances,
            self.prefill_observer,
            self.affinity,
            self.migrations,
            self._refusals.held,
            self._evidence,
            settings.place_lease_s,
            self._turn,
        )
        self.held_requests = HeldRequests(
            self.requests,
            self._decider,
            self._plans,
            self.views,
            self.instances,
            self.reservations,
            self.prefill_observer,
            self._refusals,
            settings.retry_after_s,
        )
        self.parked_requests = ParkedRequests(
            self.requests, self.admission, self.held_requests, self.instances, self._refusals
        )
        self._reports = AgentReports(
            self.instances,
            self.index,
            self.prefix_knowledge,
            self.prefill_observer,
            self.reservations,
            self.requests,
            self._plans,
            self._evidence,
            self._turn,
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
            self.parked_requests,
            self._plans,
            self.instances,
            self.prefix_knowledge,
            self.views,
            self.owned,
            self._startup_gate,
            self._turn,
            settings.gateway_lease_s,
        )
        self.gone_pools = GonePools()
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
        if self.requests.room.leaving:
            return self._now + LEAVE_PAUSE_S
        at = min(self.held_requests.retry_at, self.parked_requests.retry_at)
        return at if at < inf else None

    @property
    def unfinished(self) -> bool:
        """Whether parts of earlier events are still to be applied. The caller must then send GoOn until this is False."""
        return bool(self._work)

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and return its effects. The only mutator. Never raises for anything that a peer may send.

        An event that may have freed something also answers waiting requests. Of an event that takes long only the first part is
        applied, and later events that depend on it wait (unfinished_work.py).
        """
        self._startup_gate.begin(now)
        self._now = now
        if isinstance(event, ev.PoolLost):
            # Ownership ends at once, so that nothing more is placed in the pool; its requests are removed in parts, later.
            self._work.drop_taking(event.pool)
            self._stop_owning(event.pool)
        effects: list[ev.Effect] = []
        if isinstance(event, ev.GoOn):
            effects = self._work.go_on(lambda deferred: self._apply(deferred, now))
            self._turn.anything |= not self._work
        elif not self._work.defers(event):
            effects = self._apply(event, now)
        if self._evidence.changes:
            effects = [*effects, *self._evidence.take_changes()]
        if self._turn.fleet_changed:
            self._turn.fleet_changed, self._turn.anything = False, True
            effects = [*effects, ev.FleetChanged()]
        room = self.requests.room
        if not self._work:
            if len(room):
                effects = [*effects, *self._serve_waiting(event, now)]
            if not len(room.held):
                self.reservations.less_busy.clear()
            self._turn.clear()
            if _may_let_requests_move(event):
                effects = [*effects, *self._moves.next(now)]
        return [*effects, *self.requests.leave_next()] if room.leaving else effects

    def _serve_waiting(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Try the waiting requests for which something has changed: the held ones first, since their sessions are under way."""
        effects: list[ev.Effect] = []
        room = self.requests.room
        if self._turn or isinstance(event, ev.Tick | ev.LoadReported):
            self.prefix_knowledge.expire(now)
            if len(room.held):
                effects = self._try_held(event, now)
            if len(room.parked):
                effects = [*effects, *self._let_in(event, now)]
        return effects

    def _try_held(self, event: ev.Event, now: float) -> list[ev.Effect]:
        if isinstance(event, ev.Tick):
            return self.held_requests.tick(now)
        if self._turn.anything:
            return self.held_requests.retry_all(now)
        if self._turn.freed or not isinstance(event, ev.LoadReported):
            return self.held_requests.retry(self._turn.freed, now)
        record = self.instances.get(event.instance_id)
        return self.held_requests.reported(record.info.model, event.instance_id, now) if record is not None else []

    def _let_in(self, event: ev.Event, now: float) -> list[ev.Effect]:
        if isinstance(event, ev.Tick):
            return [
                *self.parked_requests.let_in(self.parked_requests.queue.pools(), now),
                *self.parked_requests.refuse_expired(now),
            ]
        if self._turn.anything or self._turn.session_ended:
            return self.parked_requests.let_in(self.parked_requests.queue.pools(), now)
        return self.parked_requests.let_in(self._turn.freed, now)

    def _apply(self, event: ev.Event, now: float) -> list[ev.Effect]:
        match event:  # The events of each request come first.
            case ev.PlaceRequested():
                return self._gateways.place(event, now)
            case ev.GatewayReported(gateway_id, report):
                if self._gateways.is_anothers(report.request_id, gateway_id):
                    return [ev.ReportIgnored(report.request_id, gateway_id)]
                return self._apply(report, now)
            case ev.FirstToken():
                return self._plans.first_token(event, now)
            case ev.Finished():
                return self._plans.finished(event, now)
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
            case ev.StepDone():
                return self._gateways.step_done(event, now)
            case ev.StreamOpened():
                return self._gateways.stream_opened(event, now)
            case ev.Heard():
                self._evidence.heard(event.ago_s, now)
                for request_id in event.stalled:
                    if (reservation := self.reservations.get(request_id)) is not None:
                        self._evidence.stalled(reservation, now)
                return []
            case ev.DrainsChanged():
                self._turn.fleet_changed |= self.instances.drain(event.incarnations, event.moving)
                return []
            case ev.OrdersChanged():
                self._turn.fleet_changed |= self.instances.order(event.orders)
                return []
            case ev.PolicySet():
                self._decider.policy = event.policy
                self.pool_choices.policy_set(now)
                self._turn.anything = True
                return []
            case ev.StoreState():
                self._decider.degraded = event.degraded
                return []
            case ev.PoolTaken():
                return self._work.begin(event, self._pool_taken(event, now))
            case ev.SessionsRead():
                return self._sessions.read(event, now) if self.owned.owns(event.pool) else []
            case ev.SessionEnded():
                self._turn.session_ended |= self.admission.session_ended(event.session)
                return self._sessions.end(event, now)
            case ev.PoolLost():
                return self._work.begin(event, self._pool_lost(event.pool, now))
            case ev.GoOn():
                return []
            case ev.RetryDue() if self._work:
                return []
            case ev.RetryDue():
                self.prefix_knowledge.expire(now)
                return [*self.held_requests.retry_due(now), *self.parked_requests.retry_due(now)]
            case ev.Tick():
                return self._tick(now)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep of an index is in progress; sweep() must then be called again soon."""
        assumed = self.prefix_knowledge.computed_prompts.index
        return self.index.sweeping or assumed.sweeping or self.lower_tiers.sweeping

    def sweep(self) -> None:
        """Run one turn of the sweep of each index, as PrefixIndex.sweep. Mutates."""
        self.index.sweep()
        self.prefix_knowledge.computed_prompts.index.sweep()
        self.lower_tiers.sweep()

    def explain(self, request: PlacementRequest, now: float, policy: Policy | None = None) -> Decision | ev.Refused:
        """Return what would be decided on `request` now under `policy` (None: the one in force). Changes nothing.

        Return a refusal if another replica owns the pool, since only the owner knows its open requests and sessions.
        """
        if (refused := self._gateways.not_owned(request)) is not None:
            return refused
        record = self.parked_requests.explain(request, now)
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
            return self._refusals.no_room(request, verdict.pool, "", why)
        return replace(verdict, decision_id="dry-run") if isinstance(verdict, Decision) else verdict

    def pool_policy(self, pool: str, now: float) -> PoolChoice:
        """Return the policy that decides for `pool`, and what is known of the pool, at most a second old."""
        return self.pool_choices.choice(pool, now)

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
        self.requests.room.check_invariants()
        self.admission.check_invariants()
        self.requests.check_invariants()
        self.migrations.check_invariants()
        self.views.check_invariants()
        self.prefill_observer.check_invariants()
        for record in self.instances.records():
            assert record.info.block_size % KEY_TOKENS == 0
        for reservation in self.reservations if not self._work else ():
            assert self.owned.owns(reservation.pool), reservation
        for held in self.requests.room:
            assert self.owned.owns(held.pool) or self.requests.room.is_leaving(held.request.request_id), held
        for decision in self.requests.decisions() if not self._work else ():
            assert self.owned.owns(decision.pool), decision

    def starting(self, now: float, pool: str = "") -> bool:
        """Return whether placements of `pool` (empty: of the whole fleet) wait for the first reports after the start."""
        return self._startup_gate.starting(pool, self.instances, now)

    # ---- operators, the store and time ----

    def _pool_taken(self, event: ev.PoolTaken, now: float) -> WorkSteps:
        why = f"{event.pool!r} was owned by another router for a moment"
        self.requests.room.drop_pool(event.pool, why)
        self.owned.take(event.pool)
        self._sessions.pool_taken(event.pool, now)
        self.admission.forget_pool(event.pool)
        self._forget_evidence(event.pool)
        self.prefill_observer.take_over(event.pool, event.mean_work)
        self.pool_choices.take_over(event.pool, event.facts, now)
        if event.idle_sessions is not None:
            self.admission.take_over(event.pool, event.idle_sessions, event.idle_age_s, now)
        if not self.instances.members(event.pool, event.pool):
            self.gone_pools.left((event.pool,), now)
        self._turn.fleet_changed = True
        yield []
        yield from self._leave()
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

    def _stop_owning(self, pool: str) -> None:
        self.owned.lose(pool)
        self._sessions.pool_lost(pool)
        why = f"this router does not own {pool!r} any more"
        self.requests.room.drop_pool(pool, why)
        self._turn.fleet_changed = True

    def _pool_lost(self, pool: str, now: float) -> WorkSteps:
        self._forget_evidence(pool)
        self.admission.forget_pool(pool)
        self.pool_choices.forget_pool(pool)
        self._turn.fleet_changed = True
        yield []
        yield from self._leave()
        yield from self._forget_requests(pool, now)

    def _leave(self) -> WorkSteps:
        """Answer the waiting requests that are to leave, before what was placed for them is forgotten."""
        while self.requests.room.leaving:
            yield self.requests.leave_next(1)

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

    def _forget_evidence(self, pool: str) -> None:
        """Forget the evidence about the engines, the recent migrations and sessions of a pool whose owner changes. The new owner
        learns its own. Mutates."""
        self.affinity.forget_pool(pool)
        for record in self.instances.members(pool, pool):
            self.migrations.drop(record.info.instance_id)
            self.instances.live_anew(record)

    def _tick(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for reservation in self.reservations.expired(now)[:ENDS_AT_ONCE]:
            effects += self._plans.cancelled(reservation.request_id, "its lease ended", now)
        self.sweep()
        self._evidence.tick(now)
        effects += self._reports.tick(now)
        self.affinity.expire(now)
        for instance_id in self.migrations.expire(now):
            self.instances.forget_snapshot(instance_id)
        self.prefix_knowledge.expire(now)
        self.fetches.expire(now)
        self.requests.attained.expire(now)
        self.held_requests.expire(now)
        self.parked_requests.expire(now)
        self._refusals.expire(now)
        self.admission.tick(self.parked_requests.queue.pools(), now)
        effects += self._idle_sessions(now)
        effects += self.pool_choices.tick(self.owned.owns, now)
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
        self.gone_pools.left(self.instances.pools_left(), now)
        due = self.gone_pools.due(
            lambda pool: bool(self.instances.members(pool, pool)),
            lambda pool: bool(
                self.reservations.of_pool(pool)
                or self.held_requests.queue.count(pool)
                or self.parked_requests.queue.count(pool)
            ),
            now,
        )
        for pool in due:
            self.prefill_observer.forget_pool(pool)
            self.fetches.forget_pool(pool)
            self.views.forget_pool(pool)
            self.pool_choices.forget_pool(pool)
            self.admission.forget_pool(pool)
            self._decider.forget_pool(pool)
            self._plans.forget_pool(pool)
        return [ev.PoolForgotten(pool) for pool in due]


def _may_let_requests_move(event: ev.Event) -> bool:
    """Return whether further requests may leave the instances that operators empty after `event`. Not after the end of one that
    has left: its rest is to be placed first."""
    report = event.report if isinstance(event, ev.GatewayReported) else event
    return isinstance(report, ev.Tick | ev.DrainsChanged | ev.FirstToken)
