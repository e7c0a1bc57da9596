"""The parent process of `--processes N`: it runs gateways that share a port by SO_REUSEPORT and have separate ids at routers.

The parent serves no requests. It replaces a process that dies, forwards SIGTERM, and ends when all processes have drained. A
process whose parent has died drains too. If a process cannot start, all end, because the others would fail in the same way.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog

from pointsman_common.core.addresses import parse_address
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.listening import bound_socket
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman_gateway.io.settings import GatewaySettings

log = structlog.get_logger()

# Pause before processes that died are replaced, s.
PAUSE_S = 1.0
Child = Callable[[GatewaySettings, SiblingProcesses, Connection], None]


def run_processes(settings: GatewaySettings, child: Child) -> None:
    """Run `child` in `settings.processes` processes until SIGTERM or SIGINT. Blocks. Raises OSError if an address is in use,
    SystemExit if a process cannot start."""
    stop, stopped = socket.socketpair()
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, lambda *_: stopped.send(b"."))
    with ExitStack() as stack:
        addresses = {}
        for field in ("listen", "ext_proc_listen"):
            if address := getattr(settings, field):
                with listening(settings, field):
                    reserved = stack.enter_context(_reserved(address))
                addresses[field] = str(parse_address(address)._replace(port=reserved.getsockname()[1]))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-gateway-")))
        family = _ProcessGroup(settings.model_copy(update=addresses), folder, child)
        for number in range(settings.processes):
            family.start(number)
        try:
            family.keep(stop)
        finally:
            family.end(stop)


def _reserved(listen: str) -> socket.socket:
    """Return a socket that reserves the port for the children. It does not listen, so it receives no connections."""
    address = parse_address(listen)
    # Bound without SO_REUSEPORT, so it fails if any other process has the port, even a gateway that shares it.
    with bound_socket(address) as probe:
        address = address._replace(port=probe.getsockname()[1])
    return bound_socket(address, socket.SO_REUSEPORT)


class _ProcessGroup:
    def __init__(self, settings: GatewaySettings, folder: Path, child: Child) -> None:
        self._settings = settings
        self._folder = folder
        self._child = child
        # Not forked, because gRPC and uvloop do not work after a fork.
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[int, BaseProcess] = {}
        self._unready: dict[int, Connection] = {}

    def start(self, number: int) -> None:
        """Start process `number`."""
        own = {"gateway_id": f"{self._settings.gateway_id}-{number}"}
        reader, writer = self._context.Pipe(duplex=False)
        siblings = SiblingProcesses(self._folder, number, self._settings.processes)
        arguments = (self._settings.model_copy(update=own), siblings, writer)
        process = self._context.Process(target=self._child, args=arguments, name=f"gateway-{number}")
        process.start()
        writer.close()
        self._running[number], self._unready[number] = process, reader

    def keep(self, stop: socket.socket) -> None:
        """Replace processes that die, until `stop` is readable. Raises SystemExit if a process dies before its number has ever
        served."""
        served: set[int] = set()
        while True:
            sentinels = {process.sentinel: number for number, process in self._running.items()}
            readable = wait([*sentinels, *self._unready.values(), stop])
            if stop in readable:
                return
            for number, reader in list(self._unready.items()):
                if reader in readable:
                    try:
                        reader.recv()
                        served.add(number)
                    except EOFError:
                        pass  # the process died; its sentinel is handled below
                    del self._unready[number]
                    reader.close()
            died = [sentinels[sentinel] for sentinel in readable if sentinel in sentinels]
            for number in died:
                process = self._running.pop(number)
                process.join()
                if number not in served:
                    raise SystemExit(process.exitcode or 1)
                log.error("a gateway process died", number=number, exit_code=process.exitcode)
            if died and not wait([stop], PAUSE_S):
                for number in died:
                    self.start(number)

    def end(self, stop: socket.socket) -> None:
        """Terminate all processes and wait until they have drained. Each further signal on `stop` is forwarded to them."""
        sentinels = {process.sentinel for process in self._running.values()}
        stop.setblocking(False)
        with suppress(BlockingIOError):  # no signal came: a process could not start
            stop.recv(4_096)
        for process in self._running.values():
            process.terminate()
        while sentinels:
            readable = wait([*sentinels, stop])
            sentinels -= set(readable)
            if stop in readable:
                stop.recv(4_096)
                for process in self._running.values():
                    process.terminate()
        for process in self._running.values():
            process.join()
