"""When is what a layer wrote really in memory? At once on a CPU; on an accelerator when its stream gets there."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Blocks the calling thread, and nothing else, until the work recorded before is done.
Fence = Callable[[], None]


def recorder() -> Callable[[], Fence | None]:
    """A function that marks the current stream's present end. It never waits; what it returns does (None: nothing to wait for).

    A blocking event lets the waiting thread sleep; `torch.cuda.synchronize` would hold up the whole device and the forward pass.
    """
    if not torch.cuda.is_available():
        return lambda: None
    return lambda: marked(torch.cuda.Event(blocking=True))


def marked(event: torch.cuda.Event) -> Fence:
    """`event`, recorded on the current stream."""
    event.record()
    return event.synchronize
