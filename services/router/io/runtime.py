"""The one place where the router's pure state meets the clock, the log, the store and the open streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog
from msgspec.structs import replace

from pointsman.agent.v1 import agent_pb2
from pointsman.common.io.batch_queue import BatchQueue
from pointsman.common.io.line_file import LostLines
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.gateway_claims import GatewayClaims
from pointsman.router.core.history.fleet_history import FleetHistory
from pointsman.router.core.instances.circuit_breaker import CircuitSettings
from pointsman.router.core.instances.instance_orders import OrderChange
from pointsman.router.core.instances.saturation import SaturationLimits
from pointsman.router.core.ownership import Owner
from pointsman.router.core.policy.base import Policy, SettingError
from pointsman.router.core.policy.registry import make_policy
from pointsman.router.core.requests.hold_queue import QueueSettings
from pointsman.router.core.requests.refusals import not_serving
from pointsman.router.core.router_state import RouterState, StateSettings
from pointsman.router.core.types import InstanceInfo, PlacementRequest
from pointsman.router.core.usage_accounts import UsageAccounts
from pointsman.router.io.convert import gateway_messages, usage_messages
from pointsman.router.io.convert.operator_messages import policy_etag
from pointsman.router.io.convert.told_fleet import ToldFleet
from pointsman.router.io.operator_config import OperatorConfig, contradictions
from pointsman.router.io.settings import RouterSettings
from pointsman.router.io.store.redis_store import RedisStore
from pointsman.router.io.store.store import MemoryStore, Store, StoreEffect
from pointsman.router.io.telemetry.decision_log import DecisionLog
from pointsman.router.io.telemetry.event_metrics import EventMetrics
from pointsman.router.io.telemetry.history_sampler import keep_history
from pointsman.router.io.telemetry.spans import PlacementSpans
from pointsman.router.io.telemetry.state_metrics import StateCollector
from pointsman.router.v1 import placement_pb2

if TYPE_CHECKING:
    from pointsman.common.io.otlp import Tracer

log = structlog.get_logger()

TICK_S = 0.5
# Between two parts of a sweep of the index, which take about a tenth of that.
SWEEP_PAUSE_S = 0.02
# A timer may fire some part of a millisecond early; set anew for less than this it would spin.
LEAST_TIMER_S = 0.001
# A router that starts takes all orders at once.
MAX_LOGGED_CHANGES = 100
VERSION = metadata.version("pointsman")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ReplicaInfo(msgspec.Struct, omit_defaults=True):
    """What a replica tells the others of itself with each heartbeat: the policy that it places by, where its console is ("":
    nowhere), its version, when it started (unix s), and its load. None and "": it did not say."""

    policy: tuple[str, dict[str, float | bool | str]] | None = None
    console_url: str = ""
    version: str = ""
    started_at: Annotated[float, msgspec.Meta(ge=0, lt=1e11)] | None = None
    open_requests: _Count | None = None
    held_requests: _Count | None = None
    gateways: _Count | None = None

    @classmethod
    def read(cls, text: str) -> ReplicaInfo:
        """What another replica has told, as far as it can be understood."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()


class PolicyChanged(Exception):
    """Another policy is in force than the one to be replaced; `etag` stands for it."""

    def __init__(self, etag: str) -> None:
        super().__init__(etag)
        self.etag = etag


class AgentStream:
    """What the router still has to say on one agent's stream. A refusal ends it, and so does None: the router stops. It reports
    `instance_id`, which is empty before its hello."""

    def __init__(self) -> None:
        self.instance_id = ""
        self.replies: asyncio.Queue[agent_pb2.ReportResponse | ev.RefuseReport | None] = asyncio.Queue()


class GatewayStream:
    """What the router still has to say on one gateway's stream."""

    def __init__(self) -> None:
        self.batch_queue: BatchQueue[placement_pb2.SessionResponse] = BatchQueue()

    def send(self, **kind: object) -> None:
        """Queue a SessionResponse made of its one field."""
        self.batch_queue.put(placement_pb2.SessionResponse(**kind))  # type: ignore[arg-type]


