"""One instance of a simulation: an engine model in virtual time, and what its agent reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from msgspec import structs

from pointsman.common.core.block_keys import digest_of
from pointsman.lab.engine.block_cache import BlocksRemoved, BlocksStored
from pointsman.lab.engine.interface import (
    DecodeSteps,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    Preempted,
    WaitingForRemoteKv,
)
from pointsman.lab.engine.model import EngineModel
from pointsman.lab.simulation.event_queue import EventQueue
from pointsman.lab.simulation.report_channel import Deliver
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances.report_sync import (
    TIER_DEVICE,
    ConsistencyCheck,
    Delta,
    KeyMessage,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
)
from pointsman.router.core.types import Load

# (event, now): a request awaits KV, has its first token, or its end.
OnEngineEvent = Callable[[WaitingForRemoteKv | FirstToken | Finished, float], None]
# What of a step's events is heard at its end.
ANSWERS = (FirstToken, Finished)

# Decode steps that evict blocks are not taken together for longer: the router hears of what is gone at their end.
EVICTING_S = 0.25


class SimulatedInstance:
    """Steps `model` whenever it has work; `deliver` hears the agent's reports, `on_engine_event` the answers.

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
        on_engine_event: OnEngineEvent,
    ) -> None:
        self.name = name
        self.stream_id = stream_id
        self.model = model
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
        self._seq = 0
        # Requests that end with the step under way.
        self._aborted: set[str] = set()
        # Of the step under way; they are seen at its end.
        self._events_of_step: Sequence[Event] = ()

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
        came = sum([len(_new_hashes(event)) for event in self._events_of_step if isinstance(event, BlocksStored)])
        went = sum([len(_evicted_hashes(event)) for event in self._events_of_step if isinstance(event, BlocksRemoved)])
        return len(self.model.cache) - came + went

    def all_keys(self) -> list[ev.KeysReported]:
        """A snapshot, as at the beginning and whenever a router asks for one."""
        keys = self._reported_keys()
        messages: tuple[KeyMessage, ...] = (
            SnapshotBegin(self._seq),
            SnapshotChunk(TIER_DEVICE, keys),
            SnapshotEnd(self._seq, len(keys), digest_of(TIER_DEVICE, keys)),
        )
        return [ev.KeysReported(self.stream_id, self.name, message) for message in messages]

    def report_bookmark(self, now: float) -> None:
        """Tell what the router must have by now, so that a lost report is noticed."""
        keys = self._reported_keys()
        self._send(ConsistencyCheck(self._seq, len(keys), digest_of(TIER_DEVICE, keys)), now)

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
        self._events_of_step = result.events
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
        self._events_of_step = ()
        self._report_keys(events, now)
        for event in events:
            if isinstance(event, ANSWERS) and event.request_id not in self._aborted:
                self._on_engine_event(event, now)
        if self._aborted:
            self._abort(now)
        # A request that arrived at this very moment may have started the next step already.
        if self.model.has_work and not self._busy:
            self._step(now)

    def _report_keys(self, events: Sequence[Event], now: float) -> None:
        """The agent's part: report keys that came or went."""
        added: list[Sequence[int]] = []
        removed: list[Sequence[int]] = []
        preempted = False
        for event in events:
            if isinstance(event, BlocksStored):
                added.append(_new_hashes(event))
            elif isinstance(event, Preempted):
                preempted = True
            elif isinstance(event, BlocksRemoved):
                if preempted and not all(set(event.hashes).isdisjoint(keys) for keys in added):
                    # A delta's removals come before its additions.
                    self._report(added, removed, now)
                    added, removed = [], []
                removed.append(_evicted_hashes(event))
        if any(added) or any(removed):
            self._report(added, removed, now)

    def _reported_keys(self) -> set[int]:
        """The keys that were reported: the engine's, but for what the step under way changes."""
        keys = set(self.model.cache.cached_hashes())
        for event in reversed(self._events_of_step):
            if isinstance(event, BlocksStored):
                keys.difference_update(_new_hashes(event))
            elif isinstance(event, BlocksRemoved):
                keys.update(_evicted_hashes(event))
        return keys

    def _report(self, added: Sequence[Sequence[int]], removed: Sequence[Sequence[int]], now: float) -> None:
        self._seq += 1
        self._send(Delta(self._seq, TIER_DEVICE, _concatenated(added), _concatenated(removed)), now)

    def _send(self, message: KeyMessage, now: float) -> None:
        self._deliver(ev.KeysReported(self.stream_id, self.name, message), now)


def _new_hashes(stored: BlocksStored) -> Sequence[int]:
    """What was not there before."""
    return (
        [value for value in stored.hashes if value not in stored.already_cached]
        if stored.already_cached
        else stored.hashes
    )


def _evicted_hashes(removed: BlocksRemoved) -> Sequence[int]:
    """What is not there any more."""
    if not removed.still_cached:
        return removed.hashes
    # Of two blocks of one hash that go together the second is the last.
    return list((Counter(removed.hashes) - Counter(removed.still_cached)).elements())


def _concatenated(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """All parts as one; mostly there is one, of hundreds of keys, which is not copied."""
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
