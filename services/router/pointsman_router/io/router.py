"""Connects the router's pure state with the clock, the decision log, the store and the open streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog
from msgspec.structs import replace

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.io.batch_queue import BatchQueue
from pointsman_common.io.line_file import LostLines
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.gateway_claims import GatewayClaims
from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.instances.absent_engines import AbsentEngine, AbsentEngines
from pointsman_router.core.instances.engine_life import LifeSettings
from pointsman_router.core.instances.instance_orders import OrderChange
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.key_limit_accounts import KeyLimitAccounts
from pointsman_router.core.ownership import Owner
from pointsman_router.core.placement_types import InstanceInfo, PlacementRequest
from pointsman_router.core.policy.base import Policy, SettingError
from pointsman_router.core.policy.registry import POLICIES, Policies, make_policy
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.requests.refusals import not_serving
from pointsman_router.core.router_state import RouterState, StateSettings
from pointsman_router.io.convert import gateway_messages, key_limit_messages
from pointsman_router.io.convert.operator_messages import policy_etag
from pointsman_router.io.convert.sent_fleet import SentFleet
from pointsman_router.io.operator_config import MAX_DRAINS, OperatorConfig, contradictions
from pointsman_router.io.settings import RouterSettings
from pointsman_router.io.store.redis_store import RedisStore
from pointsman_router.io.store.store import MemoryStore, Store, StoreEffect
from pointsman_router.io.store.stored_json import decoded
from pointsman_router.io.telemetry.decision_log import DecisionLog
from pointsman_router.io.telemetry.event_metrics import EventMetrics
from pointsman_router.io.telemetry.history_sampler import keep_history
from pointsman_router.io.telemetry.spans import PlacementSpans
from pointsman_router.io.telemetry.state_metrics import StateCollector

if TYPE_CHECKING:
    from pointsman_common.io.otlp import Tracer

log = structlog.get_logger()

# Interval between two ticks, s.
TICK_S = 0.5
# Pause between two parts of a sweep of the index, s. A part takes about a tenth of that.
SWEEP_PAUSE_S = 0.02
# Minimum delay of a timer for held requests, s. A timer may fire a part of a millisecond early; with a shorter delay, setting it
# again would busy-wait.
LEAST_TIMER_S = 0.001
# Maximum number of order changes that are logged one by one. A router that starts receives all orders at once.
MAX_LOGGED_CHANGES = 100
# Number of changes of pools' policies that are listed.
MAX_POLICY_CHANGES = 100
VERSION = metadata.version("pointsman")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ReplicaInfo(msgspec.Struct, omit_defaults=True):
    """What a replica reports to the others with each heartbeat. None and "" also mean: not reported."""

    policy: tuple[str, dict[str, float | bool | str]] | None = None  # name and settings
    console_url: str = ""  # empty: no console
    version: str = ""  # of the package pointsman
    started_at: Annotated[float, msgspec.Meta(ge=0, lt=1e11)] | None = None  # unix s
    open_requests: _Count | None = None  # placed and not finished, in the pools that it owns
    held_requests: _Count | None = None  # parked ones are not counted
    gateways: _Count | None = None  # number of gateways with an open stream to it
    policy_problem: str = ""  # why it does not place by the fleet's policy

    @classmethod
    def read(cls, text: str) -> ReplicaInfo:
        """Parse another replica's report. Return an empty one if it cannot be read."""
        try:
            return decoded(text or "{}", cls)
        except msgspec.MsgspecError:
            return cls()


class PolicyChanged(Exception):
    """The policy in force, identified by `etag`, is not the one that the caller wants to replace."""

    def __init__(self, etag: str) -> None:
        super().__init__(etag)
        self.etag = etag


class AgentStream:
    """The queue of replies on one agent's stream. The stream ends after a refusal, or after None, which means that the router
    stops. `instance_id` is the instance that the stream reports; it is empty before the hello."""

    def __init__(self) -> None:
        self.instance_id = ""
        self.replies: asyncio.Queue[agent_pb2.ReportResponse | ev.RefuseReport | None] = asyncio.Queue()


