"""The floor: what latencies would be if nothing ever waited and every instance had every block. Pure.

No router can place below it, so the gap between a policy and the floor is what better placement could at most win. It is no
policy of the router: each request has an engine of its own, and whatever any request has computed is cached for all from then on.
"""

from __future__ import annotations

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
FLOOR = "floor"


class Floor:
    """One run over a draw; run() may be called once. `asked` tells costs and times; its policy and instances do not count."""

    def __init__(self, sessions: Sequence[Session], asked: Simulation) -> None:
        self._asked = asked
        self._agenda = Agenda()
        self._prompts = Prompts(answers_return=asked.answers_return)
        self._clients = Clients(iter(sessions), asked, ("",), self._agenda, self._arrive)
        self._computed: set[int] = set()
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
        request, names, computed = turn.request, prompt.names, self._computed
        # The last token is always computed, for its logits.
        reusable = (request.input_length - 1) // KEY_TOKENS
        hit = next((at for at, name in enumerate(names[:reusable]) if name not in computed), reusable)
        cached = hit * KEY_TOKENS
        record = RequestRecord(
            session=request.session,
            turn=request.turn,
            mode="COLOCATED",
            route_class=route_class(request.input_length - cached, request.input_length),
            reason=FLOOR,
            rule=FLOOR,
            t_send=sent,
            cached_tokens=cached,
            prompt_tokens=request.input_length,
            output_tokens=request.output_length,
        )
        first = now + prefill_s(self._asked, request.input_length, cached)
        self._agenda.at(first, partial(self._first_token, record, turn, prompt))

    def _first_token(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        self._computed.update(prompt.names)
        record.ttft_s = now - record.t_send
        profile, steps = self._asked.profile, turn.request.output_length - 1
        first_s = profile.step_s + profile.chunk_s(1, turn.request.input_length)
        decode_s = Leap(steps, False, first_s, profile.decode_kv_token_s).seconds(steps)
        record.status = 200
        self._agenda.at(now + decode_s, partial(self._answered, record, turn, prompt))

    def _answered(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        # The last token's own KV is never computed.
        full = (prompt.length + turn.request.output_length - 1) // KEY_TOKENS
        self._computed.update(prompt.answer[: full - len(prompt.names)])
        self._end(record, turn, now)

    def _end(self, record: RequestRecord, turn: Turn, now: float) -> None:
        record.e2e_s = now - record.t_send
        self._records.append(record)
        self._clients.answered(turn, now)


def prefill_s(asked: Simulation, tokens: int, cached: int) -> float:
    """What a lone engine takes for the first token of a prompt of which `cached` tokens are there already, in s."""
    profile, largest = asked.profile, asked.engine.max_num_batched_tokens
    seconds = 0.0
    while cached < tokens:
        count = min(largest, tokens - cached)
        seconds += profile.step_s + profile.chunk_s(count, cached)
        cached += count
    return seconds
