"""The router's whole mind: events in, effects out. Pure: no I/O, no clock, no global randomness.

`RouterState.handle` is the only mutator. Picking an instance and reserving it are one synchronous call, so two big prompts that
arrive together cannot both see the same free instance. `explain` and `what_if` run the same decision code and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from services.common.keys import KEY_TOKENS
from services.router import events as ev
from services.router.affinity import Affinity
from services.router.circuit import Circuit, CircuitSettings
from services.router.domain import Decision, PlacementRequest
from services.router.fleet import Fleet
from services.router.holding import Full, Holding, not_now
from services.router.migrations import Migrations
from services.router.ownership import OwnedPools
from services.router.plans import Plans
from services.router.policy.base import Policy, decide
from services.router.prefills import Prefills
from services.router.prefix_index import PrefixIndex
from services.router.queue import QueueSettings
from services.router.remembered import Remembered
from services.router.replay import decide_again, rng_of
from services.router.reports import Reports
from services.router.reservations import Reservation, Reservations
from services.router.restored import restored_decision
from services.router.saturation import SATURATED, Limits
from services.router.truth import Truth
from services.router.views import Views
from services.router.warm_up import WarmUp

# After these no held request is nearer to its placement; or (PoolTaken) none may be placed before the gateways return.
FREES_NOTHING = (ev.PlaceRequested, ev.KeysReported, ev.GatewayLost, ev.StoreState, ev.PoolTaken, ev.PoolLost)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Times in s. `remembered_requests` bounds how many ended requests are still recognised when they are sent again, `max_keys`
    the index. Reported figures count for `stale_report_s`, keys for `stale_keys_s` after the agent's last word."""

    affinity_ttl_s: float = 3_600.0
    gateway_lease_s: float = 15.0
    place_lease_s: float = 600.0
    lost_instance_s: float = 30.0
    retry_after_s: float = 1.0
    migration_window_s: float = 10.0
    remembered_requests: int = 20_000
    stale_report_s: float = 5.0
    stale_keys_s: float = 10.0
    max_keys: int = 8_000_000
    approximate_keys: int = 16_384
    limits: Limits = field(default_factory=Limits)
    queue: QueueSettings = field(default_factory=QueueSettings)
    warm_up_s: float = 0.0
    circuit: CircuitSettings = field(default_factory=CircuitSettings)


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
        self.fleet = Fleet(self.index)
        self.reservations = Reservations()
        self.prefills = Prefills(self.reservations)
        self.truth = Truth(self.index, self.fleet, settings.stale_keys_s, settings.approximate_keys, self.prefills)
        self.affinity = Affinity(settings.affinity_ttl_s)
        self.migrations = Migrations(settings.migration_window_s)
        self.views = Views(
            self.fleet,
            self.truth,
            self.reservations,
            self.affinity,
            self.migrations,
            self.prefills,
            settings.limits,
            settings.stale_report_s,
        )
        self.plans = Plans(
            self.fleet,
            self.truth,
            self.reservations,
            self.prefills,
            Remembered(settings.remembered_requests),
            settings.circuit,
        )
        self._reports = Reports(
            self.fleet,
            self.index,
            self.truth,
            self.reservations,
            self.plans.finished,
            stale_report_s=settings.stale_report_s,
            lost_instance_s=settings.lost_instance_s,
        )
        # The seed is part of every decision's id, because a decision's randomness must follow from its id.
        self._id_prefix = f"{router_id}.{seed}" if seed else router_id
        self.holding = Holding(
            settings.queue,
            settings.retry_after_s,
            self._decide,
            self._commit,
            self._serve_there,
            self.views.has_room,
            lambda: self.policy.eager(),
        )
        self.owned = OwnedPools(everything=owns_all)
        self._warm_up = WarmUp(settings.warm_up_s)
        self._turn: dict[str, int] = {}
        self._decisions = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and return what is to be done about it. The only mutator. Never raises for what a peer may send.

        An event that may have freed something also answers held requests.
        """
        self._warm_up.begin(now)
        effects = self._apply(event, now)
        if len(self.holding.queue) and not isinstance(event, FREES_NOTHING):
            self.truth.expire(now)
            effects = [*effects, *self.holding.retry(now, thorough=isinstance(event, ev.Tick))]
        return effects

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
                return self._gateway_hello(event, now)
            case ev.GatewayLost():
                self.reservations.lease(event.gateway_id, now + self.settings.gateway_lease_s)
                self.holding.drop_gateway(event.gateway_id)
                return []
            case ev.PlaceRequested():
                return self._place(event, now)
            case ev.StepDone():
                return self._step_done(event, now)
            case ev.FirstToken():
                return self.plans.first_token(event, now)
            case ev.Finished():
                self.holding.cancel(event.request_id)
                return self.plans.finished(event, now)
            case ev.Drained():
                return [ev.FleetChanged()] if self.fleet.drain(event.incarnations) else []
            case ev.StoreState():
                self.degraded = event.degraded
                return []
            case ev.PoolTaken():
                return self._pool_taken(event, now)
            case ev.PoolLost():
                self.owned.lose(event.pool)
                self._forget_pool(event.pool)
                why = f"this router does not own {event.pool!r} any more"
                return [*self.holding.drop_pool(event.pool, why), ev.FleetChanged()]
            case ev.Tick():
                return self._tick(now)

    def explain(self, request: PlacementRequest, now: float, policy: Policy | None = None) -> Decision | ev.Refused:
        """What would be decided on `request` now, under `policy` (default: the one in force). Changes nothing.

        Only the pool's owner can tell: the others know nothing of its open requests and sessions.
        """
        if (refused := self._not_owned(request)) is not None:
            return refused
        verdict = self._decide(request, now, policy)
        if isinstance(verdict, Full):
            return self.holding.refusal(request, verdict.pool, "", "it would be held or refused")
        return replace(verdict, decision_id="dry-run") if isinstance(verdict, Decision) else verdict

    def what_if(self, decision: Decision, policy: Policy) -> Decision:
        """A recorded decision made again on its recorded view under `policy`. Changes nothing."""
        return decide_again(decision, policy)

    def check_invariants(self) -> None:
        """Raise AssertionError when anything in here contradicts itself. For tests: costs a pass over everything."""
        self.index.check_invariants()
        self.reservations.check_invariants()
        self.affinity.check_invariants()
        self.holding.queue.check_invariants()
        for held in self.holding.queue:
            reservation = self.reservations.get(held.request.request_id)
            assert (reservation.pending_tokens == 0) if held.after and reservation else reservation is None, (
                "a hold reserves nothing"
            )
        self.migrations.check_invariants()
        self.truth.check_invariants(self.reservations)
        self.views.check_invariants()
        self.prefills.check_invariants()
        for record in self.fleet.records():
            assert record.info.block_size % KEY_TOKENS == 0
        for reservation in self.reservations:
            assert self.owned.owns(reservation.pool), reservation
        for held in self.holding.queue:
            assert self.owned.owns(held.pool), held
        for decision in self.plans.decisions:
            assert self.owned.owns(decision.pool), decision

    # ---- gateways ----

    def _gateway_hello(self, hello: ev.GatewayHello, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        announced = {stream.request.request_id: stream for stream in hello.open_streams}
        between = frozenset(held.request.request_id for held in self.holding.queue if held.after)
        self.holding.drop_gateway(hello.gateway_id, keep=hello.waiting | between.intersection(announced))
        if self._warm_up.expect({*hello.known, *(one.instance_id for one in hello.open_streams)}, self.fleet, now):
            effects.append(ev.FleetChanged())
        for reservation in list(self.reservations):
            if reservation.gateway_id != hello.gateway_id or reservation.request_id in announced:
                continue
            if reservation.request_id in hello.waiting:
                self.reservations.keep(reservation.request_id)
            else:
                effects += self.plans.finished(
                    ev.Finished(reservation.request_id, "CANCELLED", error="no gateway claims it"), now
                )
        for request_id, stream in announced.items():
            known = self.reservations.get(request_id)
            pool = known.pool if known else self.fleet.pool_of(stream.request.model)
            if not self.owned.owns(pool) or request_id in between:
                continue
            new_tokens = max(stream.request.input_tokens - stream.cached_tokens, 0)
            done = known.prefilled_tokens if known and known.instance_id == stream.instance_id else 0
            reservation = Reservation(
                request_id=request_id,
                gateway_id=hello.gateway_id,
                instance_id=stream.instance_id,
                decision_id=known.decision_id if known else "",
                input_tokens=stream.request.input_tokens,
                new_tokens=new_tokens,
                step_index=known.step_index if known else 0,
                phase=stream.phase,
                prefilled_tokens=min(done, new_tokens),
                pool=pool,
                cached_tokens=stream.request.input_tokens - new_tokens,
            )
            self.holding.cancel(request_id)
            if known is not None:
                self.prefills.gone(known, now)
            self.reservations.put(reservation)
            self.truth.announced(reservation, now)
            effects.append(ev.Reserved(reservation))
        return effects

    def _place(self, event: ev.PlaceRequested, now: float) -> list[ev.Effect]:
        request = event.request
        if (refused := self._not_now(request, now)) is not None:
            return [replace(refused, gateway_id=event.gateway_id)]
        if (known := self.plans.decisions.get(request.request_id)) is not None:
            open_one = self.reservations.get(request.request_id)
            return [self.plans.told(known, open_one.step_index if open_one else 0, event.gateway_id)]
        if (reservation := self.reservations.get(request.request_id)) is not None:
            # Placed by an earlier owner, whose answer may not have arrived: the same instance again, never a second one.
            return [self._restored(reservation, replace(request, keys=()), event.gateway_id)]
        self.truth.expire(now)
        return self.holding.place(request, event.gateway_id, now)

    def _step_done(self, event: ev.StepDone, now: float) -> list[ev.Effect]:
        reservation = self.reservations.get(event.request_id)
        if reservation is not None and self.plans.decisions.get(event.request_id) is None:
            # An earlier owner's plan, which went with it. What it has computed is there.
            if event.ok:
                why = "an earlier owner of the pool had planned this request"
                return [replace(not_now(event.request_id, reservation.pool, why), gateway_id=reservation.gateway_id)]
            request = PlacementRequest(event.request_id, reservation.pool, reservation.input_tokens)
            moved = replace(reservation, step_index=event.step_index + 1)
            self.reservations.put(moved)
            return [ev.Reserved(moved), self._restored(moved, request, moved.gateway_id, moved.step_index)]
        goes_on = self.plans.goes_on(event)
        effects = self.plans.step_done(event, now)
        reservation = self.reservations.get(event.request_id)
        if goes_on is None or reservation is None:
            return effects
        request = goes_on.request
        rest = replace(
            request,
            keys=self.truth.keys_of(event.request_id),
            age_s=request.age_s + max(now - goes_on.view.now, 0.0),
            deadline_s=None,
        )
        self.truth.expire(now)
        seen = self.views.view(rest, goes_on.pool, 0, now).find(reservation.instance_id)
        if seen is None or seen.cached_tokens < goes_on.ruling.steps[-1].prefix_tokens:
            # What was computed is not known to be there: the next slice would be the same again, and so for ever.
            rest = replace(rest, sliceable_tokens=0)
        return [*effects, *self.holding.place(rest, reservation.gateway_id, now, goes_on.decision_id)]

    def _restored(
        self, reservation: Reservation, request: PlacementRequest, gateway_id: str, steps_done: int = 0
    ) -> ev.Placed:
        restored = restored_decision(reservation, request, self.policy.ref(), steps_done)
        self.plans.decisions.put(restored)
        return self.plans.told(restored, steps_done, gateway_id)

    def _serve_there(self, request: PlacementRequest, gateway_id: str, now: float) -> list[ev.Effect]:
        return self.plans.serve_there(request.request_id, "the rest could not be placed anew", now)

    def _commit(self, decision: Decision, gateway_id: str, now: float) -> list[ev.Effect]:
        request = decision.request
        self._decisions += 1
        self._turn[decision.pool] = decision.view.turn + 1
        # The keys did their work; keeping them would pin megabytes for each remembered decision.
        decision = replace(decision, request=replace(request, keys=()))
        lease_until = None if gateway_id else now + self.settings.place_lease_s
        effects: list[ev.Effect] = [ev.Decided(decision)]
        index = 0
        if decision.after and (before := self.plans.decisions.get(request.request_id)) is not None:
            # The plan goes on: its steps are counted from its beginning.
            steps = (*before.ruling.steps, *decision.ruling.steps)
            index = len(before.ruling.steps)
            decision = replace(decision, ruling=replace(decision.ruling, steps=steps))
        else:
            first = decision.view.find(decision.ruling.steps[0].instance_id)
            assert first is not None
            if usual := self.prefills.came(decision.pool, first.new_tokens, first.cached_tokens):
                effects.append(ev.UsualSet(usual, decision.pool))
        effects += self.plans.reserve(decision, index, gateway_id, lease_until, request.keys, now)
        if session := request.session:
            self.affinity.assign(decision.pool, session, decision.next_owner, now)
            effects.append(ev.OwnerSet(session, decision.next_owner, decision.pool))
        if decision.mode == "OFFLOAD":
            self.migrations.record(decision.instance_id, now)
            self._unsee((decision.instance_id,))
        self.plans.decisions.put(decision)
        self.plans.decisions.bound(len(self.reservations), lambda one: self.reservations.get(one) is not None)
        return [*effects, self.plans.told(decision, index, gateway_id)]

    def _not_now(self, request: PlacementRequest, now: float) -> ev.Refused | None:
        if (refused := self._not_owned(request)) is not None:
            return refused
        pool = self.fleet.pool_of(request.model)
        if self.cold(now, pool):
            why = "this router has just started and does not know the fleet yet"
            return not_now(request.request_id, pool, why)
        return None

    def _not_owned(self, request: PlacementRequest) -> ev.Refused | None:
        pool = self.fleet.pool_of(request.model)
        if pool and not self.owned.owns(pool):
            return not_now(request.request_id, pool, f"this router does not own {pool!r}")
        return None

    def cold(self, now: float, pool: str = "") -> bool:
        """Whether placements of `pool` (empty: of the whole fleet) wait for the first reports after the start."""
        return self._warm_up.cold(pool, self.fleet, now)

    # ---- operators, the store and time ----

    def _pool_taken(self, event: ev.PoolTaken, now: float) -> list[ev.Effect]:
        waited = self.holding.drop_pool(event.pool, f"{event.pool!r} was owned by another router for a moment")
        self.owned.take(event.pool)
        self._forget_pool(event.pool)
        for reservation in event.reservations:
            # Its gateway has not spoken to this replica yet: it gets the lease to do so.
            lease_s = self.settings.gateway_lease_s if reservation.gateway_id else self.settings.place_lease_s
            reservation = replace(reservation, lease_until=now + lease_s, pool=event.pool)
            self.holding.cancel(reservation.request_id)
            self.reservations.put(reservation)
            self.truth.announced(reservation, now)
        for session, owner in event.affinity.items():
            self.affinity.assign(event.pool, session, owner, now)
        self.prefills.taken(event.pool, event.usual)
        return [*waited, ev.FleetChanged()]

    def _forget_pool(self, pool: str) -> None:
        for reservation in self.reservations.of_pool(pool):
            self.reservations.release(reservation.request_id)
            self.truth.progress.close(reservation.request_id)
        self.plans.decisions.forget_pool(pool)
        self.affinity.forget_pool(pool)
        for record in self.fleet.members(pool, pool):
            self.migrations.drop(record.info.instance_id)
            self.prefills.forget(record.info.instance_id)
            record.circuit = Circuit()
            record.sight = None

    def _tick(self, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for reservation in self.reservations.expired(now):
            effects += self.plans.finished(
                ev.Finished(reservation.request_id, "CANCELLED", error="its lease ended"), now
            )
        effects += self._reports.tick(now)
        self.affinity.expire(now)
        self._unsee(self.migrations.expire(now))
        self.truth.expire(now)
        return effects

    # ---- deciding ----

    def _decide(self, request: PlacementRequest, now: float, policy: Policy | None) -> Decision | ev.Refused | Full:
        pool = self.fleet.pool_of(request.model)
        if not pool:
            return ev.Refused(request.request_id, "NOT_FOUND", f"no instance serves a model {request.model!r}")
        view = self.views.view(request, pool, self._turn.get(pool, 0), now)
        if not view.eligible():
            if any(candidate.excluded == SATURATED for candidate in view.candidates):
                return Full(pool, view)
            return ev.Refused(
                request.request_id,
                "UNAVAILABLE",
                f"no instance of {pool!r} can take the request now",
                self.settings.retry_after_s,
            )
        decision_id = f"{self._id_prefix}-{self._decisions + 1}"
        policy = policy or self.policy
        return decide(policy, request, pool, view, rng_of(decision_id), decision_id, degraded=self.degraded)

    def _unsee(self, instance_ids: Iterable[str]) -> None:
        for instance_id in instance_ids:
            if (record := self.fleet.get(instance_id)) is not None:
                record.sight = None
