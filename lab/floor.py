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

from lab.agenda import Agenda
from lab.clients import Clients, Turn
from lab.content import NamedPrompt
from lab.draws import Session
from lab.engine_events import Leap
from lab.prompts import Prompts
from lab.records import RequestRecord
from lab.simulation import Simulation
from services.common.keys import KEY_TOKENS
from services.router.domain import route_class

# Where a policy's name is asked for, in the lab.
FLOOR, POOLED = "floor", "pooled"
BOUNDS = (FLOOR, POOLED)


class Floor:
    """One run over a draw; run() may be called once. `asked` tells costs, times and which of BOUNDS is meant (any other policy:
    the floor); of its instances only `pooled` knows, by their blocks."""

    def __init__(self, sessions: Sequence[Session], asked: Simulation) -> None:
        self._asked = asked
        self._agenda = Agenda()
        self._prompts = Prompts(answers_return=asked.answers_return)
        self._clients = Clients(iter(sessions), asked, ("",), self._agenda, self._arrive)
        self._name = POOLED if asked.policy == POOLED else FLOOR
        tokens = asked.instances * asked.engine.kv_blocks * asked.engine.block_size
        self._cache = _Cache(tokens // KEY_TOKENS if self._name == POOLED else sys.maxsize)
        self._records: list[RequestRecord] = []

    def run(self) -> list[RequestRecord]:
        """The records in the order in which requests ended."""
        self._clients.start()
        while not self._clients.done:
            self._agenda.next()
        return self._records

    def _arrive(self, turn: Turn, now: float) -> None:
        asked, request = self._asked, turn.request
        prompt = self._prompts.of(request, last=not turn.rest)
        if request.input_length >= asked.engine.max_model_len:
            record = RequestRecord(session=request.session, turn=request.turn, status=400, error="too long", t_send=now)
            self._end(record, turn, now)
            return
        way_s = asked.front_s + asked.tokenise_token_s * prompt.length + asked.placement_s + asked.api_s
        self._agenda.at(now + way_s, partial(self._prefill, turn, prompt, now))

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
        first = now + prefill_s(self._asked, request.input_length, cached)
        self._agenda.at(first, partial(self._first_token, record, turn, prompt))

    def _first_token(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        self._cache.use(prompt.names)
        record.ttft_s = now - record.t_send
        profile, steps = self._asked.profile, turn.request.output_length - 1
        first_s = profile.step_s + profile.chunk_s(1, turn.request.input_length)
        decode_s = Leap(steps, False, first_s, profile.decode_kv_token_s).seconds(steps)
        record.status = 200
        self._agenda.at(now + decode_s, partial(self._answered, record, turn, prompt))

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


def prefill_s(asked: Simulation, tokens: int, cached: int) -> float:
    """What a lone engine takes for the first token of a prompt of which `cached` tokens are there already, in s."""
    profile, largest = asked.profile, asked.engine.max_num_batched_tokens
    seconds = 0.0
    while cached < tokens:
        count = min(largest, tokens - cached)
        seconds += profile.step_s + profile.chunk_s(count, cached)
        cached += count
    return seconds
