"""A queue of messages for a stream's writer. A gRPC message costs about 50 us at either end whatever its content, so messages
that are ready together are sent as one."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

M = TypeVar("M")

# Maximum number of messages in a batch. A batch of prompts' keys is then far smaller than the maximum size of a gRPC message.
MAX_BATCH = 32


class BatchQueue(Generic[M]):
    """A queue with one reader, which takes a batch at a time. All calls must come from one event loop."""

    def __init__(self) -> None:
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
        """Wait until messages are due, and return up to MAX_BATCH of them in order. An empty list means the end of the queue."""
        while not self._due:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        taken, self._queued = self._queued[:MAX_BATCH], self._queued[MAX_BATCH:]
        self._due = bool(self._queued) or self._ended
        return taken

    def _wake(self) -> None:
        self._due = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
