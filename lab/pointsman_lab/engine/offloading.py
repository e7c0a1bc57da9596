"""The offloading of an engine model's blocks to host memory and shared storage, by the rules of vLLM's OffloadingConnector. Pure.

Modelled on vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and vllm/v1/kv_offload/tiering/manager.py (0.32).
Every full block of a prompt is offered to the host tier once (an answer's only as part of a later prompt, vLLM's default):
those that were found in the engine's own cache, too, but not those before the prompt's last load. A waiting request loads what
follows its blocks in the engine's own cache. If another request writes or loads any of these blocks, it waits until that has
ended. Blocks in host memory are copied to storage when they are written, and stay there. A waiting request's blocks in storage
are first brought to host memory, which may evict others.

Transfers of one direction run one after the other. A step's blocks are copied when the step has ended; a preemption waits for the
request's copies. Not modelled: that a step also waits for the copies of freed blocks which it allocates again; storage is asked
at once, not between two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.host_tier import HOST, STORAGE, HostTier, OffloadedRemoved, OffloadedStored
from pointsman_lab.engine.prompt_content import TokenContent
from pointsman_lab.engine.request_queue import EngineSequence


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """Numbers of blocks that a request loads, by the tier in which they were found."""

    host: int = 0
    storage: int = 0


class _Transfer(msgspec.Struct, frozen=True, gc=False):
    """A transfer for one request; `stored` is the event at its end, if it makes blocks readable."""

    request_id: str
    blocks: tuple[int, ...]
    stored: OffloadedStored | None = None
    ends_at: float = 0.0


class _Direction(deque[_Transfer]):
    """Transfers in one direction, one after the other. Each takes `latency_s`, and `block_s` for each block."""

    def __init__(self, latency_s: float, block_s: float) -> None:
        super().__init__()
        self._latency_s = latency_s
        self._block_s = block_s
        self._free_at = 0.0

    def begin(self, transfer: _Transfer, blocks: int, now: float) -> None:
        """Queue a transfer of `blocks` blocks at `now`. Mutates."""
        self._free_at = max(now, self._free_at) + self._latency_s + self._block_s * blocks
        self.append(structs.replace(transfer, ends_at=self._free_at))


@dataclass(eq=False, slots=True)
class _Progress:
    """What is offloaded of one request. `next_block` is the first block that was not offered. `admitted`: it has been scheduled
    since its last lookup. `used` has the blocks that it stored, loaded or offered, by their position."""

    next_block: int = 0
    admitted: bool = False
    used: dict[int, int] = field(default_factory=dict)
    from_storage: set[int] = field(default_factory=set)


class Offloading:
    """The host tier `host` of `capacity` blocks of `block_size` tokens, and the `storage` that it shares with other instances:
    the blocks in it, or None. The model calls it at the given points of each step; `events` then collects what changed."""

    def __init__(self, capacity: int, block_size: int, profile: Profile, storage: set[int] | None) -> None:
        self.host = HostTier(capacity)
        self.events: list[OffloadedStored | OffloadedRemoved] = []
        self._storage = storage
        self._block_size = block_size
        host_block_s = profile.host_token_s * block_size
        storage_block_s = profile.storage_token_s * block_size
        self._stores = _Direction(profile.host_s, host_block_s)
        self._loads = _Direction(profile.host_s, host_block_s)
        self._writes = _Direction(profile.storage_s, storage_block_s)
        self._reads = _Direction(profile.storage_s, storage_block_s)
        self._progress: dict[EngineSequence, _Progress] = {}
        # Blocks that some transfer loads.
        self._loading: set[int] = set()
        # Requests that have ended, with their number of computed tokens.
        self._ended: list[tuple[EngineSequence, int]] = []
        # The last step's stores, and the reads that its lookups have begun.
        self._new_stores: list[_Transfer] = []
        self._new_reads: dict[EngineSequence, dict[int, int]] = {}

    @property
    def in_transfer(self) -> bool:
        """Whether any transfer has not ended."""
        return bool(self._stores or self._loads or self._writes or self._reads)

    @property
    def has_ended_requests(self) -> bool:
        """Whether the next step must be taken even if it schedules nothing, because of requests that have ended."""
        return bool(self._ended)

    @property
    def changed_in_step(self) -> bool:
        """Whether the current step's lookups have requested blocks, which evicts others, or requests have ended: the next step's
        lookups may then find other blocks, without a transfer's end between them. To be asked before scheduled()."""
        return bool(self._new_reads or self._ended)

    def next_end(self, *, loads_only: bool) -> float | None:
        """Return when a transfer ends next; None without one."""
        directions = (self._loads,) if loads_only else (self._loads, self._reads, self._stores, self._writes)
        return min((transfers[0].ends_at for transfers in directions if transfers), default=None)

    def lookup(self, sequence: EngineSequence, cached: int) -> int | None:
        """Return how many blocks a waiting request can load after its `cached` first ones; None if it has to wait for a transfer
        first. Blocks that are only in storage are requested. Mutates."""
        progress = self._progress.setdefault(sequence, _Progress())
        progress.admitted = False
        blocks = sequence.content.hashes(cached, sequence.length // self._block_size)
        found, readable = self.host.leading(blocks)
        if self._storage is not None:
            while found < len(blocks) and self._request(sequence, progress, blocks[found], cached + found):
                more, _ = self.host.leading(blocks[found:])
                found, readable = found + more, False
        if not readable or (self._loading and not self._loading.isdisjoint(blocks[:found])):
            return None
        return found

    def load(self, sequence: EngineSequence, cached: int, count: int, now: float) -> Loaded:
        """Load `count` blocks after the `cached` first ones, as lookup() has just returned. Mutates."""
        progress = self._progress[sequence]
        blocks = sequence.content.hashes(cached, cached + count)
        self.host.pin(blocks)
        self._loading.update(blocks)
        progress.used.update(zip(range(cached, cached + count), blocks, strict=True))
        progress.next_block = cached + count
        self._loads.begin(_Transfer(sequence.request.request_id, blocks), count, now)
        from_storage = sum([block in progress.from_storage for block in blocks]) if progress.from_storage else 0
        return Loaded(count - from_storage, from_storage)

    def preempted(self, sequence: EngineSequence, now: float) -> float:
        """Return until when the step at `now` waits for the copies of a preempted request's blocks."""
        request_id = sequence.request.request_id
        return next((store.ends_at for store in reversed(self._stores) if store.request_id == request_id), now)

    def ended(self, sequence: EngineSequence, computed: int) -> None:
        """Record that a request has ended or was aborted, with `computed` computed tokens. Mutates."""
        if sequence in self._progress:
            self._ended.append((sequence, computed))

    def scheduled(self, computed: Iterable[tuple[EngineSequence, int]], now: float) -> None:
        """Offer the blocks of the requests that a step computes, with their computed tokens at its end, and then those of the
        requests that have ended; begin the reads that the step's lookups have requested. Mutates."""
        for sequence, blocks in self._new_reads.items():
            self._reads.begin(self._storing(sequence, blocks), len(blocks), now)
        self._new_reads = {}
        for sequence, tokens in computed:
            progress = self._progress.setdefault(sequence, _Progress())
            progress.admitted = True
            self._offer(sequence, progress, tokens)
        for sequence, tokens in self._ended:
            progress = self._progress[sequence]
            if progress.admitted:
                self._offer(sequence, progress, tokens)
        for sequence, _ in self._ended:
            used = self._progress.pop(sequence).used
            self.host.use([used[position] for position in sorted(used, reverse=True)])
        self._ended = []

    def step_ended(self, now: float) -> None:
        """Begin to copy the blocks that the step has filled. Mutates."""
        for transfer in self._new_stores:
            self._stores.begin(transfer, len(transfer.blocks), now)
        self._new_stores = []

    def complete(self, now: float) -> list[str]:
        """Complete the transfers that have ended by `now`; return the requests whose blocks are loaded. Mutates."""
        received = []
        while self._stores and self._stores[0].ends_at <= now:
            store = self._stores.popleft()
            self._written(store)
            if self._storage is not None:
                self.host.pin(store.blocks)
                # A file that exists is not written again.
                self._writes.begin(store, sum([block not in self._storage for block in store.blocks]), now)
        while self._loads and self._loads[0].ends_at <= now:
            load = self._loads.popleft()
            self.host.unpin(load.blocks)
            self._loading.difference_update(load.blocks)
            received.append(load.request_id)
        while self._reads and self._reads[0].ends_at <= now:
            self._written(self._reads.popleft())
        while self._writes and self._writes[0].ends_at <= now:
            write = self._writes.popleft()
            self.host.unpin(write.blocks)
            if self._storage is not None and write.stored is not None:
                self._storage.update(write.blocks)
                self.events.append(structs.replace(write.stored, medium=STORAGE))
        return received

    def reset(self) -> None:
        """Remove all blocks of the host tier; storage keeps its blocks. Transfers are given up; no request may load blocks.
        Mutates."""
        assert not self._loads
        self.host.clear()
        for direction in (self._stores, self._writes, self._reads):
            direction.clear()
        self._new_stores, self._new_reads = [], {}
        for sequence in self._progress:
            self._progress[sequence] = _Progress()

    def take_events(self) -> list[OffloadedStored | OffloadedRemoved]:
        """Return the events since the last call. Mutates."""
        events, self.events = self.events, []
        return events

    def _written(self, transfer: _Transfer) -> None:
        self.host.written(transfer.blocks)
        if transfer.stored is not None:
            self.events.append(transfer.stored)

    def _request(self, sequence: EngineSequence, progress: _Progress, block: int, position: int) -> bool:
        """Request a block from storage; return whether it is there and host memory has room for it."""
        if self._storage is None or block not in self._storage:
            return False
        offer = self.host.offer((block,))
        progress.used[position] = block
        if not offer.accepted:
            return False
        if offer.evicted:
            self.events.append(OffloadedRemoved(HOST, offer.evicted))
        progress.from_storage.add(block)
        self._new_reads.setdefault(sequence, {})[position] = block
        return True

    def _offer(self, sequence: EngineSequence, progress: _Progress, computed: int) -> None:
        start, stop = progress.next_block, min(computed, sequence.prompt_length) // self._block_size
        if stop <= start:
            return
        blocks = sequence.content.hashes(start, stop)
        offer = self.host.offer(blocks)
        used = dict(zip(range(start, stop), blocks, strict=True))
        if len(offer.write) + len(offer.ready) < len(blocks):
            known = {*offer.write, *offer.ready}
            used = {position: block for position, block in used.items() if block in known}
        progress.used.update(used)
        if not offer.accepted:
            # As in vLLM these blocks count as used, and are offered again with those of the next step.
            return
        progress.next_block = stop
        if offer.evicted:
            self.events.append(OffloadedRemoved(HOST, offer.evicted))
        if offer.write:
            written = used
            if len(offer.write) < len(used):
                new = frozenset(offer.write)
                written = {position: block for position, block in used.items() if block in new}
            self._new_stores.append(self._storing(sequence, written))

    def _storing(self, sequence: EngineSequence, blocks: Mapping[int, int]) -> _Transfer:
        """Return a transfer that makes blocks of one request readable, by their position in it."""
        request_id, content, size = sequence.request.request_id, sequence.content, self._block_size
        hashes = tuple(blocks.values())
        if not isinstance(content, TokenContent):
            return _Transfer(request_id, hashes, OffloadedStored(HOST, hashes))
        parents = tuple([content.hashes(place - 1, place)[0] if place else None for place in blocks])
        tokens = tuple([token for place in blocks for token in content.ids(place * size, (place + 1) * size)])
        return _Transfer(request_id, hashes, OffloadedStored(HOST, hashes, parents, tokens))
