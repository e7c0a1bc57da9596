"""Finds the chunks of a prompt that no other known prompt has. Pure.

Chunks are named by keys that identify their content and all content before it. So a chunk has one predecessor, and a chunk with
two successors is where two conversations part: it and all chunks before it belong to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


class OwnChunks:
    """The predecessor of each chunk, and its successor, as far as they were seen. Holds an entry for each key until `forget`."""

    def __init__(self) -> None:
        self._before: dict[bytes, bytes] = {}
        # A chunk's only successor; None if it has several.
        self._after: dict[bytes, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._before.keys() | self._after.keys())

    def seen(self, keys: Sequence[bytes]) -> None:
        """Record the consecutive chunks of a prompt, or of a part of it, head to tail. Mutates."""
        for key, following in pairwise(keys):
            self._before[following] = key
            if self._after.setdefault(key, following) != following:
                self._after[key] = None

    def of(self, last: bytes) -> list[bytes]:
        """Return the chunks of a prompt whose last chunk is `last` that no other prompt has, tail to head. The list ends where a
        chunk was forgotten. Empty if another prompt continues this one."""
        found: list[bytes] = []
        if last in self._after:
            return found
        key: bytes | None = last
        while key is not None and (not found or self._after.get(key) == found[-1]):
            found.append(key)
            key = self._before.get(key)
        return found

    def forget(self, key: bytes) -> None:
        """Forget a chunk that is not kept any more. Its predecessor still knows that it was continued. Mutates."""
        self._before.pop(key, None)
        self._after.pop(key, None)

    def clear(self) -> None:
        """Forget all. Mutates."""
        self._before.clear()
        self._after.clear()
