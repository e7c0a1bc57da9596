"""Waits for an accelerator's events in the order in which they were recorded, in one thread for all transfers of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class Event(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self) -> None:
        """Mark the present end of the current stream."""

    def synchronize(self) -> None:
        """Wait until the stream has reached the mark; the waiting thread sleeps if the event was made with blocking=True."""


class EventWaiter:
    """Calls functions when the stream has reached the point at which each was posted, in the order of posting.

    The engine's thread only records an event and never waits. Events of one stream complete in order, so one thread that waits
    for them one after the other reports each as it completes, while later layers are still computed. A thread pool that waits
    would be blocked by prompts whose layers were launched long before they run. On a CPU (`new_event` is None) work is complete
    when it is posted, so functions are called at once and no thread runs.
    """

    def __init__(
        self,
        new_event: Callable[[], Event] | None,
        on_error: Callable[[BaseException], None],
        *,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin_thread` is called first in the waiting thread. `on_error` is told of an event that could not be waited for, in
        that thread; what was posted with it is not called."""
        self._new_event = new_event
        self._on_error = on_error
        self._begin_thread = begin_thread
        self._posted: SimpleQueue[tuple[Event | None, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def after_launched(self, call: Callable[[], None]) -> None:
        """Call when all work that the current stream was given so far has completed."""
        if self._new_event is None:
            call()
            return
        event = self._new_event()
        event.record()
        self._post(event, call)

    def in_order(self, call: Callable[[], None]) -> None:
        """Call after everything that was posted before, without waiting for the stream."""
        if self._new_event is None:
            call()
        else:
            self._post(None, call)

    def close(self) -> None:
        """End the thread when it has processed everything that was posted."""
        if self._thread is not None:
            self._posted.put(None)

    def _post(self, event: Event | None, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pointsman-layer-events", daemon=True)
            self._thread.start()
        self._posted.put((event, call))

    def _run(self) -> None:
        self._begin_thread()
        while (item := self._posted.get()) is not None:
            event, call = item
            try:
                if event is not None:
                    event.synchronize()
            except Exception as error:
                self._on_error(error)
            else:
                call()
