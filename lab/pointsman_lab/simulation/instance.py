"""One instance of a simulation: an engine model in virtual time, and its agent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from pointsman_lab.engine.interface import (
    DecodeSteps,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    WaitingForRemoteKv,
)
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.simulation.agent import ReportTo, SimulatedAgent
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.report_channel import Deliver
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import Load

# (event, now): a request waits for KV, has its first token, or has ended.
OnEngineEvent = Callable[[WaitingForRemoteKv | FirstToken | Finished, float], None]
# Events of a step that are delivered at its end.
ANSWERS = (FirstToken, Finished)

# Maximum time of decode steps that are executed as one while they evict blocks, s. The router learns of evictions at their end.
EVICTING_S = 0.25


class SimulatedInstance:
    """Runs steps of `model` whenever it has work. `deliver` receives the engine's load, `report_to` the agent's reports of keys
    to one router, and `on_engine_event` the engine's answers.

    While all requests only decode, many steps are executed as one (DecodeSteps), which ends early when a request arrives. The
    blocks that they fill are reported at their end, because no request can use them before the answer's end.
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
        tiers_reported: bool = True,
    ) -> None:
        """With `checks` the agent sends consistency checks, with `tiers_reported` also the keys of tiers below."""
        self.name = name
        self.stream_id = stream_id
        self.model = model
        self.agent = SimulatedAgent(name, stream_id, model, report_to, checks=checks, tiers_reported=tiers_reported)
        # Time spent in steps, s.
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._deliver = deliver
        self._on_engine_event = on_engine_event
        self._busy = False
        # The current DecodeSteps, their start, and a number that identifies their scheduled end: an end with another number is
        # void.
        self._decode: DecodeSteps | None = None
        self._decode_started_at = 0.0
        self._decode_number = 0
        # Time at which the next transfer of the host tier ends, if that is scheduled.
        self._wakes_at: float | None = None
        # Requests to abort at the end of the current step.
        self._aborted: set[str] = set()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Send the engine a request. Raises ValueError if the engine rejects it. Mutates."""
        self.model.submit(request, now)
        self._on_arrival(now)

    def receive(self, request_id: str, now: float) -> None:
        """Record that the KV that a request waits for has arrived. Mutates."""
        self.model.receive(request_id, now)
        self._on_arrival(now)

    def abort(self, request_id: str, now: float) -> None:
        """Abort a request, if it is open, at the end of the current step, as an engine does. No more events of it are delivered.
        Mutates."""
        self._aborted.add(request_id)
        if not self._busy:
            self._abort(now)
        # Another request may wait for the aborted one's blocks.
        self._on_arrival(now)

    def _abort(self, now: float) -> None:
        for request_id in self._aborted:
            self.model.abort(request_id, now)
        self._aborted.clear()

    def _on_arrival(self, now: float) -> None:
        """Start a step, or end the current DecodeSteps with the step that is running."""
        if not self._busy:
            self._step(now)
        elif (decode := self._decode) is not None:
            steps = decode.steps_by(now - self._decode_started_at)
            if steps < decode.steps:
                self._schedule_decode_end(steps, decode)

    def load(self, now: float) -> Load:
        """Return the engine's load."""
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
        """Report the engine's load to the routers."""
        self._deliver(ev.LoadReported(self.stream_id, self.name, self.load(now)), now)

    @property
    def num_keys(self) -> int:
        """Number of keys that were reported and are still cached."""
        return self.agent.keys.key_count

    def _step(self, now: float) -> None:
        self._busy = True
        if (decode := self.model.decode_only_steps()) is not None:
            self._decode_started_at = now
            self._schedule_decode_end(decode.steps_by(EVICTING_S) if decode.evicts else decode.steps, decode)
            self._await_transfer()
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
        self._stepped(self.model.finish_decode_steps(decode.steps, now), now)

    def _stepped(self, events: Sequence[Event], now: float) -> None:
        self.model.finish_step()
        self._busy = False
        self.agent.step_ended(events, now)
        for event in events:
            if isinstance(event, ANSWERS) and event.request_id not in self._aborted:
                self._on_engine_event(event, now)
        if self._aborted:
            self._abort(now)
        # A request that arrived at the same time may have started the next step already.
        if self._busy:
            return
        if self.model.has_work:
            self._step(now)
        else:
            self._await_transfer()

    def _await_transfer(self) -> None:
        """Schedule the end of the transfer of the host tier that a request may wait for, or that an idle engine reports."""
        ends_at = self.model.next_transfer_end
        if ends_at is not None and ends_at != self._wakes_at:
            self._wakes_at = ends_at
            self._event_queue.schedule(ends_at, self._transfer_ended)

    def _transfer_ended(self, now: float) -> None:
        if now == self._wakes_at:
            self._wakes_at = None
            self._on_arrival(now)
