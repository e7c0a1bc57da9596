"""The keys that instances without usable events probably have cached, derived from the router's own placements. Pure.

A prompt whose first token came was computed, so its keys are cached. An engine whose KV cache is full evicts the least recently
used blocks, the end of a prompt before its beginning. Answers with fewer cached tokens than predicted correct the index. Requests
that others send to the engine, past the router, stay unknown, so these keys never count as exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pointsman_router.core.prefix.exact_index import PrefixIndex


class ApproximateIndex:
    """Assumed keys by instance, at most as many per instance as its capacity."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._used: dict[str, OrderedDict[int, None]] = {}

    def count(self, instance_id: str) -> int:
        """Return how many keys an instance is assumed to hold."""
        return self.index.count(instance_id)

    def leading_blocks(self, keys: Sequence[int], instance_ids: Iterable[str]) -> dict[str, int]:
        """Return for each instance how many of `keys`, counted from the first, it is assumed to hold. Changes nothing."""
        return self.index.leading_blocks(keys, instance_ids)

    def learn(self, instance_id: str, keys: Sequence[int], capacity: int) -> None:
        """Record that `keys`, those of a prompt from its first block on, were just used. Keep at most `capacity` keys of the
        instance. Mutates."""
        used = self._used.setdefault(instance_id, OrderedDict())
        # Least recently used first, and of one prompt the end before the beginning, as engines free a request's blocks.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        self.index.add(instance_id, keys)
        evicted = [used.popitem(last=False)[0] for _ in range(len(used) - capacity)]
        self.index.remove(instance_id, evicted)

    def correct(self, instance_id: str, keys: Sequence[int]) -> None:
        """Remove `keys`, which the engine turned out not to hold. Mutates."""
        used = self._used.get(instance_id)
        if used is not None:
            self.index.remove(instance_id, keys)
            for key in keys:
                used.pop(key, None)

    def drop(self, instance_id: str) -> None:
        """Remove all keys of an instance. Mutates."""
        self._used.pop(instance_id, None)
        self.index.drop(instance_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if the order of use and the index hold different keys."""
        self.index.check_invariants()
        assert {name: set(used) for name, used in self._used.items()} == self.index.sets()
