"""The one place where the router's pure state meets the clock, the log, the store and the open streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import structlog
from msgspec.structs import replace

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from services.common.lines import LostLines
from services.common.outbox import Outbox
from services.router import events as ev
from services.router.circuit import CircuitSettings
from services.router.domain import InstanceInfo, PlacementRequest
from services.router.holding import not_now
from services.router.io.decision_log import DecisionLog
from services.router.io.fleet_metrics import FleetCollector
from services.router.io.redis_store import RedisStore
from services.router.io.settings import RouterSettings
from services.router.io.spans import PlacementSpans
from services.router.io.store import MemoryStore, Store, StoreEffect
from services.router.io.telemetry import Telemetry
from services.router.io.wire import gateways
from services.router.ownership import Owner
from services.router.policy.base import Policy, SettingError
from services.router.policy.registry import make_policy
from services.router.queue import QueueSettings
from services.router.saturation import Limits
from services.router.state import RouterState, StateSettings

if TYPE_CHECKING:
    from services.common.otlp import Tracer

log = structlog.get_logger()

TICK_S = 0.5
# An instance that went for good stays on the list of those that drain; of too many the oldest go.
MAX_DRAINED = 1_000


class About(msgspec.Struct):
    """What a replica tells the others of itself: the policy that it places by, and where its console is ("": nowhere)."""

    policy: tuple[str, dict[str, float | bool | str]] | None = None
    console_url: str = ""

    @classmethod
    def read(cls, text: str) -> About:
        """What another replica has told, as far as it can be understood."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError:
            return cls()


class Orders(msgspec.Struct, frozen=True):
    """What operators have told the fleet: the policy to place by (None: each replica's own), and the instances that are to get
    nothing new, with the incarnation that this was said of."""

    policy: tuple[str, dict[str, float | bool | str]] | None = None
    drained: dict[str, str] = {}

    @classmethod
    def read(cls, text: str) -> Orders:
        """Orders as the store keeps them. Raises msgspec.MsgspecError."""
        return msgspec.json.decode(text or "{}", type=cls)


class AgentStream:
    """What the router still has to say on one agent's stream. A refusal ends it, and so does None: the router stops."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[agent_pb2.ReportResponse | ev.RefuseReport | None] = asyncio.Queue()


class GatewayStream:
    """What the router still has to say on one gateway's stream."""

    def __init__(self) -> None:
        self.outbox: Outbox[placement_pb2.SessionResponse] = Outbox()

    def send(self, **kind: object) -> None:
        """Queue a SessionResponse made of its one field."""
        self.outbox.put(placement_pb2.SessionResponse(**kind))  # type: ignore[arg-type]


