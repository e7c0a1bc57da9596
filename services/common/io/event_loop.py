"""The event loop of a service: uvloop, on which gRPC's thread is never held up by a loop that has much to do.

grpc.aio (1.85) has a thread that wakes the loop by a byte on a pair of sockets for each event, and the loop takes one byte in
each of its turns. Where there are several events in each turn the pair fills up, after some 280 bytes; the thread then waits till
half of them are taken, turn by turn, and for some hundred milliseconds nothing that comes over gRPC is seen. So all bytes but the
last are taken before gRPC's own handler looks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

# More than the pair can hold.
MANY_BYTES = 1 << 16


class GrpcLoop(uvloop.Loop):
    """A uvloop that takes what gRPC's thread has written at once."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio's."""
        if isinstance(fd, socket.socket) and fd.family == socket.AF_UNIX and _is_grpc(callback):
            callback = partial(_take_most, fd, callback)
        super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on such a loop."""
    return uvloop.run(main, loop_factory=GrpcLoop)


def _is_grpc(callback: Callable[..., Any]) -> bool:
    """Whether it is the handler of gRPC's queue of events, bound to its loop."""
    handler = callback.func if isinstance(callback, partial) else callback
    return type(getattr(handler, "__self__", None)).__module__.startswith("grpc.")


def _take_most(pair: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # Events are queued before their bytes are written: what the handler is called for includes those of all bytes taken here.
    waiting = len(pair.recv(MANY_BYTES, socket.MSG_PEEK))
    if waiting > 1:
        pair.recv(waiting - 1)
    callback(*args)
