"""The router's whole mind: events in, effects out. Pure: no I/O, no clock, no global randomness.

`RouterState.handle` is the only mutator. Picking an instance and reserving it are one synchronous call, so two big prompts that
arrive together cannot both see the same free instance. `explain` and `what_if` run the same decision code and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.analysis.decision_replay import redecide, rng_of
from pointsman.router.core.instances.circuit_breaker import Circuit, CircuitSettings
from pointsman.router.core.instances.gone_pools import GonePools
from pointsman.router.core.instances.instance_registry import InstanceRegistry
from pointsman.router.core.instances.saturation import SATURATED, SaturationLimits
from pointsman.router.core.learning.agent_reports import Reports
from pointsman.router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman.router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman.router.core.load.affinity import Affinity
from pointsman.router.core.load.recent_migrations import Migrations
from pointsman.router.core.load.reservations import Reservation, Reservations
from pointsman.router.core.ownership import OwnedPools
from pointsman.router.core.policy.base import Policy, decide
from pointsman.router.core.policy_views import Views
from pointsman.router.core.prefix.exact_index import PrefixIndex
from pointsman.router.core.priority import Priority
from pointsman.router.core.requests.hold_queue import QueueSettings
from pointsman.router.core.requests.place_or_hold import AllSaturated, HeldRequests, not_serving
from pointsman.router.core.requests.placed_requests import MAX_STEPS, Plans
from pointsman.router.core.requests.recent_decisions import RecentDecisions
from pointsman.router.core.requests.recovered_placement import recovered_decision
from pointsman.router.core.requests.unfinished_work import Steps, UnfinishedWork
from pointsman.router.core.startup_gate import StartupGate
from pointsman.router.core.types import Decision, PlacementRequest, StepKind

# After these no held request is nearer to its placement; or (PoolTaken) none may be placed before the gateways return; or
# (RetryDue) they have been tried.
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
    """Times in s. `max_keys` bounds the index. Reported figures count for `stale_report_s`, keys for `stale_keys_s` after the
    agent's last word."""

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
    startup_wait_s: float = 0.0
    circuit: CircuitSettings = field(default_factory=CircuitSettings)


# Reservations whose lease is over that end in one tick: some 20 us each. Another one is due soon where there are more.
ENDS_AT_ONCE = 500