class Router:
    """State, log, store and streams of one router process. All methods belong to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        url = settings.redis_url.get_secret_value()
        self.telemetry = Telemetry()
        self.tracer: Tracer | None = None
        self.spans: PlacementSpans | None = None
        if settings.otlp_endpoint:
            from services.common.otlp import Tracer

            self.tracer = Tracer(settings.otlp_endpoint, "router", settings.router_id)
            self.spans = PlacementSpans(self.tracer.send)
        self.decisions = DecisionLog(settings.decision_log_size, settings.decision_log_file)
        self.state = RouterState(
            make_policy(settings.policy, settings.policy_settings),
            StateSettings(
                affinity_ttl_s=settings.affinity_ttl_s,
                gateway_lease_s=settings.gateway_lease_s,
                place_lease_s=settings.place_lease_s,
                lost_instance_s=settings.lost_instance_s,
                limits=Limits(settings.max_requests_per_instance, settings.max_kv_usage),
                queue=QueueSettings(
                    size=settings.queue_size,
                    timeout_s=settings.queue_timeout_s,
                    tenant_share=settings.queue_tenant_share,
                    ageing_tokens_per_s=settings.queue_ageing_tokens_per_s,
                    fair=settings.queue_fair,
                    expiry=settings.hold_expiry,
                ),
                circuit=CircuitSettings(
                    settings.circuit_failures, settings.circuit_first_open_s, settings.circuit_max_open_s
                ),
                migration_window_s=settings.migration_window_s,
                stale_report_s=settings.stale_report_s,
                stale_keys_s=settings.stale_keys_s,
                max_keys=settings.max_keys,
                approximate_keys=settings.approximate_keys,
                warm_up_s=settings.warm_up_s,
            ),
            router_id=settings.router_id,
            owns_all=not url,
        )
        self.agents: dict[int, AgentStream] = {}
        self.gateways: dict[str, GatewayStream] = {}
        self._callers: dict[str, set[asyncio.Future[ev.Placed | ev.Refused]]] = {}
        self.store: Store
        self._warm_watchers: list[Callable[[bool], None]] = []
        self._warm = False
        self._told_fleet: placement_pb2.Fleet | None = None
        if url:
            self.store = RedisStore(
                url,
                router_id=settings.router_id,
                fleet=settings.fleet,
                lease_s=settings.owner_lease_s,
                settle_s=settings.settle_s,
                affinity_ttl_s=settings.affinity_ttl_s,
                on_event=self.submit,
                on_owners=self._tell_fleet,
                snapshot=self._snapshot,
            )
        else:
            self.store = MemoryStore(settings.router_id)
        self.telemetry.registry.register(LostLines("router", lambda: self.decisions.lost))
        self.store.about = self._about
        self.store.on_orders = self._orders_told
        self.console_url = ""
        self.telemetry.registry.register(FleetCollector(self.state, lambda: self._warm))

    @property
    def warm(self) -> bool:
        """Whether this replica knows the fleet well enough to place, or has waited long enough to."""
        return self._warm

    def on_warm(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` with False or True now and when that changes."""
        self._warm_watchers.append(watcher)
        watcher(self._warm)

    def owner_elsewhere(self, refused: ev.Refused) -> Owner | None:
        """The other replica that a refused request is to be sent to, as far as known."""
        owner = self.store.owner(refused.pool) if refused.not_now else None
        return owner if owner is None or owner.router_id != self.settings.router_id else None

    def place(self, event: ev.PlaceRequested, traceparent: str) -> None:
        """Submit a placement request, unless this replica's lease of the pool has run out while it slept."""
        if self.spans is not None:
            self.spans.asked(event.request.request_id, event.gateway_id, traceparent)
        pool = self.state.fleet.pool_of(event.request.model)
        if pool and self.state.owned.owns(pool) and not self.store.holds(pool):
            self._deliver(replace(_changing(event.request.request_id, pool), gateway_id=event.gateway_id))
        else:
            self.submit(event)

    def end_reports(self) -> None:
        """Let the agents go: the router stops."""
        for agent in self.agents.values():
            agent.replies.put_nowait(None)

    def end_sessions(self) -> None:
        """Let all gateways go."""
        for gateway in self.gateways.values():
            gateway.outbox.end()

    async def set_policy(self, policy: Policy) -> bool:
        """Place by `policy` from now on, here and at all replicas. False when those get it only once the shared store is back."""
        ref = policy.ref()
        return await self._order(lambda orders: replace(orders, policy=(ref.name, dict(ref.settings))))

    async def drain(self, info: InstanceInfo, resume: bool) -> bool:
        """Let the instance get nothing new from any replica while its incarnation lasts, or again. False as for set_policy."""

        def change(orders: Orders) -> Orders:
            drained = {
                one: life for one, life in orders.drained.items() if one != info.instance_id and lasts(one, life)
            }
            if not resume:
                drained[info.instance_id] = info.incarnation
            return replace(orders, drained=dict(list(drained.items())[-MAX_DRAINED:]))

        def lasts(instance_id: str, incarnation: str) -> bool:
            record = self.state.fleet.get(instance_id)
            return record is None or record.info.incarnation == incarnation

        return await self._order(change)

    async def _order(self, change: Callable[[Orders], Orders]) -> bool:
        def changed(text: str) -> str:
            try:
                orders = Orders.read(text)
            except msgspec.MsgspecError:
                orders = Orders()  # of a replica in another version, and said so in the log when it came
            return msgspec.json.encode(change(orders)).decode()

        return await self.store.change_orders(changed)

    async def run(self) -> None:
        """Keep the store and the clock going until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.run())
            tasks.create_task(self._ticks())

    def submit(self, event: ev.Event) -> list[ev.Effect]:
        """Apply an event and carry out its effects."""
        started = time.perf_counter()
        effects = self.state.handle(event, time.monotonic())
        elapsed = time.perf_counter() - started
        kept: list[StoreEffect] = []
        answers: list[ev.Placed | ev.Refused] = []
        fleet_changed = False
        for effect in effects:
            match effect:
                case ev.Reserved() | ev.Released() | ev.OwnerSet() | ev.UsualSet():
                    kept.append(effect)
                case ev.Decided(decision):
                    self.decisions.decided(decision, time.time(), elapsed)
                    self.telemetry.decided(decision, elapsed)
                case ev.Noted(decision_id, note):
                    self.decisions.noted(decision_id, note, time.time())
                    if (logged := self.decisions.get(decision_id)) is not None:
                        self.telemetry.fell_back(logged.decision)
                case ev.Closed(decision_id, finished):
                    logged = self.decisions.get(decision_id)
                    self.decisions.closed(decision_id, finished, time.time())
                    self.telemetry.closed(logged.decision if logged else None, finished)
                case ev.Refused():
                    self.telemetry.refused(effect.code)
                    answers.append(effect)
                case ev.Welcome() | ev.Resync() | ev.RefuseReport():
                    self._tell_agent(effect)
                case ev.Distrusted(instance_id, reason):
                    log.warning("an instance's prefix keys are not believed", instance=instance_id, reason=reason)
                case ev.FleetChanged():
                    fleet_changed = True
                case ev.Placed():
                    answers.append(effect)
        if isinstance(event, ev.Finished):
            if self.spans is not None:
                self.spans.ended(event.request_id)
            # Whoever still waits for its placement would wait for ever: a hold ends without a word.
            self._answer_callers(ev.Refused(event.request_id, "ABORTED", "the request ended while it was held"))
        self.store.record(kept)
        for answer in answers:
            self._answer(answer)
        if fleet_changed:
            self.store.want(pool.model for pool in self.state.fleet.pools())
            self._check_warmth()
            self._tell_fleet()
        return effects

    def fleet(self) -> placement_pb2.Fleet:
        """The fleet for gateways."""
        return gateways.fleet_to_wire(
            self.state.fleet.pools(),
            self.store.owner,
            warming=not self._warm,
            owner_within_s=self.settings.owner_within_s,
        )

    def opened(self, hello: ev.GatewayHello, stream: GatewayStream) -> None:
        """A gateway opened a stream: from now on its answers go there, and an older stream of it is done with."""
        if (before := self.gateways.get(hello.gateway_id)) is not None:
            before.outbox.end()
        self.gateways[hello.gateway_id] = stream
        self.submit(hello)

    def closed(self, gateway_id: str, stream: GatewayStream) -> None:
        """A gateway's stream ended. What a newer one of it announced is not touched."""
        if self.gateways.get(gateway_id) is stream:
            del self.gateways[gateway_id]
            if self.spans is not None:
                self.spans.gateway_left(gateway_id)
            self.submit(ev.GatewayLost(gateway_id))

    async def placed(
        self, request: PlacementRequest, within_s: float | None, traceparent: str
    ) -> ev.Placed | ev.Refused:
        """The answer to a request outside any stream, however late it comes; None: without a limit of the caller's own.

        Cancelled, it ends the request, which its caller cannot know to be placed.
        """
        answer: asyncio.Future[ev.Placed | ev.Refused] = asyncio.get_running_loop().create_future()
        callers = self._callers.setdefault(request.request_id, set())
        callers.add(answer)
        if within_s is not None:
            request = replace(request, deadline_s=min(within_s, request.deadline_s or within_s))
        try:
            self.place(ev.PlaceRequested(request), traceparent)
            return await answer
        except asyncio.CancelledError:
            if callers == {answer}:
                self.submit(ev.Finished(request.request_id, "CANCELLED", error="the caller left"))
            raise
        finally:
            callers.discard(answer)
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

        self.store.after(pool, stored)

    def _deliver(self, effect: ev.Placed | ev.Refused) -> None:
        if self.spans is not None:
            self.spans.answered(effect)
        # Callers of the unary form hear the answer even when a gateway has asked for the same request since.
        self._answer_callers(effect)
        if not effect.gateway_id:
            return
        if (stream := self.gateways.get(effect.gateway_id)) is None:
            log.warning("an answer to a gateway that left", request_id=effect.request_id)
        elif isinstance(effect, ev.Placed):
            stream.send(placement=gateways.placement_to_wire(self.state, effect))
        else:
            stream.send(refusal=gateways.refusal_to_wire(effect, self.owner_elsewhere(effect)))

    def _answer_callers(self, answer: ev.Placed | ev.Refused) -> None:
        for waiting in self._callers.get(answer.request_id, ()):
            if not waiting.done():
                waiting.set_result(answer)

    def _tell_fleet(self) -> None:
        fleet = self.fleet()
        if fleet == self._told_fleet:
            return
        self._told_fleet = fleet
        for gateway in self.gateways.values():
            gateway.send(fleet=fleet)

    def _tell_agent(self, effect: ev.Welcome | ev.Resync | ev.RefuseReport) -> None:
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

    def _about(self) -> str:
        ref = self.state.policy.ref()
        return msgspec.json.encode(About((ref.name, dict(ref.settings)), self.console_url)).decode()

    def _orders_told(self, text: str) -> None:
        try:
            orders = Orders.read(text)
            self.submit(ev.Drained(orders.drained))
            policy = make_policy(*orders.policy) if orders.policy else self.state.policy
        except (msgspec.MsgspecError, SettingError) as error:
            # Of a replica in another version: better two policies than none.
            log.error("the fleet's orders cannot be taken whole", orders=text, error=str(error))
            return
        if policy.ref() != self.state.policy.ref():
            log.info("the fleet's policy is taken", policy=policy.ref().name)
            self.state.policy = policy

    def _check_warmth(self) -> None:
        warm = not self.state.cold(time.monotonic())
        if warm is not self._warm:
            self._warm = warm
            for watcher in self._warm_watchers:
                watcher(warm)
            self._tell_fleet()

    def _snapshot(self, pool: str) -> list[StoreEffect]:
        reserved = [ev.Reserved(reservation) for reservation in self.state.reservations.of_pool(pool)]
        owned = [ev.OwnerSet(*owner, pool) for owner in self.state.affinity.of_pool(pool).items()]
        usual = self.state.prefills.kept(pool)
        return [*reserved, *owned, *([ev.UsualSet(usual, pool)] if usual else [])]

    async def _ticks(self) -> None:
        while True:
            self._check_warmth()
            self.submit(ev.Tick())
            await asyncio.sleep(TICK_S)


def _changing(request_id: str, pool: str) -> ev.Refused:
    return not_now(request_id, pool, "the pool's owner is changing")
