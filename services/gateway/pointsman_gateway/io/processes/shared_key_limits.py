"""A file in which the gateway processes of one address count the usage of each API key.

The lock of a process that dies is released. The process that replaces it starts with no requests in flight. A process holds the
lock for a few microseconds, for which its siblings wait.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pointsman_gateway.core.rate_limits import KeyUsage, OpenUsage, TokenBucket

_KEY_BYTES = 32
_FIGURES = struct.Struct("8d q q d q 3d")  # the fields of KeyUsage, in their order, but for requests in flight
_ROOM = 64  # number of accounts by which the file grows


class SharedKeyLimitsFile:
    """The accounts of API keys in `file`, read and written by process `number` of `count`."""

    def __init__(self, file: Path, number: int, count: int) -> None:
        """Raises OSError."""
        self._number = number
        self._flights = struct.Struct(f"{count}q")
        self._size = _KEY_BYTES + _FIGURES.size + self._flights.size
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._offsets: dict[bytes, int] = {}  # of the accounts that this process has seen, by key
        self._seen = 0  # offset up to which it has
        with self._locked():
            if not os.fstat(self._fd).st_size:
                os.posix_fallocate(self._fd, 0, self._size * _ROOM)
            data = self._mapped()
            for at in range(0, len(data), self._size):
                own = at + self._size - self._flights.size + number * 8
                data[own : own + 8] = bytes(8)

    def usage_of(self, key: bytes) -> OpenUsage:
        """Return how the account of `key` (32 bytes, not all zero) is opened; add it if it is new. Raises ValueError for another
        key."""
        if len(key) != _KEY_BYTES or not any(key):
            raise ValueError("the key must be a digest of 32 bytes, not all zero")
        with self._locked():
            data = self._mapped()
            while key not in self._offsets and self._seen < len(data):
                found = data[self._seen : self._seen + _KEY_BYTES]
                if not any(found):
                    break
                self._offsets[found] = self._seen
                self._seen += self._size
            if (at := self._offsets.get(key, -1)) < 0:
                at = self._offsets[key] = self._seen
                if at == len(data):
                    os.posix_fallocate(self._fd, at, self._size * max(_ROOM, len(self._offsets)))
                    data = self._mapped()
                data[at : at + _KEY_BYTES] = key
                _FIGURES.pack_into(data, at + _KEY_BYTES, *_figures_of(KeyUsage()))
                self._seen += self._size
        return partial(self._usage, at + _KEY_BYTES)

    @contextmanager
    def _usage(self, at: int) -> Iterator[KeyUsage]:
        """Lock the file and yield the account whose figures start at offset `at`; write it back unless the block raises."""
        with self._locked():
            data, behind = self._mapped(), at + _FIGURES.size
            figures = _FIGURES.unpack_from(data, at)
            buckets = (TokenBucket(*figures[n : n + 2]) for n in range(0, 8, 2))
            flights = list(self._flights.unpack_from(data, behind))
            own = flights[self._number]
            fields: list[Any] = [*buckets, *figures[8:], own, sum(flights) - own]
            usage = KeyUsage(*fields)
            yield usage
            flights[self._number] = usage.in_flight
            _FIGURES.pack_into(data, at, *_figures_of(usage))
            self._flights.pack_into(data, behind, *flights)

    def close(self) -> None:
        """Close the file. No account may be opened afterwards."""
        if self._map is not None:
            self._map.close()
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _mapped(self) -> mmap.mmap:
        """Return a map of the whole file, which a sibling may have extended."""
        size = os.fstat(self._fd).st_size
        if self._map is None or len(self._map) < size:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._fd, size)
        return self._map


def _figures_of(usage: KeyUsage) -> Iterator[float]:
    """Yield the figures of an account that processes share, in the order of _FIGURES."""
    for bucket in (usage.requests, usage.tokens, usage.fleet_requests, usage.fleet_tokens):
        yield from (bucket.level, bucket.at)
    yield from (usage.shares, usage.slots, usage.leased_until, usage.peak, usage.empty_until)
    yield from (usage.used_requests, usage.used_tokens)
