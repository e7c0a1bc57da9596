"""Lower bounds of latency, where no request waits: `floor`, where no computed block is evicted, and `pooled`. Pure.

No placement can be faster than the floor. A part of the gap to the floor does not depend on placement, because blocks that caches
of limited size evict must be computed again. `pooled` measures this part: it has one cache for all requests, as large as the
caches of all instances together, which evicts the least recently used blocks as an engine does. Neither bound is a policy of the
router: each request has an engine to itself, and the blocks that it has computed are cached for all later requests.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_lab.engine.interface import DecodeSteps
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.clients import Clients, Turn
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.workload.block_names import PromptBlocks
from pointsman_lab.workload.session_starts import Session
from pointsman_router.core.placement_types import route_class

# Names that the lab's settings accept in place of a policy's name.
FLOOR, POOLED = "floor", "pooled"
BOUNDS = (FLOOR, POOLED)


class LatencyBound:
    """One run of a bound over a draw of sessions; run() may be called once.

    `config` sets the costs, the times and, by its policy, which of BOUNDS is computed (any other policy: the floor). Its
    instances count for `pooled` alone, by the sum of their KV blocks.
    """

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
        """Run all sessions; return the records in the order in which requests ended."""
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
            output_tokens=self._answer_tokens(turn),
        )
        first = now + prefill_s(self._config, request.input_length, cached)
        self._event_queue.schedule(first, partial(self._first_token, record, turn, prompt))

    def _answer_tokens(self, turn: Turn) -> int:
        return self._config.engine.answer_tokens(turn.request.input_length, turn.request.output_length)

    def _first_token(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        self._cache.use(prompt.names)
        record.ttft_s = now - record.t_send
        profile, steps = self._config.profile, self._answer_tokens(turn) - 1
        first_s = profile.step_s + profile.chunk_s(1, turn.request.input_length)
        decode_s = DecodeSteps(steps, False, first_s, profile.decode_kv_token_s).seconds(steps)
        record.status = 200
        self._event_queue.schedule(now + decode_s, partial(self._answered, record, turn, prompt))

    def _answered(self, record: RequestRecord, turn: Turn, prompt: NamedPrompt, now: float) -> None:
        # The last token's own KV is never computed.
        full = (prompt.length + self._answer_tokens(turn) - 1) // KEY_TOKENS
        self._cache.use((*prompt.names, *prompt.answer[: max(full - len(prompt.names), 0)]))
        self._end(record, turn, now)

    def _end(self, record: RequestRecord, turn: Turn, now: float) -> None:
        record.e2e_s = now - record.t_send
        self._records.append(record)
        self._clients.answered(turn, now)


class _Cache:
    """LRU set of block names, at most `limit`.

    The first block of a prompt counts as its most recently used, as when an engine frees a sequence. So no block stays longer
    than the block before it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: OrderedDict[int, None] = OrderedDict()

    def hits(self, names: Sequence[int]) -> int:
        """Return how many leading `names` are cached."""
        cached = self._names
        return next((at for at, name in enumerate(names) if name not in cached), len(names))

    def use(self, names: Sequence[int]) -> None:
        """Add `names`, or mark them as used; evict the least recently used names above the limit. Mutates."""
        cached = self._names
        for name in reversed(names):
            cached[name] = None
            cached.move_to_end(name)
        for _ in range(len(cached) - self._limit):
            cached.popitem(last=False)


def prefill_s(config: SimulationConfig, tokens: int, cached: int) -> float:
    """Return the time to the first token of a prompt on an otherwise idle engine with `cached` of its `tokens` cached, in s."""
    profile, largest = config.profile, config.engine.max_num_batched_tokens
    seconds = 0.0
    while cached < tokens:
        count = min(largest, tokens - cached)
        seconds += profile.step_s + profile.chunk_s(count, cached)
        cached += count
    return seconds
