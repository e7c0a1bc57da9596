"""The prompts that were computed lately on instances whose events are trusted, so that their approximate keys can be made as soon
as the events no longer are. Pure.

A prompt's keys are kept as they came, 8 bytes each, not as a set: a thousand instances with an index each would need gigabytes.
A prompt without its keys takes as much as PROMPT_KEYS of them, which counts, so that short prompts do not take more memory than
long ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

# Maximum number of keys of all instances, PROMPT_KEYS of each prompt included, and of one instance as a multiple of its capacity.
MAX_KEYS = 4_000_000
PROMPT_KEYS = 64
CAPACITIES = 2
# Number of keys before a prompt's end among which the end of a session's turn before is looked for: 2,048 tokens.
NEW_KEYS = 128


class RecentPlacements:
    """Prompts' keys by instance, the newest last, with at most `max_keys` keys in total, where each prompt counts
    PROMPT_KEYS more. A prompt replaces the one that it continues."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Instance -> last key of a prompt -> number of the placement, and the prompt's keys.
        self._kept: dict[str, OrderedDict[int, tuple[int, Sequence[int]]]] = {}
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._count = 0
        # (number, instance, last key) in the order of placements; entries that are replaced stay until their turn.
        self._order: deque[tuple[int, str, int]] = deque()
        self._number = 0

    def add(self, instance_id: str, keys: Sequence[int], capacity: int) -> None:
        """Record that a prompt's `keys` were computed on an instance that can hold `capacity` keys. Mutates."""
        if not keys or len(keys) + PROMPT_KEYS > self._max_keys:
            return
        kept = self._kept.setdefault(instance_id, OrderedDict())
        for at in range(len(keys) - 1, max(len(keys) - 1 - NEW_KEYS, -1), -1):
            if keys[at] in kept:
                self._remove(instance_id, keys[at])
                break
        self._number += 1
        kept = self._kept.setdefault(instance_id, OrderedDict())
        kept[keys[-1]] = self._number, keys
        self._sizes[instance_id] = self._sizes.get(instance_id, 0) + len(keys)
        self._total += len(keys) + PROMPT_KEYS
        self._count += 1
        self._order.append((self._number, instance_id, keys[-1]))
        while self._sizes[instance_id] > CAPACITIES * capacity and len(kept) > 1:
            self._remove(instance_id, next(iter(kept)))
        while self._total > self._max_keys:
            number, oldest, last = self._order.popleft()
            if self._is_kept(number, oldest, last):
                self._remove(oldest, last)
        self._compact()

    def of(self, instance_id: str) -> Iterable[Sequence[int]]:
        """Return the prompts' keys of an instance, the oldest first."""
        return [keys for _, keys in self._kept.get(instance_id, OrderedDict()).values()]

    def drop(self, instance_id: str) -> None:
        """Remove all prompts of an instance. Mutates."""
        for last in list(self._kept.get(instance_id, ())):
            self._remove(instance_id, last)
        self._compact()

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums differ from the prompts, or a prompt is never removed."""
        sizes = {name: sum(len(keys) for _, keys in kept.values()) for name, kept in self._kept.items()}
        assert all(self._kept.values())
        assert sizes == self._sizes
        entries = {(number, name, last) for name, kept in self._kept.items() for last, (number, _) in kept.items()}
        assert len(entries) == self._count
        assert sum(sizes.values()) + PROMPT_KEYS * self._count == self._total <= self._max_keys
        assert entries <= set(self._order)
        assert len(self._order) <= 2 * len(entries) + 16

    def _compact(self) -> None:
        if len(self._order) > 2 * self._count + 16:
            self._order = deque(entry for entry in self._order if self._is_kept(*entry))

    def _is_kept(self, number: int, instance_id: str, last: int) -> bool:
        kept = self._kept.get(instance_id)
        return kept is not None and last in kept and kept[last][0] == number

    def _remove(self, instance_id: str, last: int) -> None:
        _, keys = self._kept[instance_id].pop(last)
        self._sizes[instance_id] -= len(keys)
        self._total -= len(keys) + PROMPT_KEYS
        self._count -= 1
        if not self._kept[instance_id]:
            del self._kept[instance_id], self._sizes[instance_id]
