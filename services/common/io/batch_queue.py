"""Messages that wait for a stream's writer. A gRPC message costs about 50 us at either end, whatever is in it: those that are
ready together are sent as one."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

M = TypeVar("M")

# A batch of prompts' keys stays far below what a message may weigh.
MAX_BATCH = 32


class BatchQueue(Generic[M]):
    """A queue with one reader, which takes all that is there. Belongs to the event loop that it is used on."""

    def __init__(self) -> None:
        self._queued: list[M] = []
        self._due = False
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: M, max_delay_s: float = 0.0) -> None:
        """Queue a message. The reader gets it at once, or, where it need not hurry, with the next that does, after `within_s` (s)
        at the latest."""
        self._queued.append(message)
        if not max_delay_s:
            self._wake()
        elif not self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max_delay_s, self._wake)

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._wake()

    async def take(self) -> list[M]:
        """The messages that are there, MAX_BATCH at most, in order; waits for one. Empty at the end."""
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
