"""A loop that has much to do, and gRPC's thread, which wakes it for each event."""

from __future__ import annotations

import array
import asyncio
import fcntl
import queue
import resource
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVarTuple

import grpc
import grpc.aio
import pytest
import uvloop

from pointsman_common.io import event_loop
from pointsman_common.io.channel import END_OF_STREAM, SERVER_OPTIONS

STREAMS, TURNS = 64, 80
# From its first loop on libuv keeps a pipe for the life of the process. It is made here, so that it counts for no test.
uvloop.new_event_loop().close()


_Args = TypeVarTuple("_Args")


class Watched(event_loop.GrpcLoop):
    """A loop that keeps the sockets that it reads."""

    read: list[socket.socket]

    def add_reader(self, fd: Any, callback: Callable[[*_Args], Any], *args: *_Args) -> None:
        super().add_reader(fd, callback, *args)
        if isinstance(fd, socket.socket) and fd.family == socket.AF_UNIX:
            self.read = [*getattr(self, "read", []), fd]


def unread(one: socket.socket) -> int:
    """Bytes that wait in a socket."""
    count = array.array("i", [0])
    fcntl.ioctl(one.fileno(), termios.FIONREAD, count)
    return count[0]


async def _held_up(loop: Watched) -> list[int]:
    """How many wake-ups wait in each turn of a loop that is busy, while many streams bring messages."""

    async def report(_: object, context: Any) -> None:
        while await context.read() is not END_OF_STREAM:
            pass

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Report": grpc.stream_stream_rpc_method_handler(report)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    closing: queue.SimpleQueue[None] = queue.SimpleQueue()

    def messages() -> Iterator[bytes]:
        while closing.empty():
            yield b"x"

    def call() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.stream_stream("/test/Report", None, None)(messages()) for _ in range(STREAMS)]
            for call in calls:
                for _ in call:
                    pass

    calling = loop.run_in_executor(None, call)
    waiting = []
    for _ in range(TURNS):
        # Work that holds the loop.
        time.sleep(0.01)  # noqa: ASYNC251
        await asyncio.sleep(0)
        waiting.append(max(map(unread, loop.read)))
    closing.put(None)
    await calling
    await server.stop(None)
    return waiting


def test_wake_ups_do_not_pile_up_while_the_loop_is_busy() -> None:
    waiting = uvloop.run(_run(), loop_factory=Watched)
    # Each stream has at most one unhandled event, and one more may arrive while this one is handled.
    assert max(waiting) <= 2 * STREAMS + 8


async def _run() -> list[int]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Watched)
    return await _held_up(loop)


@pytest.mark.parametrize("sent", [1, 2, 200])
def test_the_handler_finds_one_byte_whatever_has_come(sent: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"1" * sent)
        event_loop._take_most(ours, lambda: seen.append(ours.recv(1_000)))
        assert seen.pop() == b"1"


seen: list[bytes] = []


SHOW = """
import resource
from pointsman_common.io.event_loop import run
async def show():
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
run(show())
"""


def test_a_service_may_have_as_many_files_open_as_the_machine_lets_it() -> None:
    """A shell's limit is often 1,024, and each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def low() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))

    shown = subprocess.run([sys.executable, "-c", SHOW], preexec_fn=low, capture_output=True, check=True, timeout=60)
    assert int(shown.stdout) == most
