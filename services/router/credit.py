"""Keys that finished work must have left on an instance, before the instance's events say so. Pure.

An event lags the answer by a step of the engine and a message of the agent; a session's next turn may be faster than both. What
was just computed is therefore credited at once, until events confirm it (it is then in the index) or contradict it, or `CREDIT_S`
has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from services.router.prefix_index import PrefixIndex

CREDIT_S = 2.0
MAX_KEYS = 200_000


class Credit:
    """Sets of credited keys by instance, at most `max_keys` in all, each for `seconds`."""

    def __init__(self, seconds: float = CREDIT_S, max_keys: int = MAX_KEYS) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._held = PrefixIndex()
        self._ends: deque[tuple[float, str, Sequence[int]]] = deque()
        self._queued = 0

    def __len__(self) -> int:
        """How many keys were credited and have not come to their end, confirmed ones included."""
        return self._queued

    def count(self, instance_id: str) -> int:
        """How many keys an instance is credited with."""
        return self._held.count(instance_id)

    def give(self, instance_id: str, keys: Sequence[int], now: float) -> None:
        """Credit `keys`, which follow what the index holds. When full, the oldest credit ends. Mutates."""
        if not keys or len(keys) > self._max_keys:
            return
        while self._queued + len(keys) > self._max_keys:
            self._end_oldest()
        self._held.add(instance_id, keys)
        self._ends.append((now + self._seconds, instance_id, keys))
        self._queued += len(keys)

    def reach(self, instance_id: str, keys: Sequence[int], blocks: int) -> int:
        """How many of `keys`, counted from the first, the instance has when the index says `blocks`."""
        held = self._held
        if blocks < len(keys) and held.count(instance_id) and held.holds(instance_id, keys[blocks]):
            return blocks + held.leading_blocks(keys[blocks:], (instance_id,))[instance_id]
        return blocks

    def settle(self, instance_id: str, keys: Iterable[int]) -> None:
        """The instance's events speak of `keys`: they are credited no longer, the index knows. Mutates."""
        if self._held.count(instance_id):
            self._held.remove(instance_id, keys)

    def drop(self, instance_id: str) -> None:
        """Nothing of the instance is credited any longer. Mutates."""
        self._held.drop(instance_id)

    def expire(self, now: float) -> None:
        """End what is past its time. Mutates."""
        while self._ends and self._ends[0][0] <= now:
            self._end_oldest()

    def check_invariants(self) -> None:
        """Raise AssertionError when a credited key has no end, or there are too many."""
        self._held.check_invariants()
        ending: dict[str, set[int]] = {}
        for _, instance_id, keys in self._ends:
            ending.setdefault(instance_id, set()).update(keys)
        for instance_id, held in self._held.sets().items():
            assert held <= ending.get(instance_id, set())
        assert self._queued == sum(len(keys) for _, _, keys in self._ends) <= self._max_keys

    def _end_oldest(self) -> None:
        _, instance_id, keys = self._ends.popleft()
        self._queued -= len(keys)
        self._held.remove(instance_id, keys)
