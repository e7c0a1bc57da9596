"""Real processes for tests: free ports, waiting with a deadline, logs to show when something fails, and a certain end."""

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

from tests.support import leaks
from tests.support.waiting import until

# Tests that run at the same time are each told some (tools/run_tests.py).
_FIRST_PORT, _END_PORT = map(int, os.environ.get("POINTSMAN_TEST_PORTS", "20000-32000").split("-"))
_given_ports: set[int] = set()


class ProcessFailure(AssertionError):
    """A process ended, or did not become ready in time; the message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on and that this session has not given before.

    Below the range that the kernel takes outgoing connections from, so that none of them occupies it before its server starts.
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


@dataclass
class Process:
    """A command with its log, in a process group of its own. It dies with the test process, however that one ends.

    start() may be called again after stop() or kill(); the log is appended to. `env` is added to this process's environment, or,
    with `only_env`, is all that it has.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    only_env: bool = False
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _owner: object = field(default_factory=leaks.owner, init=False, repr=False)

    def start(self) -> None:
        """Start it. To be called in the main thread: the kernel ties its life to that thread's."""
        assert not self.alive, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                # Not by preexec_fn: Python code in a child forked beside gRPC's threads may crash before it gets to exec.
                ["setpriv", "--pdeathsig", "TERM", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**({} if self.only_env else os.environ), **self.env},
                cwd=self.cwd,
                start_new_session=True,
            )
        leaks.give(self._owner, self._child.pid)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Its process id. AssertionError when it was never started."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child.pid

    def wait_ready(self, ready: Callable[[], bool], *, within_s: float) -> None:
        """Wait until `ready`. Raises ProcessFailure when it ends before, or takes longer."""

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
        """End it by SIGTERM and return its status; what is left of its group after `within_s` is killed."""
        return self._end(signal.SIGTERM, within_s)

    def kill(self) -> int:
        """End its whole group by SIGKILL and return its status."""
        return self._end(signal.SIGKILL, 10)

    def tail(self, lines: int = 60) -> str:
        """The last lines of its log, under a heading."""
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
        return status


def _signal_group(group: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sign)
