"""One instance of a simulation: an engine model in virtual time, and what its agent reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from msgspec import structs

from lab.agenda import Agenda
from lab.block_cache import BlocksRemoved, BlocksStored
from lab.engine_events import EngineRequest, Event, Finished, FirstToken, KvAwaited, Leap, Preempted
from lab.engine_model import EngineModel
from lab.link import Tell
from services.common.keys import digest_of
from services.router import events as ev
from services.router.domain import Load
from services.router.sync import TIER_DEVICE, Bookmark, Delta, KeyMessage, SnapshotBegin, SnapshotChunk, SnapshotEnd

# (event, now): a request awaits KV, has its first token, or its end.
Hear = Callable[[KvAwaited | FirstToken | Finished, float], None]
# What of a step's events is heard at its end.
ANSWERS = (FirstToken, Finished)

# Steps that evict blocks are not taken together for longer: the router hears of what is gone at their end.
EVICTING_S = 0.25


class SimulatedInstance:
    """Steps `model` whenever it has work; `tell` hears the agent's reports, `hear` the answers.

    While all requests only decode, many steps are one leap, cut short when a request arrives; the blocks that they fill, which
    nobody can ask for before the answer's end, are reported at its end.
    """

    def __init__(self, name: str, stream_id: int, model: EngineModel, agenda: Agenda, tell: Tell, hear: Hear) -> None:
        self.name = name
        self.stream_id = stream_id
        self.model = model
        # Seconds spent in steps.
        self.busy_s = 0.0
        self._agenda = agenda
        self._tell = tell
        self._hear = hear
        self._busy = False
        # The leap under way, when it began, and how many of them there have been: an end of an earlier one is void.
        self._leap: Leap | None = None
        self._leapt_at = 0.0
        self._leaps = 0
        self._seq = 0
        # Of the step under way; they are seen at its end.
        self._coming: Sequence[Event] = ()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Give the engine a request. Raises ValueError when it refuses it. Mutates."""
        self.model.submit(request, now)
        self._look(now)

    def receive(self, request_id: str, now: float) -> None:
        """The KV that a request awaits is there. Mutates."""
        self.model.receive(request_id, now)
        self._look(now)

    def _look(self, now: float) -> None:
        """Something came: begin a step, or end a leap with the step under way."""
        if not self._busy:
            self._step(now)
        elif (leap := self._leap) is not None:
            steps = leap.steps_by(now - self._leapt_at)
            if steps < leap.steps:
                self._leap_to(steps, leap)

    def load(self, now: float) -> Load:
        """The engine's figures."""
        model = self.model
        ahead = self._leap.steps_by(now - self._leapt_at) if self._leap else 0
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
        self._tell(ev.LoadReported(self.stream_id, self.name, self.load(now)), now)

    @property
    def num_keys(self) -> int:
        """How many keys were reported and hold."""
        came = sum([len(_came(event)) for event in self._coming if isinstance(event, BlocksStored)])
        went = sum([len(_went(event)) for event in self._coming if isinstance(event, BlocksRemoved)])
        return len(self.model.cache) - came + went

    def all_keys(self) -> list[ev.KeysReported]:
        """A snapshot, as at the beginning and whenever a router asks for one."""
        keys = self._told()
        messages: tuple[KeyMessage, ...] = (
            SnapshotBegin(self._seq),
            SnapshotChunk(TIER_DEVICE, keys),
            SnapshotEnd(self._seq, len(keys), digest_of(TIER_DEVICE, keys)),
        )
        return [ev.KeysReported(self.stream_id, self.name, message) for message in messages]

    def report_bookmark(self, now: float) -> None:
        """Tell what the router must have by now, so that a lost report is noticed."""
        keys = self._told()
        self._send(Bookmark(self._seq, len(keys), digest_of(TIER_DEVICE, keys)), now)

    def _step(self, now: float) -> None:
        self._busy = True
        if (leap := self.model.leap()) is not None:
            self._leapt_at = now
            self._leap_to(leap.steps_by(EVICTING_S) if leap.evicts else leap.steps, leap)
            return
        result = self.model.step(now)
        for awaited in result.awaited:
            self._hear(awaited, now)
        self.busy_s += result.duration_s
        self._coming = result.events
        self._agenda.at(now + result.duration_s, partial(self._stepped, result.events))

    def _leap_to(self, steps: int, leap: Leap) -> None:
        self._leap = leap = structs.replace(leap, steps=steps)
        self._leaps += 1
        self._agenda.at(self._leapt_at + leap.seconds(steps), partial(self._landed, self._leaps))

    def _landed(self, number: int, now: float) -> None:
        leap = self._leap
        if leap is None or number != self._leaps:
            return
        self._leap = None
        self.busy_s += now - self._leapt_at
        self._stepped(self.model.land(leap.steps), now)

    def _stepped(self, events: Sequence[Event], now: float) -> None:
        self.model.finish_step()
        self._busy = False
        self._coming = ()
        self._report_keys(events, now)
        for event in events:
            if isinstance(event, ANSWERS):
                self._hear(event, now)
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
                added.append(_came(event))
            elif isinstance(event, Preempted):
                preempted = True
            elif isinstance(event, BlocksRemoved):
                if preempted and not all(set(event.hashes).isdisjoint(keys) for keys in added):
                    # A delta's removals come before its additions.
                    self._report(added, removed, now)
                    added, removed = [], []
                removed.append(_went(event))
        if any(added) or any(removed):
            self._report(added, removed, now)

    def _told(self) -> set[int]:
        """The keys that were reported: the engine's, but for what the step under way changes."""
        keys = set(self.model.cache.cached_hashes())
        for event in reversed(self._coming):
            if isinstance(event, BlocksStored):
                keys.difference_update(_came(event))
            elif isinstance(event, BlocksRemoved):
                keys.update(_went(event))
        return keys

    def _report(self, added: Sequence[Sequence[int]], removed: Sequence[Sequence[int]], now: float) -> None:
        self._seq += 1
        self._send(Delta(self._seq, TIER_DEVICE, _together(added), _together(removed)), now)

    def _send(self, message: KeyMessage, now: float) -> None:
        self._tell(ev.KeysReported(self.stream_id, self.name, message), now)


def _came(stored: BlocksStored) -> Sequence[int]:
    """What was not there before."""
    return [value for value in stored.hashes if value not in stored.again] if stored.again else stored.hashes


def _went(removed: BlocksRemoved) -> Sequence[int]:
    """What is not there any more."""
    if not removed.left:
        return removed.hashes
    # Of two blocks of one hash that go together the second is the last.
    return list((Counter(removed.hashes) - Counter(removed.left)).elements())


def _together(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """All parts as one; mostly there is one, of hundreds of keys, which is not copied."""
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
