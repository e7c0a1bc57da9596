"""A discrete-event simulator: a trace, N engine models, the routers' own RouterState and the gateway's own state machine of each
request, in virtual time. Pure.

The code that places live requests also places the simulated ones, unchanged, and the gateway's state machine handles the answers.
A client that is told to retry later does so. Tokenising, queries to the router, sending to an engine and reporting take the
configured times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_gateway.core.request.sessions import Sessions
from pointsman_lab.admission.registry import RULES
from pointsman_lab.engine.interface import Finished, FirstToken, WaitingForRemoteKv
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_lab.simulation.admission_gate import AdmissionGate
from pointsman_lab.simulation.agent import CONSISTENCY_CHECK_INTERVAL_S, REPORT_INTERVAL_S
from pointsman_lab.simulation.clients import Clients, Turn
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.event_queue import Action, EventQueue
from pointsman_lab.simulation.fleet import SimulatedFleet
from pointsman_lab.simulation.gateway import CLIENT_LEFT, SimulatedGateway
from pointsman_lab.simulation.owner_changes import OwnerChanges
from pointsman_lab.simulation.report_channel import Deliver, ReportChannel
from pointsman_lab.simulation.request import SimulatedRequest, request_id
from pointsman_lab.simulation.routers import Routers
from pointsman_lab.workload.block_names import PromptBlocks
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.traces import TraceRequest, by_session
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.router_state import RouterState

MODEL = "simulated"
# Interval between the routers' ticks, s; the same as in the router.
TICK_EVERY_S = 0.5
# Tokens of the trace whose names are remembered, as a multiple of the capacity of all caches.
NAMED_CACHES = 4


class Simulator:
    """One run. run() or play() may be called once. `routers`, `busy_s` and the counts can be read afterwards."""

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        config: SimulationConfig,
        on_sample: Callable[[InstanceSample], None] | None = None,
        max_instances: int = 0,
    ) -> None:
        """Create a simulator at time 0.

        `trace` has requests, or sessions in the order of their starts. Sessions are read one by one when they start, so a long
        trace is never in memory as a whole. `on_sample` is called for each instance once a second. `max_instances` is the
        maximum number of instances (0: those at the beginning). Raises SettingError for an unknown policy or setting.
        """
        self._config = config
        self._on_sample = on_sample
        self._ended: list[RequestRecord] = []
        self._event_queue = EventQueue()
        # A multiple of the capacity of all caches: no cache still holds a block that has not been used for that long.
        # Shared storage keeps every block.
        held = max(config.instances, max_instances) * (config.engine.kv_blocks + config.engine.host_blocks) * KEY_TOKENS
        limit = None if config.shared_storage else NAMED_CACHES * held
        self._prompts = PromptBlocks(limit, prompts_include_answers=config.prompts_include_answers)
        self._sessions = Sessions()
        self._pools = [MODEL] if config.pools == 1 else [f"{MODEL}-{number}" for number in range(config.pools)]
        policy = make_policy(config.policy, config.policy_settings) if isinstance(config.policy, str) else config.policy
        names = ["sim"] if config.routers == 1 else [f"sim-{number}" for number in range(config.routers)]

        def new_state(name: str) -> RouterState:
            return RouterState(policy, config.router, router_id=name, seed=config.seed, owns_all=len(names) == 1)

        self.routers = Routers(
            {name: new_state(name) for name in names},
            self._pools,
            self._new_channel,
            self._on_effect,
            self._event_queue,
        )
        sessions = trace if isinstance(trace, Iterator) else iter(_in_order(trace))
        self._clients = Clients(sessions, config, self._pools, self._event_queue, self._arrive)
        self._fleet = SimulatedFleet(
            config,
            self._pools,
            self._event_queue,
            self.routers.report,
            self.routers.report_to,
            self._on_engine_event,
        )
        self._gateway = SimulatedGateway(
            config,
            self._event_queue,
            self.routers,
            self._fleet.instances,
            self._fleet.pool_of,
            self._prompts.new_names,
            self._end,
        )
        self._gate = self._new_gate() if config.lab_admission else None
        self._owner_changes = OwnerChanges(
            config,
            self._pools,
            self._event_queue,
            self.routers,
            new_state,
            self._open_streams,
            self._gateway.owner_lost,
            self._on_new_owner,
        )

    def run(self) -> list[RequestRecord]:
        """Play the trace to its end; return the records in the order in which requests ended."""
        return list(self.play())

    def play(self) -> Iterator[RequestRecord]:
        """As run(), but yield each record as soon as its request has ended; records are not kept."""
        self._begin()
        self._clients.start()
        while not self._clients.done:
            self._event_queue.run_next()
            if self._ended:
                yield from self._ended
                self._ended.clear()

    def _begin(self) -> None:
        """Connect all agents and the gateway, and start the clock."""
        for name in self.routers.states:
            self._open_streams(name, 0.0)
        self._fleet.report_loads(0.0)
        self._every(TICK_EVERY_S, partial(self.routers.deliver_to_all, ev.Tick()))
        self._every(REPORT_INTERVAL_S, self._fleet.report_loads)
        if self._on_sample is not None:
            self._every(REPORT_INTERVAL_S, partial(self._sample, self._on_sample))
        if self._config.report_loss:
            self._every(CONSISTENCY_CHECK_INTERVAL_S, self._fleet.report_due)
        self._owner_changes.begin()
        if self._gate is not None:
            self._gate.begin()

    @property
    def router(self) -> RouterState:
        """The owner of the first pool. Raises LookupError while the pool has none."""
        return self.routers.states[self.routers.owner(self._pools[0])]

    @property
    def resent_requests(self) -> int:
        """Number of requests that were sent again to a new owner of their pool."""
        return self._gateway.resent_requests

    @property
    def steps_without_router(self) -> int:
        """Number of steps that the gateway took without a router."""
        return self._gateway.steps_without_router

    @property
    def busy_s(self) -> dict[str, float]:
        """Time that each instance has spent in steps, s."""
        return self._fleet.busy_s

    def _new_channel(self, name: str, deliver: Deliver) -> ReportChannel:
        config = self._config
        losses = random.Random(f"loss {config.seed} {name}")
        return ReportChannel(self._event_queue, deliver, config.report_delay_s, config.report_loss, losses)

    def _every(self, seconds: float, action: Action) -> None:
        def again(now: float) -> None:
            action(now)
            self._event_queue.schedule(now + seconds, again)

        self._event_queue.schedule(seconds, again)

    def _sample(self, on_sample: Callable[[InstanceSample], None], now: float) -> None:
        owners = {pool: self.routers.states[name] for pool in self._pools if (name := self.routers.owner(pool))}
        for sample in self._fleet.samples(owners, now):
            on_sample(sample)

    # ---- clients and gateway ----

    def _arrive(self, turn: Turn, now: float) -> None:
        request = turn.request
        prompt = self._prompts.prompt_of(request, last=not (turn.later_turns or turn.may_continue))
        placement = PlacementRequest(
            request_id=request_id(turn),
            model=turn.pool,
            input_tokens=prompt.length,
            keys=prompt.names,
            tenant=turn.tenant.name,
            session_id=request.session if turn.named else self._session_by_prefix(turn, prompt),
            parent=f"{turn.tenant.name}/{turn.parent}" if turn.names_parent else "",
            priority=turn.tenant.priority,
            weight=turn.tenant.weight,
            max_output_tokens=request.output_length,
            exclude=turn.exclude,
            sliceable_tokens=prompt.length,
            parkable=True,
        )
        record = RequestRecord(session=request.session, turn=request.turn, t_send=now)
        running = SimulatedRequest(turn, record, prompt, placement)
        if self._config.leaves_after_s is not None:
            self._event_queue.schedule(now + self._config.leaves_after_s, partial(self._lose_patience, running))
        if self._gate is None:
            self._pass_on(running, now)
        else:
            self._gate.arrive(running, now)

    def _session_by_prefix(self, turn: Turn, prompt: NamedPrompt) -> str:
        """Return the session that the gateway finds for a request without one. Mutates."""
        tenant = turn.tenant.name
        return self._sessions.resolve(tenant, prompt.names, hint="", fresh=f"s-{request_id(turn)}")

    def _pass_on(self, running: SimulatedRequest, now: float) -> None:
        tokenised_at = now + self._config.frontend_s + self._config.tokenise_token_s * running.prompt.length
        self._gateway.take(running, tokenised_at)

    def _lose_patience(self, running: SimulatedRequest, now: float) -> None:
        """Let a client that has had no token disconnect."""
        if running.record.status or running.record.ttft_s is not None:
            return
        if self._gate is not None and self._gate.leave(running):
            self._end(running, now, CLIENT_LEFT, "client left")
        else:
            self._gateway.disconnect(running, now)

    def _new_gate(self) -> AdmissionGate:
        pool_of = self._fleet.pool_of
        of_pool = {pool: [name for name in pool_of if pool_of[name] == pool] for pool in self._pools}
        tokens = self._config.engine.kv_blocks * self._config.engine.block_size
        new_rule = RULES[self._config.lab_admission]
        return AdmissionGate(
            {pool: new_rule(dict.fromkeys(names, tokens)) for pool, names in of_pool.items()},
            of_pool,
            self._event_queue,
            lambda pool, now: {name: self._fleet.instances[name].load(now) for name in of_pool[pool]},
            self._pass_on,
        )

    def _on_engine_event(self, event: WaitingForRemoteKv | FirstToken | Finished, now: float) -> None:
        self._gateway.on_engine_event(event, now)

    def _end(self, running: SimulatedRequest, now: float, status: int, error: str) -> None:
        running.record.status, running.record.error = status, error
        running.record.e2e_s = now - running.record.t_send
        self._ended.append(running.record)
        if self._gate is not None:
            over = not running.turn.later_turns or (self._config.gives_up and not running.record.ok)
            self._gate.answered(running, now, over=over)
        self._clients.answered(running.turn, now, ok=running.record.ok)

    # ---- the routers ----

    def _on_effect(self, router: str, effect: ev.Effect, now: float) -> None:
        """Carry out a router's effect on a request or an instance."""
        if isinstance(effect, ev.Placed | ev.Refused | ev.Parked):
            self._gateway.hear(effect, now)
        elif isinstance(effect, ev.Welcome):
            self._fleet.of_stream(effect.stream_id).agent.welcomed(router, effect, now)
        elif isinstance(effect, ev.Resync):
            self._fleet.of_stream(effect.stream_id).agent.resync(router, now)

    def _open_streams(self, router: str, now: float) -> None:
        """Open the streams of the gateway and all agents to a router."""
        self.routers.deliver(router, self._gateway.hello(), now)
        for hello in self._fleet.hellos():
            self.routers.deliver(router, hello, now)

    def _on_new_owner(self, pool: str, new_owner: str, now: float) -> None:
        self.routers.deliver(new_owner, self._gateway.hello(), now)
        self._gateway.owner_changed(pool, now)


def _in_order(requests: Sequence[TraceRequest]) -> list[Session]:
    return sorted(by_session(requests).values(), key=lambda turns: turns[0].timestamp_ms)
