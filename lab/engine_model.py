"""A model of one vLLM engine: continuous batching with chunked prefill over a block cache, in virtual time. Pure.

The emulated engine and the simulator share it. It schedules as vllm/v1/core/sched/scheduler.py (0.32) does with the FCFS
policy: running requests first, in order; when blocks run out the last admitted one is preempted and later recomputed; then
waiting requests while tokens, sequences and blocks last, each only if its whole prompt fits. What a step costs comes from a
Profile.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from lab.block_cache import AllCleared, BlockCache, BlocksRemoved, BlocksStored, extend_hashes, root_hash


@dataclass(frozen=True)
class Profile:
    """What a step costs, in seconds.

    A chunk of n tokens after c computed ones takes prefill_token_s * n + prefill_pair_s * n * (2c + n), so that a prompt of
    N costs a*N + b*N^2 however it is cut. The defaults are fitted at 8k and 64k to prefill times measured with a 30B MoE
    coder model on a data-centre GPU (reference 0.575, 1.495, 4.44 and 15.2 s at 8k, 16k, 32k and 64k; this gives 0.575,
    1.53, 4.57 and 15.2), and decode to its 6-8 ms/token: 96 KiB of KV per token read at 3 TB/s, plus the weights.
    """

    step_s: float = 0.005
    prefill_token_s: float = 4.708e-5
    prefill_pair_s: float = 2.8205e-9
    decode_sequence_s: float = 5e-5
    decode_kv_token_s: float = 3.3e-8
    # A KV transfer between instances once its prefill is over, and what a layer-wise push leaves to do then. Fitted to the
    # reference's 0.123, 0.202 and 0.529 s at 8k, 16k and 32k (this gives 0.13, 0.26 and 0.50) and 0.058 s layer-wise.
    transfer_s: float = 0.010
    transfer_token_s: float = 1.5e-5
    layerwise_tail_s: float = 0.058

    def chunk_s(self, tokens: int, computed: int) -> float:
        """Seconds for `tokens` of one sequence after `computed`; one token is a decode step."""
        if tokens == 1:
            return self.decode_sequence_s + self.decode_kv_token_s * computed
        return self.prefill_token_s * tokens + self.prefill_pair_s * tokens * (2 * computed + tokens)

    def transfer_time_s(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` to another instance."""
        return self.transfer_s + self.transfer_token_s * tokens

    def transfer_tail_s(self, tokens: int, overlapped_s: float) -> float:
        """Seconds from a prefill's end until `tokens` of KV are elsewhere, pushed layer by layer during its last `overlapped_s`
        (0: fetched afterwards). A push hides no more than that, always leaves its last layer, and is never the slower way."""
        whole = self.transfer_time_s(tokens)
        if not overlapped_s:
            return whole
        return min(whole, max(self.layerwise_tail_s, whole - overlapped_s))


@dataclass(frozen=True)
class EngineConfig:
    """The engine's settings, named as vLLM's flags are. `vocabulary` is what it may generate; `seed` changes its answers."""

    block_size: int = 16
    kv_blocks: int = 20_000
    max_model_len: int = 131_072
    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    vocabulary: Sequence[int] = range(1_000, 2_000)
    eos_token_id: int | None = None
    # Where a request that may stop by itself does: after so many tokens, drawn from its prompt.
    natural_length: tuple[int, int] = (16, 96)
    seed: int = 0
    hash_seed: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size {self.block_size} is no multiple of 16")
        if self.kv_blocks * self.block_size < self.max_model_len:
            # vLLM refuses to start for the same reason: a lone request could wait for ever.
            raise ValueError(
                f"{self.kv_blocks} blocks of {self.block_size} hold less than max_model_len {self.max_model_len}"
            )
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len) < 1:
            raise ValueError("max_num_batched_tokens, max_num_seqs and max_model_len must be at least 1")
        if not len(self.vocabulary):
            raise ValueError("vocabulary is empty")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is asked of the engine. `remote_tokens` leading prompt tokens have their KV delivered from another instance."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False
    session_id: str = ""
    cache_salt: str = ""
    remote_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed; `cached_tokens` of it came from the local cache and `remote_tokens` from another instance."""

    request_id: str
    cached_tokens: int
    remote_tokens: int


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """Token number `index` (from 0) of an answer."""

    request_id: str
    index: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete: "length", or "stop" when its last token is the end-of-sequence token."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request lost its blocks and waits to be recomputed."""

    request_id: str


Event = FirstToken | TokenGenerated | Finished | Preempted | BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: it takes `duration_s` from its `now`, and its events are seen by others at its end."""

    duration_s: float
    events: list[Event]
    scheduled: dict[str, int]


@dataclass
class Counters:
    """Totals since the start, under the names of vLLM's metrics."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0


