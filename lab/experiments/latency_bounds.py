"""What latencies would be if nothing ever waited: the floor, where nothing computed is ever evicted, and `pooled`. Pure.

No router can place below the floor, but a part of the gap to it is no matter of places: whatever caches of limited size evict has
to be computed again. `pooled` tells how much: one cache for all, as large as all instances' together, that evicts as an engine
does, what was used least recently. Neither is a policy of the router: each request has an engine of its own, and what it has
computed is cached for all from then on.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.lab.engine.interface import DecodeSteps
from pointsman.lab.engine.prompt_content import NamedPrompt
from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.clients import Clients, Turn
from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.event_queue import EventQueue
from pointsman.lab.workload.block_names import PromptBlocks
from pointsman.lab.workload.session_starts import Session
from pointsman.router.core.types import route_class

# Where a policy's name is asked for, in the lab.
FLOOR, POOLED = "floor", "pooled"
BOUNDS = (FLOOR, POOLED)


class LatencyBound:
    """One run over a draw; run() may be called once. `config` tells costs, times and which of BOUNDS is meant (any other policy:
    the floor); of its instances only `pooled` knows, by their blocks."""

    def __init__(self, sessions: Sequence[Session], config: SimulationConfig) -> None:
        self._config = config
        self._event_queue = EventQueue()
        self._prompts = PromptBlocks(prompts_include_answers=config.prompts_include_answers)
        self._clients = Clients(iter(sessions), config, ("",), self._event_queue, self._arrive)
        self._name = POOLED if config.policy == POOLED else FLOOR
        tokens = config.instances * config.engine.kv_blocks * config.engine.block_size
        self._cache = _Cache(tokens // KEY_TOKENS if self._name == POOLED else sys.maxsize)
        self._records: list[RequestRecord] = []

    def run(self) -> list[RequestRecord]:
        """The records in the order in which requests ended."""
        self._clients.start()
        while not self._clients.done:
            self._event_queue.run_next()
        return self._records

    def _arrive(self, turn: Turn, now: float) -> None:
        config, request = self._config, turn.request
        prompt = self._prompts.prompt_of(request, last=not turn.later_turns)
        if request.input_length >= config.engine.max_model_len:
            record = RequestRecord(session=request.session, turn=request.turn, status=400, error="too long", t_send=now)
            self._end(record, turn, now)
            return
        way_s = config.frontend_s + config.tokenise_token_s * prompt.length + config.placement_s + config.api_s
        self._event_queue.schedule(now + way_s, partial(self._prefill, turn, prompt, now))

    def _prefill(self, turn: Turn, prompt: NamedPrompt, sent: float, now: float) -> None:
        request = turn.request
        # The last token is always computed, for its logits.
        cached = self._cache.hits(prompt.names[: (request.input_length - 1) // KEY_TOKENS]) * KEY_TOKENS
        record = RequestRecord(
            session=request.session,
            turn=request.turn,
            mode="COLOCATED",
            route_class=route_class(request.input_length - cached, request.input_length),
            reason=self._name,
            rule=self._name,
            t_send=sent,
            cached_tokens=cached,
            prompt_tokens=request.input_length,
            output_tokens=request.output_length,
        )
        first = now + prefill_s(self._config, request.input_length, cached)
        self._event_queue.schedule(first, partial(self._first_token, record, turn, prompt))

    def _first_token(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        self._cache.use(prompt.names)
        record.ttft_s = now - record.t_send
        profile, steps = self._config.profile, turn.request.output_length - 1
        first_s = profile.step_s + profile.chunk_s(1, turn.request.input_length)
        decode_s = DecodeSteps(steps, False, first_s, profile.decode_kv_token_s).seconds(steps)
        record.status = 200
        self._event_queue.schedule(now + decode_s, partial(self._answered, record, turn, prompt))

    def _answered(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        # The last token's own KV is never computed.
        full = (prompt.length + turn.request.output_length - 1) // KEY_TOKENS
        self._cache.use((*prompt.names, *prompt.answer[: max(full - len(prompt.names), 0)]))
        self._end(record, turn, now)

    def _end(self, record: RequestRecord, turn: Turn, now: float) -> None:
        record.e2e_s = now - record.t_send
        self._records.append(record)
        self._clients.answered(turn, now)


class _Cache:
    """Names of the `limit` blocks that were used last. Of a prompt's blocks the first count as used last, as when an engine lets
    go of a sequence, so that none outlives the block before it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: OrderedDict[int, None] = OrderedDict()

    def hits(self, names: Sequence[int]) -> int:
        """How many leading ones are cached."""
        cached = self._names
        return next((at for at, name in enumerate(names) if name not in cached), len(names))

    def use(self, names: Sequence[int]) -> None:
        """They are computed, or read. Mutates."""
        cached = self._names
        for name in reversed(names):
            cached[name] = None
            cached.move_to_end(name)
        for _ in range(len(cached) - self._limit):
            cached.popitem(last=False)


def prefill_s(config: SimulationConfig, tokens: int, cached: int) -> float:
    """What a lone engine takes for the first token of a prompt of which `cached` tokens are there already, in s."""
    profile, largest = config.profile, config.engine.max_num_batched_tokens
    seconds = 0.0
    while cached < tokens:
        count = min(largest, tokens - cached)
        seconds += profile.step_s + profile.chunk_s(count, cached)
        cached += count
    return seconds
