"""The parent of `--processes N`: gateways that share a port by SO_REUSEPORT, each a gateway of its own for the router.

The parent serves nothing. It replaces a process that dies, passes SIGTERM on, and ends when all have drained; a process whose
parent is gone drains too. A process that cannot start at all ends everything: what hinders one hinders all.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog

from pointsman.gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman.gateway.io.settings import GatewaySettings

log = structlog.get_logger()

PAUSE_S = 1.0
Child = Callable[[GatewaySettings, SiblingProcesses, Connection], None]


def run_processes(settings: GatewaySettings, child: Child) -> None:
    """Run `child` in `settings.processes` processes until SIGTERM or SIGINT. Blocks. Raises OSError when the address is taken,
    SystemExit when a process cannot start."""
    stop, stopped = socket.socketpair()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stopped.send(b"."))
    with tempfile.TemporaryDirectory(prefix="pointsman-gateway-") as folder, _reserved(settings.listen) as port:
        bound = port.getsockname()[1]
        family = _ProcessGroup(settings, f"{settings.listen.rpartition(':')[0]}:{bound}", Path(folder), child)
        for number in range(settings.processes):
            family.start(number)
        try:
            family.keep(stop)
        finally:
            family.end(stop)


def _reserved(listen: str) -> socket.socket:
    """A socket that keeps the port for the children, and takes no connection, since it does not listen."""
    host, _, port = listen.rpartition(":")
    address = (host.strip("[]"), int(port))
    kind = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(kind) as probe:
        # Without SO_REUSEPORT: it must be nobody else's, not even another gateway's that shares.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        address = (address[0], probe.getsockname()[1])
    own = socket.socket(kind)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind(address)
    return own


class _ProcessGroup:
    def __init__(self, settings: GatewaySettings, listen: str, folder: Path, child: Child) -> None:
        self._settings = settings
        self._listen = listen
        self._folder = folder
        self._child = child
        # Not forked: gRPC and uvloop do not survive that.
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[int, BaseProcess] = {}
        self._unready: dict[int, Connection] = {}

    def start(self, number: int) -> None:
        """Start process `number`."""
        own = {"listen": self._listen, "gateway_id": f"{self._settings.gateway_id}-{number}"}
        reader, writer = self._context.Pipe(duplex=False)
        siblings = SiblingProcesses(self._folder, number, self._settings.processes)
        arguments = (self._settings.model_copy(update=own), siblings, writer)
        process = self._context.Process(target=self._child, args=arguments, name=f"gateway-{number}")
        process.start()
        writer.close()
        self._running[number], self._unready[number] = process, reader

    def keep(self, stop: socket.socket) -> None:
        """Replace what dies, until `stop` can be read. Raises SystemExit when one of the first cannot start."""
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
                        pass  # its sentinel tells the rest
                    del self._unready[number]
                    reader.close()
            for number in [sentinels[one] for one in readable if one in sentinels]:
                process = self._running.pop(number)
                process.join()
                if number not in served:
                    raise SystemExit(process.exitcode or 1)
                log.error("a gateway process died", number=number, exit_code=process.exitcode)
                time.sleep(PAUSE_S)
                self.start(number)

    def end(self, stop: socket.socket) -> None:
        """Let all drain, and wait for them; what `stop` has told again, they are told again."""
        sentinels = {process.sentinel for process in self._running.values()}
        stop.setblocking(False)
        with suppress(BlockingIOError):  # it ends by itself: a process could not start
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
