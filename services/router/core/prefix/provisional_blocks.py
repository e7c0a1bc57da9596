"""Keys that finished work must have left on an instance, before the instance's events say so. Pure.

An event lags the answer by a step of the engine and a message of the agent; a session's next turn may be faster than both. What
was just computed is therefore counted at once, until events confirm it (it is then in the index) or contradict it, or
`PROVISIONAL_S` has passed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

PROVISIONAL_S = 2.0
MAX_KEYS = 200_000


class ProvisionalBlocks:
    """Sets of provisional keys by instance, at most `max_keys` in all, each for `seconds`."""

    def __init__(self, seconds: float = PROVISIONAL_S, max_keys: int = MAX_KEYS) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._held: dict[str, set[int]] = {}
        self._ends: deque[tuple[float, str, Sequence[int]]] = deque()
        self._queued = 0

    def __len__(self) -> int:
        """How many keys were added and have not come to their end, confirmed ones included."""
        return self._queued

    def count(self, instance_id: str) -> int:
        """How many provisional keys an instance has."""
        return len(self._held.get(instance_id, ()))

    def instance_ids(self) -> Iterable[str]:
        """The instances that have any."""
        return self._held.keys()

    def add(self, instance_id: str, keys: Sequence[int], now: float) -> None:
        """Count `keys`, which follow what the index holds. When full, the oldest end. Mutates."""
        if not keys or len(keys) > self._max_keys:
            return
        while self._queued + len(keys) > self._max_keys:
            self._end_oldest()
        self._held.setdefault(instance_id, set()).update(keys)
        self._ends.append((now + self._seconds, instance_id, keys))
        self._queued += len(keys)

    def extend(self, instance_id: str, keys: Sequence[int], blocks: int) -> int:
        """How many of `keys`, counted from the first, the instance has when the index says `blocks`."""
        held = self._held.get(instance_id)
        if not held or blocks >= len(keys) or keys[blocks] not in held:
            return blocks
        # Keys are chained: the end is found as in PrefixIndex.leading_blocks.
        return bisect_left(keys, True, lo=blocks + 1, key=lambda key: key not in held)

    def settle(self, instance_id: str, keys: Iterable[int]) -> None:
        """The instance's events speak of `keys`: they are provisional no longer, the index knows. Mutates."""
        self._remove(instance_id, keys)

    def drop(self, instance_id: str) -> None:
        """The instance has no provisional keys any longer. Mutates."""
        self._held.pop(instance_id, None)

    def expire(self, now: float) -> None:
        """End what is past its time. Mutates."""
        while self._ends and self._ends[0][0] <= now:
            self._end_oldest()

    def check_invariants(self) -> None:
        """Raise AssertionError when a provisional key has no end, or there are too many."""
        assert all(self._held.values())
        ending: dict[str, set[int]] = {}
        for _, instance_id, keys in self._ends:
            ending.setdefault(instance_id, set()).update(keys)
        for instance_id, held in self._held.items():
            assert held <= ending.get(instance_id, set())
        assert self._queued == sum(len(keys) for _, _, keys in self._ends) <= self._max_keys

    def _end_oldest(self) -> None:
        _, instance_id, keys = self._ends.popleft()
        self._queued -= len(keys)
        self._remove(instance_id, keys)

    def _remove(self, instance_id: str, keys: Iterable[int]) -> None:
        if (held := self._held.get(instance_id)) is not None:
            held.difference_update(keys)
            if not held:
                del self._held[instance_id]
