"""The gateway of a simulation: the gateway's own state machine for each request, with its effects in virtual time. Pure.

Real are: the order of requests to routers and steps, their instances, their timeouts, and the reports. Modelled are: the ways to
routers and engines, and the choice of a router (`Routers` has each pool's owner).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from msgspec import structs
from xxhash import xxh3_64_intdigest

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_gateway.core.api.errors import RETRY_S
from pointsman_gateway.core.request import request_events as ge
from pointsman_gateway.core.request.failures import error_for
from pointsman_gateway.core.request.local_pace import LocalPace
from pointsman_gateway.core.request.request_state_machine import Phase
from pointsman_gateway.core.waiting_for_owner import Ask, PlaceAt, RefuseWaiting, WaitingForOwner, WaitingRequest
from pointsman_lab.engine.interface import EngineRequest, Finished, FirstToken, WaitingForRemoteKv
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.gateway_messages import assigned, finished, note_decision, refused, target_named
from pointsman_lab.simulation.instance import SimulatedInstance
from pointsman_lab.simulation.request import SimulatedRequest, engine_id
from pointsman_lab.simulation.routers import Routers
from pointsman_router.core import events_and_effects as ev

GATEWAY = "sim"
# HTTP status, as in nginx's log, of a request whose client disconnected.
CLIENT_LEFT = 499

# (request, now, HTTP status, error): handles the request's end.
OnEnd = Callable[[SimulatedRequest, float, int, str], None]


class SimulatedGateway:
    """All open requests, by the id of their current attempt.

    `resent_requests` counts requests that were sent again to a new owner of their pool. `steps_without_router` counts steps that
    the gateway took without a router.
    """

    def __init__(
        self,
        config: SimulationConfig,
        event_queue: EventQueue,
        routers: Routers,
        instances: Mapping[str, SimulatedInstance],
        pool_of: Mapping[str, str],
        new_name: Callable[[], range],
        on_end: OnEnd,
    ) -> None:
        """`instances` and `pool_of` are views that always have the present instances; `new_name` returns an unused block name."""
        self.requests: dict[str, SimulatedRequest] = {}
        self.resent_requests = 0
        self.steps_without_router = 0
        self._config = config
        self._event_queue = event_queue
        self._routers = routers
        self._instances = instances
        self._pool_of = pool_of
        self._new_name = new_name
        self._on_end = on_end
        self._pace = LocalPace()
        self._waiting = WaitingForOwner(self._pace)
        self._link_free_at: dict[str, float] = {}  # when an instance has sent all that was asked of it, s
        self._wake_at = math.inf  # when requests that wait for an owner are looked at next

    # ---- clients ----

    def take(self, running: SimulatedRequest, tokenised_at: float) -> None:
        """Accept a request. Its prompt is tokenised at `tokenised_at` (s); the way to the router follows. Mutates."""
        self.requests[running.placement.request_id] = running
        self._event_queue.schedule(tokenised_at + self._network_delay_s(running), partial(self._begin, running))

    def disconnect(self, running: SimulatedRequest, now: float) -> None:
        """Let the client of a request that has not ended disconnect. Mutates."""
        machine = running.state_machine
        running.left = True
        if machine is not None and machine.phase is not Phase.DONE:
            self._waiting.remove(running.placement.request_id)
            self._handle(running, ge.ClientDisconnected(), now)
        else:
            # The prompt is being tokenised, or the client waits before it retries.
            self.requests.pop(running.placement.request_id, None)
            self._on_end(running, now, CLIENT_LEFT, "client left")

    def _begin(self, running: SimulatedRequest, now: float) -> None:
        if running.left:
            return
        state_machine = running.begin(self._config.timeouts)
        self.requests[running.placement.request_id] = running
        self._apply(running, state_machine.start(now), now)

    def _answer(self, running: SimulatedRequest, now: float) -> None:
        """End a request. A client that is told to retry later sends it again, as another request."""
        del self.requests[running.placement.request_id]
        if running.left:
            self._on_end(running, now, CLIENT_LEFT, "client left")
            return
        if running.failure is None:
            self._on_end(running, now, 400 if running.rejection else 200, running.rejection)
            return
        error = error_for(running.failure)
        if error.retry_after_s is None or running.refusals >= self._config.retries:
            self._on_end(running, now, error.status, error.message)
            return
        running.refusals += 1
        self._event_queue.schedule(now + error.retry_after_s, partial(self._begin, running))

    # ---- the state machine ----

    def _handle(self, running: SimulatedRequest, event: ge.Event, now: float) -> None:
        assert running.state_machine is not None
        self._apply(running, running.state_machine.handle(event, now), now)

    def _apply(self, running: SimulatedRequest, effects: list[ge.Effect], now: float) -> None:
        """Carry out effects, and all effects that follow from them at once."""
        state_machine = running.state_machine
        assert state_machine is not None
        for effect in effects:
            self._carry_out(running, effect, now)
        while running.follow_ups:
            for effect in state_machine.handle(running.follow_ups.popleft(), now):
                self._carry_out(running, effect, now)
        if state_machine.phase is Phase.DONE:
            self._answer(running, now)
        else:
            self._plan_tick(running)

    def _carry_out(self, running: SimulatedRequest, effect: ge.Effect, now: float) -> None:
        match effect:
            case ge.AskRouter():
                self._begin_attempt(running, effect)
                self._submit_to_router(running, now)
            case ge.AskNextStep():
                self._ask_next_step(running, effect, now)
            case ge.Prefill():
                self._count_open(running, effect.step.target.instance_id)
                self._prefill(running, effect.step, now)
            case ge.Serve():
                self.steps_without_router += effect.step.degraded
                self._count_open(running, effect.step.target.instance_id)
                self._serve(running, effect.step, now)
            case ge.AbortUpstream():
                instance, name = running.upstream
                running.upstream = "", ""
                if instance:
                    self._instances[instance].abort(name, now)
            case ge.ReportServedAlone():
                self._report(running, ev.StreamOpened(GATEWAY, running.open_stream()), now)
            case ge.ReportFirstToken():
                running.began = True
                self._pace.began(running.open_at)
                self._report(running, ev.FirstToken(effect.attempt_id, effect.refused_by), now)
            case ge.ReportFinished():
                self._waiting.remove(effect.attempt_id)
                self._count_open(running, "")
                self._report(running, finished(running.record, running.own_cached, effect), now)
            case ge.FailRequest():
                running.failure = effect
            case _:
                # No engine is announced as layer-wise, so no step is sent early. KV transfers are inline. Answers do not break
                # off.
                raise AssertionError(effect)

    def _plan_tick(self, running: SimulatedRequest) -> None:
        """Schedule a tick at the state machine's deadline. A tick that is scheduled earlier schedules the next one."""
        assert running.state_machine is not None
        deadline = running.state_machine.deadline
        if deadline is not None and (running.tick_at is None or deadline < running.tick_at):
            running.tick_at = deadline
            self._event_queue.schedule(deadline, partial(self._tick, running.placement.request_id))

    def _tick(self, attempt_id: str, now: float) -> None:
        running = self.requests.get(attempt_id)
        if running is not None and running.tick_at == now:
            running.tick_at = None
            self._handle(running, ge.Tick(), now)

    # ---- routers ----

    def hello(self) -> ev.GatewayHello:
        """Return the first message on every stream to a router; also sent to a pool's new owner."""
        requests = self.requests.items()
        return ev.GatewayHello(
            GATEWAY,
            tuple(running.open_stream() for _, running in requests if running.step is not None),
            frozenset(name for name, running in requests if running.asks_first_step),
            frozenset(self._instances),
        )

    def owner_lost(self, pool: str, now: float) -> None:
        """Handle the loss of a pool's owner: its answers that have not arrived yet are void. Mutates."""
        self._waiting.disconnected(pool, now, self._config.ownerless_timeout_s)
        for running in list(self.requests.values()):
            if running.placement.model != pool:
                continue
            if running.asks_next_step:
                self._lose_router(running, now)
            elif running.asks_first_step:
                self._let_wait(running, now)

    def owner_changed(self, pool: str, now: float) -> None:
        """Send all requests that wait for their first step to a pool's new owner, which has received a hello. Mutates."""
        for running in list(self.requests.values()):
            if running.placement.model == pool and running.asks_first_step:
                self.resent_requests += 1
                self._let_wait(running, now)
        self._waiting.connected(pool, now, changed=True)
        self._wake(now)

    def hear(self, effect: ev.Placed | ev.Refused | ev.Parked, now: float) -> None:
        """Receive a router's answer, after its delay. Mutates."""
        # A request that has ended was reported to its router before: the router has released its placement.
        if (running := self.requests.get(effect.request_id)) is not None:
            answered = partial(self._answered, running, running.questions, effect)
            self._event_queue.schedule(now + self._network_delay_s(running), answered)

    def _answered(
        self, running: SimulatedRequest, question: int, effect: ev.Placed | ev.Refused | ev.Parked, now: float
    ) -> None:
        waits = running.asks_first_step or running.asks_next_step
        if question != running.questions or not waits:
            return
        not_serving = isinstance(effect, ev.Refused) and effect.not_serving
        if not not_serving and self._waiting.served(running.placement.model):
            self._wake(now)
        if isinstance(effect, ev.Parked):
            running.parked_until = now + effect.bound_s
            self._handle(running, ge.RequestParked(effect.request_id, effect.bound_s), now)
        elif isinstance(effect, ev.Placed):
            note_decision(running.record, effect.decision)
            if running.parked_until is not None and (admitted := effect.decision.request.admitted) is not None:
                running.record.parked_s = admitted.view.waited_s
            self._handle(running, assigned(effect), now)
        elif not not_serving:
            if effect.admission is not None:
                running.record.parked_s = effect.admission.view.waited_s
            self._handle(running, refused(effect), now)
        elif running.asks_next_step:
            # The owner does not know the plan, which another router made.
            self._lose_router(running, now)
        else:
            self._waiting.refused(running.placement.model, now, self._config.ownerless_timeout_s)
            self._let_wait(running, now)

    def _lose_router(self, running: SimulatedRequest, now: float) -> None:
        before = running.placement.request_id
        running.questions += 1
        self._handle(running, ge.RouterLost(before), now)
        if running.placement.request_id != before:
            self.resent_requests += bool(self._routers.owner(running.placement.model))

    def _begin_attempt(self, running: SimulatedRequest, asked: ge.AskRouter) -> None:
        del self.requests[running.placement.request_id]
        running.begin_attempt(asked)
        self.requests[asked.attempt_id] = running

    def _submit_to_router(self, running: SimulatedRequest, now: float) -> None:
        """Request an attempt's first step from the pool's owner, or wait until the pool has an owner."""
        running.asked_at = now
        pool = running.placement.model
        if not self._routers.owner(pool):
            self._waiting.disconnected(pool, now, self._config.ownerless_timeout_s)
        if self._waiting.must_wait(pool):
            self._let_wait(running, now)
        else:
            self._ask(running, now)

    def _ask(self, running: SimulatedRequest, now: float) -> None:
        owner = self._routers.owner(running.placement.model)
        assert owner
        assert running.asked_at is not None
        running.questions += 1
        age_s, parked_s = now - running.asked_at, 0.0
        if running.parked_until is not None:
            age_s, parked_s = 0.0, age_s
        deadline_s = self._config.timeouts.placement_s - age_s
        placement = structs.replace(running.placement, age_s=age_s, parked_s=parked_s, deadline_s=deadline_s)
        self._routers.deliver(owner, ev.PlaceRequested(placement, GATEWAY), now)

    def _let_wait(self, running: SimulatedRequest, now: float) -> None:
        """Let a request wait for an owner of its pool. Answers that are on their way are void."""
        placement, until = running.placement, running.parked_until
        if placement.request_id in self._waiting:
            return
        running.questions += 1
        assert running.asked_at is not None
        waiting = WaitingRequest(
            placement.request_id,
            running.asked_at,
            placement.input_tokens,
            placement.exclude,
            running.computed_at,
            until if until is not None and until > now else None,
        )
        self._waiting.add(placement.model, waiting)
        self._wake(now)

    def _wake(self, now: float) -> None:
        """Schedule the next look at what waits for an owner."""
        limit_s = self._config.ownerless_timeout_s
        times = [self._waiting.wake_at(pool, now, limit_s) for pool in self._waiting.pools()]
        at = max(min((at for at in times if at is not None), default=math.inf), now)
        if at < self._wake_at:
            self._wake_at = at
            self._event_queue.schedule(at, self._serve_waiting)

    def _serve_waiting(self, now: float) -> None:
        """Ask, place or refuse the requests that are due."""
        if now < self._wake_at:
            return
        self._wake_at = math.inf
        for end in self._waiting.due(now, self._config.ownerless_timeout_s, self._instances_of):
            running = self.requests[end.request_id]
            match end:
                case Ask():
                    self._ask(running, now)
                case PlaceAt():
                    running.open_at, running.began = end.instance_id, False
                    step = ge.StepAssigned(end.request_id, target_named(end.instance_id), degraded=True)
                    self._handle(running, step, now)
                case RefuseWaiting():
                    code = ge.PLACEMENT_TIMEOUT if end.parked else ge.UNAVAILABLE
                    refused = ge.PlacementRefused(end.request_id, code, "no router", RETRY_S)
                    self._handle(running, refused, now)
        self._wake(now)

    def _instances_of(self, pool: str) -> list[str]:
        return [name for name in self._instances if self._pool_of[name] == pool]

    def _count_open(self, running: SimulatedRequest, instance_id: str) -> None:
        """Count a request as open at an instance ("": at none)."""
        if running.open_at == instance_id:
            return
        if running.open_at:
            self._pace.closed(running.open_at, began=running.began)
        if instance_id:
            self._pace.opened(instance_id)
        running.open_at, running.began = instance_id, False

    def _ask_next_step(self, running: SimulatedRequest, asked: ge.AskNextStep, now: float) -> None:
        running.questions += 1
        if not self._routers.owner(running.placement.model):
            running.follow_ups.append(ge.RouterLost(asked.attempt_id))
            return
        done = ev.StepDone(
            asked.attempt_id,
            asked.index,
            ok=not asked.error,
            error=asked.error,
            instance_failed=asked.instance_failed,
            deadline_s=self._config.timeouts.placement_s,
        )
        self._report(running, done, now)

    def _report(self, running: SimulatedRequest, event: ev.Event, now: float) -> None:
        """Report to the owner of the request's pool. Without an owner nothing is sent: the hello to the next owner has the
        state."""
        if owner := self._routers.owner(running.placement.model):
            self._routers.deliver(owner, event, now)

    # ---- engines ----

    def _prefill(self, running: SimulatedRequest, step: ge.StepAssigned, now: float) -> None:
        if step.kv_source is None:
            prompt = self._beginning(running.prompt, step.prefill_tokens)
            self._send(running, step.target, step, EngineRequest(engine_id(step), prompt, 1), now)
            return
        # One token more than the KV that is sent: the source has all others, and computes that one.
        prompt = self._beginning(running.prompt, step.prefill_tokens + 1)
        self._send(running, step.kv_source, step, EngineRequest(engine_id(step), prompt, 1), now)

    def _beginning(self, prompt: NamedPrompt, tokens: int) -> NamedPrompt:
        """Return the first `tokens` of a prompt as a prompt. What is generated after a part of it does not belong to it."""
        if tokens >= prompt.length:
            return prompt
        return replace(prompt, length=tokens, names=prompt.names[: tokens // KEY_TOKENS], answer=self._new_name())

    def _fetched(self, running: SimulatedRequest, step: ge.StepAssigned, cached: int, now: float) -> None:
        """Send a step's instance its request, since the KV source has found `cached` tokens of the prompt."""
        running.own_prefills.ended(step.target.instance_id, step.prefill_tokens, 0, cached)
        running.prefill_s = 0.0
        prompt = self._beginning(running.prompt, step.prefill_tokens + 1)
        asked = EngineRequest(engine_id(step), prompt, 1, remote_tokens=step.prefill_tokens)
        self._send(running, step.target, step, asked, now)

    def _serve(self, running: SimulatedRequest, step: ge.StepAssigned, now: float) -> None:
        running.record.instance = step.target.instance_id
        remote = running.prefilled if step.kv_source is not None else 0
        output = running.turn.request.output_length
        asked = EngineRequest(engine_id(step), running.prompt, output, remote_tokens=remote)
        self._send(running, step.target, step, asked, now)

    def _send(
        self, running: SimulatedRequest, to: ge.Target, step: ge.StepAssigned, request: EngineRequest, now: float
    ) -> None:
        running.upstream = to.instance_id, request.request_id
        delay_s = self._random_s(running, self._config.api_s)
        if delay_s:
            self._event_queue.schedule(now + delay_s, partial(self._arrive, running, to, step, request))
        else:
            self._submit(running, to, step, request, now)

    def _arrive(
        self, running: SimulatedRequest, to: ge.Target, step: ge.StepAssigned, request: EngineRequest, now: float
    ) -> None:
        # Otherwise the request was given up on its way.
        if running.upstream == (to.instance_id, request.request_id):
            self._submit(running, to, step, request, now)
            self._apply(running, [], now)

    def _submit(
        self, running: SimulatedRequest, to: ge.Target, step: ge.StepAssigned, request: EngineRequest, now: float
    ) -> None:
        if to.instance_id not in self._instances:
            # Nothing reserves a KV source for a fetch, so it may have left before the gateway heard of the step.
            assert step.fetches, f"{request.request_id} is sent to an instance that has left"
            running.upstream = "", ""
            left = ge.PrefillEnded("the KV source has left", instance_failed=True, instance_id=to.instance_id)
            running.follow_ups.append(left)
            return
        try:
            self._instances[to.instance_id].submit(request, now)
        except ValueError as error:
            running.upstream = "", ""
            if step.prefill_tokens:
                running.follow_ups.append(ge.PrefillEnded(str(error)))
            else:
                running.rejection = str(error)
                running.follow_ups.append(ge.ResponseRejected(400))

    def on_engine_event(self, event: WaitingForRemoteKv | FirstToken | Finished, now: float) -> None:
        """Handle an engine's event of a request that is open there. Mutates."""
        running = self.requests[event.request_id.rpartition("/")[0]]
        step, record = running.step, running.record
        assert step is not None
        assert engine_id(step) == event.request_id, "an answer to a step that was not taken"
        if isinstance(event, WaitingForRemoteKv):
            received = partial(self._instances[step.target.instance_id].receive, event.request_id)
            arrives_at = now + self._transfer_s(running, event.tokens)
            if self._config.one_transfer_at_a_time and step.kv_source is not None:
                free_at = self._link_free_at.get(step.kv_source.instance_id, now)
                arrives_at += max(free_at - now, 0.0)
                self._link_free_at[step.kv_source.instance_id] = arrives_at
            self._event_queue.schedule(arrives_at, received)
        elif step.kv_source is not None and running.upstream[0] == step.kv_source.instance_id:
            # The source's answer to a fetch has one token.
            if isinstance(event, Finished):
                self._fetched(running, step, running.found_at_source, now)
            else:
                running.found_at_source = event.cached_tokens + event.host_tokens + event.storage_tokens
        elif isinstance(event, FirstToken):
            if step.prefill_tokens and step.kv_source is None:
                running.prefilled = step.prefill_tokens
                cached = event.cached_tokens + event.host_tokens + event.storage_tokens
                running.prefill_s = self._config.profile.chunk_s(step.prefill_tokens - cached, cached)
                at, own = (step.kv_target or step.target).instance_id, running.own_prefills
                own.ended(at, step.prefill_tokens, 0 if step.kv_target else own.end(at), cached)
            elif not step.prefill_tokens:
                record.ttft_s = now - record.t_send
                cached = event.cached_tokens + event.host_tokens + event.storage_tokens
                running.own_cached = running.own_prefills.among(step.target.instance_id, cached)
                # A prompt's own tokens are the last of those found; lower tiers have what follows on the GPU's.
                record.cached_tokens = hits = cached - running.own_cached
                record.host_tokens = min(event.host_tokens, max(hits - event.cached_tokens, 0))
                record.storage_tokens = max(hits - event.cached_tokens - event.host_tokens, 0)
                self._handle(running, ge.ResponseStarted(), now)
        else:
            running.upstream = "", ""
            if step.prefill_tokens:
                self._handle(running, ge.PrefillEnded(), now)
            else:
                record.prompt_tokens = running.turn.request.input_length
                asked = running.turn.request
                record.output_tokens = self._config.engine.answer_tokens(asked.input_length, asked.output_length)
                self._handle(running, ge.ResponseEnded(), now)

    def _transfer_s(self, running: SimulatedRequest, missing: int) -> float:
        """Return the seconds until the KV of `missing` tokens, from a PREFILL on another instance, has arrived in its blocks."""
        return self._config.profile.transfer_tail_s(missing, running.prefill_s if self._config.layerwise else 0.0)

    # ---- chance ----

    def _random_s(self, running: SimulatedRequest, mean_s: float) -> float:
        """Return an exponentially distributed time with this mean. Under one seed, the n-th draw of a request is always the
        same."""
        if not mean_s:
            return 0.0
        running.draw_count += 1
        drawn = xxh3_64_intdigest(f"{self._config.seed} {running.draw_id} {running.draw_count}".encode())
        return -mean_s * math.log((drawn + 1) / 2**64)

    def _network_delay_s(self, running: SimulatedRequest) -> float:
        """Return the next delay of a message to or from the router, s."""
        return self._random_s(running, self._config.placement_s / 2)
