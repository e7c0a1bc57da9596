"""A discrete-event simulator: a trace, N engine models and the routers' own RouterState, in virtual time. Pure.

The router that places live requests places these, unchanged: it is told of keys, loads, steps, first tokens and ends by the same
events, and its answers are carried out as a gateway does, whenever they come. A client that is told to come again later does.
Tokenising, asking the router, reaching an engine and reporting take the time that is set for them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs
from xxhash import xxh3_64_intdigest

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.lab.engine.interface import EngineRequest, Finished, FirstToken, WaitingForRemoteKv
from pointsman.lab.report.instance_samples import InstanceSample
from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.clients import Clients, Turn
from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.event_queue import Action, EventQueue
from pointsman.lab.simulation.fleet import SimulatedFleet
from pointsman.lab.simulation.owner_changes import OwnerChanges
from pointsman.lab.simulation.report_channel import Deliver, ReportChannel
from pointsman.lab.simulation.request import SimulatedRequest, engine_id, request_id
from pointsman.lab.simulation.routers import Routers
from pointsman.lab.workload.block_names import PromptBlocks
from pointsman.lab.workload.session_starts import Session
from pointsman.lab.workload.traces import TraceRequest, by_session
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.policy.registry import make_policy
from pointsman.router.core.router_state import RouterState
from pointsman.router.core.types import Phase, PlacementRequest, Step, StepKind

MODEL = "simulated"
GATEWAY = "sim"
# As the agent, the router and the gateway do.
LOAD_EVERY_S = 1.0
BOOKMARK_EVERY_S = 5.0
TICK_EVERY_S = 0.5
STEP_WITHIN_S = 60.0
RETRIES = 2
# How much of a trace has names that are remembered, as a multiple of what all caches hold.
NAMED_CACHES = 4
# What clients see of a refusal; 503 for every other one.
HTTP_STATUS = {"RESOURCE_EXHAUSTED": 429, "NOT_FOUND": 404}
# The reason of a SERVE that a gateway takes by itself, because no router told it the next step.
ROUTER_AWAY = "router_away"


class Simulator:
    """One run; run() or play() may be called once. `routers`, `busy_s` and the counts can be looked at afterwards.

    `resent_requests` counts requests that had to ask a new owner of their pool, `steps_without_router` steps that a gateway took
    by itself.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        config: SimulationConfig,
        on_sample: Callable[[InstanceSample], None] | None = None,
    ) -> None:
        """`trace`: requests, or sessions in the order of their starts, which are then taken one by one as their time comes: a
        long trace need never exist as a whole. `on_sample` is told of each instance once a second. Raises SettingError for an
        unknown policy or setting."""
        self._config = config
        self._on_sample = on_sample
        self.resent_requests = 0
        self.steps_without_router = 0
        self._ended: list[RequestRecord] = []
        self._event_queue = EventQueue()
        # Several times what all caches hold: a block that was not asked for meanwhile is in none of them.
        held = config.instances * config.engine.kv_blocks * KEY_TOKENS
        self._prompts = PromptBlocks(NAMED_CACHES * held, prompts_include_answers=config.prompts_include_answers)
        self._running: dict[str, SimulatedRequest] = {}
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
        self._owner_changes = OwnerChanges(
            config,
            self._pools,
            self._event_queue,
            self.routers,
            new_state,
            self._open_streams,
            self._on_owner_lost,
            self._on_new_owner,
        )
        sessions = trace if isinstance(trace, Iterator) else iter(_in_order(trace))
        self._clients = Clients(sessions, config, self._pools, self._event_queue, self._arrive)
        self._fleet = SimulatedFleet(config, self._pools, self._event_queue, self.routers.report, self._on_engine_event)

    def run(self) -> list[RequestRecord]:
        """Play the trace to its end; records in the order in which requests ended."""
        return list(self.play())

    def play(self) -> Iterator[RequestRecord]:
        """As run(), with each record as soon as its request has ended; they are not kept."""
        self._begin()
        self._clients.start()
        while not self._clients.done:
            self._event_queue.run_next()
            if self._ended:
                yield from self._ended
                self._ended.clear()

    def _begin(self) -> None:
        """All agents and the gateway are there, and time begins."""
        for name in self.routers.states:
            self._open_streams(name, 0.0)
        self._fleet.report_loads(0.0)
        self._every(TICK_EVERY_S, partial(self.routers.deliver_to_all, ev.Tick()))
        self._every(LOAD_EVERY_S, self._fleet.report_loads)
        if self._on_sample is not None:
            self._every(LOAD_EVERY_S, partial(self._sample, self._on_sample))
        if self._config.report_loss:
            self._every(BOOKMARK_EVERY_S, self._fleet.report_bookmarks)
        self._owner_changes.begin()

    @property
    def router(self) -> RouterState:
        """The owner of the first pool; LookupError while it has none."""
        return self.routers.states[self.routers.owner(self._pools[0])]

    @property
    def busy_s(self) -> dict[str, float]:
        """How long each instance has been in steps, in s."""
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

    # ---- clients ----

    def _arrive(self, turn: Turn, now: float) -> None:
        request = turn.request
        name = request_id(turn)
        prompt = self._prompts.prompt_of(request, last=not (turn.later_turns or turn.may_continue))
        placement = PlacementRequest(
            request_id=name,
            model=turn.pool,
            input_tokens=prompt.length,
            keys=prompt.names,
            session_id=request.session,
            max_output_tokens=request.output_length,
            exclude=turn.exclude,
            sliceable_tokens=prompt.length,
        )
        record = RequestRecord(session=request.session, turn=request.turn, t_send=now)
        running = self._running[name] = SimulatedRequest(turn, record, prompt, placement)
        tokenised = now + self._config.frontend_s + self._config.tokenise_token_s * prompt.length
        self._event_queue.schedule(tokenised + self._network_delay_s(running), partial(self._ask, name))

    def _end(self, name: str, now: float, status: int, error: str = "") -> None:
        running = self._running.pop(name)
        running.record.status, running.record.error = status, error
        running.record.e2e_s = now - running.record.t_send
        self._ended.append(running.record)
        self._clients.answered(running.turn, now)

    def _random_s(self, running: SimulatedRequest, mean_s: float) -> float:
        """A time with that mean, exponentially distributed; the same for the same draw of a request under one seed."""
        if not mean_s:
            return 0.0
        running.draw_count += 1
        drawn = xxh3_64_intdigest(f"{self._config.seed} {running.placement.request_id} {running.draw_count}".encode())
        return -mean_s * math.log((drawn + 1) / 2**64)

    def _network_delay_s(self, running: SimulatedRequest) -> float:
        """Seconds that a word to or from the router takes this time."""
        return self._random_s(running, self._config.placement_s / 2)

    # ---- the routers ----

    def _on_effect(self, router: str, effect: ev.Effect, now: float) -> None:
        """Do what a router wants done, for whichever request or instance."""
        if isinstance(effect, ev.Placed):
            running = self._running[effect.request_id]
            self._event_queue.schedule(
                now + self._network_delay_s(running), partial(self._placed, running.ask_count, effect)
            )
        elif isinstance(effect, ev.Refused):
            running = self._running[effect.request_id]
            self._event_queue.schedule(
                now + self._network_delay_s(running), partial(self._refused, running.ask_count, effect)
            )
        elif isinstance(effect, ev.Resync) or (isinstance(effect, ev.Welcome) and effect.snapshot):
            for event in self._fleet.of_stream(effect.stream_id).all_keys():
                self.routers.report_to(router, event, now)

    def _open_streams(self, router: str, now: float) -> None:
        """The gateway and all agents open a stream to a router."""
        self.routers.deliver(router, ev.GatewayHello(GATEWAY), now)
        for hello in self._fleet.hellos():
            self.routers.deliver(router, hello, now)

    def _on_owner_lost(self, pool: str, now: float) -> None:
        """The pool's owner is gone: what is still to come from it never will, or does not count."""
        for running in list(self._running.values()):
            if running.placement.model == pool and running.awaits_router:
                running.ask_count += 1
                if running.placed is not None:
                    self._router_lost(running, now)

    def _on_new_owner(self, pool: str, new_owner: str, now: float) -> None:
        """A new owner: the gateway tells it which streams are open, and asks again for what waits."""
        known = self._running.items()
        hello = ev.GatewayHello(
            GATEWAY,
            tuple(running.open_stream() for _, running in known if running.placed is not None),
            frozenset(name for name, running in known if running.placed is None and running.awaits_router),
            frozenset(self._fleet.instances),
        )
        self.routers.deliver(new_owner, hello, now)
        for name, running in list(known):
            if running.placement.model == pool and running.placed is None and running.awaits_router:
                self.resent_requests += 1
                self._ask(name, now)

    # ---- the gateway ----

    def _ask(self, name: str, now: float) -> None:
        running = self._running[name]
        running.awaits_router = True
        running.ask_count += 1
        if running.asked_at is None:
            running.asked_at = now
        if owner := self.routers.owner(running.placement.model):
            placement = structs.replace(running.placement, age_s=now - running.asked_at)
            self.routers.deliver(owner, ev.PlaceRequested(placement, GATEWAY), now)

    def _report(self, name: str, event: ev.Event, now: float) -> None:
        """Tell the owner of the request's pool; while there is none, the hello to the next one says as much."""
        if owner := self.routers.owner(self._running[name].placement.model):
            self.routers.deliver(owner, event, now)

    def _refused(self, ask_count: int, refused: ev.Refused, now: float) -> None:
        running = self._running.get(refused.request_id)
        if running is None or running.ask_count != ask_count:
            return
        running.awaits_router = False
        if running.placed is not None:
            # Its owner does not know the plan: it was another's.
            assert refused.not_serving
            self._router_lost(running, now)
            return
        if refused.retry_after_s is None or running.refusals >= self._config.retries:
            self._end(refused.request_id, now, HTTP_STATUS.get(refused.code, 503), refused.message)
            return
        running.refusals += 1
        # It comes again as a new request.
        running.asked_at = None
        self._event_queue.schedule(now + refused.retry_after_s, partial(self._ask, refused.request_id))

    def _placed(self, ask_count: int, placed: ev.Placed, now: float) -> None:
        running, step = self._running.get(placed.request_id), placed.step
        if running is None or running.ask_count != ask_count or not running.awaits_router:
            return
        running.awaits_router = False
        running.placed = placed
        if not running.record.decision:
            decision = placed.decision
            running.record.decision = decision.decision_id
            running.record.mode = decision.mode
            running.record.route_class = decision.route_class
            running.record.reason = decision.result.reason
            running.record.rule = decision.result.steps[-1].reason
            running.record.predicted_cached_tokens = decision.cached_tokens
        if step.kind is StepKind.PREFILL:
            tokens = step.prefix_tokens or running.prompt.length
            prompt = running.prompt
            if tokens < prompt.length:
                # What is generated after a part of a prompt is no part of it.
                names = prompt.names[: tokens // KEY_TOKENS]
                prompt = replace(prompt, length=tokens, names=names, answer=self._prompts.new_names())
            self._send(placed, EngineRequest(engine_id(placed), prompt, 1), now)
        else:
            self._serve(placed, now)

    def _transfer_s(self, running: SimulatedRequest, missing: int) -> float:
        """Seconds until `missing` tokens' KV that a PREFILL left elsewhere is where there are blocks for it now."""
        return self._config.profile.transfer_tail_s(missing, running.prefill_s if self._config.layerwise else 0.0)

    def _serve(self, placed: ev.Placed, now: float) -> None:
        running = self._running[placed.request_id]
        running.record.instance = placed.step.instance_id
        remote = running.prefilled if placed.step.kv_source else 0
        output = running.turn.request.output_length
        self._send(placed, EngineRequest(engine_id(placed), running.prompt, output, remote_tokens=remote), now)

    def _send(self, placed: ev.Placed, request: EngineRequest, now: float) -> None:
        delay_s = self._random_s(self._running[placed.request_id], self._config.api_s)
        if delay_s:
            self._event_queue.schedule(now + delay_s, partial(self._submit, placed, request))
        else:
            self._submit(placed, request, now)

    def _submit(self, placed: ev.Placed, request: EngineRequest, now: float) -> None:
        name = placed.request_id
        try:
            self._fleet.instances[placed.step.instance_id].submit(request, now)
        except ValueError as error:
            if placed.step.kind is StepKind.PREFILL:
                self._step_done(name, placed, now, str(error))
                return
            self._report(name, ev.Finished(name, "REJECTED", error=str(error), http_status=400), now)
            self._end(name, now, 400, str(error))

    def _step_done(self, name: str, placed: ev.Placed, now: float, error: str = "") -> None:
        """Ask for the step after a PREFILL; where nobody tells it in time, the gateway goes on alone."""
        running = self._running[name]
        running.awaits_router = True
        running.ask_count += 1
        running.failed = running.failed or bool(error)
        if not self.routers.owner(running.placement.model):
            self._router_lost(running, now)
            return
        self._event_queue.schedule(now + STEP_WITHIN_S, partial(self._serve_without_router, name, running.ask_count))
        done = ev.StepDone(name, placed.step_index, ok=not error, error=error, deadline_s=STEP_WITHIN_S)
        self._report(name, done, now)

    def _router_lost(self, running: SimulatedRequest, now: float) -> None:
        """Whoever was to tell the next step is gone, and the plan with it: a new attempt asks the next owner, who finds cached
        what is computed. After an offload or a failure the gateway goes on alone, as its own state machine does
        (services/gateway/core/request/request_state_machine.py)."""
        before, step = running.placement.request_id, running.placed
        assert step is not None
        steps = step.decision.result.steps
        for_another = any(one.instance_id != step.step.instance_id for one in steps[step.step_index + 1 :])
        if running.failed or for_another or running.attempts >= RETRIES:
            running.awaits_router = True
            self._serve_without_router(before, running.ask_count, now)
            return
        self._report(before, ev.Finished(before, "CANCELLED", error="its router was lost between two steps"), now)
        del self._running[before]
        running.start_attempt()
        name = running.placement.request_id
        self._running[name] = running
        self.resent_requests += bool(self.routers.owner(running.placement.model))
        self._ask(name, now)

    def _serve_without_router(self, name: str, ask_count: int, now: float) -> None:
        """No next step came: one SERVE goes where the prefix is."""
        running = self._running.get(name)
        if running is None or running.ask_count != ask_count or not running.awaits_router:
            return
        assert running.placed is not None
        self.steps_without_router += 1
        running.awaits_router = False
        step = Step(StepKind.SERVE, running.placed.step.instance_id, ROUTER_AWAY)
        computed = 0 if running.failed else running.placed.step.prefix_tokens
        running.placed = structs.replace(running.placed, step_index=running.placed.step_index + 1, step=step, last=True)
        stream = structs.replace(running.open_stream(), cached_tokens=computed)
        self._report(name, ev.StreamOpened(GATEWAY, stream), now)
        self._serve(running.placed, now)

    def _on_engine_event(self, event: WaitingForRemoteKv | FirstToken | Finished, now: float) -> None:
        name, _, number = event.request_id.rpartition("/")
        running = self._running[name]
        placed, record = running.placed, running.record
        assert placed is not None
        assert placed.step_index == int(number), "an answer to a step that was not taken"
        if isinstance(event, WaitingForRemoteKv):
            receive = partial(self._fleet.instances[placed.step.instance_id].receive, event.request_id)
            self._event_queue.schedule(now + self._transfer_s(running, event.tokens), receive)
        elif placed.step.kind is StepKind.PREFILL:
            if isinstance(event, FirstToken):
                tokens = placed.step.prefix_tokens or running.prompt.length
                running.prefilled = tokens
                running.prefill_s = self._config.profile.chunk_s(tokens - event.cached_tokens, event.cached_tokens)
            else:
                self._step_done(name, placed, now)
        elif isinstance(event, FirstToken):
            running.phase = Phase.DECODE
            record.ttft_s = now - record.t_send
            record.cached_tokens = event.cached_tokens
            self._report(name, ev.FirstToken(name), now)
        else:
            record.prompt_tokens = running.turn.request.input_length
            record.output_tokens = running.turn.request.output_length
            told = (record.prompt_tokens, record.cached_tokens, record.output_tokens)
            self._report(name, ev.Finished(name, "OK", *told, http_status=200), now)
            self._end(name, now, 200)


def _in_order(requests: Sequence[TraceRequest]) -> list[Session]:
    return sorted(by_session(requests).values(), key=lambda turns: turns[0].timestamp_ms)
