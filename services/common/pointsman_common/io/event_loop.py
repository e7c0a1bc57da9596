"""The event loop of a service: uvloop, changed so that a busy loop does not block gRPC's thread.

grpc.aio (1.85) has a thread that writes one byte to a socket pair for each event, to wake the loop. The loop reads one byte per
iteration. With several events per iteration the pair is full after about 280 bytes. The thread then blocks until half of the
bytes are read, one per iteration, and for some hundred milliseconds the loop receives no gRPC events. GrpcLoop therefore reads
all bytes but the last before gRPC's own handler runs.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

# Maximum number of bytes read at once, more than the socket pair can hold.
MANY_BYTES = 1 << 16


class GrpcLoop(uvloop.Loop):
    """A uvloop that reads all wake-up bytes of gRPC's thread at once."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio's add_reader."""
        if isinstance(fd, socket.socket) and fd.family == socket.AF_UNIX and _is_grpc(callback):
            callback = partial(_take_most, fd, callback)
        super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on a GrpcLoop, with as many open files as the process may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return uvloop.run(main, loop_factory=GrpcLoop)


def _is_grpc(callback: Callable[..., Any]) -> bool:
    """Return whether `callback` is the handler of gRPC's event queue, a bound method of an object in gRPC's modules."""
    handler = callback.func if isinstance(callback, partial) else callback
    return type(getattr(handler, "__self__", None)).__module__.startswith("grpc.")


def _take_most(pair: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # gRPC queues an event before it writes the byte, so the handler also finds the events of all bytes that are read here.
    waiting = len(pair.recv(MANY_BYTES, socket.MSG_PEEK))
    if waiting > 1:
        pair.recv(waiting - 1)
    callback(*args)
