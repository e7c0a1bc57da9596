"""Runs emulated engines and a control plane as child processes of a command, on free ports of this machine."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import subprocess
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pointsman_common.io.child_command import pointsman_child
from pointsman_common.io.direct_http import open_directly

# Timeout for each engine's start and for the gateway to be ready, s, and what is added to the second for each engine.
START_S, START_S_PER_ENGINE = 180.0, 2.0
# Number of engines that start at a time, for each CPU.
STARTS_PER_CPU = 2
# Time that a child has to end after SIGTERM before it is killed, s.
STOP_S = 40.0


class LocalFleetError(RuntimeError):
    """A part of the fleet did not start or ended early; the message names it."""


class ChildProcesses:
    """Child processes, ended at the end of the `with` block: the control plane first, then the engines."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets a log of each child."""
        self._folder = folder
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        # The control plane ends first, so that its open streams still have their engines.
        plane = [name for name in self._running if not name.startswith("engine")]
        for names in (plane, [name for name in self._running if name not in plane]):
            self.stop(*names)

    def stop(self, *names: str) -> None:
        """End these children; kill those that do not end within STOP_S."""
        ended = [self._running.pop(name) for name in names]
        for process in ended:
            process.terminate()
        for process in ended:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `pointsman ARGUMENTS`; its stderr goes to NAME.log. `environment` is added to this process's."""
        with (self._folder / f"{name}.log").open("w") as log:
            # A new process group: a terminal's Ctrl-C must reach the command alone, which ends its children in order.
            self._running[name] = subprocess.Popen(
                pointsman_child(*arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
                env=os.environ | dict(environment or {}),
            )

    def read_url(self, name: str, timeout_s: float = START_S) -> str:
        """Return the URL at the end of a child's first line. Raises LocalFleetError if no line comes within `timeout_s`."""
        process = self._running[name]
        assert process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout_s) else ""
        if not line.strip():
            late = f" within {timeout_s:.0f} s" if process.poll() is None else ""
            raise LocalFleetError(f"{name} did not start{late}: {self._last_log_line(name)}")
        return line.split()[-1]

    def check(self) -> None:
        """Raise LocalFleetError if a child has ended."""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                raise LocalFleetError(f"{name} ended with status {status}: {self._last_log_line(name)}")

    def wait(self) -> None:
        """Block until a child ends. Raises LocalFleetError then."""
        while True:
            self.check()
            time.sleep(0.5)

    def _last_log_line(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no message"


def start_engines(
    processes: ChildProcesses, count: int, flags: Sequence[str], told: Callable[[int], None] | None = None
) -> list[str]:
    """Start emulated engines with `flags` of `pointsman emulate`; return their base URLs. `told` gets the number of those that
    listen, each time that one does. Raises LocalFleetError.

    A few start at a time: the first of 64 would otherwise need as long as all of them, which is minutes on a laptop.
    """
    names = [f"engine-{number}" for number in range(count)]
    at_once = STARTS_PER_CPU * (os.cpu_count() or 1)
    starting = iter(names)
    for name in itertools.islice(starting, at_once):
        processes.start(name, ["emulate", "--port", "0", *flags])
    urls = []
    for name in names:
        urls.append(processes.read_url(name))
        if told is not None:
            told(len(urls))
        for following in itertools.islice(starting, 1):
            processes.start(following, ["emulate", "--port", "0", *flags])
    return urls


@dataclass(frozen=True)
class PlaneAddresses:
    """HOST:PORT of a control plane's parts."""

    listen: str
    router: str
    console: str

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://{self.listen}"


def begin_plane(
    processes: ChildProcesses,
    folder: Path,
    engines: Sequence[str],
    flags: Sequence[str],
    wanted: tuple[int, int, int],
) -> PlaneAddresses:
    """Start router, agent and gateway in front of `engines` with flags of `pointsman up`. Call it in the main thread.

    `wanted`: ports of gateway, router and console; where one is taken, the next free one is used. The agent's state is kept in
    `folder`. Raises LocalFleetError.
    """
    addresses = PlaneAddresses(*(f"127.0.0.1:{free_port(port)}" for port in wanted))
    given = [flag for url in engines for flag in ("--engine", url)]
    given += ["--listen", addresses.listen, "--router-listen", addresses.router, "--console", addresses.console]
    given += ["--router-metrics", "", "--agent-metrics", "", "--state-dir", str(folder / "agent"), *flags]
    processes.start("control-plane", ["up", *given])
    return addresses


def wait_for_plane(processes: ChildProcesses, plane: PlaneAddresses, engines: int) -> None:
    """Block until the gateway's tokens are exact for that many engines. Raises LocalFleetError."""
    _wait_healthy(f"{plane.url}/health", engines, processes)


class LocalPlane:
    """A control plane whose router can be replaced, inside its `with` block; agent and gateway keep running then.

    A new router has learned nothing, like that of a new control plane, and only one process starts for it.
    """

    def __init__(self, folder: Path, engines: Sequence[str]) -> None:
        """`folder` gets logs and the agent's state."""
        folder.mkdir(parents=True, exist_ok=True)
        self._processes = ChildProcesses(folder)
        self._engines = len(engines)
        self._has_router = False
        listen, self.router = (f"127.0.0.1:{free_port(0)}" for _ in range(2))
        self.url = f"http://{listen}"
        quiet = ["--log-level", "warning"]
        agent = [flag for url in engines for flag in ("--engines", url)]
        agent += ["--routers", self.router, "--metrics-listen", "", "--state-dir", str(folder / "agent"), *quiet]
        self._services = {
            "agent": ["agent", *agent],
            "gateway": ["gateway", "--listen", listen, "--routers", self.router, *quiet],
        }

    def __enter__(self) -> LocalPlane:
        self._processes.__enter__()
        for name, arguments in self._services.items():
            self._processes.start(name, arguments)
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)

    def new_router(self, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Replace the router by one with these flags of `pointsman router`; return when the gateway's tokens are exact for all
        engines. Raises LocalFleetError."""
        if self._has_router:
            self._processes.stop("router")
            _wait_for(f"{self.url}/health", self._processes, lambda health: not health["router_connected"])
        given = ["router", "--listen", self.router, "--metrics-listen", "", "--log-level", "warning", *flags]
        self._processes.start("router", given, environment)
        self._has_router = True
        _wait_healthy(f"{self.url}/health", self._engines, self._processes)


def free_port(wanted: int) -> int:
    """Return the first free port from `wanted` on, any free port if it is 0. Raises LocalFleetError if 200 ports are taken."""
    if not wanted:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return int(probe.getsockname()[1])
    for port in range(wanted, min(wanted + 200, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LocalFleetError(f"no free port from {wanted} on")


def _wait_healthy(url: str, engines: int, processes: ChildProcesses) -> None:
    """Wait until the gateway is ready and has `engines` instances, all with exact tokens. Raises as _wait_for()."""
    _wait_for(
        url,
        processes,
        lambda health: (
            health["status"] == "ok" and sum(model["instances"] for model in health["models"].values()) == engines
        ),
        START_S + START_S_PER_ENGINE * engines,
    )


def _wait_for(
    url: str, processes: ChildProcesses, reached: Callable[[dict[str, Any]], bool], within_s: float = START_S
) -> None:
    """Wait until the gateway's health has `reached` a state. Raises LocalFleetError with its last answer if it has not
    `within_s`, or if a child ends."""
    until = time.monotonic() + within_s
    last = "no answer"
    while time.monotonic() < until:
        processes.check()
        try:
            with open_directly(url, 2) as response:
                last = response.read(4_000).decode(errors="replace")
        except urllib.error.HTTPError as answer:
            last = answer.read(4_000).decode(errors="replace")
        except OSError as error:
            last = str(error)
        with suppress(msgspec.DecodeError):
            if reached(msgspec.json.decode(last)):
                return
        time.sleep(0.2)
    raise LocalFleetError(f"the gateway is not ready after {within_s:.0f} s: {last}")
