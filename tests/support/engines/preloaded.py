"""Starts vLLM servers as forks of a process that has loaded vLLM, preloaded_vllm.py: in seconds, not in half a minute."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes.process import Child, Process, Start, alive, by_command
from tests.support.repository import REPOSITORY

# vLLM's and its libraries' settings that are read when they are loaded.
LOADING_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
LOADED_WITHIN_S = 240.0
POLL_S = 0.02
# The socket of the running preloaded_vllm.py.
_address: Path | None = None


@contextmanager
def preloaded(python: Path, folder: Path) -> Iterator[None]:
    """Inside the block, launch() forks. `python` is that of the engines."""
    global _address
    address = folder / "preloaded.sock"
    script = Path(__file__).with_name("preloaded_vllm.py")
    process = Process(
        "preloaded vLLM", [str(python), str(script), str(address)], folder / "preloaded.log", LOADING_ENVIRONMENT
    )
    process.start()
    try:
        process.wait_ready(address.exists, within_s=LOADED_WITHIN_S)
        _address = address
        yield
    finally:
        _address = None
        process.stop()


def launch(start: Start) -> Child:
    """Start `python -m MODULE ...`, by a fork inside preloaded()'s block, else by the command itself."""
    if _address is None:
        return by_command(start)
    _, _, *module = start.argv
    message = {
        "argv": module,
        "env": dict(start.env),
        "cwd": str(start.cwd or REPOSITORY),
        "log": str(start.log),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(_address))
        connection.sendall(json.dumps(message).encode() + b"\n")
        pid, watcher = map(int, connection.makefile().readline().split())
        return _Fork(pid, watcher, _address.parent / f"{pid}.status")


class _Fork:
    """A server that was forked. A file tells its end: an open connection would belong to the test that happened to start it."""

    def __init__(self, pid: int, watcher: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._watcher, self._status = watcher, status

    def poll(self) -> int | None:
        """Return the exit status, None while the server runs."""
        if self.returncode is None:
            watched = alive(self._watcher)
            if self._status.exists():
                self.returncode = int(self._status.read_text())
            elif not watched:  # killed, and its server with it
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status at the server's end. Raises subprocess.TimeoutExpired after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal to the server."""
        if self.poll() is None:
            os.kill(self.pid, sig)
