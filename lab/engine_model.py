"""A model of one vLLM engine: continuous batching with chunked prefill over a block cache, in virtual time. Pure.

The emulated engine and the simulator share it. It schedules as vllm/v1/core/sched/scheduler.py (0.32) does with the FCFS
policy: running requests first, in order; when blocks run out the last admitted one is preempted and later recomputed; then
waiting requests while tokens, sequences and blocks last, each only if its whole prompt fits. What a step costs comes from a
Profile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.block_cache import AllCleared, BlockCache, BlocksRemoved, BlocksStored, Holding, root_hash
from lab.content import NamedPrompt, Names, Tokens
from lab.engine_events import (
    Counters,
    EngineConfig,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    Leap,
    Preempted,
    StepResult,
    TokenGenerated,
)
from lab.profile import Profile


@dataclass(eq=False, slots=True)
class _Sequence:
    request: EngineRequest
    content: Tokens | Names
    length: int
    end: int
    natural_end: int | None
    submitted_at: float
    held: Holding = field(default_factory=Holding)
    computed: int = 0
    # Of the prompt, when it was first admitted; None before.
    cached: int | None = None
    remote: int = 0

    @property
    def decodes(self) -> bool:
        """Whether it has begun to answer and only its last token is left to compute."""
        return self.length - self.computed == 1 and self.length > len(self.request.prompt)


class EngineModel:
    """One engine. submit, abort, reset_prefix_cache, step and finish_step are the only methods that change it."""

    def __init__(self, config: EngineConfig | None = None, profile: Profile | None = None) -> None:
        self.config = config or EngineConfig()
        self.profile = profile or Profile()
        self.cache = BlockCache(self.config.kv_blocks, self.config.block_size)
        self.counters = Counters()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._pending: list[Event] = []
        self._finishing: list[_Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is here. A cleared cache alone is no work: vLLM too tells it with the next request's step."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return 1 - self.cache.free / self.cache.capacity

    def cached_tokens(self, hashes: Sequence[int]) -> int:
        """How many tokens of a prompt with these block hashes are cached, without holding them."""
        return self.cache.hits(hashes, len(hashes)) * self.config.block_size

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request at `now` (s). Raises ValueError for one that no state of the engine could serve."""
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already here")
        length = len(request.prompt)
        if not 0 < length < self.config.max_model_len:
            raise ValueError(f"a prompt of {length} tokens does not fit max_model_len {self.config.max_model_len}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        config, natural = self.config, None
        content: Tokens | Names
        if isinstance(request.prompt, NamedPrompt):
            content = Names(request.prompt, config.block_size)
        else:
            root = root_hash(config.hash_seed, request.cache_salt)
            content = Tokens(request.prompt, root, config.block_size, config.vocabulary, config.seed)
            if not request.ignore_eos and config.eos_token_id is not None:
                low, high = config.natural_length
                natural = length + low + content.digest % (high - low + 1)
        sequence = _Sequence(
            request=request,
            content=content,
            length=length,
            end=min(length + request.max_tokens, config.max_model_len),
            natural_end=natural,
            submitted_at=now,
        )
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str, now: float) -> bool:
        """Forget a request and free its blocks. False when it is not here, for instance because it has finished."""
        del now
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; told with the next step, as vLLM does. False while a request holds blocks."""
        if not self.cache.clear():
            return False
        self._pending.append(AllCleared())
        return True

    def finish_step(self) -> None:
        """Let go of the requests that the last step finished; to be called at its end (step() does, when nobody has).

        Until then they count as running and hold their blocks, as they do in an engine whose step is not over.
        """
        for sequence in self._finishing:
            if self._sequences.get(sequence.request.request_id) is sequence:
                del self._sequences[sequence.request.request_id]
                self._running.remove(sequence)
                self._release(sequence)
        self._finishing.clear()

    def step(self, now: float) -> StepResult:
        """Run one step that starts at `now` (s). With nothing to do it takes no time and has no events."""
        del now  # Costs do not depend on it; callers of a discrete-event loop read better with it.
        self.finish_step()
        events: list[Event] = self._pending
        self._pending = []
        if not self._sequences:
            return StepResult(0.0, events, {})
        scheduled = self._schedule(events)
        profile = self.profile
        duration = profile.step_s
        for sequence, count in scheduled:
            duration += profile.chunk_s(count, sequence.computed)
        for sequence, count in scheduled:
            sequence.computed += count
            if sequence.computed == sequence.length:
                self._sample(sequence, events)
        return StepResult(duration, events, {item.request.request_id: count for item, count in scheduled})

    # ---- many steps at once ----

    def leap(self) -> Leap | None:
        """The steps from here to the next end of an answer, when until then all running requests only decode, none can be
        admitted and none need be preempted; None when the next step is of another kind. Changes nothing; for NamedPrompts."""
        self.finish_step()
        running, config, profile = self._running, self.config, self.profile
        if not running or self._pending or not all(one.decodes and type(one.content) is Names for one in running):
            return None
        if len(running) > config.max_num_batched_tokens or (
            self._waiting and len(running) < config.max_num_seqs and self._room_for(self._waiting[0]) is not None
        ):
            return None
        steps = min(one.end - one.length for one in running)
        while steps > 1 and self._blocks_for(steps) > self.cache.free:
            steps //= 2
        if self._blocks_for(steps) > self.cache.free:
            return None
        first_s = profile.step_s + sum([profile.chunk_s(1, one.computed) for one in running])
        return Leap(
            steps, self.cache.blank < self._blocks_for(steps), first_s, profile.decode_kv_token_s * len(running)
        )

    def land(self, steps: int) -> list[Event]:
        """Take the first `steps` of the leap that leap() has just told; the events of all. Mutates."""
        events: list[Event] = []
        block_size = self.config.block_size
        for one in self._running:
            assert isinstance(one.content, Names)
            # The last step's token, and what it brings, is sampled as in any step.
            one.content.extend(steps - 1)
            one.length += steps - 1
            self._grow(one, -(-(one.computed + steps) // block_size) - len(one.held), steps, events)
            one.computed += steps
            self.counters.generation_tokens += steps - 1
            self._sample(one, events)
        return events

    def kv_usage_after(self, steps: int) -> float:
        """kv_usage once the first `steps` of a leap have begun."""
        return self.kv_usage + self._blocks_for(steps) / self.cache.capacity

    def _blocks_for(self, steps: int) -> int:
        block_size = self.config.block_size
        return sum([max(-(-(one.computed + steps) // block_size) - len(one.held), 0) for one in self._running])

    def _schedule(self, events: list[Event]) -> list[tuple[_Sequence, int]]:
        config = self.config
        budget = config.max_num_batched_tokens
        # A lone request has nobody to starve (as in vLLM), so the threshold only counts from two on.
        threshold = config.long_prefill_token_threshold if len(self._sequences) > 1 else 0
        chunk_limit = threshold or config.max_num_batched_tokens
        scheduled: list[tuple[_Sequence, int]] = []
        preemptions = self.counters.num_preemptions
        position = 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            count = min(sequence.length - sequence.computed, chunk_limit, budget)
            if not self._make_room(sequence, count, events):
                break
            scheduled.append((sequence, count))
            budget -= count
            position += 1
        # What was just preempted heads the queue: admitting in the same step would only hand its blocks back.
        if self.counters.num_preemptions > preemptions:
            return scheduled
        while self._waiting and budget > 0 and len(self._running) < config.max_num_seqs:
            sequence = self._waiting[0]
            count = self._admit(sequence, min(chunk_limit, budget), events)
            if not count:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            scheduled.append((sequence, count))
            budget -= count
        return scheduled

    def _make_room(self, sequence: _Sequence, count: int, events: list[Event]) -> bool:
        """Give a running sequence the blocks for `count` more tokens, preempting from the end. False when it lost its own."""
        missing = -(-(sequence.computed + count) // self.config.block_size) - len(sequence.held)
        while missing > self.cache.free:
            victim = self._running.pop()
            self._preempt(victim, events)
            if victim is sequence:
                return False
        self._grow(sequence, missing, count, events)
        return True

    def _admit(self, sequence: _Sequence, limit: int, events: list[Event]) -> int:
        """Give a waiting sequence its cached blocks and room for a first chunk; its size, or 0 when it does not fit."""
        block_size = self.config.block_size
        length, hashes = sequence.length, sequence.content.hashes
        hit = self._room_for(sequence)
        if hit is None:
            return 0
        cached = hit * block_size
        first = sequence.cached is None
        remote = max(0, min(sequence.request.remote_tokens, length - 1) - cached) if first else 0
        sequence.held = self.cache.hold(hashes, hit)
        sequence.computed = cached + remote
        self.counters.prefix_cache_queries += length
        self.counters.prefix_cache_hits += cached
        if first:
            sequence.cached = cached
            sequence.remote = remote
            if sequence.request.remote_tokens:
                self.counters.external_prefix_cache_queries += length - cached
                self.counters.external_prefix_cache_hits += remote
        count = min(length - sequence.computed, limit)
        self._grow(sequence, -(-(sequence.computed + count) // block_size) - hit, count, events)
        return count

    def _room_for(self, sequence: _Sequence) -> int | None:
        """The cached blocks of a waiting sequence whose whole prompt fits; None when it does not."""
        length, hashes = sequence.length, sequence.content.hashes
        block_size, cache = self.config.block_size, self.cache
        # The last token is always computed, for its logits: a hit stops before it.
        hit = cache.hits(hashes, (length - 1) // block_size)
        missing = -(-length // block_size) - hit
        return hit if missing <= cache.free and missing + cache.idle(hashes, hit) <= cache.free else None

    def _grow(self, sequence: _Sequence, missing: int, count: int, events: list[Event]) -> None:
        if missing > 0 and (removed := self.cache.allocate(sequence.held, missing)):
            events.append(BlocksRemoved(tuple(removed)))
        block_size, content = self.config.block_size, sequence.content
        # Blocks are findable from the step that fills them on, as in vLLM, which caches them when it schedules.
        full = (sequence.computed + count) // block_size
        start = sequence.held.full
        if full <= start:
            return
        hashes = content.hashes[start:full]
        self.cache.store(sequence.held, hashes)
        parent = content.hashes[start - 1] if start else None
        tokens = content.ids(start * block_size, full * block_size)
        request = sequence.request
        events.append(BlocksStored(tuple(hashes), parent, tokens, request.session_id, request.cache_salt))

    def _preempt(self, sequence: _Sequence, events: list[Event]) -> None:
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.counters.num_preemptions += 1
        events.append(Preempted(sequence.request.request_id))

    def _release(self, sequence: _Sequence) -> None:
        self.cache.release(sequence.held)
        sequence.computed = 0

    def _sample(self, sequence: _Sequence, events: list[Event]) -> None:
        request, content = sequence.request, sequence.content
        index = sequence.length - len(request.prompt)
        if index == 0:
            self._count_prompt(sequence)
            events.append(FirstToken(request.request_id, sequence.cached or 0, sequence.remote))
        stops = sequence.natural_end is not None and sequence.length + 1 >= sequence.natural_end
        if isinstance(content, Tokens):
            token = content.append(self.config.eos_token_id if stops else None)
            events.append(TokenGenerated(request.request_id, index, token))
        else:
            content.extend(1)
        sequence.length += 1
        self.counters.generation_tokens += 1
        if stops or sequence.length >= sequence.end:
            events.append(Finished(request.request_id, "stop" if stops else "length"))
            self._finishing.append(sequence)

    def _count_prompt(self, sequence: _Sequence) -> None:
        counters, length, cached = self.counters, len(sequence.request.prompt), sequence.cached or 0
        counters.prompt_tokens += length
        counters.local_cache_hit += cached
        counters.external_kv_transfer += sequence.remote
        counters.local_compute += length - cached - sequence.remote
