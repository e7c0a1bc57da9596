"""An event loop in virtual time: its clock jumps to the next timer, and processes on it can compute, stop and resume."""

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

# Wall-clock time at the loop's time 0, s.
EPOCH = 1_800_000_000.0
# Returns the owner of a context's code. Code without an owner is never stopped, and its computing takes no time.
Owner = Callable[[Context], object]
# Minimum charge of a callback that makes its owner's next callback wait, s. After a smaller charge the next callback runs at
# once, with its clock ahead. A timer for each callback would take more CPU time than the callbacks do.
SHORTEST_TURN_S = 0.001

_NETWORK = Context()


class Deadlock(Exception):
    """No callback is ready, and no timer is set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, in s, which starts at 1,000 and advances only when all tasks wait.

    While an owner is stopped none of its callbacks run; those that became ready meanwhile run in order when the owner resumes. An
    owner whose callback was charged for CPU time is busy for that time afterwards. Its clock advances within the callback.
    """

    def __init__(self, owner_of: Owner = lambda _: None) -> None:
        self.now = 1_000.0
        # How far the clock of the running callback is ahead of `now`, s.
        self._ahead = 0.0
        super().__init__(_JumpingSelector(self))
        self._ready: Any = _Ready(self, owner_of)
        self._stops: Counter[object] = Counter()
        self._busy_until: dict[object, float] = {}
        self.on_turn: Callable[[object, float, float], None] = lambda owner, begun, seconds: None
        """Called after a charge of at least SHORTEST_TURN_S, with the owner, the start of its turn, and the charge, s."""

    def time(self) -> float:
        """Return the time as the running callback sees it, s."""
        return self.now + self._ahead

    def charge(self, seconds: float) -> None:
        """Charge the running callback's owner for `seconds` of CPU. Code without an owner is not charged."""
        if self._ready.owner is not None:
            self._ahead += seconds

    def stop_owner(self, owner: object) -> None:
        """Stop an owner, until resume_owner() has been called as often as stop_owner()."""
        self._stops[owner] += 1
        self._ready.stopped.setdefault(owner, [])

    def resume_owner(self, owner: object) -> None:
        """End one stop of an owner."""
        self._stops[owner] -= 1
        if self._stops[owner] <= 0:
            self.release_owner(owner)

    def release_owner(self, owner: object) -> None:
        """End all stops of an owner."""
        self._stops.pop(owner, None)
        self._ready.extend(self._ready.stopped.pop(owner, ()))

    def end(self) -> None:
        """Cancel all tasks, and close the loop."""
        for owner in list(self._ready.stopped):
            self.release_owner(owner)
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.close()

    def begin_turn(self, owner: object) -> None:
        """Note that a callback of `owner` runs next."""
        self._ready.owner = owner
        if owner is not None and (until := self._busy_until.get(owner, 0.0)) > self.now:
            self._ahead = until - self.now

    def end_turn(self) -> None:
        """Account for the callback that ran last, which has returned."""
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
    """The loop's queue of ready callbacks. Callbacks of stopped owners are put aside.

    In place of such a callback the loop gets a cancelled handle, which it ignores.
    """

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
    """Replace `time.time`, `time.monotonic` and `time.perf_counter` by the loop's clock inside the block, for the whole process.

    `clock_offset_s` returns the error of the wall clock (`time.time`) of the caller, s.
    """
    real = time.monotonic, time.time, time.perf_counter
    time.monotonic = time.perf_counter = loop.time
    time.time = lambda: EPOCH + loop.time() + clock_offset_s()
    try:
        yield
    finally:
        time.monotonic, time.time, time.perf_counter = real
