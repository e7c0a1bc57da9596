"""An accelerator's stream on a machine without one: launching returns at once, a thread does the work later and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue


class EmulatedStream:
    """A stream whose work is done by a thread. `ended_at` has the time (time.perf_counter, s) at which each piece of work
    ended."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[tuple[float, Callable[[], object]] | None] = SimpleQueue()
        self.ended_at: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, takes_s: float, work: Callable[[], object]) -> None:
        """Queue work that ends `takes_s` after it has begun; its effects are there at its end."""
        self._launched.put((takes_s, work))

    def new_event(self) -> EmulatedEvent:
        """As torch.cuda.Event()."""
        return EmulatedEvent(self)

    def close(self) -> None:
        """End the thread when all work is done."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = time.perf_counter()
        while (item := self._launched.get()) is not None:
            takes_s, work = item
            # Work that was queued in time begins when the work before it ends, whatever sleeping has cost.
            due = max(due, time.perf_counter() - takes_s) + takes_s
            time.sleep(max(due - time.perf_counter(), 0.0))
            work()
            if takes_s:
                self.ended_at.append(time.perf_counter())


class EmulatedEvent:
    """As torch.cuda.Event with blocking=True."""

    def __init__(self, stream: EmulatedStream) -> None:
        self._stream = stream
        self._reached = threading.Event()

    def record(self) -> None:
        self._stream.launch(0.0, self._reached.set)

    def synchronize(self) -> None:
        self._reached.wait()
