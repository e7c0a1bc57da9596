"""Keys that a step just computed on an instance, before the instance's events report them. Pure.

An event comes later than the answer, by a step of the engine and a message of the agent; a session's next turn may be faster than
both. So keys that were just computed count at once, until events confirm them (they are then in the index) or contradict them, or
`PROVISIONAL_S` has passed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence

# How long a provisional key counts, s.
PROVISIONAL_S = 2.0
# Maximum number of provisional keys of all instances.
MAX_KEYS = 200_000


class ProvisionalBlocks:
    """Sets of provisional keys by instance, at most `max_keys` in total, each for at most `seconds`."""

    def __init__(self, seconds: float = PROVISIONAL_S, max_keys: int = MAX_KEYS) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._held: dict[str, set[int]] = {}
        self._ends: deque[tuple[float, str, Sequence[int]]] = deque()
        self._queued = 0

    def __len__(self) -> int:
        """Return how many keys were added and have not expired, including confirmed ones."""
        return self._queued

    def count(self, instance_id: str) -> int:
        """Return how many provisional keys an instance has."""
        return len(self._held.get(instance_id, ()))

    def add(self, instance_id: str, keys: Sequence[int], now: float) -> None:
        """Add `keys`, which follow those of the prompt that the index holds. If full, the oldest keys expire. More keys than the
        maximum are ignored. Mutates."""
        if not keys or len(keys) > self._max_keys:
            return
        while self._queued + len(keys) > self._max_keys:
            self._end_oldest()
        self._held.setdefault(instance_id, set()).update(keys)
        self._ends.append((now + self._seconds, instance_id, keys))
        self._queued += len(keys)

    def reach(self, keys: Sequence[int], blocks: Mapping[str, int]) -> dict[str, int]:
        """Return how many of `keys`, counted from the first, an instance has, for those that have more of them than `blocks` says
        by the index. Instances that are not in `blocks` are left out."""
        found: dict[str, int] = {}
        first, last = keys[0] if keys else 0, len(keys)
        for instance_id in self._held.keys() & blocks.keys():
            held, known = self._held[instance_id], blocks[instance_id]
            # Most instances have no block. An array makes an int of each key that is read.
            if known < last and (keys[known] if known else first) in held:
                found[instance_id] = _run_end(held, keys, known + 1)
        return found

    def settle(self, instance_id: str, keys: Iterable[int]) -> None:
        """Remove `keys`, which the instance's events have reported as added or removed, so that the index is right. Mutates."""
        self._remove(instance_id, keys)

    def drop(self, instance_id: str) -> None:
        """Remove all provisional keys of an instance. Mutates."""
        self._held.pop(instance_id, None)

    def expire(self, now: float) -> None:
        """Remove the keys whose time has passed. Mutates."""
        while self._ends and self._ends[0][0] <= now:
            self._end_oldest()

    def check_invariants(self) -> None:
        """Raise AssertionError if a provisional key never expires, or there are too many."""
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


def _run_end(held: Container[int], keys: Sequence[int], start: int) -> int:
    # Keys are chained, so the end is found by bisection, as in PrefixIndex.runs.
    return bisect_left(keys, True, lo=start, key=lambda key: key not in held)
