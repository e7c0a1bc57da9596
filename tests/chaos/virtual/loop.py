"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Iterator

EPOCH = 1_800_000_000.0


class Deadlock(Exception):
    """Nothing is ready, and nothing ever will be."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Everything that runs on it sees only its own clock, in s, which begins at 1,000 and moves when all are waiting."""

    def __init__(self) -> None:
        self.now = 1_000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """The moment."""
        return self.now

    def end(self) -> None:
        """Cancel what is still running, and close."""
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.close()


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock
        self._loop.now += max(timeout, 0.0)
        return []


@contextlib.contextmanager
def virtual_clocks(loop: VirtualLoop) -> Iterator[None]:
    """`time.time` and `time.monotonic` are the loop's inside the block, for the whole process."""
    real = time.monotonic, time.time
    time.monotonic = loop.time
    time.time = lambda: EPOCH + loop.now
    try:
        yield
    finally:
        time.monotonic, time.time = real
