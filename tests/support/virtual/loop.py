"""An event loop whose clock jumps to the next timer instead of waiting for it, and on which processes compute, stop and go on."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import Context
from types import SimpleNamespace
from typing import Any

EPOCH = 1_800_000_000.0
# Whose code something is. What has no owner never stops, and computes in no time.
Owner = Callable[[Context], object]
# An owner that computes for less than so long, in s, does not keep its next callback waiting: that one begins with its clock
# ahead instead. A timer for each callback would take more CPU time than the callbacks do.
SHORTEST_TURN_S = 0.001

_NETWORK = Context()


class Deadlock(Exception):
    """Nothing is ready, and nothing ever will be."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Everything that runs on it sees only its own clock, in s, which begins at 1,000 and moves when all are waiting.

    While an owner is stopped nothing of its own runs; what was due by then runs when it goes on, in its order. An owner whose
    callback was charged for what it computes is busy for so long afterwards, and sees its clock go on within the callback.
    """

    def __init__(self, owner_of: Owner = lambda _: None) -> None:
        self.now = 1_000.0
        # By how much the clock of the callback that is running is ahead.
        self._ahead = 0.0
        super().__init__(_JumpingSelector(self))
        self._ready: Any = _Ready(self, owner_of)
        self._stops: Counter[object] = Counter()
        self._busy_until: dict[object, float] = {}
        self.on_turn: Callable[[object, float, float], None] = lambda owner, begun, seconds: None
        """Called with an owner, when it began to be busy, and for how long it is, in s: where that is SHORTEST_TURN_S or more."""

    def time(self) -> float:
        """The moment, for the callback that is running."""
        return self.now + self._ahead

    def charge(self, seconds: float) -> None:
        """The callback that is running computes for so long. Without an owner nothing is charged."""
        if self._ready.owner is not None:
            self._ahead += seconds

    def stop_owner(self, owner: object) -> None:
        """Nothing of it runs from now on, until it is resumed as often as it was stopped."""
        self._stops[owner] += 1
        self._ready.stopped.setdefault(owner, [])

    def resume_owner(self, owner: object) -> None:
        """One stop is over."""
        self._stops[owner] -= 1
        if self._stops[owner] <= 0:
            self.release_owner(owner)

    def release_owner(self, owner: object) -> None:
        """It runs again, however often it was stopped."""
        self._stops.pop(owner, None)
        self._ready.extend(self._ready.stopped.pop(owner, ()))

    def end(self) -> None:
        """Cancel what is still running, and close."""
        for owner in list(self._ready.stopped):
            self.release_owner(owner)
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.close()

    def begin_turn(self, owner: object) -> None:
        """`owner` runs next."""
        self._ready.owner = owner
        if owner is not None and (until := self._busy_until.get(owner, 0.0)) > self.now:
            self._ahead = until - self.now

    def end_turn(self) -> None:
        """What ran last has returned."""
        owner, self._ready.owner = self._ready.owner, None
        if not self._ahead:
            return
        ahead, self._ahead = self._ahead, 0.0
        self._busy_until[owner] = self.now + ahead
        if ahead >= SHORTEST_TURN_S:
            self.on_turn(owner, self.now, ahead)
            self.stop_owner(owner)
            self.call_at(self.now + ahead, self.resume_owner, owner, context=_NETWORK)

    def _run_once(self) -> None:
        self.end_turn()
        super()._run_once()  # type: ignore[misc]


class _Ready(deque[asyncio.Handle]):
    """What is to run now. The loop takes one after the other from it, and passes over those that are cancelled."""

    def __init__(self, loop: VirtualLoop, owner_of: Owner) -> None:
        super().__init__()
        self.stopped: dict[object, list[asyncio.Handle]] = {}
        self.owner: object = None
        self._loop = loop
        self._owner_of = owner_of
        self._nothing: Any = SimpleNamespace(_cancelled=True)

    def popleft(self) -> asyncio.Handle:
        self._loop.end_turn()
        handle = super().popleft()
        owner = self._owner_of(handle._context)  # type: ignore[attr-defined]
        if self.stopped:
            held = self.stopped.get(owner)
            if held is not None:
                held.append(handle)
                nothing: asyncio.Handle = self._nothing
                return nothing
        self._loop.begin_turn(owner)
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
    """`time.time`, `time.monotonic` and `time.perf_counter` are the loop's inside the block, for the whole process; by
    `clock_offset_s` the first is not as it should be where it is asked."""
    real = time.monotonic, time.time, time.perf_counter
    time.monotonic = time.perf_counter = loop.time
    time.time = lambda: EPOCH + loop.time() + clock_offset_s()
    try:
        yield
    finally:
        time.monotonic, time.time, time.perf_counter = real