@dataclass(eq=False, slots=True)
class _Sequence:
    request: EngineRequest
    tokens: list[int]
    root: int
    digest: int
    end: int
    natural_end: int | None
    submitted_at: float
    hashes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    computed: int = 0
    # Of the prompt, when it was first admitted; None before.
    cached: int | None = None
    remote: int = 0


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
        return len(self.cache.lookup(hashes, len(hashes))) * self.config.block_size

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request at `now` (s). Raises ValueError for one that no state of the engine could serve."""
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already here")
        length = len(request.prompt)
        if not 0 < length < self.config.max_model_len:
            raise ValueError(f"a prompt of {length} tokens does not fit max_model_len {self.config.max_model_len}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        digest = xxh3_64_intdigest(array("I", request.prompt).tobytes(), self.config.seed)
        natural = None
        if not request.ignore_eos and self.config.eos_token_id is not None:
            low, high = self.config.natural_length
            natural = length + low + digest % (high - low + 1)
        sequence = _Sequence(
            request=request,
            tokens=list(request.prompt),
            root=root_hash(self.config.hash_seed, request.cache_salt),
            digest=digest,
            end=min(length + request.max_tokens, self.config.max_model_len),
            natural_end=natural,
            submitted_at=now,
        )
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, self.config.block_size)
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
            if sequence.computed == len(sequence.tokens):
                self._sample(sequence, events)
        return StepResult(duration, events, {item.request.request_id: count for item, count in scheduled})

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
            count = min(len(sequence.tokens) - sequence.computed, chunk_limit, budget)
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
        missing = -(-(sequence.computed + count) // self.config.block_size) - len(sequence.blocks)
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
        length = len(sequence.tokens)
        # The last token is always computed, for its logits: a hit stops before it.
        hit = self.cache.lookup(sequence.hashes, (length - 1) // block_size)
        cached = len(hit) * block_size
        first = sequence.cached is None
        remote = max(0, min(sequence.request.remote_tokens, length - 1) - cached) if first else 0
        if -(-length // block_size) - len(hit) + self.cache.idle(hit) > self.cache.free:
            return 0
        self.cache.hold(hit)
        sequence.blocks = hit
        sequence.stored = len(hit)
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
        self._grow(sequence, -(-(sequence.computed + count) // block_size) - len(hit), count, events)
        return count

    def _grow(self, sequence: _Sequence, missing: int, count: int, events: list[Event]) -> None:
        if missing > 0:
            blocks, removed = self.cache.allocate(missing)
            sequence.blocks += blocks
            if removed:
                events.append(BlocksRemoved(tuple(removed)))
        block_size = self.config.block_size
        # Blocks are findable from the step that fills them on, as in vLLM, which caches them when it schedules.
        full = (sequence.computed + count) // block_size
        start = sequence.stored
        if full <= start:
            return
        hashes = sequence.hashes[start:full]
        self.cache.store(sequence.blocks[start:full], hashes)
        sequence.stored = full
        parent = sequence.hashes[start - 1] if start else None
        tokens = tuple(sequence.tokens[start * block_size : full * block_size])
        request = sequence.request
        events.append(BlocksStored(tuple(hashes), parent, tokens, request.session_id, request.cache_salt))

    def _preempt(self, sequence: _Sequence, events: list[Event]) -> None:
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.counters.num_preemptions += 1
        events.append(Preempted(sequence.request.request_id))

    def _release(self, sequence: _Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored = sequence.computed = 0

    def _sample(self, sequence: _Sequence, events: list[Event]) -> None:
        config, request = self.config, sequence.request
        length = len(sequence.tokens)
        index = length - len(request.prompt)
        if index == 0:
            self._count_prompt(sequence)
            events.append(FirstToken(request.request_id, sequence.cached or 0, sequence.remote))
        stops = sequence.natural_end is not None and length + 1 >= sequence.natural_end
        if stops and config.eos_token_id is not None:
            token = config.eos_token_id
        else:
            # Reading the digest before the index makes answers of equal prompts equal on every instance of a seed.
            draw = xxh3_64_intdigest(index.to_bytes(8, "little"), sequence.digest)
            token = config.vocabulary[draw % len(config.vocabulary)]
        sequence.tokens.append(token)
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, config.block_size)
        self.counters.generation_tokens += 1
        events.append(TokenGenerated(request.request_id, index, token))
        if stops or length + 1 >= sequence.end:
            events.append(Finished(request.request_id, "stop" if stops else "length"))
            self._finishing.append(sequence)

    def _count_prompt(self, sequence: _Sequence) -> None:
        counters, length, cached = self.counters, len(sequence.request.prompt), sequence.cached or 0
        counters.prompt_tokens += length
        counters.local_cache_hit += cached
        counters.external_kv_transfer += sequence.remote
        counters.local_compute += length - cached - sequence.remote
