"""One instance of a simulation: an engine model in virtual time, and its agent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from pointsman.lab.engine.interface import (
    DecodeSteps,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    WaitingForRemoteKv,
)
from pointsman.lab.engine.model import EngineModel
from pointsman.lab.simulation.agent import ReportTo, SimulatedAgent
from pointsman.lab.simulation.event_queue import EventQueue
from pointsman.lab.simulation.report_channel import Deliver
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.types import Load

# (event, now): a request awaits KV, has its first token, or its end.
OnEngineEvent = Callable[[WaitingForRemoteKv | FirstToken | Finished, float], None]
# What of a step's events is heard at its end.
ANSWERS = (FirstToken, Finished)

# Decode steps that evict blocks are not taken together for longer: the router hears of what is gone at their end.
EVICTING_S = 0.25


class SimulatedInstance:
    """Steps `model` whenever it has work; `deliver` hears the engine's figures, `report_to` what the agent tells one
    router of its keys, `on_engine_event` the answers.

    While all requests only decode, many steps are taken as one (DecodeSteps), cut short when a request arrives; the blocks that
    they fill, which nobody can ask for before the answer's end, are reported at its end.
    """

    def __init__(
        self,
        name: str,
        stream_id: int,
        model: EngineModel,
        event_queue: EventQueue,
        deliver: Deliver,
        report_to: ReportTo,
        on_engine_event: OnEngineEvent,
        *,
        checks: bool,
    ) -> None:
        """With `checks` the agent tells now and then what the routers must have."""
        self.name = name
        self.stream_id = stream_id
        self.model = model
        self.agent = SimulatedAgent(name, stream_id, model.cache, report_to, checks=checks)
        # Seconds spent in steps.
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._deliver = deliver
        self._on_engine_event = on_engine_event
        self._busy = False
        # The DecodeSteps under way, when it began, and how many of them there have been: an end of an earlier one is void.
        self._decode: DecodeSteps | None = None
        self._decode_started_at = 0.0
        self._decode_number = 0
        # Requests that end with the step under way.
        self._aborted: set[str] = set()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Give the engine a request. Raises ValueError when it refuses it. Mutates."""
        self.model.submit(request, now)
        self._on_arrival(now)

    def receive(self, request_id: str, now: float) -> None:
        """The KV that a request awaits is there. Mutates."""
        self.model.receive(request_id, now)
        self._on_arrival(now)

    def abort(self, request_id: str, now: float) -> None:
        """Let go of a request, if it is here: at the end of the step under way, as an engine does. Nothing is told of it any
        more. Mutates."""
        self._aborted.add(request_id)
        if not self._busy:
            self._abort(now)
        # What it held may be what another one waits for.
        self._on_arrival(now)

    def _abort(self, now: float) -> None:
        for request_id in self._aborted:
            self.model.abort(request_id, now)
        self._aborted.clear()

    def _on_arrival(self, now: float) -> None:
        """Something came: begin a step, or end DecodeSteps with the step under way."""
        if not self._busy:
            self._step(now)
        elif (decode := self._decode) is not None:
            steps = decode.steps_by(now - self._decode_started_at)
            if steps < decode.steps:
                self._schedule_decode_end(steps, decode)

    def load(self, now: float) -> Load:
        """The engine's figures."""
        model = self.model
        ahead = self._decode.steps_by(now - self._decode_started_at) if self._decode else 0
        return Load(
            sampled_at=now,
            running=model.num_running,
            waiting=model.num_waiting,
            kv_usage=model.kv_usage_after(ahead),
            generation_tokens=model.counters.generation_tokens + ahead * model.num_running,
            prefix_cache_queries=model.counters.prefix_cache_queries,
            prefix_cache_hits=model.counters.prefix_cache_hits,
            external_prefix_cache_queries=model.counters.external_prefix_cache_queries,
            external_prefix_cache_hits=model.counters.external_prefix_cache_hits,
            preemptions=model.counters.num_preemptions,
        )

    def report_load(self, now: float) -> None:
        """Tell the engine's figures."""
        self._deliver(ev.LoadReported(self.stream_id, self.name, self.load(now)), now)

    @property
    def num_keys(self) -> int:
        """How many keys were reported and hold."""
        return self.agent.keys.key_count

    def _step(self, now: float) -> None:
        self._busy = True
        if (decode := self.model.decode_only_steps()) is not None:
            self._decode_started_at = now
            self._schedule_decode_end(decode.steps_by(EVICTING_S) if decode.evicts else decode.steps, decode)
            return
        result = self.model.step(now)
        for awaited in result.awaited:
            self._on_engine_event(awaited, now)
        self.busy_s += result.duration_s
        self.agent.keys.begin(result.events)
        self._event_queue.schedule(now + result.duration_s, partial(self._stepped, result.events))

    def _schedule_decode_end(self, steps: int, decode: DecodeSteps) -> None:
        self._decode = decode = structs.replace(decode, steps=steps)
        self._decode_number += 1
        self._event_queue.schedule(
            self._decode_started_at + decode.seconds(steps), partial(self._decode_ended, self._decode_number)
        )

    def _decode_ended(self, number: int, now: float) -> None:
        decode = self._decode
        if decode is None or number != self._decode_number:
            return
        self._decode = None
        self.busy_s += now - self._decode_started_at
        self._stepped(self.model.finish_decode_steps(decode.steps), now)

    def _stepped(self, events: Sequence[Event], now: float) -> None:
        self.model.finish_step()
        self._busy = False
        self.agent.step_ended(events, now)
        for event in events:
            if isinstance(event, ANSWERS) and event.request_id not in self._aborted:
                self._on_engine_event(event, now)
        if self._aborted:
            self._abort(now)
        # A request that arrived at this very moment may have started the next step already.
        if self.model.has_work and not self._busy:
            self._step(now)
