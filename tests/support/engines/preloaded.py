"""Starts vLLM servers as forks of a process that has loaded vLLM, preloaded_vllm.py: in seconds, not in half a minute."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes.process import Child, Process, Start, by_command
from tests.support.repository import REPOSITORY

# vLLM's and its libraries' settings that are read when they are loaded.
LOADING_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
LOADED_WITHIN_S = 240.0
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
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_address))
    told = {
        "argv": module,
        "env": dict(start.env),
        "cwd": str(start.cwd or REPOSITORY),
        "log": str(start.log),
    }
    connection.sendall(json.dumps(told).encode() + b"\n")
    return _Fork(connection)


class _Fork:
    """A server that was forked. The connection tells its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told = b""
        self.pid = int(self._line(None))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None while the server runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status at the server's end. Raises subprocess.TimeoutExpired after `timeout` s."""
        if self.returncode is None:
            try:
                # Without a word, the process that watched it has been killed.
                self.returncode = int(self._line(timeout) or -signal.SIGKILL)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal to the server."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _line(self, timeout: float | None) -> bytes:
        """Return the next line; what came of it if the connection ends. Raises TimeoutError or BlockingIOError at the timeout."""
        self._connection.settimeout(timeout)
        while b"\n" not in self._told and (more := self._connection.recv(64)):
            self._told += more
        line, _, self._told = self._told.partition(b"\n")
        return line
