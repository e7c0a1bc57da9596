"""A command on a terminal of its own (a pseudo-terminal), as a user starts it, and what it prints there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# Escape sequences of colours and the like.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class OnTerminal:
    """A running command whose standard streams are a terminal. End it by `stop`."""

    def __init__(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, size: tuple[int, int] = (40, 120)
    ) -> None:
        """`size`: lines and columns of the terminal."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=cwd,
                env={**environment, "TERM": "xterm-256color", **(env or {})},
                start_new_session=True,
            )
        finally:
            os.close(slave)
        self._printed = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        """The whole lines that were printed so far, without escape sequences."""
        text = _ESCAPES.sub("", bytes(self._printed).decode(errors="replace"))
        return [line.rstrip("\r") for line in text.split("\n")[:-1]]

    def stop(self, within_s: float = 60.0) -> int:
        """Send SIGINT, as Ctrl-C does, wait for the end, and return the exit status. Kills what has not ended in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(10)
        finally:
            self._reader.join(within_s)
            os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65_536)
            except OSError:  # EIO: no process has the terminal open any more
                return
            if not piece:
                return
            self._printed += piece