class GatewayStream:
    """The queue of messages to one gateway. `url` and `address` are those of fleet_pb2.Gateway."""

    def __init__(self, url: str = "", address: str = "") -> None:
        self.url = url
        self.address = address
        self.batch_queue: BatchQueue[placement_pb2.SessionResponse] = BatchQueue()

    def send(self, **kind: object) -> None:
        """Queue a SessionResponse with this one field."""
        self.batch_queue.put(placement_pb2.SessionResponse(**kind))  # type: ignore[arg-type]


class Router:
    """The state, the decision log, the store and the streams of one router process. All methods must be called on its event
    loop."""

    def __init__(self, settings: RouterSettings, policies: Policies = POLICIES) -> None:
        """`policies`: those that operators can choose. Raises InvalidSetting if the policy at start is none of them."""
        self.settings = settings
        self.policies = policies
        self.telemetry = EventMetrics()
        self.tracer: Tracer | None = None
        self.spans: PlacementSpans | None = None
        if settings.otlp_endpoint:
            from pointsman_common.io.otlp import Tracer

            self.tracer = Tracer(settings.otlp_endpoint, "router", settings.router_id)
            self.spans = PlacementSpans(self.tracer.send)
        self.decisions = DecisionLog(
            settings.decision_log_size, settings.decision_log_file, settings.decision_log_max_mb << 20
        )
        self.state = RouterState(
            settings.initial_policy(policies),
            StateSettings(
                affinity_ttl_s=settings.affinity_ttl_s,
                gateway_lease_s=settings.gateway_lease_s,
                lost_instance_s=settings.lost_instance_s,
                limits=SaturationLimits(settings.max_requests_per_instance, settings.max_kv_usage),
                queue=QueueSettings(
                    size=settings.queue_size,
                    timeout_s=settings.queue_timeout_s,
                    tenant_share=settings.queue_tenant_share,
                    fair=settings.queue_fair,
                    expiry=settings.hold_expiry,
                ),
                admission=AdmissionSettings(settings.session_admission, standard_s=settings.admission_standard_s),
                life=LifeSettings(settings.circuit_failures),
                migration_window_s=settings.migration_window_s,
                stale_report_s=settings.stale_report_s,
                stale_keys_s=settings.stale_keys_s,
                max_keys=settings.max_keys,
                startup_wait_s=settings.startup_wait_s,
            ),
            router_id=settings.router_id,
            owns_all=settings.redis_address is None,
        )
        self.history = FleetHistory(time.monotonic())
        # When another policy began to decide for a pool, unix s; the latest last.
        self.policy_changes: deque[tuple[float, ev.PolicyTaken]] = deque(maxlen=MAX_POLICY_CHANGES)
        self.agents: dict[int, AgentStream] = {}
        self.absent_engines = AbsentEngines()
        self.gateways: dict[str, GatewayStream] = {}
        self.gateway_claims = GatewayClaims(settings.gateway_lease_s)
        self.key_limit_accounts = KeyLimitAccounts()
        # Request id -> callers of `placed` that wait for the answer -> the model that each asked for.
        self._callers: dict[str, dict[asyncio.Future[ev.Placed | ev.Refused], str]] = {}
        self.store: Store
        self._ready_watchers: list[Callable[[bool], None]] = []
        self._ready = False
        self._goes_on = False  # the next turn of the event loop is scheduled to apply unfinished work
        self._retry_at = math.inf  # when the next timer for held requests fires, monotonic s
        self._sent_fleet = SentFleet(settings.ownerless_timeout_s)
        self._fleet_untold = False  # the fleet or an owner has changed, and _tell_fleet has not run since
        self._logged_shared_names: dict[str, list[str]] = {}
        self._operator_config = OperatorConfig()  # as last received from the store
        self._policy_problem = ""  # why the policy in the operator config is not in force here
        if settings.redis_address is not None:
            self.store = RedisStore(
                settings.redis_address,
                router_id=settings.router_id,
                fleet=settings.fleet,
                lease_s=settings.owner_lease_s,
                settle_s=settings.settle_s,
                affinity_ttl_s=settings.affinity_ttl_s,
                on_event=self.submit,
                on_owners=self._tell_fleet_soon,
                snapshot=self._snapshot,
                merge_config=merged_operator_configs,
            )
        else:
            self.store = MemoryStore(settings.router_id)
        self.telemetry.registry.register(LostLines("router", lambda: self.decisions.lost))
        self.store.replica_info = self._replica_info
        self.store.on_operator_config = self._take_operator_config
        self.console_url = ""
        self.started_at = time.time()
        self.telemetry.registry.register(StateCollector(self.state, lambda: self._ready, self.absent))
        self.telemetry.lost_replicas.set_function(lambda: len(self.store.lost_replicas()))
        self.telemetry.accounted_keys.set_function(lambda: len(self.key_limit_accounts))

    @property
    def ready(self) -> bool:
        """Whether this replica places requests: the known instances have reported, or the start-up wait has passed."""
        return self._ready

    def on_ready(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` with the value of `ready` now, and whenever the value changes."""
        self._ready_watchers.append(watcher)
        watcher(self._ready)

    def owner_elsewhere(self, refused: ev.Refused) -> Owner | None:
        """Return the other replica that a refused request should be sent to; None if there is none, or none is known."""
        owner = self.store.owner(refused.pool) if refused.not_serving else None
        return owner if owner is None or owner.router_id != self.settings.router_id else None

    def place(self, event: ev.PlaceRequested, traceparent: str) -> None:
        """Submit a placement request. Refuse it if this replica's lease of the pool has expired, as it does while the process is
        suspended."""
        if self.spans is not None:
            self.spans.asked(event.request.request_id, event.gateway_id, traceparent)
        pool = self.state.instances.pool_of(event.request.model)
        if pool and self.state.owned.owns(pool) and not self.store.may_place(pool):
            self._deliver(replace(_changing(event.request.request_id, pool), gateway_id=event.gateway_id))
        else:
            self.submit(event)

    def refuse(self, refused: ev.Refused) -> None:
        """Refuse an invalid placement request of a gateway. An open request with the same id is not affected."""
        self.telemetry.refused(refused.code)
        self._tell_gateway(refused)

    def end_reports(self) -> None:
        """End all agents' streams, since the router stops."""
        for agent in self.agents.values():
            agent.replies.put_nowait(None)

    def end_sessions(self) -> None:
        """End all gateways' streams."""
        for gateway in self.gateways.values():
            gateway.batch_queue.end()

    async def set_policy(self, policy: Policy, etag: str) -> bool:
        """Set the policy of all replicas. Return False if the others receive it only once the shared store answers again.
        Raises PolicyChanged unless `etag` is empty or identifies the policy that is replaced."""
        ref = policy.ref()

        def change(config: OperatorConfig) -> OperatorConfig:
            # `config` is the shared store's, which another replica may have changed.
            if etag and (found := policy_etag(self._policy_of(config).ref())) != etag:
                raise PolicyChanged(found)
            return config.with_policy((ref.name, dict(ref.settings)), time.time())

        return await self._change_config(change)

    def _policy_of(self, config: OperatorConfig) -> Policy:
        """Return the policy that this replica uses under `config`: its current one if `config` has none or an unknown one."""
        try:
            return make_policy(*config.policy, self.policies) if config.policy else self.state.policy
        except SettingError:
            return self.state.policy

    async def drain(self, info: InstanceInfo, *, resume: bool = False, move: bool = False) -> bool:
        """Stop all replicas from placing on the instance until its incarnation ends, or undo that. `move`: its requests are also
        to leave it. Returns as set_policy does."""
        incarnation, move = ("", False) if resume else (info.incarnation, move)
        return await self._change_config(
            lambda config: config.with_drain(info.instance_id, incarnation, time.time(), move=move)
        )

    async def set_instance_order(self, change: OrderChange) -> bool:
        """Change the order for an instance, which need not be known, at all replicas. Returns as set_policy does. Raises
        TooManyOrders."""
        return await self._change_config(lambda config: config.with_order(change))

    async def _change_config(self, change: Callable[[OperatorConfig], OperatorConfig]) -> bool:
        def changed(text: str) -> str:
            try:
                config = OperatorConfig.read(text)
            except msgspec.MsgspecError:
                config = OperatorConfig()  # written by another version; logged when it was received
            return change(config).written()

        return await self.store.change_operator_config(changed)

    async def run(self) -> None:
        """Run the store, the ticks and the history until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.run())
            tasks.create_task(self._ticks())
            tasks.create_task(keep_history(self.state, lambda: self.history))

    def absent(self) -> list[AbsentEngine]:
        """Return the engines that agents are set to follow and that have no instance, ordered by URL."""
        instance_ids = (record.info.instance_id for record in self.state.instances.records())
        return self.absent_engines.beside(instance_ids, time.monotonic())

    def submit(self, event: ev.Event) -> list[ev.Effect]:
        """Apply an event to the state, carry out its effects, and return them."""
        now, started = time.monotonic(), time.perf_counter()
        effects = self.state.handle(event, now)
        elapsed = time.perf_counter() - started
        kept: list[StoreEffect] = []
        answers: list[ev.Placed | ev.Refused | ev.Parked] = []
        ends: list[ev.SessionEndApplied] = []
        fleet_changed = ignored = False
        for effect in effects:
            match effect:  # The effects of each request come first.
                case ev.Reserved() | ev.Released() | ev.SessionOwnerSet() | ev.SessionDisowned():
                    kept.append(effect)
                case ev.Placed():
                    answers.append(effect)
                case ev.DecisionMade(decision):
                    owner = self.store.owner(decision.pool)
                    self.decisions.decided(decision, time.time(), elapsed, owner.epoch if owner is not None else 0)
                    self.telemetry.decided(decision, elapsed)
                    self.history.decided(decision, now)
                case ev.DecisionClosed(decision_id, finished, decision):
                    # The log in memory forgets decisions while their requests are open.
                    if (logged := self.decisions.closed(decision_id, finished, time.time())) is not None:
                        decision = logged.decision
                    self.telemetry.closed(decision, finished)
                    if decision is not None:
                        self.history.ended(decision, finished, now)
                case ev.MeanWorkSet() | ev.IdleSessionsSet() | ev.PoolFactsSet():
                    kept.append(effect)
                case ev.SessionEndApplied():
                    ends.append(effect)
                case ev.DecisionNoted(noted, note):
                    self.decisions.noted(noted.decision_id, note, time.time())
                    self.telemetry.fell_back(noted)
                case ev.Refused():
                    self.telemetry.refused(effect.code)
                    if effect.admission is not None:
                        self.telemetry.parking_ended(effect.admission, effect.pool)
                        self.decisions.admission_refused(effect, time.time())
                    self.history.refused(effect, now)
                    answers.append(effect)
                case ev.Welcome() | ev.Pace() | ev.Resync() | ev.RefuseReport():
                    self._reply_to_agent(effect)
                case ev.PredictionAuditFailed(instance_id, reason):
                    log.warning(
                        "an instance failed the prediction audit; its block keys are dropped",
                        instance=instance_id,
                        reason=reason,
                    )
                case ev.EventsDistrusted(instance_id, reason):
                    log.warning(
                        "an instance's KV events do not agree with its answers; its prefixes are approximate",
                        instance=instance_id,
                        reason=reason,
                    )
                case ev.EventsTrusted(instance_id, again):
                    # As loud as the loss of trust: whoever keeps only warnings must hear of both.
                    tell = log.warning if again else log.info
                    tell("an instance's KV events agree with its answers; its prefixes are exact", instance=instance_id)
                case ev.ReportIgnored(request_id, gateway_id):
                    ignored = True
                    self.telemetry.ignored_reports.inc()
                    log.warning(
                        "ignored a gateway's report about another gateway's request",
                        request_id=request_id,
                        gateway_id=gateway_id,
                    )
                case ev.PolicyTaken():
                    self._tell_policy(effect)
                case ev.LifeChanged():
                    self._tell_life(effect)
                case ev.InstanceKept(instance_id, pool, reason):
                    log.warning(
                        "an instance stays in the fleet without an agent; start its agent again",
                        instance=instance_id,
                        model=pool,
                        reason=reason,
                    )
                case ev.FleetChanged():
                    fleet_changed = True
                case ev.PoolForgotten(pool):
                    self.store.give_up(pool)
                case ev.Parked():
                    self.telemetry.parked(effect.pool)
                    answers.append(effect)
                case ev.Move():
                    self.telemetry.moves.labels("lost" if effect.lost else "silent" if effect.silent else "drain").inc()
                    self._tell_gateway(effect)
        if (
            isinstance(ended := event.report if isinstance(event, ev.GatewayReported) else event, ev.Finished)
            and not ignored
        ):
            if self.spans is not None:
                self.spans.ended(ended.request_id)
            if ended.request_id in self._callers:
                # They would wait for ever: a held request that ends has no other answer.
                self._answer_callers(ev.Refused(ended.request_id, "ABORTED", "the request ended while it was held"))
        self.store.record(kept)
        for answer in answers:
            self._answer(answer)
        for end in ends:
            self._confirm(end)
        if fleet_changed:
            self._tell_fleet_soon()
        if (retry_at := self.state.retry_at) is not None and retry_at < self._retry_at:
            self._retry_at = retry_at
            delay_s = max(retry_at - time.monotonic(), LEAST_TIMER_S)
            asyncio.get_running_loop().call_later(delay_s, self._retry_held, retry_at)
        if self.state.unfinished and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
        return effects

    def _tell_policy(self, taken: ev.PolicyTaken) -> None:
        """Log, count and keep that another policy decides for a pool. What operators choose is logged once for all pools."""
        self.policy_changes.append((time.time(), taken))
        if not taken.reason:
            return
        self.telemetry.policy_changes.labels(taken.pool, taken.policy, taken.reason).inc()
        facts = taken.facts
        log.info(
            "auto took another policy for a pool",
            model=taken.pool,
            policy=taken.policy,
            reason=taken.reason,
            before=taken.before,
            before_reason=taken.before_reason,
            ready=facts.instances,
            exact=facts.exact,
            learned=facts.learned,
            mean_cost=round(facts.mean_cost, 2),
        )

    def _tell_life(self, changed: ev.LifeChanged) -> None:
        """Log and count that an instance was put out, or in, by what its requests show."""
        if not changed.out:
            # As loud as its being put out: whoever keeps only warnings must hear of both.
            log.warning("an instance answers again", instance=changed.instance_id, model=changed.pool)
            return
        self.telemetry.put_out.labels(changed.pool, changed.cause).inc()
        log.warning(
            "an instance gets no requests but one at a time on trial, until it answers",
            instance=changed.instance_id,
            model=changed.pool,
            cause=changed.cause,
            reason=changed.reason,
        )

    def _tell_fleet_soon(self) -> None:
        """Apply and send the changes of the fleet and of its owners that this turn of the event loop makes, together: an update
        costs the same for one instance as for a thousand, and a gateway answers each that has new owners with all its streams."""
        if not self._fleet_untold:
            self._fleet_untold = True
            asyncio.get_running_loop().call_soon(self._tell_fleet)

    def _tell_fleet(self) -> None:
        """Apply and send changes of the fleet, if any: shared names, the pools to compete for, readiness, gateways."""
        if self._fleet_untold:
            self._fleet_untold = False
            self._tell_shared_names()
            self.store.compete_for(pool.model for pool in self.state.instances.pools())
            self._check_ready()
            self._tell_gateways()

    def _go_on(self) -> None:
        """Apply the next part of the state's unfinished work, in a new turn of the event loop."""
        self._goes_on = False
        self.submit(ev.GoOn())

    def _finish(self) -> None:
        """Apply all unfinished work of the state now."""
        while self.state.unfinished:
            self.submit(ev.GoOn())

    def _retry_held(self, retry_at: float) -> None:
        if retry_at == self._retry_at:  # otherwise an earlier timer has replaced this one
            self._retry_at = math.inf
            self.submit(ev.RetryDue())

    def _tell_shared_names(self) -> None:
        shared = self.state.instances.shared_names
        for name, pools in shared.items():
            if self._logged_shared_names.get(name) != pools:
                log.warning(
                    "several pools share a model name; requests for it go to the first", name=name, models=pools
                )
        self._logged_shared_names = shared

    def opened(self, hello: ev.GatewayHello, stream: GatewayStream) -> None:
        """Register the stream that a gateway opened under an id that it has claimed, and send it the fleet. The gateway's answers
        go to this stream from now on. An older stream of the gateway ends."""
        if (before := self.gateways.get(hello.gateway_id)) is not None:
            before.batch_queue.end()
        # Send pending changes to the other gateways first: the new stream begins with the fleet as it was last sent to all.
        self._tell_gateways()
        stream.send(fleet=self._sent_fleet.whole())
        self.gateways[hello.gateway_id] = stream
        self.submit(hello)

    def closed(self, gateway_id: str, stream: GatewayStream) -> None:
        """Handle the end of a gateway's stream. Does nothing if a newer stream of the gateway has replaced it."""
        if self.gateways.get(gateway_id) is stream:
            del self.gateways[gateway_id]
            self.gateway_claims.closed(gateway_id, time.monotonic())
            if self.spans is not None:
                self.spans.gateway_left(gateway_id)
            self.submit(ev.GatewayLost(gateway_id))

    def account(self, gateway_id: str, report: placement_pb2.UsageReport) -> None:
        """Apply a gateway process's report on API keys' usage, and answer it on the gateway's stream."""
        answer, bad = key_limit_messages.answer_report(self.key_limit_accounts, gateway_id, report, time.monotonic())
        if bad:
            self.telemetry.bad_usage.inc(bad)
        if (stream := self.gateways.get(gateway_id)) is not None:
            stream.send(usage=answer)

    async def placed(
        self, request: PlacementRequest, within_s: float | None, traceparent: str
    ) -> ev.Placed | ev.Refused:
        """Place a request outside any stream and return the answer. `within_s`: how long the caller waits, s; None: no limit.

        If this call is cancelled, the request ends, since its caller does not learn whether it was placed.
        """
        answer: asyncio.Future[ev.Placed | ev.Refused] = asyncio.get_running_loop().create_future()
        callers = self._callers.setdefault(request.request_id, {})
        callers[answer] = request.model
        if within_s is not None:
            own = within_s if request.deadline_s is None else request.deadline_s
            request = replace(request, deadline_s=min(within_s, own))
        try:
            self.place(ev.PlaceRequested(request), traceparent)
            return await answer
        except asyncio.CancelledError:
            if callers.keys() == {answer}:
                ended = ev.Finished(request.request_id, "CANCELLED", error="the caller left")
                self.submit(ev.GatewayReported("", ended))
            raise
        finally:
            callers.pop(answer, None)
            if not callers:
                self._callers.pop(request.request_id, None)

    def _answer(self, effect: ev.Placed | ev.Refused | ev.Parked) -> None:
        """Send a refusal at once, and a placement once the store has it. So a new owner of the pool knows every placement that
        was ever sent."""
        if isinstance(effect, ev.Parked):
            if effect.gateway_id:
                self._tell_gateway(effect)
            return
        if isinstance(effect, ev.Refused):
            self._deliver(effect)
            return
        pool = effect.decision.pool

        def stored(kept: bool) -> None:
            self._deliver(effect if kept else replace(_changing(effect.request_id, pool), gateway_id=effect.gateway_id))

        self.store.when_stored(pool, stored)

    def _confirm(self, end: ev.SessionEndApplied) -> None:
        """Tell the gateway in which pools a session has ended, once the store has it in all of them. A pool that is lost
        meanwhile is left out, and so are all while the store does not answer: the gateway then tells the next owner."""
        waiting = set(end.pools)
        models: list[str] = []

        def stored(pool: str, kept: bool) -> None:
            waiting.discard(pool)
            if kept and not self.state.degraded:
                models.append(pool)
            if not waiting and models and (stream := self.gateways.get(end.gateway_id)) is not None:
                ended = placement_pb2.SessionEnded(tenant=end.tenant, session_id=end.session_id, models=models)
                stream.send(session_ended=ended)

        for pool in end.pools:
            self.store.when_stored(pool, partial(stored, pool))

    def _deliver(self, effect: ev.Placed | ev.Refused) -> None:
        if self.spans is not None:
            self.spans.answered(effect)
        # Unary callers receive the answer even if a gateway has asked for the same request since.
        self._answer_callers(effect)
        if effect.gateway_id:
            self._tell_gateway(effect)

    def _tell_gateway(self, effect: ev.Placed | ev.Refused | ev.Parked | ev.Move) -> None:
        if (stream := self.gateways.get(effect.gateway_id)) is None:
            log.warning("dropped an answer to a gateway without a stream", request_id=effect.request_id)
        elif isinstance(effect, ev.Placed):
            # The placement may be on an instance that was not sent to the gateway yet.
            self._tell_fleet()
            stream.send(placement=gateway_messages.placement_to_wire(self.state, effect))
        elif isinstance(effect, ev.Parked):
            stream.send(parked=gateway_messages.parked_to_wire(effect))
        elif isinstance(effect, ev.Move):
            stream.send(move=gateway_messages.move_to_wire(effect))
        else:
            stream.send(refusal=gateway_messages.refusal_to_wire(effect, self.owner_elsewhere(effect)))

    def _answer_callers(self, answer: ev.Placed | ev.Refused) -> None:
        only = answer.asked_model if isinstance(answer, ev.Refused) else None
        for waiting, model in self._callers.get(answer.request_id, {}).items():
            if not waiting.done() and only in (None, model):
                waiting.set_result(answer)

    def _tell_gateways(self) -> None:
        """Send all gateways what has changed of the fleet since the last update."""
        pools = self.state.instances.pools()
        update = self._sent_fleet.update(pools, self.store.owner, starting=not self._ready)
        if update is None:
            return
        response = placement_pb2.SessionResponse(fleet_update=update)
        for gateway in self.gateways.values():
            gateway.batch_queue.put(response)

    def _reply_to_agent(self, effect: ev.Welcome | ev.Pace | ev.Resync | ev.RefuseReport) -> None:
        stream = self.agents.get(effect.stream_id)
        if stream is None:
            return
        match effect:
            case ev.Welcome():
                welcome = agent_pb2.Welcome(
                    snapshot=effect.snapshot, resume_from_seq=effect.resume_from_seq, router_id=self.settings.router_id
                )
                stream.replies.put_nowait(agent_pb2.ReportResponse(welcome=welcome))
            case ev.Pace():
                pace = agent_pb2.Pace(
                    load_interval_ms=round(effect.load_interval_s * 1e3),
                    key_interval_ms=round(effect.key_interval_s * 1e3),
                )
                stream.replies.put_nowait(agent_pb2.ReportResponse(pace=pace))
            case ev.Resync():
                self.telemetry.resyncs.inc()
                log.warning("requested a snapshot from an agent", instance=effect.instance_id, reason=effect.reason)
                stream.replies.put_nowait(agent_pb2.ReportResponse(resync=agent_pb2.Resync(reason=effect.reason)))
            case ev.RefuseReport():
                log.warning("refused an agent's report", reason=effect.reason)
                stream.replies.put_nowait(effect)

    def _replica_info(self) -> str:
        ref = self.state.policy.ref()
        info = ReplicaInfo(
            (ref.name, dict(ref.settings)),
            self.console_url,
            VERSION,
            self.started_at,
            len(self.state.reservations),
            len(self.state.held_requests.queue),
            len(self.gateways),
            self._policy_problem,
        )
        return msgspec.json.encode(info).decode()

    def _take_operator_config(self, text: str) -> None:
        try:
            config = OperatorConfig.read(text)
            self._log_changes(config)
            self.submit(ev.DrainsChanged(config.drained, config.moving))
            self.submit(ev.OrdersChanged(config.orders_in_force))
            policy = make_policy(*config.policy, self.policies) if config.policy else self.state.policy
        except (msgspec.MsgspecError, SettingError) as error:
            # Written by a replica of another version. Replicas with different policies are better than none that places.
            self._policy_problem = error.sentence if isinstance(error, SettingError) else f"it cannot be read: {error}"
            log.error("the operator config cannot be applied in full", config=text, error=self._policy_problem)
            return
        self._policy_problem = ""
        if policy.ref() != self.state.policy.ref():
            log.info("applied the fleet's policy", policy=policy.ref().name)
            self.submit(ev.PolicySet(policy))

    def _log_changes(self, config: OperatorConfig) -> None:
        """Log changes of drains and orders. All replicas log them, not only the one that received the order."""
        before, self._operator_config = self._operator_config, config
        if pushed_out := sorted(before.drained.keys() - config.drains.keys()):
            log.warning(
                "drains have ended: newer ones take their places",
                instances=pushed_out[:MAX_LOGGED_CHANGES],
                limit=MAX_DRAINS,
            )
        # Not logged: orders that were lifted before this router received them, as a router that starts does.
        changes = [
            change
            for change in config.changes(before)
            if change.kind != "policy" and (change.now != change.before or change.reason)
        ]
        for change in changes[:MAX_LOGGED_CHANGES]:
            log.info(
                "operators changed an instance's order",
                instance=change.instance_id,
                kind=change.kind,
                now=change.now,
                before=change.before,
                reason=change.reason,
            )
        if (left := len(changes) - MAX_LOGGED_CHANGES) > 0:
            log.info("operators changed more orders", count=left)

    def _check_ready(self) -> None:
        ready = not self.state.starting(time.monotonic())
        if ready is not self._ready:
            self._ready = ready
            for watcher in self._ready_watchers:
                watcher(ready)
            self._tell_gateways()

    def _snapshot(self, pool: str) -> Iterator[StoreEffect | None]:
        """Yield all that is known of a pool, for the store. Events may change the state between two items; each item is current
        when it is yielded. The first None follows the reservations; each further None is a point where the caller may pause."""
        self._finish()
        if mean_work := self.state.prefill_observer.mean_work_record(pool):
            yield ev.MeanWorkSet(mean_work, pool)
        if (admission := self.state.admission.pools.get(pool)) is not None:
            yield ev.IdleSessionsSet(admission.ledger.idle(), pool)
        if (facts := self.state.pool_choices.kept(pool)) is not None:
            yield ev.PoolFactsSet(facts, pool)
        for listed in self.state.reservations.of_pool(pool):
            reservation = self.state.reservations.get(listed.request_id)
            if reservation is not None and reservation.pool == pool:
                yield ev.Reserved(reservation)
        yield None
        for known in self.state.affinity.returning(pool):
            yield None if known is None else ev.SessionOwnerSet(*known, pool)

    async def _ticks(self) -> None:
        while True:
            self._check_ready()
            self.submit(ev.Tick())
            self.gateway_claims.expire(time.monotonic())
            self.telemetry.keep_instances(self.state.instances)
            ends = time.monotonic() + TICK_S
            # The tick did one part of the sweep, and ended some of the requests with an expired lease. Do more in the time left.
            while ends - (now := time.monotonic()) > SWEEP_PAUSE_S:
                if self.state.reservations.expired(now):
                    await asyncio.sleep(SWEEP_PAUSE_S)
                    self.submit(ev.Tick())
                elif self.state.sweeping:
                    await asyncio.sleep(SWEEP_PAUSE_S)
                    self.state.sweep()
                else:
                    break
            await asyncio.sleep(max(ends - time.monotonic(), 0.0))


def _changing(request_id: str, pool: str) -> ev.Refused:
    return not_serving(request_id, pool, "the pool's owner is changing")


def merged_operator_configs(before: str, own: str, stored: str) -> str:
    """Merge this router's operator config (`own`) with the store's (`stored`). Both were changed from `before`, the store's
    earlier text. If two orders contradict each other, the later one wins, and both are logged. Return `stored` unchanged if one
    of the texts cannot be read, which means that another version wrote it."""
    try:
        known, ours, theirs = (OperatorConfig.read(text) for text in (before, own, stored))
    except msgspec.MsgspecError:
        return stored
    for counts, earlier in contradictions(known, ours, theirs):
        log.warning(
            "two replicas received contradicting changes; the later one counts",
            instance=counts.instance_id,
            kind=counts.kind,
            counts=counts.now,
            reason=counts.reason,
            set_aside=earlier.now,
            set_aside_reason=earlier.reason,
        )
    merged = ours.merged(theirs)
    return stored if merged == theirs else merged.written()
