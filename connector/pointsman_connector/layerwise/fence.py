"""When is what a layer wrote really in memory? At once on a CPU; on an accelerator when its stream gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Blocks the calling thread, and nothing else, until the work that was queued before the mark is done.
Fence = Callable[[], None]


class Event(Protocol):
    """What of torch.cuda.Event is used."""

    def record(self) -> None:
        """Mark the present end of the current stream."""

    def synchronize(self) -> None:
        """Wait until the stream has got to the mark."""


def marker(new_event: Callable[[], Event] | None) -> Callable[[], Fence | None]:
    """A function to call after each layer, in the thread that queues the forward pass: it never waits, what it returns does.

    An event for each layer lets that layer's bytes go while the next one is computed; synchronising the device would hold up
    the forward pass. Without events (a CPU computes at once) there is nothing to wait for.
    """
    if new_event is None:
        return lambda: None

    def mark() -> Fence:
        event = new_event()
        event.record()
        return event.synchronize

    return mark
