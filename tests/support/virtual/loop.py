"""An event loop whose clock jumps to the next timer instead of waiting for it, and on which processes can stop and go on."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from types import SimpleNamespace
from typing import Any

EPOCH = 1_800_000_000.0
# Whose code something is. What has no owner never stops.
Owner = Callable[[Context], object]


class Deadlock(Exception):
    """Nothing is ready, and nothing ever will be."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Everything that runs on it sees only its own clock, in s, which begins at 1,000 and moves when all are waiting.

    While an owner is stopped nothing of its own runs; what was due by then runs when it goes on, in its order.
    """

    def __init__(self, owner_of: Owner = lambda _: None) -> None:
        self.now = 1_000.0
        super().__init__(_JumpingSelector(self))
        self._ready: Any = _Ready(owner_of)

    def time(self) -> float:
        """The moment."""
        return self.now

    def stop_owner(self, owner: object) -> None:
        """Nothing of it runs from now on."""
        self._ready.stopped.setdefault(owner, [])

    def resume_owner(self, owner: object) -> None:
        """It runs again."""
        self._ready.extend(self._ready.stopped.pop(owner, ()))

    def end(self) -> None:
        """Cancel what is still running, and close."""
        for owner in list(self._ready.stopped):
            self.resume_owner(owner)
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.close()


class _Ready(deque[asyncio.Handle]):
    """What is to run now. The loop takes one after the other from it, and passes over those that are cancelled."""

    def __init__(self, owner_of: Owner) -> None:
        super().__init__()
        self.stopped: dict[object, list[asyncio.Handle]] = {}
        self._owner_of = owner_of
        self._nothing: Any = SimpleNamespace(_cancelled=True)

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        if self.stopped:
            held = self.stopped.get(self._owner_of(handle._context))  # type: ignore[attr-defined]
            if held is not None:
                held.append(handle)
                nothing: asyncio.Handle = self._nothing
                return nothing
        return handle


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock
        self._loop.now += max(timeout, 0.0)
        return []


@contextlib.contextmanager
def virtual_clocks(loop: VirtualLoop, clock_offset_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """`time.time` and `time.monotonic` are the loop's inside the block, for the whole process; by `clock_offset_s` the former is
    not as it should be where it is asked."""
    real = time.monotonic, time.time
    time.monotonic = loop.time
    time.time = lambda: EPOCH + loop.now + clock_offset_s()
    try:
        yield
    finally:
        time.monotonic, time.time = real
