"""A discrete-event simulator: a trace, N engine models and the router's own RouterState, in virtual time. Pure.

The router that places live requests places these, unchanged: it is told of keys, loads, first tokens and ends by the same events.
What is left out: the time of tokenising, placing and reporting (all 0), and plans of more than one step, which are refused.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lab.block_cache import BlocksRemoved, BlocksStored
from lab.engine_model import EngineConfig, EngineModel, EngineRequest, Event, Finished, FirstToken, Profile
from lab.records import RequestRecord
from lab.traces import TraceRequest, by_session
from services.common.keys import KEY_SCHEME, KEY_TOKENS, digest_of, prompt_keys
from services.router import events as ev
from services.router.domain import InstanceInfo, Load, PlacementRequest, StepKind
from services.router.policy.registry import make_policy
from services.router.state import RouterState, StateSettings
from services.router.sync import TIER_DEVICE, Delta, SnapshotBegin, SnapshotEnd

MODEL = "simulated"
# The chain's root of services.common.keys, given as a salt: the engine's block hashes then are Pointsman's keys.
ROOT_SALT = "\x1f".join((KEY_SCHEME, MODEL, "", ""))
LOAD_EVERY_S = 1.0


class SimulationError(ValueError):
    """A simulation that cannot be run as asked."""


@dataclass(frozen=True)
class Simulation:
    """What to simulate. `timing` is "trace" or "think", as in replays; times of the trace are multiplied by `time_scale`."""

    instances: int = 8
    policy: str = "unified"
    policy_settings: Mapping[str, object] = field(default_factory=dict)
    timing: str = "trace"
    time_scale: float = 1.0
    seed: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)
    profile: Profile = field(default_factory=Profile)


@dataclass(eq=False)
class _Running:
    request: TraceRequest
    record: RequestRecord
    rest: Sequence[TraceRequest]


@dataclass(eq=False)
class _Instance:
    name: str
    stream_id: int
    model: EngineModel
    busy: bool = False
    seq: int = 0
    held: Counter[int] = field(default_factory=Counter)


class Simulator:
    """One run; run() may be called once. `router` can be looked at afterwards."""

    def __init__(self, requests: Sequence[TraceRequest], asked: Simulation) -> None:
        """Raises SimulationError for settings that cannot be simulated, SettingError for an unknown policy or setting."""
        if asked.engine.block_size != KEY_TOKENS or asked.engine.hash_seed:
            raise SimulationError(f"only engines with block_size {KEY_TOKENS} and hash_seed 0 are simulated")
        self._asked = asked
        self._sessions = list(by_session(requests).values())
        self._origin_ms = min(request.timestamp_ms for request in requests)
        policy = make_policy(asked.policy, asked.policy_settings)
        self.router = RouterState(policy, StateSettings(), router_id="sim", seed=asked.seed)
        self.records: list[RequestRecord] = []
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._running: dict[str, _Running] = {}
        self._unfinished = len(requests)
        self._instances = {
            name: _Instance(name, number, EngineModel(asked.engine, asked.profile))
            for number, name in enumerate((f"i{number}" for number in range(asked.instances)), 1)
        }

    def run(self) -> list[RequestRecord]:
        """Play the trace to its end; records in the order in which requests ended. Raises SimulationError as in the class."""
        self.router.handle(ev.GatewayHello("sim"), 0.0)
        for instance in self._instances.values():
            self._join(instance)
        self._at(LOAD_EVERY_S, self._report_loads)
        for turns in self._sessions:
            self._at(self._due(turns[0]), partial(self._arrive, turns[0], turns[1:]))
        while self._unfinished:
            now, _, action = heapq.heappop(self._agenda)
            action(now)
        return self.records

    def _join(self, instance: _Instance) -> None:
        config = self._asked.engine
        info = InstanceInfo(
            instance_id=instance.name,
            incarnation="1",
            url=f"sim://{instance.name}",
            model=MODEL,
            block_size=config.block_size,
            kv_capacity_tokens=config.kv_blocks * config.block_size,
            max_model_len=config.max_model_len,
        )
        self.router.handle(ev.AgentHello(instance.stream_id, info, KEY_SCHEME, 1, 0), 0.0)
        for message in (SnapshotBegin(0), SnapshotEnd(0, 0, digest_of(TIER_DEVICE, ()))):
            self.router.handle(ev.KeysReported(instance.stream_id, instance.name, message), 0.0)
        self._report_load(instance, 0.0)

    def _arrive(self, request: TraceRequest, rest: Sequence[TraceRequest], now: float) -> None:
        name = f"{request.session}#{request.turn}"
        record = RequestRecord(session=request.session, turn=request.turn, t_send=now)
        tokens = tokens_of(request)
        placement = PlacementRequest(
            request_id=name,
            model=MODEL,
            input_tokens=len(tokens),
            keys=prompt_keys(tokens, MODEL),
            session_id=request.session,
            max_output_tokens=request.output_length,
        )
        self._running[name] = _Running(request, record, rest)
        for effect in self.router.handle(ev.PlaceRequested(placement, "sim"), now):
            match effect:
                case ev.Placed():
                    if effect.step.kind is not StepKind.SERVE:
                        raise SimulationError(
                            f"policy {self._asked.policy} plans several steps, which is not simulated"
                        )
                    record.instance = effect.step.instance_id
                    record.decision = effect.decision.decision_id
                    self._submit(self._instances[record.instance], name, tokens, now)
                case ev.Refused():
                    record.status, record.error = 503, effect.message
                    self._done(name, now)

    def _submit(self, instance: _Instance, name: str, tokens: list[int], now: float) -> None:
        running = self._running[name]
        engine = EngineRequest(name, tokens, running.request.output_length, ignore_eos=True, cache_salt=ROOT_SALT)
        try:
            instance.model.submit(engine, now)
        except ValueError as error:
            running.record.status, running.record.error = 400, str(error)
            self.router.handle(ev.Finished(name, "REJECTED", error=str(error), http_status=400), now)
            self._done(name, now)
            return
        if not instance.busy:
            self._step(instance, now)

    def _step(self, instance: _Instance, now: float) -> None:
        result = instance.model.step(now)
        instance.busy = True
        self._at(now + result.duration_s, partial(self._stepped, instance, result.events))

    def _stepped(self, instance: _Instance, events: Sequence[Event], now: float) -> None:
        instance.model.finish_step()
        instance.busy = False
        self._report_keys(instance, events, now)
        for event in events:
            if isinstance(event, FirstToken):
                record = self._running[event.request_id].record
                record.ttft_s = now - record.t_send
                record.cached_tokens = event.cached_tokens
                self.router.handle(ev.FirstToken(event.request_id), now)
            elif isinstance(event, Finished):
                running = self._running[event.request_id]
                record = running.record
                record.status = 200
                record.prompt_tokens = running.request.input_length
                record.output_tokens = running.request.output_length
                told = (record.prompt_tokens, record.cached_tokens, record.output_tokens)
                self.router.handle(ev.Finished(event.request_id, "OK", *told, http_status=200), now)
                self._done(event.request_id, now)
        # A turn that arrived at this very moment may have started the next step already.
        if instance.model.has_work and not instance.busy:
            self._step(instance, now)

    def _done(self, name: str, now: float) -> None:
        running = self._running.pop(name)
        running.record.e2e_s = now - running.record.t_send
        self.records.append(running.record)
        self._unfinished -= 1
        if running.rest:
            following = running.rest[0]
            think_s = (following.think_ms or 0.0) / 1e3 * self._asked.time_scale
            due = now + think_s if self._asked.timing == "think" else max(now, self._due(following))
            self._at(due, partial(self._arrive, following, running.rest[1:]))

    def _report_keys(self, instance: _Instance, events: Sequence[Event], now: float) -> None:
        """The agent's part: count references, and report keys that came or went."""
        before: dict[int, bool] = {}
        for event in events:
            if isinstance(event, BlocksStored | BlocksRemoved):
                for value in event.hashes:
                    before.setdefault(value, instance.held[value] > 0)
                    instance.held[value] += 1 if isinstance(event, BlocksStored) else -1
        added = [value for value, held in before.items() if not held and instance.held[value]]
        removed = [value for value, held in before.items() if held and not instance.held[value]]
        if added or removed:
            instance.seq += 1
            delta = Delta(instance.seq, TIER_DEVICE, added, removed)
            self.router.handle(ev.KeysReported(instance.stream_id, instance.name, delta), now)

    def _report_loads(self, now: float) -> None:
        self.router.handle(ev.Tick(), now)
        for instance in self._instances.values():
            self._report_load(instance, now)
        self._at(now + LOAD_EVERY_S, self._report_loads)

    def _report_load(self, instance: _Instance, now: float) -> None:
        model = instance.model
        load = Load(
            sampled_at=now,
            running=model.num_running,
            waiting=model.num_waiting,
            kv_usage=model.kv_usage,
            generation_tokens=model.counters.generation_tokens,
            prefix_cache_queries=model.counters.prefix_cache_queries,
            prefix_cache_hits=model.counters.prefix_cache_hits,
            preemptions=model.counters.num_preemptions,
        )
        self.router.handle(ev.LoadReported(instance.stream_id, instance.name, load), now)

    def _due(self, request: TraceRequest) -> float:
        return (request.timestamp_ms - self._origin_ms) / 1e3 * self._asked.time_scale

    def _at(self, moment: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (moment, self._order, action))


def tokens_of(request: TraceRequest) -> list[int]:
    """Token ids of a trace's request: equal block ids give equal tokens, and the rest is this request's own."""
    tokens: list[int] = []
    for block in request.hash_ids[: request.input_length // request.block_size]:
        tokens += [block & 0x7FFFFFFF] * request.block_size
    own = 0x80000000 | (hash_of(f"{request.session}#{request.turn}") & 0x7FFFFFFF)
    return tokens + [own] * (request.input_length - len(tokens))


def hash_of(name: str) -> int:
    """A number for `name`, the same in every process."""
    return prompt_keys(list(name.encode().ljust(-(-len(name.encode()) // KEY_TOKENS) * KEY_TOKENS)), MODEL)[-1]
