"""Fences, which show when a layer's output is in memory: at once on a CPU, on an accelerator when its stream reaches a mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Blocks only the calling thread until the work that was queued before the mark is done.
Fence = Callable[[], None]


class Event(Protocol):
    """The methods of torch.cuda.Event that this package uses."""

    def record(self) -> None:
        """Mark the current end of the current stream."""

    def synchronize(self) -> None:
        """Block until the stream has reached the mark."""


def marker(new_event: Callable[[], Event] | None) -> Callable[[], Fence | None]:
    """Return a function to call after each layer, in the thread that queues the forward pass. The function does not block; the
    fence that it returns does.

    An event for each layer permits writing that layer while the next one is computed. Synchronising the device would delay the
    forward pass. Without events (a CPU computes at once) there is no fence.
    """
    if new_event is None:
        return lambda: None

    def mark() -> Fence:
        event = new_event()
        event.record()
        return event.synchronize

    return mark