class RouterState:
    """Instances, keys, reservations, affinity and the policy in force. Times (`now`) are in s on one monotonic clock."""

    def __init__(
        self,
        policy: Policy,
        settings: StateSettings,
        *,
        router_id: str = "router",
        seed: int = 0,
        owns_all: bool = True,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.router_id = router_id
        self.degraded = False
        self.index = PrefixIndex(settings.max_keys)
        self.instances = InstanceRegistry(self.index)
        self.reservations = Reservations()
        self.prefill_observer = PrefillObserver(self.reservations)
        self.prefix_knowledge = PrefixKnowledge(
            self.index, self.instances, settings.stale_keys_s, self.prefill_observer
        )
        self.affinity = Affinity(settings.affinity_ttl_s)
        self.migrations = Migrations(settings.migration_window_s)
        self.views = Views(
            self.instances,
            self.prefix_knowledge,
            self.reservations,
            self.affinity,
            self.migrations,
            self.prefill_observer,
            settings.limits,
            settings.stale_report_s,
        )
        self.plans = Plans(
            self.instances,
            self.prefix_knowledge,
            self.reservations,
            self.prefill_observer,
            RecentDecisions(),
            settings.circuit,
        )
        self._reports = Reports(
            self.instances,
            self.index,
            self.prefix_knowledge,
            self.reservations,
            self.plans.finished,
            stale_report_s=settings.stale_report_s,
            lost_instance_s=settings.lost_instance_s,
        )
        # The seed is part of every decision's id, because a decision's randomness must follow from its id.
        self._id_prefix = f"{router_id}.{seed}" if seed else router_id
        self.held_requests = HeldRequests(
            settings.queue,
            settings.retry_after_s,
            self._decide,
            self._commit,
            self._serve_there,
            self.views.has_room,
            self.views.saturated,
            self.instances.members,
            self.instances.answers,
            self.reservations.eased,
            lambda: self.policy.without_holds(),
            self.prefill_observer.samples,
        )
        self.owned = OwnedPools(everything=owns_all)
        self._startup_gate = StartupGate(settings.startup_wait_s)
        self._decision_numbers: dict[str, int] = {}
        self._gone_pools = GonePools()
        self._work = UnfinishedWork(self._pool_of_event)
        self._decisions = 0

    @property
    def retry_at(self) -> float | None:
        """When to handle RetryDue, in s: what frees something for held requests is gathered for some ms. None: not, as things
        are. May be another after each event."""
        return self.held_requests.retry_at

    @property
    def unfinished(self) -> bool:
        """Whether a part of what was handled is still to be applied: GoOn has to follow, again and again, until none is."""
        return bool(self._work)

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and return what is to be done about it. The only mutator. Never raises for what a peer may send.

        An event that may have freed something also answers held requests. Of a long one the first part is applied; what depends
        on it waits (unfinished_work).
        """
        self._startup_gate.begin(now)
        effects: list[ev.Effect] = []
        if isinstance(event, ev.PoolLost):
            # Once this returns nothing more is placed in the pool, though its requests are forgotten in parts.
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
        return effects

    def _handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = self._apply(event, now)
        if len(self.held_requests.queue) and not self._work and not isinstance(event, EVENTS_WITHOUT_RETRY):
            self.prefix_knowledge.expire(now)
            effects = [*effects, *self._try_held(event, effects, now)]
        if not len(self.held_requests.queue):
            self.reservations.eased.clear()
        return effects

    def _try_held(self, event: ev.Event, effects: Sequence[ev.Effect], now: float) -> list[ev.Effect]:
        """Answer the held requests that the event may have freed something for."""
        if isinstance(event, ev.Tick):
            return self.held_requests.tick(now)
        if any(isinstance(effect, ev.FleetChanged) for effect in effects):
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
                return self._work.begin(event, self._gateway_hello(event, now))
            case ev.GatewayLost():
                self.reservations.lease(event.gateway_id, now + self.settings.gateway_lease_s)
                self.held_requests.drop_gateway(event.gateway_id)
                return []
            case ev.PlaceRequested():
                return self._place(event, now)
            case ev.StepDone():
                return self._step_done(event, now)
            case ev.StreamOpened():
                return self._stream_opened(event, now)
            case ev.FirstToken():
                return self.plans.first_token(event, now)
            case ev.Finished():
                return self._finished(event, now)
            case ev.GatewayTold(gateway_id, told):
                if self._is_anothers(told.request_id, gateway_id):
                    return [ev.ReportIgnored(told.request_id, gateway_id)]
                return self._apply(told, now)
            case ev.DrainsChanged():
                return [ev.FleetChanged()] if self.instances.drain(event.incarnations) else []
            case ev.OrdersChanged():
                return [ev.FleetChanged()] if self.instances.order(event.orders) else []
            case ev.StoreState():
                self.degraded = event.degraded
                return []
            case ev.PoolTaken():
                return self._work.begin(event, self._pool_taken(event, now))
            case ev.SessionsRead():
                return self._sessions_read(event, now)
            case ev.PoolLost():
                return self._work.begin(event, self._pool_lost(event.pool, now))
            case ev.GoOn():
                return []
            case ev.RetryDue() if self._work:
                return []
            case ev.RetryDue():
                self.prefix_knowledge.expire(now)
                return self.held_requests.retry_due(now)
            case ev.Tick():
                return self._tick(now)

    def explain(self, request: PlacementRequest, now: float, policy: Policy | None = None) -> Decision | ev.Refused:
        """What would be decided on `request` now, under `policy` (default: the one in force). Changes nothing.

        Only the pool's owner can tell: the others know nothing of its open requests and sessions.
        """
        if (refused := self._not_owned(request)) is not None:
            return refused
        verdict = self._decide(request, now, policy)
        if (late := self.held_requests.refused_as_late(request, verdict, "")) is not None:
            return late
        if isinstance(verdict, AllSaturated):
            queue = self.held_requests.queue
            before = sum(queue.count(verdict.pool, one) for one in Priority if one.level >= request.priority.level)
            why = f"it would be held or refused; {queue.count(verdict.pool)} wait, {before} of them {request.priority} or higher"
            return self.held_requests.refusal(request, verdict.pool, "", why)
        return replace(verdict, decision_id="dry-run") if isinstance(verdict, Decision) else verdict

    def what_if(self, decision: Decision, policy: Policy) -> Decision:
        """A recorded decision made again on its recorded view under `policy`. Changes nothing."""
        return redecide(decision, policy)

    def check_invariants(self) -> None:
        """Raise AssertionError when anything in here contradicts itself. For tests: costs a pass over everything."""
        self.index.check_invariants()
        self.instances.check_invariants()
        self.reservations.check_invariants()
        self.affinity.check_invariants()
        self.held_requests.queue.check_invariants()
        for held in self.held_requests.queue:
            reservation = self.reservations.get(held.request.request_id)
            assert (reservation.pending_tokens == 0) if held.previous_id and reservation else reservation is None, (
                "a hold reserves nothing"
            )
        self.migrations.check_invariants()
        self.prefix_knowledge.check_invariants(self.reservations)
        self.views.check_invariants()
        self.prefill_observer.check_invariants()
        for record in self.instances.records():
            assert record.info.block_size % KEY_TOKENS == 0
            if (trial := record.circuit.trial) != "":
                on_trial = self.reservations.get(trial)
                assert on_trial is not None, record.circuit
                assert on_trial.instance_id == record.info.instance_id, record.circuit
        for reservation in self.reservations if not self._work else ():
            assert self.owned.owns(reservation.pool), reservation
        for held in self.held_requests.queue:
            assert self.owned.owns(held.pool), held
        for decision in self.plans.decisions if not self._work else ():
            assert self.owned.owns(decision.pool), decision

    # ---- gateways ----

    def _gateway_hello(self, hello: ev.GatewayHello, now: float) -> Steps:
        announced = {stream.request.request_id: stream for stream in hello.open_streams}
        between = frozenset(held.request.request_id for held in self.held_requests.queue if held.previous_id)
        self.held_requests.drop_gateway(hello.gateway_id, keep=hello.waiting | between.intersection(announced))
        if self._startup_gate.expect(
            {*hello.known, *(one.instance_id for one in hello.open_streams)}, self.instances, now
        ):
            yield [ev.FleetChanged()]
        for reservation in [one for one in self.reservations if one.gateway_id == hello.gateway_id]:
            if reservation.request_id in announced:
                continue
            if reservation.request_id in hello.waiting:
                self.reservations.keep(reservation.request_id)
                yield []
            else:
                yield self.plans.finished(
                    ev.Finished(reservation.request_id, "CANCELLED", error="no gateway claims it"), now
                )
        for request_id, stream in announced.items():
            if request_id in between:
                continue
            if self._is_anothers(request_id, hello.gateway_id):
                yield [ev.ReportIgnored(request_id, hello.gateway_id)]
                continue
            known = self.reservations.get(request_id)
            done = known.prefilled_tokens if known and known.instance_id == stream.instance_id else 0
            yield self._announced(hello.gateway_id, stream, known.step_index if known else 0, done, now)

    def _finished(self, event: ev.Finished, now: float) -> list[ev.Effect]:
        self.held_requests.cancel(event.request_id)
        return self.plans.finished(event, now)

    def _is_anothers(self, request_id: str, gateway_id: str) -> bool:
        """Whether a request belongs to another gateway whose stream is open: no gateway's id is ever another's, and no request
        moves between gateways. The stream of a reservation with a lease is gone, or has not said hello since the pool was
        taken."""
        held = self.held_requests.queue.get(request_id)
        if held is not None and held.gateway_id not in ("", gateway_id):
            return True
        reservation = self.reservations.get(request_id)
        if reservation is None or reservation.lease_until is not None:
            return False
        return reservation.gateway_id not in ("", gateway_id)

    def _stream_opened(self, event: ev.StreamOpened, now: float) -> list[ev.Effect]:
        request_id = event.stream.request.request_id
        if self._is_anothers(request_id, event.gateway_id):
            return [ev.ReportIgnored(request_id, event.gateway_id)]
        known = self.reservations.get(request_id)
        index, noted = self.plans.served_alone(known, event.stream.instance_id) if known else (0, [])
        return [*noted, *self._announced(event.gateway_id, event.stream, index, 0, now)]

    def _announced(
        self, gateway_id: str, stream: ev.OpenStream, step_index: int, prefilled_tokens: int, now: float
    ) -> list[ev.Effect]:
        """A gateway runs a request there, wherever it was known to be."""
        request_id = stream.request.request_id
        known = self.reservations.get(request_id)
        pool = known.pool if known else self.instances.pool_of(stream.request.model)
        # It runs, also where its model has no instance any more: an answer to who asked before would be a second.
        self.held_requests.cancel(request_id)
        if not self.owned.owns(pool):
            return []
        new_tokens = max(stream.request.input_tokens - stream.cached_tokens, 0)
        reservation = Reservation(
            request_id=request_id,
            gateway_id=gateway_id,
            instance_id=stream.instance_id,
            decision_id=known.decision_id if known else "",
            input_tokens=stream.request.input_tokens,
            new_tokens=new_tokens,
            step_index=step_index,
            phase=stream.phase,
            prefilled_tokens=min(prefilled_tokens, new_tokens),
            pool=pool,
            cached_tokens=stream.request.input_tokens - new_tokens,
        )
        self.plans.put(reservation, now)
        self.prefix_knowledge.announced(reservation, now)
        return [ev.Reserved(reservation)]

    def _place(self, event: ev.PlaceRequested, now: float) -> list[ev.Effect]:
        request = event.request
        if self._is_anothers(request.request_id, event.gateway_id):
            why = f"another gateway has a request {request.request_id!r} open"
            return [ev.Refused(request.request_id, "ALREADY_EXISTS", why, gateway_id=event.gateway_id)]
        if (refused := self._not_serving(request, now)) is not None:
            # Asked again while it was held: this is its answer, so that a later one would be a second.
            self.held_requests.cancel(request.request_id)
            return [replace(refused, gateway_id=event.gateway_id)]
        if (refused := self._no_second_answer(request)) is not None:
            return [replace(refused, gateway_id=event.gateway_id)]
        ended: list[ev.Effect] = []
        if (again := self._placed_again(request, event.gateway_id)) is not None:
            if not self._would_answer_by_a_producer(again):
                return [again]
            # Its plan, which went with an earlier owner, was to have another instance answer. Nobody waits for that one's step.
            ended = self.plans.finished(
                ev.Finished(request.request_id, "CANCELLED", error="its instance only produces KV"), now
            )
            self.plans.decisions.drop(request.request_id)
        if not event.gateway_id:
            # Nobody would carry a plan on: the unary form gets one SERVE.
            request = replace(request, single_instance=True, sliceable_tokens=0)
        self.prefix_knowledge.expire(now)
        return [*ended, *self.held_requests.place(request, event.gateway_id, now)]

    def _placed_again(self, request: PlacementRequest, gateway_id: str) -> ev.Placed | None:
        """The answer that a request had before, if it had any."""
        if (reservation := self.reservations.get(request.request_id)) is not None:
            if (decision := self.plans.decision_of(reservation)) is not None:
                return self.plans.placed_effect(decision, reservation.step_index, gateway_id)
            # Placed by an earlier owner, whose answer may not have arrived: the same instance again, never a second one.
            return self._recovered(reservation, replace(request, keys=()), gateway_id)
        return None

    def _would_answer_by_a_producer(self, placed: ev.Placed) -> bool:
        """Whether the step is an answer of an instance that only produces KV, where others of its pool answer."""
        step, decision = placed.step, placed.decision
        return step.kind is StepKind.SERVE and self.instances.leaves_answers_to_others(
            step.instance_id, decision.pool, decision.request.model
        )

    def _no_second_answer(self, request: PlacementRequest) -> ev.Refused | None:
        """The refusal of a request that is not to be placed: its id is that of another request, or of one that has ended, or its
        time is over. None for one that is open or held, whose answer may be told once more, and for a new one."""
        request_id = request.request_id
        known, reservation = self.plans.decisions.get(request_id), self.reservations.get(request_id)
        if self._is_another(request, known, reservation):
            why = f"{request_id!r} is the id of a request for another model"
            return ev.Refused(request_id, "INVALID_ARGUMENT", why, asked_model=request.model)
        if reservation is not None or self.held_requests.queue.get(request_id) is not None:
            return None
        if known is not None:
            # Its placement reserves nothing any more; another one would be a second answer to one request.
            why = f"the request {request_id!r} has ended; another one needs another id"
            return ev.Refused(request_id, "ABORTED", why, pool=known.pool)
        if request.deadline_s is not None and request.deadline_s <= 0:
            return ev.Refused(request_id, "DEADLINE_EXCEEDED", "its gateway's deadline for the first step is over")
        return None

    def _is_another(self, request: PlacementRequest, known: Decision | None, reservation: Reservation | None) -> bool:
        """Whether the id of `request` is that of another request, which was for another model. Of a request that an earlier owner
        placed only the pool is known; names may have moved to another pool since."""
        held = self.held_requests.queue.get(request.request_id)
        first = held.request if held is not None else known.request if known is not None else None
        if first is not None and first.model == request.model:
            return False
        where = held or known or reservation
        if where is None:
            return False
        asked = self.instances.pool_of(request.model)
        if asked != where.pool:
            return bool(asked) or first is not None
        record = self.instances.get(reservation.instance_id) if reservation is not None else None
        # The instance may serve another model by now.
        if record is None or record.info.model != asked:
            return False
        return not self.instances.answers(record.info.instance_id, request.model)

    def _step_done(self, event: ev.StepDone, now: float) -> list[ev.Effect]:
        reservation = self.reservations.get(event.request_id)
        if reservation is not None and not self.owned.owns(reservation.pool):
            return []
        if reservation is not None and self.plans.decision_of(reservation) is None:
            # An earlier owner's plan, which went with it. What it has computed is there.
            pool = reservation.pool
            if event.ok or self.instances.leaves_answers_to_others(reservation.instance_id, pool, pool):
                why = "an earlier owner of the pool had planned this request"
                return [
                    replace(not_serving(event.request_id, reservation.pool, why), gateway_id=reservation.gateway_id)
                ]
            if event.step_index >= MAX_STEPS:
                return []
            request = PlacementRequest(event.request_id, reservation.pool, reservation.input_tokens)
            moved = replace(reservation, step_index=event.step_index + 1)
            self.plans.put(moved, now)
            return [ev.Reserved(moved), self._recovered(moved, request, moved.gateway_id)]
        unfinished_plan = self.plans.unfinished_plan(event)
        effects = self.plans.step_done(event, now)
        reservation = self.reservations.get(event.request_id)
        if unfinished_plan is None or reservation is None:
            return effects
        request = unfinished_plan.request
        rest = replace(
            request,
            keys=self.prefix_knowledge.keys_of(event.request_id),
            age_s=request.age_s + max(now - unfinished_plan.view.now, 0.0),
            deadline_s=event.deadline_s,
        )
        if self.instances.pool_of(rest.model) != unfinished_plan.pool:
            # The name belongs to another pool now, which another router may own.
            return [*effects, *self._serve_there(rest, reservation.gateway_id, now)]
        self.prefix_knowledge.expire(now)
        seen = self.views.view(rest, unfinished_plan.pool, 0, now).find(reservation.instance_id)
        if seen is None or seen.cached_tokens < unfinished_plan.result.steps[-1].prefix_tokens:
            # What was computed is not known to be there: the next slice would be the same again, and so for ever.
            rest = replace(rest, sliceable_tokens=0)
        return [*effects, *self.held_requests.place(rest, reservation.gateway_id, now, unfinished_plan.decision_id)]

    def _recovered(self, reservation: Reservation, request: PlacementRequest, gateway_id: str) -> ev.Placed:
        steps_done = min(reservation.step_index, MAX_STEPS)
        restored = recovered_decision(reservation, request, self.policy.ref(), steps_done)
        self.plans.decisions.put(restored)
        return self.plans.placed_effect(restored, steps_done, gateway_id)

    def _serve_there(self, request: PlacementRequest, gateway_id: str, now: float) -> list[ev.Effect]:
        return self.plans.serve_there(request.request_id, "the rest could not be placed anew", now)

    def _commit(self, decision: Decision, gateway_id: str, now: float) -> list[ev.Effect]:
        request = decision.request
        self._decisions += 1
        self._decision_numbers[decision.pool] = decision.view.decision_number + 1
        # The keys did their work; keeping them would pin megabytes for each remembered decision.
        decision = replace(decision, request=replace(request, keys=()))
        lease_until = None if gateway_id else now + self.settings.place_lease_s
        effects: list[ev.Effect] = [ev.DecisionMade(decision)]
        index = 0
        if decision.previous_id and (before := self.plans.decisions.get(request.request_id)) is not None:
            # The plan goes on: its steps are counted from its beginning.
            steps = (*before.result.steps, *decision.result.steps)
            index = len(before.result.steps)
            decision = replace(decision, result=replace(decision.result, steps=steps))
        else:
            first = decision.view.find(decision.result.steps[0].instance_id)
            assert first is not None
            if decision.held_s > 0:
                self.held_requests.retry_after.waited(decision.pool, request.priority, decision.held_s, now)
            if mean_work := self.prefill_observer.count_request(decision.pool, first.new_tokens, first.cached_tokens):
                effects.append(ev.MeanWorkSet(mean_work, decision.pool))
        effects += self.plans.reserve(decision, index, gateway_id, lease_until, request.keys, now)
        session = request.session
        # Most prompts come once, and nobody need remember where: the store gets the sessions that come back.
        if session and self.affinity.assign(decision.pool, session, decision.next_owner, now):
            effects.append(ev.SessionOwnerSet(session, decision.next_owner, decision.pool))
        if decision.mode == "OFFLOAD":
            self.migrations.record(decision.instance_id, now)
            self._drop_snapshots((decision.instance_id,))
        self.plans.decisions.put(decision)
        self.plans.decisions.evict(len(self.reservations), lambda one: self.reservations.get(one) is not None)
        return [*effects, self.plans.placed_effect(decision, index, gateway_id)]

    def _not_serving(self, request: PlacementRequest, now: float) -> ev.Refused | None:
        if (refused := self._not_owned(request)) is not None:
            return refused
        pool = self.instances.pool_of(request.model)
        if self.starting(now, pool):
            why = "this router has just started and does not know the fleet yet"
            return not_serving(request.request_id, pool, why)
        return None

    def _not_owned(self, request: PlacementRequest) -> ev.Refused | None:
        pool = self.instances.pool_of(request.model)
        if pool and not self.owned.owns(pool):
            return not_serving(request.request_id, pool, f"this router does not own {pool!r}")
        return None

    def starting(self, now: float, pool: str = "") -> bool:
        """Whether placements of `pool` (empty: of the whole fleet) wait for the first reports after the start."""
        return self._startup_gate.starting(pool, self.instances, now)

    # ---- operators, the store and time ----

    def _pool_taken(self, event: ev.PoolTaken, now: float) -> Steps:
        waited = self.held_requests.drop_pool(event.pool, f"{event.pool!r} was owned by another router for a moment")
        self.owned.take(event.pool)
        self._close_circuits(event.pool)
        self.prefill_observer.take_over(event.pool, event.mean_work)
        if not self.instances.members(event.pool, event.pool):
            self._gone_pools.left((event.pool,), now)
        yield [*waited, ev.FleetChanged()]
        yield from self._forget_requests(event.pool, now)
        for reservation in event.reservations:
            if not self.owned.owns(event.pool):
                return
            # Its gateway has not spoken to this replica yet: it gets the lease to do so.
            lease_s = self.settings.gateway_lease_s if reservation.gateway_id else self.settings.place_lease_s
            reservation = replace(reservation, lease_until=now + lease_s, pool=event.pool)
            self.held_requests.cancel(reservation.request_id)
            # What is known here of a request of that id was decided in another pool.
            ended = self.plans.finished(
                ev.Finished(reservation.request_id, "CANCELLED", error="another router has placed it"), now
            )
            self.plans.decisions.drop(reservation.request_id)
            self.plans.put(reservation, now)
            self.prefix_knowledge.announced(reservation, now)
            yield ended

    def _pool_of_event(self, event: ev.Event) -> str | None:
        """The pool of a request that an event is about; None where nothing is known of the request."""
        asked: PlacementRequest | None = None
        match event:
            case ev.PlaceRequested():
                asked = event.request
            case ev.StreamOpened():
                asked = event.stream.request
            case ev.StepDone() | ev.FirstToken() | ev.Finished():
                request_id = event.request_id
            case ev.GatewayTold():
                request_id = event.told.request_id
            case _:
                return None
        request_id = asked.request_id if asked is not None else request_id
        known = (
            self.reservations.get(request_id)
            or self.held_requests.queue.get(request_id)
            or self.plans.decisions.get(request_id)
        )
        if known is not None:
            return known.pool
        return self.instances.pool_of(asked.model) if asked is not None else None

    def _sessions_read(self, event: ev.SessionsRead, now: float) -> list[ev.Effect]:
        if self.owned.owns(event.pool):
            for session, owner in event.sessions.items():
                self.affinity.recall(event.pool, session, owner, now)
        return []

    def _stop_owning(self, pool: str) -> list[ev.Effect]:
        self.owned.lose(pool)
        why = f"this router does not own {pool!r} any more"
        return [*self.held_requests.drop_pool(pool, why), ev.FleetChanged()]

    def _pool_lost(self, pool: str, now: float) -> Steps:
        self._close_circuits(pool)
        yield [ev.FleetChanged()]
        yield from self._forget_requests(pool, now)

    def _forget_requests(self, pool: str, now: float) -> Steps:
        remaining = self.reservations.of_pool(pool)
        while remaining:
            # As it is by now: its lease may have ended meanwhile.
            known = self.reservations.get(remaining.pop().request_id)
            if known is not None and known.pool == pool:
                self.plans.forget(known, now)
                yield []
        for _ in self.plans.decisions.forget_pool(pool):
            yield []

    def _close_circuits(self, pool: str) -> None:
        """Another router knows by now, or will, how the pool's instances do. Mutates; the sessions are forgotten, too."""
        self.affinity.forget_pool(pool)
        for record in self.instances.members(pool, pool):
            self.migrations.drop(record.info.instance_id)
            record.circuit = Circuit()
            record.candidate_snapshot = None
            self.instances.refresh(record)

    def _tick(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for reservation in self.reservations.expired(now)[:ENDS_AT_ONCE]:
            effects += self.plans.finished(
                ev.Finished(reservation.request_id, "CANCELLED", error="its lease ended"), now
            )
        self.index.sweep()
        effects += self._reports.tick(now)
        self.affinity.expire(now)
        self._drop_snapshots(self.migrations.expire(now))
        self.prefix_knowledge.expire(now)
        self.held_requests.expire(now)
        return effects + self._forget_gone_pools(now)

    def _forget_gone_pools(self, now: float) -> list[ev.Effect]:
        self._gone_pools.left(self.instances.pools_left(), now)
        due = self._gone_pools.due(
            lambda pool: bool(self.instances.members(pool, pool)),
            lambda pool: bool(self.reservations.of_pool(pool) or self.held_requests.queue.count(pool)),
            now,
        )
        for pool in due:
            self.prefill_observer.forget_pool(pool)
            self.views.forget_pool(pool)
            self._decision_numbers.pop(pool, None)
        return [ev.PoolForgotten(pool) for pool in due]

    # ---- deciding ----

    def _decide(
        self, request: PlacementRequest, now: float, policy: Policy | None
    ) -> Decision | ev.Refused | AllSaturated:
        pool = self.instances.pool_of(request.model)
        if not pool:
            return ev.Refused(request.request_id, "NOT_FOUND", f"no instance serves a model {request.model!r}")
        policy = policy or self.policy
        number = self._decision_numbers.get(pool, 0)
        view = self.views.view(request, pool, number, now, few=policy.looks_at_few)
        if not view.eligible():
            if any(one.excluded == SATURATED and not one.produces_only for one in view.candidates):
                return AllSaturated(pool, view)
            return ev.Refused(
                request.request_id,
                "UNAVAILABLE",
                f"no instance of {pool!r} can take the request now",
                self.settings.retry_after_s,
                pool=pool,
            )
        decision_id = f"{self._id_prefix}-{self._decisions + 1}"
        return decide(policy, request, pool, view, rng_of(decision_id), decision_id, degraded=self.degraded)

    def _drop_snapshots(self, instance_ids: Iterable[str]) -> None:
        for instance_id in instance_ids:
            if (record := self.instances.get(instance_id)) is not None:
                record.candidate_snapshot = None
