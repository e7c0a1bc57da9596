"""Keys that a step just computed on an instance, before the instance's events report them. Pure.

An event comes later than the answer, by a step of the engine and a message of the agent; a session's next turn may be faster than
both. So keys that were just computed count at once, until events confirm them (they are then in the index) or contradict them, or
`PROVISIONAL_S` has passed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence

# How long a provisional key counts, s: until its events are late (event_trust.SETTLE_S) and the next message of an agent that is
# not silent (prefix_knowledge.LEAST_SILENCE_S) has led to doubts about them, so that what was placed counts.
PROVISIONAL_S = 4.0
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
        # The first key of each entry of `_ends` -> number of entries.
        self._heads: dict[int, int] = {}

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
        self._heads[keys[0]] = self._heads.get(keys[0], 0) + 1

    def reach(self, keys: Sequence[int], blocks: Mapping[str, int]) -> dict[str, int]:
        """Return how many of `keys`, counted from the first, an instance has, for those that have more of them than `blocks` says
        by the index. Instances that are not in `blocks` are left out."""
        found: dict[str, int] = {}
        last = len(keys)
        # Most instances have no block, and the first key of a prompt is the first one of an entry, or in none.
        begun = last > 0 and keys[0] in self._heads
        for instance_id in self._held.keys() & blocks.keys():
            known = blocks[instance_id]
            if (known or begun) and known < last and keys[known] in (held := self._held[instance_id]):
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
        assert self._heads == Counter(keys[0] for _, _, keys in self._ends)

    def _end_oldest(self) -> None:
        _, instance_id, keys = self._ends.popleft()
        self._queued -= len(keys)
        if left := self._heads.pop(keys[0]) - 1:
            self._heads[keys[0]] = left
        self._remove(instance_id, keys)

    def _remove(self, instance_id: str, keys: Iterable[int]) -> None:
        if (held := self._held.get(instance_id)) is not None:
            held.difference_update(keys)
            if not held:
                del self._held[instance_id]


def _run_end(held: Container[int], keys: Sequence[int], start: int) -> int:
    # Keys are chained, so the end is found by bisection, as in PrefixIndex.runs.
    return bisect_left(keys, True, lo=start, key=lambda key: key not in held)
