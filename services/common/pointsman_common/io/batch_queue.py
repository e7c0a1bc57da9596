"""A queue of messages for a stream's writer. A gRPC message costs about 50 us at either end whatever its content, so messages
that are ready together are sent as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")

# Maximum number of messages in a batch, and their size, bytes (one message may be larger). The keys of a million tokens take
# 500 kB, and the peer takes a whole batch in one turn of its event loop.
MAX_BATCH, MAX_BATCH_BYTES = 32, 2 << 20


class BatchQueue(Generic[M]):
    """A queue with one reader, which takes a batch at a time. All calls must come from one event loop. `size_of` returns the size
    of a message, bytes; None: all are small."""

    def __init__(self, size_of: Callable[[M], int] | None = None) -> None:
        self._size_of = size_of
        self._queued: list[M] = []
        self._due = False
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: M, max_delay_s: float = 0.0) -> None:
        """Queue a message. With `max_delay_s`, the reader receives the message with the next one that is queued without a delay,
        or after `max_delay_s` at the latest; else at once."""
        self._queued.append(message)
        if not max_delay_s:
            self._wake()
        elif not self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max_delay_s, self._wake)

    def end(self) -> None:
        """Mark the end of the queue: no message follows."""
        self._ended = True
        self._wake()

    async def take(self) -> list[M]:
        """Wait until messages are due, and return up to MAX_BATCH and about MAX_BATCH_BYTES of them in order. An empty list means
        the end of the queue."""
        while not self._due:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        most = self._most()
        taken, self._queued = self._queued[:most], self._queued[most:]
        self._due = bool(self._queued) or self._ended
        return taken

    def _most(self) -> int:
        """Return how many messages the next batch has at most."""
        size = 0
        for count, message in enumerate(self._queued[:MAX_BATCH] if self._size_of is not None else ()):
            assert self._size_of is not None
            size += self._size_of(message)
            if size > MAX_BATCH_BYTES:
                return max(count, 1)
        return MAX_BATCH

    def _wake(self) -> None:
        self._due = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
