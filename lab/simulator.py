"""A discrete-event simulator: a trace, N engine models and the router's own RouterState, in virtual time. Pure.

The router that places live requests places these, unchanged: it is told of keys, loads, steps, first tokens and ends by the same
events, and its answers are carried out as a gateway does, whenever they come. A client that is told to come again later does.
Tokenising, asking the router and reporting take the time that is set for them; one router owns the pool.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lab.agenda import Agenda
from lab.content import NamedPrompt
from lab.draws import Session
from lab.engine_events import EngineConfig, EngineRequest, Finished, FirstToken, KvAwaited
from lab.engine_model import EngineModel
from lab.link import Link
from lab.profile import Profile
from lab.prompts import Prompts
from lab.records import RequestRecord
from lab.samples import InstanceSample
from lab.simulated_instance import SimulatedInstance
from lab.traces import TraceRequest, by_session
from services.common.keys import KEY_SCHEME, KEY_TOKENS
from services.router import events as ev
from services.router.domain import InstanceInfo, KvTransfer, PlacementRequest, StepKind
from services.router.policy.base import Policy
from services.router.policy.registry import make_policy
from services.router.state import RouterState, StateSettings

MODEL = "simulated"
GATEWAY = "sim"
# As the agent and the router do.
LOAD_EVERY_S = 1.0
BOOKMARK_EVERY_S = 5.0
TICK_EVERY_S = 0.5
# What clients see of a refusal; 503 for every other one.
HTTP_STATUS = {"RESOURCE_EXHAUSTED": 429, "NOT_FOUND": 404}


class SimulationError(ValueError):
    """A simulation that cannot be run as asked."""


@dataclass(frozen=True)
class Simulation:
    """What to simulate. `timing` is "trace" or "think", as in replays; times of the trace are multiplied by `time_scale`. With
    `max_sessions` no more sessions are in flight: further ones wait, from their first turn on, until one has ended (0: no cap).

    `policy` is a name, with `policy_settings`, or a policy itself. `retries` is how often a client that was refused for the
    moment asks again, each time after the seconds that it was told. With `layerwise` KV is pushed while it is computed.
    A prompt is tokenised at `tokenise_token_s` per token; the way to the router and the way back each take `placement_s` / 2
    in the mean, drawn from an exponential distribution. Agents' reports come `report_delay_s` late, if they come: a share of
    `report_loss` (0 to below 1) does not. All draws follow from `seed`.
    """

    instances: int = 8
    policy: str | Policy = "unified"
    policy_settings: Mapping[str, object] = field(default_factory=dict)
    timing: str = "trace"
    time_scale: float = 1.0
    max_sessions: int = 0
    seed: int = 0
    retries: int = 10
    layerwise: bool = False
    tokenise_token_s: float = 0.0
    placement_s: float = 0.0
    report_delay_s: float = 0.0
    report_loss: float = 0.0
    router: StateSettings = field(default_factory=StateSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    profile: Profile = field(default_factory=Profile)


@dataclass(eq=False)
class _Running:
    """A request from its arrival to its end. `step` is the router's last answer."""

    request: TraceRequest
    record: RequestRecord
    rest: Session
    prompt: NamedPrompt
    placement: PlacementRequest
    refused: int = 0
    step: ev.Placed | None = None
    # What the last PREFILL step left on its instance, and how long computing it took, in tokens and s.
    prefilled: int = 0
    prefill_s: float = 0.0


