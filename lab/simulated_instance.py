"""One instance of a simulation: an engine model in virtual time, and what its agent reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from lab.agenda import Agenda
from lab.block_cache import BlocksRemoved, BlocksStored
from lab.engine_model import EngineModel, EngineRequest, Event, Finished, FirstToken
from services.router import events as ev
from services.router.domain import Load
from services.router.sync import TIER_DEVICE, Delta

# (event, now): the router hears of something.
Tell = Callable[[ev.Event, float], None]
# (event, now): a request has its first token, or its end.
Hear = Callable[[FirstToken | Finished, float], None]


class SimulatedInstance:
    """Steps `model` whenever it has work; `tell` hears the agent's reports, `hear` the answers."""

    def __init__(self, name: str, stream_id: int, model: EngineModel, agenda: Agenda, tell: Tell, hear: Hear) -> None:
        self.name = name
        self.stream_id = stream_id
        self.model = model
        self._agenda = agenda
        self._tell = tell
        self._hear = hear
        self._busy = False
        self._seq = 0
        self._held: Counter[int] = Counter()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Give the engine a request. Raises ValueError when it refuses it. Mutates."""
        self.model.submit(request, now)
        if not self._busy:
            self._step(now)

    def report_load(self, now: float) -> None:
        """Tell the engine's figures."""
        model = self.model
        load = Load(
            sampled_at=now,
            running=model.num_running,
            waiting=model.num_waiting,
            kv_usage=model.kv_usage,
            generation_tokens=model.counters.generation_tokens,
            prefix_cache_queries=model.counters.prefix_cache_queries,
            prefix_cache_hits=model.counters.prefix_cache_hits,
            external_prefix_cache_queries=model.counters.external_prefix_cache_queries,
            external_prefix_cache_hits=model.counters.external_prefix_cache_hits,
            preemptions=model.counters.num_preemptions,
        )
        self._tell(ev.LoadReported(self.stream_id, self.name, load), now)

    def _step(self, now: float) -> None:
        result = self.model.step(now)
        self._busy = True
        self._agenda.at(now + result.duration_s, partial(self._stepped, result.events))

    def _stepped(self, events: Sequence[Event], now: float) -> None:
        self.model.finish_step()
        self._busy = False
        self._report_keys(events, now)
        for event in events:
            if isinstance(event, FirstToken | Finished):
                self._hear(event, now)
        # A request that arrived at this very moment may have started the next step already.
        if self.model.has_work and not self._busy:
            self._step(now)

    def _report_keys(self, events: Sequence[Event], now: float) -> None:
        """The agent's part: count references, and report keys that came or went."""
        before: dict[int, bool] = {}
        for event in events:
            if isinstance(event, BlocksStored | BlocksRemoved):
                for value in event.hashes:
                    before.setdefault(value, self._held[value] > 0)
                    self._held[value] += 1 if isinstance(event, BlocksStored) else -1
        added = [value for value, held in before.items() if not held and self._held[value]]
        removed = [value for value, held in before.items() if held and not self._held[value]]
        if added or removed:
            self._seq += 1
            self._tell(ev.KeysReported(self.stream_id, self.name, Delta(self._seq, TIER_DEVICE, added, removed)), now)
