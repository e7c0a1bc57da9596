"""Real processes for tests: free ports, waiting with a deadline, logs for error messages, and a certain end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.support import leaks
from tests.support.waiting import until

# Range of ports. tools/run_tests.py gives each of several concurrent test runs its own range.
_FIRST_PORT, _END_PORT = map(int, os.environ.get("POINTSMAN_TEST_PORTS", "20000-32000").split("-"))
_given_ports: set[int] = set()


class ProcessFailure(AssertionError):
    """A process ended, or did not become ready in time; the message ends with the last lines of its log."""


def free_port() -> int:
    """Return a TCP port on the loopback interface that no process listens on and that this session has not returned before.

    Ports are below the kernel's range for outgoing connections, so no connection occupies a port before its server starts.
    """
    rng = random.SystemRandom()
    for _ in range(1_000):
        port = rng.randrange(_FIRST_PORT, _END_PORT)
        if port in _given_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given_ports.add(port)
            return port
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {_END_PORT}")


# Places among the fields of _stat().
_GROUP, _NUM_THREADS = 2, 17


def alive(pid: int) -> bool:
    """Return whether a process with this id runs. One that has ended may exist until its parent asks for its status."""
    fields = _stat(pid)
    return fields is not None and _runs(fields)


def _group_runs(group: int) -> bool:
    """Return whether any process of a process group runs."""
    every = (_stat(int(folder.name)) for folder in Path("/proc").glob("[0-9]*"))
    return any(fields is not None and int(fields[_GROUP]) == group and _runs(fields) for fields in every)


def _runs(fields: list[str]) -> bool:
    # The first thread of a killed process may end before others, and with them its files.
    return fields[0] not in "ZX" or int(fields[_NUM_THREADS]) > 1


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process from its state on (proc_pid_stat(5)); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


class Child(Protocol):
    """A process that was started, as subprocess.Popen has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status at the process's end. Raises subprocess.TimeoutExpired after `timeout` s."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process."""


@dataclass(frozen=True)
class Start:
    """What a process is started with."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path | None
    log: Path


def by_command(start: Start) -> Child:
    """Start a process in a session of its own."""
    with start.log.open("ab") as log:
        return subprocess.Popen(
            # Not by preexec_fn: Python code in a child that is forked while gRPC's threads run may crash before exec.
            ["setpriv", "--pdeathsig", "TERM", *start.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=start.env,
            cwd=start.cwd,
            start_new_session=True,
        )


@dataclass
class Process:
    """A command with its log, in a process group of its own. It dies when the test process ends, in whatever way.

    start() may be called again after stop() or kill(), and then appends to the log. `env` is added to this process's environment,
    or is the whole environment with `only_env`. `launch` starts it.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    only_env: bool = False
    launch: Callable[[Start], Child] = by_command
    _child: Child | None = field(default=None, init=False, repr=False)
    _owner: object = field(default_factory=leaks.owner, init=False, repr=False)

    def start(self) -> None:
        """Start the process. Must be called in the main thread: the kernel ends the process when the calling thread ends."""
        assert not self.alive, f"{self.name} runs already"
        env = {**({} if self.only_env else os.environ), **self.env}
        self._child = self.launch(Start(self.argv, env, self.cwd, self.log))
        leaks.give(self._owner, self._child.pid)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """The process id. Raises AssertionError if the process was never started."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child.pid

    def wait_ready(self, ready: Callable[[], bool], *, within_s: float) -> None:
        """Wait until `ready()`. Raises ProcessFailure if the process ends before, or after `within_s`."""

        def ready_or_dead() -> bool:
            if not self.alive:
                code = self._child.returncode if self._child else None
                raise ProcessFailure(f"{self.name} ended with status {code}\n{self.tail()}")
            return ready()

        try:
            until(ready_or_dead, within_s=within_s, what=f"{self.name} ready")
        except ProcessFailure:
            raise
        except AssertionError as late:
            raise ProcessFailure(f"{late}\n{self.tail()}") from None

    def stop(self, *, within_s: float = 20) -> int:
        """Send SIGTERM, and return the exit status. Kills the process after `within_s`, and the rest of its group at its end."""
        return self._end(signal.SIGTERM, within_s)

    def kill(self) -> int:
        """Kill the whole process group, and return the exit status when all its processes have ended."""
        return self._end(signal.SIGKILL, 10)

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of the log, under a heading."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- the last lines of {self.log.name}\n" + "\n".join(text.splitlines()[-lines:])

    def _end(self, sign: signal.Signals, within_s: float) -> int:
        assert self._child is not None, f"{self.name} was never started"
        group = self._child.pid
        if sign is signal.SIGKILL:
            _signal_group(group, sign)
        elif self.alive:
            self._child.send_signal(sign)
        try:
            status = self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            _signal_group(group, signal.SIGKILL)
            status = self._child.wait(10)
        _signal_group(group, signal.SIGKILL)
        # A process that was forked holds the sockets of the one that has ended, and takes connections.
        until(lambda: not _group_runs(group), within_s=10, what=f"the end of all processes of {self.name}")
        return status


def _signal_group(group: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sign)
