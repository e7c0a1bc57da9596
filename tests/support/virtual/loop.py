"""An event loop in virtual time: its clock jumps to the next timer, and processes on it can compute, stop and resume."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any

# Wall-clock time at the loop's time 0, s.
EPOCH = 1_800_000_000.0
# Returns the owner of a context's code. Code without an owner is never stopped, and its computing takes no time.
Owner = Callable[[Context], object]
# Minimum charge of a callback that makes its owner's next callback wait, s. After a smaller charge the next callback runs at
# once, with its clock ahead. A timer for each callback would take more CPU time than the callbacks do.
SHORTEST_TURN_S = 0.001
# Timers whose time is less than this away are due, s.
CLOCK_RESOLUTION_S = 1e-9
# Of more timers than this, cancelled ones are removed once they are more than half.
MANY_TIMERS = 100

_NETWORK = Context()


class Deadlock(Exception):
    """No callback is ready, and no timer is set."""


class _Callback:
    """A callback that is to run, at once or at a time, in place of asyncio's Handle and TimerHandle. `scheduled`: it is among the
    loop's timers."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "loop", "scheduled")

    def __init__(
        self, loop: VirtualLoop, callback: Any, args: Any, context: Context | None, *, scheduled: bool
    ) -> None:
        self.loop, self.callback, self.args = loop, callback, args
        self.context = copy_context() if context is None else context
        self.scheduled, self.is_cancelled = scheduled, False

    def __lt__(self, other: object) -> bool:
        """Return False: timers of equal times have no order."""
        return False

    def cancel(self) -> None:
        """Do not run it."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.loop.cancelled_timers += self.scheduled
            self.callback = self.args = None

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.is_cancelled


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, in s, which starts at 1,000 and advances only when all tasks wait.

    While an owner is stopped none of its callbacks run; those that became ready meanwhile run in order when the owner resumes. An
    owner whose callback was charged for CPU time is busy for that time afterwards. Its clock advances within the callback.

    Nothing is ever read from a socket, so callbacks and timers are kept and run by shorter code than asyncio's.
    """

    _stopping: bool

    def __init__(self, owner_of: Owner = lambda _: None) -> None:
        self.now = 1_000.0
        # How far the clock of the running callback is ahead of `now`, s.
        self._ahead = 0.0
        super().__init__()
        self._ready: deque[_Callback] = deque()
        # A heap, by their times.
        self._timers: list[tuple[float, _Callback]] = []
        self.cancelled_timers = 0
        """How many of the timers are cancelled, at most."""
        self._owner_of = owner_of
        self._owner: object = None
        # Owner -> its callbacks that became ready since it was stopped.
        self._stopped: dict[object, list[_Callback]] = {}
        self._stops: Counter[object] = Counter()
        self._busy_until: dict[object, float] = {}
        self.on_turn: Callable[[object, float, float], None] = lambda owner, begun, seconds: None
        """Called after a charge of at least SHORTEST_TURN_S, with the owner, the start of its turn, and the charge, s."""

    def time(self) -> float:
        """Return the time as the running callback sees it, s."""
        return self.now + self._ahead

    def charge(self, seconds: float) -> None:
        """Charge the running callback's owner for `seconds` of CPU. Code without an owner is not charged."""
        if self._owner is not None:
            self._ahead += seconds

    def stop_owner(self, owner: object) -> None:
        """Stop an owner, until resume_owner() has been called as often as stop_owner()."""
        self._stops[owner] += 1
        self._stopped.setdefault(owner, [])

    def resume_owner(self, owner: object) -> None:
        """End one stop of an owner."""
        self._stops[owner] -= 1
        if self._stops[owner] <= 0:
            self.release_owner(owner)

    def release_owner(self, owner: object) -> None:
        """End all stops of an owner."""
        self._stops.pop(owner, None)
        self._ready.extend(self._stopped.pop(owner, ()))

    def end(self) -> None:
        """Cancel all tasks, and close the loop."""
        for owner in list(self._stopped):
            self.release_owner(owner)
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.close()

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """Run a callback in the loop's next turn."""
        call = _Callback(self, callback, args, context, scheduled=False)
        self._ready.append(call)
        return call

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """Run a callback at a time, s on the loop's clock."""
        call = _Callback(self, callback, args, context, scheduled=True)
        heappush(self._timers, (when, call))
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """Run a callback after `delay` seconds."""
        return self.call_at(self.now + self._ahead + delay, callback, *args, context=context)

    def _end_turn(self) -> None:
        """Account for the callback that ran last, which has returned."""
        owner, self._owner = self._owner, None
        if not self._ahead:
            return
        ahead, self._ahead = self._ahead, 0.0
        self._busy_until[owner] = self.now + ahead
        if ahead >= SHORTEST_TURN_S:
            self.on_turn(owner, self.now, ahead)
            self.stop_owner(owner)
            self.call_at(self.now + ahead, self.resume_owner, owner, context=_NETWORK)

    def _run_once(self) -> None:
        """Run turns until the loop is to stop. Raises Deadlock."""
        while True:
            self._end_turn()
            self._take_due()
            ready = self._ready
            for _ in range(len(ready)):
                self._run(ready.popleft())
            if self._stopping:
                return

    def _take_due(self) -> None:
        """Make the timers ready whose time has come; if nothing else is ready, the clock jumps to the first."""
        timers = self._timers
        if len(timers) > MANY_TIMERS and self.cancelled_timers * 2 > len(timers):
            timers[:] = [timer for timer in timers if not timer[1].is_cancelled]
            heapify(timers)
            self.cancelled_timers = 0
        while timers and timers[0][1].is_cancelled:
            heappop(timers)
            self.cancelled_timers -= 1
        if not self._ready and not self._stopping:
            if not timers:
                raise Deadlock
            self.now += max(timers[0][0] - self.now, 0.0)
        due = self.now + CLOCK_RESOLUTION_S
        while timers and timers[0][0] < due:
            call = heappop(timers)[1]
            call.scheduled = False
            self._ready.append(call)

    def _run(self, call: _Callback) -> None:
        """Run a callback, unless it is cancelled. That of a stopped owner is put aside."""
        owner = self._owner_of(call.context)
        if self._stopped and (held := self._stopped.get(owner)) is not None:
            held.append(call)
            return
        if call.is_cancelled:
            return
        self._owner = owner
        if owner is not None and (until := self._busy_until.get(owner, 0.0)) > self.now:
            self._ahead = until - self.now
        try:
            call.context.run(call.callback, *call.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"an error in {call.callback}", "exception": error})
        self._end_turn()


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
