"""A cache policy of vLLM's CPU offloading tier: evicts first what belongs to sessions that have ended, and else as vLLM's LRU.

A session's last request carries SESSION_END in its kv_transfer_params. When it has finished, the chunks of its prompt that no
other prompt has become the first to be evicted, tail first. A request that uses one of them again takes it back. vLLM loads the
policy by `"eviction_policy": "EndedFirst", "cache_policy_module_path": "pointsman_connector.ended_first"` in
kv_connector_extra_config.

Source of the interface: vllm/v1/kv_offload/cpu/policies/base.py of vLLM 0.32, which calls it experimental.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from pointsman_connector.own_chunks import OwnChunks

# Name in a request's kv_transfer_params; true on the last request of a session.
SESSION_END = "pointsman_session_end"


class EndedFirst(CachePolicy):
    """Chunks of ended sessions in the order of eviction, and all others in vLLM's LRU policy."""

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity`: number of chunks."""
        super().__init__(cache_capacity)
        self._live: CachePolicy = CachePolicyFactory.get_cache_policy_cls("lru")(cache_capacity)
        self._ended: dict[bytes, ChunkStatus] = {}
        self._own = OwnChunks()

    def get(self, key: bytes) -> ChunkStatus | None:
        """Return a chunk, or None."""
        return self._ended.get(key) or self._live.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        """Add a new chunk."""
        self._live.insert(key, chunk)

    def remove(self, key: bytes) -> None:
        """Remove a chunk whose store failed."""
        if self._ended.pop(key, None) is None:
            self._live.remove(key)
        self._own.forget(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Mark chunks as recently used."""
        keys = list(keys)
        self._take_back(keys)
        self._live.touch(keys, req_context)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Observe store misses."""
        self._live.on_store_miss(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Apply the accesses of a request, and the end of its session if it is the last one."""
        for keys in key_groups:
            self._take_back(keys)
            # Chunks that were evicted, or never stored, would not be forgotten again.
            for kept, run in groupby(keys, lambda key: self.get(key) is not None):
                if kept:
                    self._own.seen(list(run))
        self._live.on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        params = req_context.kv_transfer_params
        if isinstance(params, dict) and params.get(SESSION_END) is True:
            for keys in key_groups:
                self._end(keys)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Evict n chunks, none of them protected or in use; None without a change if there are not so many."""
        chosen: list[tuple[bytes, ChunkStatus]] = []
        for key, chunk in self._ended.items():
            if len(chosen) == n:
                break
            if chunk.ref_cnt == 0 and key not in protected:
                chosen.append((key, chunk))
        others = self._live.evict(n - len(chosen), protected)
        if others is None:
            return None
        for key, _ in chosen:
            del self._ended[key]
        evicted = [*chosen, *others]
        for key, _ in evicted:
            self._own.forget(key)
        return evicted

    def clear(self) -> None:
        """Remove all chunks."""
        self._live.clear()
        self._ended.clear()
        self._own.clear()

    def mark_evictable(self, key: bytes) -> None:
        """Record that no transfer uses a chunk any more. Of a chunk of an ended session `evict` reads that itself."""
        if key not in self._ended:
            self._live.mark_evictable(key)

    def mark_non_evictable(self, key: bytes) -> None:
        """Record that a transfer begins to use a chunk. Whoever loads a chunk of an ended session needs it."""
        self._take_back((key,))
        self._live.mark_non_evictable(key)

    def _end(self, keys: Sequence[bytes]) -> None:
        """Make the chunks that only this prompt has the first to be evicted."""
        last = next((key for key in reversed(keys) if self.get(key) is not None), None)
        for key in self._own.of(last) if last is not None else ():
            chunk = self._live.get(key)
            # A chunk that is being loaded is another request's, too.
            if chunk is not None and chunk.ref_cnt <= 0:
                self._live.remove(key)
                self._ended[key] = chunk

    def _take_back(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (chunk := self._ended.pop(key, None)) is not None:
                self._live.insert(key, chunk)
