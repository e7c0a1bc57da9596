"""Places in long work at which the thread that does it may give way to the event loop. Python runs one thread at a time, and does
not let the loop go first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")
# Items between two pauses: some 50 us of work.
ITEMS = 64


class _Own(threading.local):
    pause: Callable[[], None] | None = None


_own = _Own()


def set_pause(own: Callable[[], None] | None) -> None:
    """Set what pause() calls in this thread. Mutates."""
    _own.pause = own


def pause() -> None:
    """Call this thread's pause, if it has one. Long work calls it about every 100 us."""
    if (own := _own.pause) is not None:
        own()


def paced(items: Iterable[_Item]) -> Iterable[_Item]:
    """Return `items` as they are, or, in a thread that has a pause, with a pause after each ITEMS of them."""
    return items if (own := _own.pause) is None else _paced(items, own)


def _paced(items: Iterable[_Item], own: Callable[[], None]) -> Iterator[_Item]:
    for at, item in enumerate(items, 1):
        yield item
        if not at % ITEMS:
            own()