class Router:
    """State, log, store and streams of one router process. All methods belong to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        url = settings.redis_url.get_secret_value()
        self.telemetry = EventMetrics()
        self.tracer: Tracer | None = None
        self.spans: PlacementSpans | None = None
        if settings.otlp_endpoint:
            from pointsman.common.io.otlp import Tracer

            self.tracer = Tracer(settings.otlp_endpoint, "router", settings.router_id)
            self.spans = PlacementSpans(self.tracer.send)
        self.decisions = DecisionLog(
            settings.decision_log_size, settings.decision_log_file, settings.decision_log_max_mb << 20
        )
        self.state = RouterState(
            make_policy(settings.policy, settings.policy_settings),
            StateSettings(
                affinity_ttl_s=settings.affinity_ttl_s,
                gateway_lease_s=settings.gateway_lease_s,
                lost_instance_s=settings.lost_instance_s,
                limits=SaturationLimits(settings.max_requests_per_instance, settings.max_kv_usage),
                queue=QueueSettings(
                    size=settings.queue_size,
                    timeout_s=settings.queue_timeout_s,
                    tenant_share=settings.queue_tenant_share,
                    ageing_tokens_per_s=settings.queue_ageing_tokens_per_s,
                    fair=settings.queue_fair,
                    lower_class_share=settings.queue_lower_class_share,
                    expiry=settings.hold_expiry,
                ),
                circuit=CircuitSettings(
                    settings.circuit_failures, settings.circuit_first_open_s, settings.circuit_max_open_s
                ),
                migration_window_s=settings.migration_window_s,
                stale_report_s=settings.stale_report_s,
                stale_keys_s=settings.stale_keys_s,
                max_keys=settings.max_keys,
                startup_wait_s=settings.startup_wait_s,
            ),
            router_id=settings.router_id,
            owns_all=not url,
        )
        self.history = FleetHistory(time.monotonic())
        self.agents: dict[int, AgentStream] = {}
        self.gateways: dict[str, GatewayStream] = {}
        self.gateway_claims = GatewayClaims(settings.gateway_lease_s)
        self.usage_accounts = UsageAccounts()
        # By request id: who waits for the answer, and for which model.
        self._callers: dict[str, dict[asyncio.Future[ev.Placed | ev.Refused], str]] = {}
        self.store: Store
        self._ready_watchers: list[Callable[[bool], None]] = []
        self._ready = False
        self._goes_on = False  # the next turn applies a part of what is unfinished
        self._retry_at = math.inf  # when the next timer for held requests is due, by the monotonic clock
        self._told_fleet = ToldFleet(settings.ownerless_timeout_s)
        self._fleet_untold = False  # the fleet has changed in this turn, and nobody has been told
        self._told_shared_names: dict[str, list[str]] = {}
        self._operator_config = OperatorConfig()  # as it was last taken
        if url:
            self.store = RedisStore(
                url,
                router_id=settings.router_id,
                fleet=settings.fleet,
                lease_s=settings.owner_lease_s,
                settle_s=settings.settle_s,
                affinity_ttl_s=settings.affinity_ttl_s,
                on_event=self.submit,
                on_owners=self._tell_gateways,
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
        self.telemetry.registry.register(StateCollector(self.state, lambda: self._ready))
        self.telemetry.lost_replicas.set_function(lambda: len(self.store.lost_replicas()))
        self.telemetry.accounted_keys.set_function(lambda: len(self.usage_accounts))

    @property
    def ready(self) -> bool:
        """Whether this replica knows the fleet well enough to place, or has waited long enough to."""
        return self._ready

    def on_ready(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` with False or True now and when that changes."""
        self._ready_watchers.append(watcher)
        watcher(self._ready)

    def owner_elsewhere(self, refused: ev.Refused) -> Owner | None:
        """The other replica that a refused request is to be sent to, as far as known."""
        owner = self.store.owner(refused.pool) if refused.not_serving else None
        return owner if owner is None or owner.router_id != self.settings.router_id else None

    def place(self, event: ev.PlaceRequested, traceparent: str) -> None:
        """Submit a placement request, unless this replica's lease of the pool has run out while it slept."""
        if self.spans is not None:
            self.spans.asked(event.request.request_id, event.gateway_id, traceparent)
        pool = self.state.instances.pool_of(event.request.model)
        if pool and self.state.owned.owns(pool) and not self.store.may_place(pool):
            self._deliver(replace(_changing(event.request.request_id, pool), gateway_id=event.gateway_id))
        else:
            self.submit(event)

    def refuse(self, refused: ev.Refused) -> None:
        """Answer a gateway's question that cannot be; a request that has the id already is not touched."""
        self.telemetry.refused(refused.code)
        self._tell_gateway(refused)

    def end_reports(self) -> None:
        """Let the agents go: the router stops."""
        for agent in self.agents.values():
            agent.replies.put_nowait(None)

    def end_sessions(self) -> None:
        """Let all gateways go."""
        for gateway in self.gateways.values():
            gateway.batch_queue.end()

    async def set_policy(self, policy: Policy, etag: str) -> bool:
        """Place by `policy` from now on, here and at all replicas. False when those get it only once the shared store is back.
        Raises PolicyChanged unless `etag` is empty or stands for the policy that this one replaces."""
        ref = policy.ref()

        def change(config: OperatorConfig) -> OperatorConfig:
            # What the shared store has, which another replica may have changed by now.
            if etag and (found := policy_etag(self._policy_of(config).ref())) != etag:
                raise PolicyChanged(found)
            return config.with_policy((ref.name, dict(ref.settings)), time.time())

        return await self._change_config(change)

    def _policy_of(self, config: OperatorConfig) -> Policy:
        """The policy that this replica places by under a configuration: its own where that says none, or one unknown here."""
        try:
            return make_policy(*config.policy) if config.policy else self.state.policy
        except SettingError:
            return self.state.policy

    async def drain(self, info: InstanceInfo, resume: bool) -> bool:
        """Let the instance get nothing new from any replica while its incarnation lasts, or again. False as for set_policy."""
        incarnation = "" if resume else info.incarnation
        return await self._change_config(lambda config: config.with_drain(info.instance_id, incarnation, time.time()))

    async def set_instance_order(self, change: OrderChange) -> bool:
        """Change the order for an instance, known or not, at all replicas. False as for set_policy. Raises TooManyOrders."""
        return await self._change_config(lambda config: config.with_order(change))

    async def _change_config(self, change: Callable[[OperatorConfig], OperatorConfig]) -> bool:
        def changed(text: str) -> str:
            try:
                config = OperatorConfig.read(text)
            except msgspec.MsgspecError:
                config = OperatorConfig()  # of a replica in another version, and said so in the log when it came
            return change(config).written()

        return await self.store.change_operator_config(changed)

    async def run(self) -> None:
        """Keep the store and the clock going until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.run())
            tasks.create_task(self._ticks())
            tasks.create_task(keep_history(self.state, lambda: self.history))

    def submit(self, event: ev.Event) -> list[ev.Effect]:
        """Apply an event and carry out its effects."""
        now, started = time.monotonic(), time.perf_counter()
        effects = self.state.handle(event, now)
        elapsed = time.perf_counter() - started
        kept: list[StoreEffect] = []
        answers: list[ev.Placed | ev.Refused] = []
        fleet_changed = ignored = False
        for effect in effects:
            match effect:
                case ev.Reserved() | ev.Released() | ev.SessionOwnerSet() | ev.MeanWorkSet():
                    kept.append(effect)
                case ev.DecisionMade(decision):
                    self.decisions.decided(decision, time.time(), elapsed)
                    self.telemetry.decided(decision, elapsed)
                    self.history.decided(decision, now)
                case ev.DecisionNoted(decision_id, note):
                    self.decisions.noted(decision_id, note, time.time())
                    if (logged := self.decisions.get(decision_id)) is not None:
                        self.telemetry.fell_back(logged.decision)
                case ev.DecisionClosed(decision_id, finished):
                    logged = self.decisions.get(decision_id)
                    self.decisions.closed(decision_id, finished, time.time())
                    self.telemetry.closed(logged.decision if logged else None, finished)
                    if logged is not None:
                        self.history.ended(logged.decision, finished, now)
                case ev.Refused():
                    self.telemetry.refused(effect.code)
                    self.history.refused(effect, now)
                    answers.append(effect)
                case ev.Welcome() | ev.Resync() | ev.RefuseReport():
                    self._reply_to_agent(effect)
                case ev.PredictionAuditFailed(instance_id, reason):
                    log.warning(
                        "an instance's predictions failed the audit; its prefix keys are dropped",
                        instance=instance_id,
                        reason=reason,
                    )
                case ev.ReportIgnored(request_id, gateway_id):
                    ignored = True
                    self.telemetry.ignored_reports.inc()
                    log.warning("a gateway tells of another's request", request_id=request_id, gateway_id=gateway_id)
                case ev.FleetChanged():
                    fleet_changed = True
                case ev.PoolForgotten(pool):
                    self.store.give_up(pool)
                case ev.Placed():
                    answers.append(effect)
        if isinstance(ended := event.told if isinstance(event, ev.GatewayTold) else event, ev.Finished) and not ignored:
            if self.spans is not None:
                self.spans.ended(ended.request_id)
            # Whoever still waits for its placement would wait for ever: a hold ends without a word.
            self._answer_callers(ev.Refused(ended.request_id, "ABORTED", "the request ended while it was held"))
        self.store.record(kept)
        for answer in answers:
            self._answer(answer)
        if fleet_changed and not self._fleet_untold:
            # All changes of a turn at once: an engine of a thousand costs what all of them do.
            self._fleet_untold = True
            asyncio.get_running_loop().call_soon(self._tell_fleet)
        if (retry_at := self.state.retry_at) is not None and retry_at < self._retry_at:
            self._retry_at = retry_at
            delay_s = max(retry_at - time.monotonic(), LEAST_TIMER_S)
            asyncio.get_running_loop().call_later(delay_s, self._retry_held, retry_at)
        if self.state.unfinished and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
        return effects

    def _tell_fleet(self) -> None:
        """Let everybody know what has changed of the fleet."""
        if self._fleet_untold:
            self._fleet_untold = False
            self._tell_shared_names()
            self.store.compete_for(pool.model for pool in self.state.instances.pools())
            self._check_ready()
            self._tell_gateways()

    def _go_on(self) -> None:
        """The next turn of the loop."""
        self._goes_on = False
        self.submit(ev.GoOn())

    def _finish(self) -> None:
        """Apply at once what is unfinished."""
        while self.state.unfinished:
            self.submit(ev.GoOn())

    def _retry_held(self, retry_at: float) -> None:
        if retry_at == self._retry_at:  # otherwise an earlier moment has come between
            self._retry_at = math.inf
            self.submit(ev.RetryDue())

    def _tell_shared_names(self) -> None:
        shared = self.state.instances.shared_names
        for name, pools in shared.items():
            if self._told_shared_names.get(name) != pools:
                log.warning("several models answer to a name; requests for it go to the first", name=name, models=pools)
        self._told_shared_names = shared

    def opened(self, hello: ev.GatewayHello, stream: GatewayStream) -> None:
        """A gateway opened a stream under an id that it has claimed: it is told the fleet, from now on its answers go there, and
        an older stream of it is done with."""
        if (before := self.gateways.get(hello.gateway_id)) is not None:
            before.batch_queue.end()
        # What the others do not know yet goes to them first: the newcomer begins with what all have been told.
        self._tell_gateways()
        stream.send(fleet=self._told_fleet.whole())
        self.gateways[hello.gateway_id] = stream
        self.submit(hello)

    def closed(self, gateway_id: str, stream: GatewayStream) -> None:
        """A gateway's stream ended. What a newer one of it announced is not touched."""
        if self.gateways.get(gateway_id) is stream:
            del self.gateways[gateway_id]
            self.gateway_claims.closed(gateway_id, time.monotonic())
            if self.spans is not None:
                self.spans.gateway_left(gateway_id)
            self.submit(ev.GatewayLost(gateway_id))

    def account(self, gateway_id: str, report: placement_pb2.UsageReport) -> None:
        """Take a gateway process's report of what keys have used, and answer it."""
        reports = usage_messages.usage_reports(report)
        if len(reports) < len(report.keys):
            self.telemetry.bad_usage.inc(len(report.keys) - len(reports))
        answer = self.usage_accounts.report(
            gateway_id, report.gateway or gateway_id, reports, time.monotonic(), full=report.full
        )
        if (stream := self.gateways.get(gateway_id)) is not None:
            stream.send(usage=usage_messages.usage_answer_to_wire(answer))

    async def placed(
        self, request: PlacementRequest, within_s: float | None, traceparent: str
    ) -> ev.Placed | ev.Refused:
        """The answer to a request outside any stream, however late it comes; None: without a limit of the caller's own.

        Cancelled, it ends the request, which its caller cannot know to be placed.
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
                self.submit(ev.GatewayTold("", ended))
            raise
        finally:
            callers.pop(answer, None)
            if not callers:
                self._callers.pop(request.request_id, None)

    def _answer(self, effect: ev.Placed | ev.Refused) -> None:
        """Tell a refusal at once, a placement when it is kept: whoever takes the pool over knows all that was ever told."""
        if isinstance(effect, ev.Refused):
            self._deliver(effect)
            return
        pool, lost = effect.decision.pool, _changing(effect.request_id, effect.decision.pool)

        def stored(kept: bool) -> None:
            self._deliver(effect if kept else replace(lost, gateway_id=effect.gateway_id))

        self.store.when_stored(pool, stored)

    def _deliver(self, effect: ev.Placed | ev.Refused) -> None:
        if self.spans is not None:
            self.spans.answered(effect)
        # Callers of the unary form hear the answer even when a gateway has asked for the same request since.
        self._answer_callers(effect)
        if effect.gateway_id:
            self._tell_gateway(effect)

    def _tell_gateway(self, effect: ev.Placed | ev.Refused) -> None:
        if (stream := self.gateways.get(effect.gateway_id)) is None:
            log.warning("an answer to a gateway that left", request_id=effect.request_id)
        elif isinstance(effect, ev.Placed):
            # It may be on an instance of which the gateway does not know yet.
            self._tell_fleet()
            stream.send(placement=gateway_messages.placement_to_wire(self.state, effect))
        else:
            stream.send(refusal=gateway_messages.refusal_to_wire(effect, self.owner_elsewhere(effect)))

    def _answer_callers(self, answer: ev.Placed | ev.Refused) -> None:
        only = answer.asked_model if isinstance(answer, ev.Refused) else ""
        for waiting, model in self._callers.get(answer.request_id, {}).items():
            if not waiting.done() and only in ("", model):
                waiting.set_result(answer)

    def _tell_gateways(self) -> None:
        """Tell all gateways what has changed of the fleet since they were told."""
        pools = self.state.instances.pools()
        update = self._told_fleet.update(pools, self.store.owner, starting=not self._ready)
        if update is None:
            return
        response = placement_pb2.SessionResponse(fleet_update=update)
        for gateway in self.gateways.values():
            gateway.batch_queue.put(response)

    def _reply_to_agent(self, effect: ev.Welcome | ev.Resync | ev.RefuseReport) -> None:
        stream = self.agents.get(effect.stream_id)
        if stream is None:
            return
        match effect:
            case ev.Welcome():
                welcome = agent_pb2.Welcome(
                    snapshot=effect.snapshot, resume_from_seq=effect.resume_from_seq, router_id=self.settings.router_id
                )
                stream.replies.put_nowait(agent_pb2.ReportResponse(welcome=welcome))
            case ev.Resync():
                self.telemetry.resyncs.inc()
                log.warning("asking for a snapshot", instance=effect.instance_id, reason=effect.reason)
                stream.replies.put_nowait(agent_pb2.ReportResponse(resync=agent_pb2.Resync(reason=effect.reason)))
            case ev.RefuseReport():
                log.warning("refusing an agent's report", reason=effect.reason)
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
        )
        return msgspec.json.encode(info).decode()

    def _take_operator_config(self, text: str) -> None:
        try:
            config = OperatorConfig.read(text)
            self._log_changes(config)
            self.submit(ev.DrainsChanged(config.drained))
            self.submit(ev.OrdersChanged(config.orders_in_force))
            policy = make_policy(*config.policy) if config.policy else self.state.policy
        except (msgspec.MsgspecError, SettingError) as error:
            # Of a replica in another version: better two policies than none.
            log.error("the operators' configuration cannot be applied in full", config=text, error=str(error))
            return
        if policy.ref() != self.state.policy.ref():
            log.info("the fleet's policy is applied", policy=policy.ref().name)
            self.submit(ev.PolicySet(policy))

    def _log_changes(self, config: OperatorConfig) -> None:
        """Tell of drains and orders, on the router that was asked and on all that take them over."""
        before, self._operator_config = self._operator_config, config
        # What was not in force and is not now is not told: a router that starts takes orders that were lifted, too.
        changes = [
            one for one in config.changes(before) if one.kind != "policy" and (one.now != one.before or one.reason)
        ]
        for one in changes[:MAX_LOGGED_CHANGES]:
            log.info(
                "operators changed an instance's order",
                instance=one.instance_id,
                kind=one.kind,
                now=one.now,
                before=one.before,
                reason=one.reason,
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
        """All that is known of a pool, each as it is when it is its turn: events may come meanwhile. The first None comes after
        the reservations, others where others may have a turn."""
        self._finish()
        if mean_work := self.state.prefill_observer.mean_work_record(pool):
            yield ev.MeanWorkSet(mean_work, pool)
        for one in self.state.reservations.of_pool(pool):
            reservation = self.state.reservations.get(one.request_id)
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
            # The tick has swept a part already, and ended some of a lost gateway's requests.
            while ends - (now := time.monotonic()) > SWEEP_PAUSE_S:
                if self.state.reservations.expired(now):
                    await asyncio.sleep(SWEEP_PAUSE_S)
                    self.submit(ev.Tick())
                elif self.state.index.sweeping:
                    await asyncio.sleep(SWEEP_PAUSE_S)
                    self.state.index.sweep()
                else:
                    break
            await asyncio.sleep(max(ends - time.monotonic(), 0.0))


def _changing(request_id: str, pool: str) -> ev.Refused:
    return not_serving(request_id, pool, "the pool's owner is changing")


def merged_operator_configs(before: str, own: str, stored: str) -> str:
    """What this router and the store have of operators' configuration together, each made from what the store had `before`: of
    orders that contradict each other the later one, which is logged. The store's as it is where one cannot be read: that is of a
    version which understands another."""
    try:
        known, ours, theirs = (OperatorConfig.read(text) for text in (before, own, stored))
    except msgspec.MsgspecError:
        return stored
    for counts, earlier in contradictions(known, ours, theirs):
        log.warning(
            "two orders that were given apart contradict each other; the later one counts",
            instance=counts.instance_id,
            kind=counts.kind,
            counts=counts.now,
            reason=counts.reason,
            set_aside=earlier.now,
            set_aside_reason=earlier.reason,
        )
    merged = ours.merged(theirs)
    return stored if merged == theirs else merged.written()