class Simulator:
    """One run; run() or play() may be called once. `router` and `busy_s` can be looked at afterwards."""

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        asked: Simulation,
        on_sample: Callable[[InstanceSample], None] | None = None,
    ) -> None:
        """`trace`: requests, or sessions in the order of their starts, which are then taken one by one as their time comes: a
        long trace need never exist as a whole. `on_sample` is told of each instance once a second. Raises SimulationError for
        settings that cannot be simulated, SettingError for an unknown policy or setting."""
        if asked.engine.block_size != KEY_TOKENS:
            raise SimulationError(f"only engines with block_size {KEY_TOKENS} are simulated")
        if not 0 <= asked.report_loss < 1:
            raise SimulationError(f"report_loss {asked.report_loss} is not in 0 to below 1")
        if min(asked.tokenise_token_s, asked.placement_s, asked.report_delay_s, asked.max_sessions) < 0:
            raise SimulationError("tokenise_token_s, placement_s, report_delay_s and max_sessions must not be negative")
        self._asked = asked
        self._on_sample = on_sample
        self._rng = random.Random(f"latency {asked.seed}")
        self._sessions = trace if isinstance(trace, Iterator) else iter(_in_order(trace))
        self._origin_ms: float | None = None
        # Sessions in flight, and those whose time has come but not their turn.
        self._in_flight = 0
        self._kept_out: deque[Session] = deque()
        self._all_started = False
        policy = make_policy(asked.policy, asked.policy_settings) if isinstance(asked.policy, str) else asked.policy
        self.router = RouterState(policy, asked.router, router_id="sim", seed=asked.seed)
        self._ended: list[RequestRecord] = []
        self._agenda = Agenda()
        self._prompts = Prompts()
        losses = random.Random(f"loss {asked.seed}")
        self._link = Link(self._agenda, self._tell, asked.report_delay_s, asked.report_loss, losses)
        self._running: dict[str, _Running] = {}
        self._instances = {
            name: SimulatedInstance(
                name, number, EngineModel(asked.engine, asked.profile), self._agenda, self._link.send, self._hear
            )
            for number, name in enumerate((f"i{number}" for number in range(asked.instances)), 1)
        }

    def run(self) -> list[RequestRecord]:
        """Play the trace to its end; records in the order in which requests ended."""
        return list(self.play())

    def play(self) -> Iterator[RequestRecord]:
        """As run(), with each record as soon as its request has ended; they are not kept."""
        self._tell(ev.GatewayHello(GATEWAY), 0.0)
        for instance in self._instances.values():
            self._join(instance)
        self._every(TICK_EVERY_S, partial(self._tell, ev.Tick()))
        self._every(LOAD_EVERY_S, self._report_loads)
        if self._on_sample is not None:
            self._every(LOAD_EVERY_S, partial(self._sample, self._on_sample))
        if self._asked.report_loss:
            self._every(BOOKMARK_EVERY_S, self._report_bookmarks)
        self._await_session()
        while self._in_flight or not self._all_started:
            self._agenda.next()
            if self._ended:
                yield from self._ended
                self._ended.clear()

    @property
    def busy_s(self) -> dict[str, float]:
        """How long each instance has been in steps, in s."""
        return {instance.name: instance.busy_s for instance in self._instances.values()}

    # ---- the fleet ----

    def _join(self, instance: SimulatedInstance) -> None:
        config = self._asked.engine
        info = InstanceInfo(
            instance_id=instance.name,
            incarnation="1",
            url=f"sim://{instance.name}",
            model=MODEL,
            block_size=config.block_size,
            kv_capacity_tokens=config.kv_blocks * config.block_size,
            max_model_len=config.max_model_len,
            kv_transfer=KvTransfer("MOONCAKE", f"sim://{instance.name}"),
            prefill_chunk_limit=config.long_prefill_token_threshold,
        )
        self._tell(ev.AgentHello(instance.stream_id, info, KEY_SCHEME, 1, 0), 0.0)
        instance.report_all_keys(0.0)
        instance.report_load(0.0)

    def _report_loads(self, now: float) -> None:
        for instance in self._instances.values():
            instance.report_load(now)

    def _sample(self, tell: Callable[[InstanceSample], None], now: float) -> None:
        for instance in self._instances.values():
            counters, load = self.router.reservations.counters(instance.name), instance.load(now)
            tell(
                InstanceSample(
                    t=round(now, 3),
                    instance=instance.name,
                    num_requests=counters.num_requests,
                    pending_prefill_tokens=counters.pending_prefill_tokens,
                    ongoing_decode_tokens=counters.ongoing_decode_tokens,
                    keys=instance.num_keys,
                    sessions=self.router.affinity.sessions_of(instance.name),
                    running=load.running,
                    waiting=load.waiting,
                    kv_usage=round(load.kv_usage, 6),
                    prefix_queries=load.prefix_cache_queries,
                    prefix_hits=load.prefix_cache_hits,
                    external_queries=load.external_prefix_cache_queries,
                    external_hits=load.external_prefix_cache_hits,
                )
            )

    def _report_bookmarks(self, now: float) -> None:
        for instance in self._instances.values():
            instance.report_bookmark(now)

    def _every(self, seconds: float, action: Callable[[float], None]) -> None:
        def again(now: float) -> None:
            action(now)
            self._agenda.at(now + seconds, again)

        self._agenda.at(seconds, again)

    # ---- clients ----

    def _await_session(self) -> None:
        """Let the next session begin when its time comes."""
        turns = next(self._sessions, None)
        if turns is None:
            self._all_started = True
            return
        if self._origin_ms is None:
            self._origin_ms = turns[0].timestamp_ms
        self._agenda.at(self._due(turns[0]), partial(self._begin, turns))

    def _begin(self, turns: Session, now: float) -> None:
        self._in_flight += 1
        if self._asked.max_sessions and self._in_flight > self._asked.max_sessions:
            self._kept_out.append(turns)
        else:
            self._arrive(turns[0], turns[1:], now)
        self._await_session()

    def _leave(self, now: float) -> None:
        """A session is over: one that was kept out may begin."""
        self._in_flight -= 1
        if self._kept_out:
            turns = self._kept_out.popleft()
            self._arrive(turns[0], turns[1:], now)

    def _arrive(self, request: TraceRequest, rest: Session, now: float) -> None:
        name = f"{request.session}#{request.turn}"
        prompt = self._prompts.of(request)
        placement = PlacementRequest(
            request_id=name,
            model=MODEL,
            input_tokens=prompt.length,
            keys=prompt.names,
            session_id=request.session,
            max_output_tokens=request.output_length,
            sliceable=True,
        )
        record = RequestRecord(session=request.session, turn=request.turn, t_send=now)
        self._running[name] = _Running(request, record, rest, prompt, placement)
        self._agenda.at(now + self._asked.tokenise_token_s * prompt.length + self._way_s(), partial(self._ask, name))

    def _way_s(self) -> float:
        """Seconds that a word to or from the router takes this time."""
        return self._rng.expovariate(2 / self._asked.placement_s) if self._asked.placement_s else 0.0

    def _ask(self, name: str, now: float) -> None:
        self._tell(ev.PlaceRequested(self._running[name].placement, GATEWAY), now)

    def _end(self, name: str, now: float, status: int, error: str = "") -> None:
        running = self._running.pop(name)
        running.record.status, running.record.error = status, error
        running.record.e2e_s = now - running.record.t_send
        self._ended.append(running.record)
        if not running.rest:
            self._leave(now)
        else:
            following = running.rest[0]
            think_s = (following.think_ms or 0.0) / 1e3 * self._asked.time_scale
            due = now + think_s if self._asked.timing == "think" else max(now, self._due(following))
            self._agenda.at(due, partial(self._arrive, following, running.rest[1:]))

    def _due(self, request: TraceRequest) -> float:
        return (request.timestamp_ms - (self._origin_ms or 0.0)) / 1e3 * self._asked.time_scale

    # ---- the gateway ----

    def _tell(self, event: ev.Event, now: float) -> None:
        """Let the router hear of something, and do what it answers, to whichever request."""
        for effect in self.router.handle(event, now):
            if isinstance(effect, ev.Placed):
                self._agenda.at(now + self._way_s(), partial(self._placed, effect))
            elif isinstance(effect, ev.Refused):
                self._agenda.at(now + self._way_s(), partial(self._refused, effect))
            elif isinstance(effect, ev.Resync):
                self._instances[effect.instance_id].report_all_keys(now)

    def _refused(self, refused: ev.Refused, now: float) -> None:
        running = self._running[refused.request_id]
        if refused.retry_after_s is None or running.refused >= self._asked.retries:
            self._end(refused.request_id, now, HTTP_STATUS.get(refused.code, 503), refused.message)
            return
        running.refused += 1
        self._agenda.at(now + refused.retry_after_s, partial(self._ask, refused.request_id))

    def _placed(self, placed: ev.Placed, now: float) -> None:
        running, step = self._running[placed.request_id], placed.step
        running.step = placed
        if not running.record.decision:
            decision = placed.decision
            running.record.decision = decision.decision_id
            running.record.mode = decision.mode
            running.record.route_class = decision.route_class
            running.record.reason = decision.ruling.reason
            running.record.rule = decision.ruling.steps[-1].reason
        if step.kind is StepKind.PREFILL:
            tokens = step.prefix_tokens or running.prompt.length
            prefix = replace(running.prompt, length=tokens, names=running.prompt.names[: tokens // KEY_TOKENS])
            self._submit(placed, EngineRequest(_engine_id(placed), prefix, 1), now)
        else:
            self._serve(placed, now)

    def _transfer_s(self, running: _Running, missing: int) -> float:
        """Seconds until `missing` tokens' KV that a PREFILL left elsewhere is where there are blocks for it now."""
        return self._asked.profile.transfer_tail_s(missing, running.prefill_s if self._asked.layerwise else 0.0)

    def _serve(self, placed: ev.Placed, now: float) -> None:
        running = self._running[placed.request_id]
        running.record.instance = placed.step.instance_id
        remote = running.prefilled if placed.step.kv_source else 0
        output = running.request.output_length
        request = EngineRequest(_engine_id(placed), running.prompt, output, remote_tokens=remote)
        self._submit(placed, request, now)

    def _submit(self, placed: ev.Placed, request: EngineRequest, now: float) -> None:
        name = placed.request_id
        try:
            self._instances[placed.step.instance_id].submit(request, now)
        except ValueError as error:
            if placed.step.kind is StepKind.PREFILL:
                self._tell(ev.StepDone(name, placed.step_index, ok=False, error=str(error)), now)
                return
            self._tell(ev.Finished(name, "REJECTED", error=str(error), http_status=400), now)
            self._end(name, now, 400, str(error))

    def _hear(self, event: KvAwaited | FirstToken | Finished, now: float) -> None:
        name, _, number = event.request_id.rpartition("/")
        running = self._running[name]
        placed, record = running.step, running.record
        assert placed is not None
        assert placed.step_index == int(number), "an answer to a step that was not taken"
        if isinstance(event, KvAwaited):
            receive = partial(self._instances[placed.step.instance_id].receive, event.request_id)
            self._agenda.at(now + self._transfer_s(running, event.tokens), receive)
        elif placed.step.kind is StepKind.PREFILL:
            if isinstance(event, FirstToken):
                tokens = placed.step.prefix_tokens or running.prompt.length
                running.prefilled = tokens
                running.prefill_s = self._asked.profile.chunk_s(tokens - event.cached_tokens, event.cached_tokens)
            else:
                self._tell(ev.StepDone(name, placed.step_index, ok=True), now)
        elif isinstance(event, FirstToken):
            record.ttft_s = now - record.t_send
            record.cached_tokens = event.cached_tokens
            self._tell(ev.FirstToken(name), now)
        else:
            record.prompt_tokens = running.request.input_length
            record.output_tokens = running.request.output_length
            told = (record.prompt_tokens, record.cached_tokens, record.output_tokens)
            self._tell(ev.Finished(name, "OK", *told, http_status=200), now)
            self._end(name, now, 200)


def _in_order(requests: Sequence[TraceRequest]) -> list[Session]:
    return sorted(by_session(requests).values(), key=lambda turns: turns[0].timestamp_ms)


def _engine_id(placed: ev.Placed) -> str:
    return f"{placed.request_id}/{placed.step_index}"
