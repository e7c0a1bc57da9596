"""What instances without usable events have cached, as far as the router's own placements tell. Pure.

A prompt whose first token came was computed, so its keys are there; an engine evicts what was used least recently, the end of a
prompt before its beginning, once its KV cache is full. Answers with fewer cached tokens than predicted correct the belief. What
others send to the engine past the router stays unknown, which is why none of this is ever called exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pointsman.router.core.prefix.exact_index import PrefixIndex


class ApproximateIndex:
    """Assumed keys by instance, each instance's bounded by its own capacity."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._used: dict[str, OrderedDict[int, None]] = {}

    def count(self, instance_id: str) -> int:
        """How many keys an instance is assumed to hold."""
        return self.index.count(instance_id)

    def leading_blocks(self, keys: Sequence[int], instance_ids: Iterable[str]) -> dict[str, int]:
        """For each instance: how many of `keys`, counted from the first, it is assumed to hold. Changes nothing."""
        return self.index.leading_blocks(keys, instance_ids)

    def learn(self, instance_id: str, keys: Sequence[int], capacity: int) -> None:
        """`keys`, a prompt from its first block on, were just used; of all keys at most `capacity` stay. Mutates."""
        used = self._used.setdefault(instance_id, OrderedDict())
        # Oldest first, and of one prompt the end before the beginning, as engines free a request's blocks.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        self.index.add(instance_id, keys)
        evicted = [used.popitem(last=False)[0] for _ in range(len(used) - capacity)]
        self.index.remove(instance_id, evicted)

    def correct(self, instance_id: str, keys: Sequence[int]) -> None:
        """The engine turned out not to hold `keys`. Mutates."""
        used = self._used.get(instance_id)
        if used is not None:
            self.index.remove(instance_id, keys)
            for key in keys:
                used.pop(key, None)

    def drop(self, instance_id: str) -> None:
        """Forget an instance's keys. Mutates."""
        self._used.pop(instance_id, None)
        self.index.drop(instance_id)

    def check_invariants(self) -> None:
        """Raise AssertionError when the order of use and the index hold different keys."""
        self.index.check_invariants()
        assert {name: set(used) for name, used in self._used.items()} == self.index.sets()
