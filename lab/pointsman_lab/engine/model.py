"""A model of one vLLM engine: continuous batching with chunked prefill over a block cache, in virtual time. Pure.

The emulated engine and the simulator share it. It schedules as vllm/v1/core/sched/scheduler.py (0.32, not asynchronous) does.
Running requests are first, in order. When blocks run out, the request that was admitted last, or the least urgent one, is
preempted and later recomputed. Then waiting requests are admitted while tokens, sequences and blocks last, each only if its whole
prompt fits. Requests whose KV another instance has delivered, or host memory, are admitted first. tests/engine/test_scheduler.py
and test_host_tier.py compare model and vLLM step by step. The cost of a step comes from a Profile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from pointsman_lab.engine.block_cache import AllCleared, BlockCache, BlocksStored, root_hash
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import (
    Counters,
    DecodeSteps,
    EngineConfig,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    Preempted,
    StepResult,
    TokenGenerated,
    WaitingForRemoteKv,
)
from pointsman_lab.engine.offloading import Loaded, Offloading
from pointsman_lab.engine.prompt_content import NamedContent, NamedPrompt, TokenContent
from pointsman_lab.engine.request_queue import ArrivalQueue, EngineSequence, PriorityQueue, Queue


class EngineModel:
    """One engine. Only submit, abort, receive, reset_prefix_cache, step, finish_step and finish_decode_steps change its state."""

    def __init__(
        self, config: EngineConfig | None = None, profile: Profile | None = None, storage: set[int] | None = None
    ) -> None:
        """`storage` has the blocks in storage that the engine shares with others; only an engine with a host tier uses it."""
        self.config = config or EngineConfig()
        self.profile = profile or Profile()
        self.cache = BlockCache(self.config.kv_blocks, self.config.block_size)
        self.offloading: Offloading | None = None
        if self.config.host_blocks:
            self.offloading = Offloading(self.config.host_blocks, self.config.block_size, self.profile, storage)
        self.counters = Counters()
        by_priority = self.config.scheduling_policy == "priority"
        self._by_priority = by_priority
        # vLLM computes the watermark from all blocks, including the one that never holds KV.
        self._watermark = int(self.config.watermark * (self.config.kv_blocks + 1))
        self._waiting: Queue = PriorityQueue() if by_priority else ArrivalQueue()
        # Waiting requests that hold blocks: their KV is being transferred, or has arrived.
        self._waiting_with_blocks: Queue = PriorityQueue() if by_priority else ArrivalQueue()
        # Requests aborted during a KV transfer: the transfer writes to their blocks until it ends.
        self._aborted_loading: dict[str, EngineSequence] = {}
        # Whether nothing could be scheduled and nothing has changed since.
        self._nothing_schedulable = False
        # Whether there was no work, and no step since then.
        self._was_idle = False
        self._running: list[EngineSequence] = []
        self._sequences: OrderedDict[str, EngineSequence] = OrderedDict()
        self._pending: list[Event] = []
        self._finishing: list[EngineSequence] = []
        # Until when the current step waits for copies of preempted requests' blocks.
        self._waits_until = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. A cleared cache is no work: vLLM, too, reports it with the next request's step."""
        if self._sequences and not self._nothing_schedulable:
            return True
        return self.offloading is not None and self.offloading.has_ended_requests

    @property
    def next_transfer_end(self) -> float | None:
        """Time (s) from which a step has work, or a decode step may be followed by one of another kind, because a transfer of the
        host tier has ended. None without one. The end of a step completes the transfers that have ended by then, too."""
        return None if self.offloading is None else self.offloading.next_end(loads_only=bool(self._running))

    @property
    def num_running(self) -> int:
        """Number of admitted requests, which hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not admitted, including preempted ones and those that wait for KV."""
        return len(self._waiting) + len(self._waiting_with_blocks)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return 1 - self.cache.free / self.cache.capacity

    def cached_tokens(self, hashes: Sequence[int]) -> int:
        """Return how many tokens of a prompt with these block hashes are cached, without holding their blocks."""
        return self.cache.find(hashes, len(hashes))[0] * self.config.block_size

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request at `now` (s). Raises ValueError if the engine could never serve it."""
        if request.request_id in self._sequences or request.request_id in self._aborted_loading:
            raise ValueError(f"request {request.request_id} is already in the engine")
        length = len(request.prompt)
        if not 0 < length < self.config.max_model_len:
            raise ValueError(f"a prompt of {length} tokens does not fit max_model_len {self.config.max_model_len}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        config, natural = self.config, None
        content: TokenContent | NamedContent
        if isinstance(request.prompt, NamedPrompt):
            content = NamedContent(request.prompt)
        else:
            root = root_hash(config.hash_seed, request.cache_salt)
            content = TokenContent(
                request.prompt, root, config.block_size, config.vocabulary, config.seed, request.begun
            )
            if not request.ignore_eos and config.eos_token_id is not None:
                low, high = config.natural_length
                own = len(request.answer) + 1 if request.answer else low + content.digest % (high - low + 1)
                natural = length - request.begun + own
        sequence = EngineSequence(
            request=request,
            content=content,
            length=length,
            prompt_length=length,
            end=min(length + request.max_tokens, config.max_model_len),
            natural_end=natural,
            submitted_at=now,
        )
        if not self._sequences:
            self._was_idle = True
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)
        self._nothing_schedulable = False

    def abort(self, request_id: str, now: float) -> bool:
        """Remove a request and free its blocks; blocks that wait for KV are freed when the transfer ends. Return False if the
        request is not in the engine, for instance because it has finished."""
        del now
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._nothing_schedulable = False
        for queue in (self._running, self._waiting_with_blocks, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
                break
        if self.offloading is not None:
            self.offloading.ended(sequence, sequence.computed)
        if sequence.waits_for_remote_kv:
            self._aborted_loading[request_id] = sequence
        else:
            self._release(sequence)
        return True

    def receive(self, request_id: str, now: float) -> bool:
        """Record that the KV that a request waits for has arrived, or never will; also called for aborted requests. Return False
        if the request does not wait for KV."""
        del now
        if (orphan := self._aborted_loading.pop(request_id, None)) is not None:
            self._release(orphan)
        elif (sequence := self._sequences.get(request_id)) is not None and sequence.waits_for_remote_kv:
            sequence.waits_for_remote_kv = False
        else:
            return False
        self._nothing_schedulable = False
        return True

    def reset_prefix_cache(self, *, offloaded: bool = False) -> bool:
        """Remove all cached blocks, and if `offloaded` those of the host tier; the next step reports it, as in vLLM. Return
        False, without a change, while a request holds blocks."""
        if not self.cache.clear():
            return False
        if offloaded and self.offloading is not None:
            self.offloading.reset()
        self._pending.append(AllCleared())
        return True

    def finish_step(self) -> None:
        """Remove the requests that the last step finished. To be called at that step's end; step() does it otherwise.

        Until then they count as running and hold their blocks, as in an engine whose step has not ended.
        """
        for sequence in self._finishing:
            if self._sequences.get(sequence.request.request_id) is sequence:
                del self._sequences[sequence.request.request_id]
                self._running.remove(sequence)
                if self.offloading is not None:
                    self.offloading.ended(sequence, sequence.computed)
                self._release(sequence)
        self._finishing.clear()

    def step(self, now: float) -> StepResult:
        """Run one step that starts at `now` (s). A step that schedules nothing takes only the time for which it waits for copies
        of preempted requests' blocks; without work its events are only those that were pending."""
        self.finish_step()
        events: list[Event] = self._pending
        self._pending = []
        self._complete_transfers(now)
        awaited: list[WaitingForRemoteKv] = []
        preemptions = self.counters.num_preemptions
        scheduled = self._schedule(events, awaited, now) if self._sequences else {}
        duration = self._duration(scheduled, now)
        # After a preemption the next step can admit requests again.
        settled = self.counters.num_preemptions == preemptions
        if self.offloading is not None:
            settled = settled and not self.offloading.changed_in_step
            computed = [(sequence, sequence.computed + count) for sequence, count in scheduled.items()]
            self.offloading.scheduled(computed, now)
            self.offloading.step_ended(now + duration)
        for sequence, count in scheduled.items():
            sequence.computed += count
            if sequence.computed == sequence.length:
                self._sample(sequence, events)
        if not scheduled and self._sequences:
            self._nothing_schedulable = settled
        self._complete_transfers(now + duration)
        if self.offloading is not None:
            # As in vLLM, after those of the engine's own cache.
            events += self.offloading.take_events()
        scheduled_tokens = {item.request.request_id: count for item, count in scheduled.items()}
        return StepResult(duration, events, scheduled_tokens, tuple(awaited))

    def _duration(self, scheduled: dict[EngineSequence, int], now: float) -> float:
        """Return the seconds of a step at `now`, before its tokens count as computed. Mutates."""
        # vLLM's worker waits for a preempted request's copies before it looks whether there is anything to compute.
        waits_s = max(self._waits_until - now, 0.0)
        if not scheduled:
            return waits_s
        profile = self.profile
        duration = profile.step_s
        if self._was_idle:
            self._was_idle = False
            duration += profile.wake_s
        for sequence, count in scheduled.items():
            duration += profile.chunk_s(count, sequence.computed)
        return duration + waits_s

    def _complete_transfers(self, now: float) -> None:
        offloading = self.offloading
        if offloading is None or (end := offloading.next_end(loads_only=False)) is None or end > now:
            return
        for request_id in offloading.complete(now):
            self.receive(request_id, now)
        # A request may have waited for any of them.
        self._nothing_schedulable = False

    # ---- many steps at once ----

    def decode_only_steps(self) -> DecodeSteps | None:
        """Return the steps until an answer ends next, if in all of them the running requests only decode, no request can be
        admitted and none has to be preempted. Return None if the next step is of another kind. Changes nothing; for NamedPrompts
        only."""
        self.finish_step()
        running, config, profile = self._running, self.config, self.profile
        if not running or self._pending or len(running) > config.max_num_batched_tokens:
            return None
        if (offloading := self.offloading) is not None and (
            offloading.has_ended_requests or (self._waiting and offloading.in_transfer)
        ):
            return None
        for sequence in running:
            if not sequence.decodes or type(sequence.content) is not NamedContent:
                return None
        if self._waiting_with_blocks and not all(
            sequence.waits_for_remote_kv for sequence in self._waiting_with_blocks
        ):
            return None
        if self._waiting and len(running) < config.max_num_seqs and self._first_fits():
            return None
        steps = min([sequence.end - sequence.length for sequence in running])
        while (blocks := self._blocks_for(steps)) > self.cache.free:
            if steps == 1:
                return None
            steps //= 2
        first_s = profile.step_s + sum([profile.chunk_s(1, sequence.computed) for sequence in running])
        return DecodeSteps(steps, self.cache.empty < blocks, first_s, profile.decode_kv_token_s * len(running))

    def finish_decode_steps(self, steps: int, now: float) -> list[Event]:
        """Execute the first `steps` of the steps that decode_only_steps() has just returned, which end at `now` (s); return their
        events. Mutates."""
        events: list[Event] = []
        self._complete_transfers(now)
        block_size = self.config.block_size
        for sequence in self._running:
            sequence.length += steps
            computed, held = sequence.computed + steps, sequence.held
            if computed // block_size > held.full or computed > held.blocks * block_size:
                self._grow(sequence, -(-computed // block_size) - held.blocks, steps, events)
            sequence.computed = computed
            if sequence.length >= sequence.end:
                self._finish(sequence, "length", events)
        self.counters.generation_tokens += steps * len(self._running)
        if self.offloading is not None:
            self.offloading.scheduled([(sequence, sequence.computed) for sequence in self._running], now)
            self.offloading.step_ended(now)
            events += self.offloading.take_events()
        return events

    def kv_usage_after(self, steps: int) -> float:
        """Return kv_usage after the start of the first `steps` of DecodeSteps."""
        return self.kv_usage + self._blocks_for(steps) / self.cache.capacity if steps else self.kv_usage

    def _blocks_for(self, steps: int) -> int:
        block_size = self.config.block_size
        needed = [-(-(sequence.computed + steps) // block_size) - sequence.held.blocks for sequence in self._running]
        return sum([blocks for blocks in needed if blocks > 0])

    def _schedule(
        self, events: list[Event], awaited: list[WaitingForRemoteKv], now: float
    ) -> dict[EngineSequence, int]:
        config, cache, running = self.config, self.cache, self._running
        block_size, chunk_limit, budget = config.block_size, self._chunk_limit(), config.max_num_batched_tokens
        scheduled: dict[EngineSequence, int] = {}
        preempted = False
        position = 0
        while position < len(running) and budget > 0:
            sequence = running[position]
            count = min(sequence.length - sequence.computed, chunk_limit, budget)
            missing = -(-(sequence.computed + count) // block_size) - sequence.held.blocks
            while missing > cache.free:
                preempted = True
                victim = self._preempt(events, now)
                if victim in scheduled:
                    # Return the tokens of the budget that this step had assigned to it.
                    budget += scheduled.pop(victim)
                    position -= 1
                if victim is sequence:
                    return scheduled
            self._grow(sequence, missing, count, events)
            scheduled[sequence] = count
            budget -= count
            position += 1
        # Preempted requests are at the head of the queue: admitting in the same step would only return their blocks to them.
        if not preempted and (self._waiting or self._waiting_with_blocks):
            self._admit(scheduled, budget, chunk_limit, events, awaited, now)
        return scheduled

    def _chunk_limit(self) -> int:
        """Return the maximum number of tokens of one sequence in a step. The threshold applies only to several requests."""
        config, requests = self.config, len(self._sequences)
        budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
        if not threshold or requests < 2:
            return budget
        return max(threshold, budget // requests) if config.long_prefill_token_threshold_adaptive else threshold

    def _admit(
        self,
        scheduled: dict[EngineSequence, int],
        budget: int,
        chunk_limit: int,
        events: list[Event],
        awaited: list[WaitingForRemoteKv],
        now: float,
    ) -> None:
        """Admit waiting sequences, those that hold blocks first. A sequence that does not fit blocks all behind it."""
        block_size, running = self.config.block_size, self._running
        passed_over: list[EngineSequence] = []
        deferred: list[EngineSequence] = []
        while budget > 0 and len(running) < self.config.max_num_seqs:
            queue = self._waiting_with_blocks or self._waiting
            if not queue:
                break
            sequence = queue[0]
            if sequence.waits_for_remote_kv:
                passed_over.append(queue.take())
                continue
            if sequence.held.blocks:
                # The blocks of its delivered KV are cached from here on. The last token of the prompt is computed for its logits.
                self._grow(sequence, 0, 0, events)
                sequence.computed = min(sequence.computed, sequence.length - 1)
                if -(-sequence.length // block_size) - sequence.held.blocks + self._headroom() > self.cache.free:
                    break
            else:
                hit, idle = self._cached_blocks(sequence)
                missing_tokens = self._missing_remote(sequence, hit * block_size)
                loadable = 0
                if not missing_tokens and self.offloading is not None:
                    found = self.offloading.lookup(sequence, hit)
                    if found is None:
                        deferred.append(queue.take())
                        continue
                    loadable, missing_tokens = found, found * block_size
                if not self._fits(sequence, hit, idle):
                    break
                if missing_tokens and not self._room_to_load(sequence, hit, missing_tokens):
                    break
                loaded = self.offloading.load(sequence, hit, loadable, now) if self.offloading and loadable else None
                self._allocate_cached_blocks(sequence, hit, missing_tokens, loaded)
                if missing_tokens:
                    blocks = -(-sequence.computed // block_size) - hit
                    if removed := self.cache.allocate(sequence.held, blocks):
                        events.append(removed)
                    sequence.waits_for_remote_kv = True
                    if loaded is None:
                        awaited.append(WaitingForRemoteKv(sequence.request.request_id, missing_tokens))
                    passed_over.append(queue.take())
                    continue
            count = min(sequence.length - sequence.computed, chunk_limit, budget)
            self._grow(sequence, -(-(sequence.computed + count) // block_size) - sequence.held.blocks, count, events)
            running.append(queue.take())
            scheduled[sequence] = count
            budget -= count
        for sequence in reversed(passed_over):
            self._waiting_with_blocks.put_back(sequence)
        for sequence in reversed(deferred):
            self._waiting.put_back(sequence)

    def _allocate_cached_blocks(
        self, sequence: EngineSequence, hit: int, missing_tokens: int, loaded: Loaded | None
    ) -> None:
        """Assign a sequence its cached blocks, and count as vLLM does: the lookup of a preempted sequence is not counted. The
        missing tokens are `loaded` from the tiers below, or come from another instance."""
        cached = hit * self.config.block_size
        sequence.held = self.cache.hold(sequence.content.hashes(0, hit), hit)
        sequence.computed = cached + missing_tokens
        if sequence.cached is not None:
            return
        sequence.cached = cached
        if loaded is None:
            sequence.remote = missing_tokens
        else:
            sequence.from_host = loaded.host * self.config.block_size
            sequence.from_storage = loaded.storage * self.config.block_size
        counters = self.counters
        counters.prefix_cache_queries += sequence.length
        counters.prefix_cache_hits += cached
        if sequence.request.remote_tokens or self.offloading is not None:
            counters.external_prefix_cache_queries += sequence.length - cached
            counters.external_prefix_cache_hits += missing_tokens

    def _missing_remote(self, sequence: EngineSequence, cached: int) -> int:
        """Return the prompt tokens beyond `cached` to be transferred from another instance. A sequence that was preempted after
        its transfer computes them."""
        if sequence.cached is not None:
            return 0
        return max(0, min(sequence.request.remote_tokens, sequence.length) - cached)

    def _room_to_load(self, sequence: EngineSequence, hit: int, missing_tokens: int) -> bool:
        """Return whether blocks for KV to be transferred fit beside the blocks that admitted prompts still need. They are held
        without progress during the transfer."""
        block_size, hashes = self.config.block_size, sequence.content.hashes(0, hit)
        need = -(-(hit * block_size + missing_tokens) // block_size) - hit + self.cache.find(hashes, hit)[1]
        holders = [sequence for sequence in self._sequences.values() if sequence.held.blocks]
        reserved = sum([max(-(-sequence.length // block_size) - sequence.held.blocks, 0) for sequence in holders])
        return bool(need + self._headroom() <= self.cache.free - reserved)

    def _headroom(self) -> int:
        """Return the number of blocks that admitting one more request must leave free."""
        return self._watermark if self._running else 0

    def _first_fits(self) -> bool:
        first = self._waiting[0]
        return self._fits(first, *self._cached_blocks(first))

    def _cached_blocks(self, sequence: EngineSequence) -> tuple[int, int]:
        """Return the number of cached blocks of a waiting sequence, and how many of these no request holds."""
        # The last token is always computed, for its logits, so a hit ends before it.
        limit = (sequence.length - 1) // self.config.block_size
        return self.cache.find(sequence.content.hashes(0, limit), limit)

    def _fits(self, sequence: EngineSequence, hit: int, idle: int) -> bool:
        """Return whether the whole prompt of a waiting sequence fits, of which `hit` blocks are cached and `idle` not held."""
        missing = -(-sequence.length // self.config.block_size) - hit + self._headroom()
        return missing + idle <= self.cache.free

    def _grow(self, sequence: EngineSequence, missing: int, count: int, events: list[Event]) -> None:
        if missing > 0 and (removed := self.cache.allocate(sequence.held, missing)):
            events.append(removed)
        block_size, content = self.config.block_size, sequence.content
        # A block is cached from the step that fills it, as in vLLM, which caches it when it schedules.
        full = (sequence.computed + count) // block_size
        start = sequence.held.full
        if full <= start:
            return
        hashes = content.hashes(start, full)
        already_cached = self.cache.store(sequence.held, hashes)
        parent = content.hashes(start - 1, start)[0] if start else None
        tokens = content.ids(start * block_size, full * block_size)
        request = sequence.request
        events.append(BlocksStored(hashes, parent, tokens, request.session_id, request.cache_salt, already_cached))

    def _preempt(self, events: list[Event], now: float) -> EngineSequence:
        """Preempt the last running sequence, or the least urgent one: free its blocks and queue it again."""
        if self._by_priority:
            victim = max(self._running, key=attrgetter("rank"))
            self._running.remove(victim)
        else:
            victim = self._running.pop()
        if self.offloading is not None:
            self._waits_until = max(self._waits_until, self.offloading.preempted(victim, now))
        self._release(victim)
        self._waiting.put_back(victim)
        self.counters.num_preemptions += 1
        events.append(Preempted(victim.request.request_id))
        return victim

    def _release(self, sequence: EngineSequence) -> None:
        self.cache.release(sequence.held)
        sequence.computed = 0

    def _sample(self, sequence: EngineSequence, events: list[Event]) -> None:
        request, content = sequence.request, sequence.content
        index = sequence.length - sequence.prompt_length
        if index == 0:
            self._count_prompt(sequence)
            loaded = sequence.from_host, sequence.from_storage
            events.append(FirstToken(request.request_id, sequence.cached or 0, sequence.remote, *loaded))
        stops = sequence.natural_end is not None and sequence.length + 1 >= sequence.natural_end
        if isinstance(content, TokenContent):
            at = index + request.begun
            given = request.answer[at] if at < len(request.answer) else None
            token = content.append(self.config.eos_token_id if stops else given)
            events.append(TokenGenerated(request.request_id, index, token))
        sequence.length += 1
        self.counters.generation_tokens += 1
        if stops or sequence.length >= sequence.end:
            self._finish(sequence, "stop" if stops else "length", events)

    def _finish(self, sequence: EngineSequence, reason: str, events: list[Event]) -> None:
        events.append(Finished(sequence.request.request_id, reason))
        self._finishing.append(sequence)

    def _count_prompt(self, sequence: EngineSequence) -> None:
        counters, cached = self.counters, sequence.cached or 0
        external = sequence.remote + sequence.from_host + sequence.from_storage
        counters.prompt_tokens += sequence.prompt_length
        counters.local_cache_hit += cached
        counters.external_kv_transfer += external
        counters.local_compute += sequence.prompt_length - cached - external
