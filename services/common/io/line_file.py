"""Files that a service appends lines to. A disk that is full, slow or stuck costs lines, and never the work that they tell of.

Whoever rotates a file renames or removes it: within a second it is opened anew by its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0
# Older files that stay beside one that is rotated: FILE.1 is the newest of them.
KEPT_FILES = 4
# What may wait for the disk. More than a second's lines of the busiest service.
MAX_WAITING_BYTES = 64 << 20
# How long what still waits may take at the end.
CLOSE_S = 5.0


class LineFile:
    """Appends whole lines. `lost` counts those that the disk did not take. Processes may share a file."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: a file that a line would make larger is renamed, and KEPT_FILES of these stay; 0: never. Raises OSError
        for a file that cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._losing = 0
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._look()

    def append(self, line: bytes) -> None:
        """Append one line, or lose it."""
        line += b"\n"
        try:
            if time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
                self._follow_rotation()
            if self._rotatable and self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            written = self._file.write(line)
            if written < len(line):
                self._take_back(written)
                raise OSError("only a part of it was taken")
        except OSError as error:
            self.lose(str(error))
            return
        self._size += written
        if self._losing:
            log.warning("lines are kept again", path=str(self._path), lost=self._losing)
            self._losing = 0

    def lose(self, reason: str) -> None:
        """Count a line that is lost; the first of several is told."""
        self.lost += 1
        self._losing += 1
        if self._losing == 1:
            log.error("lines are lost", path=str(self._path), reason=reason)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _look(self) -> None:
        """What the open file is: another process may append to it, too."""
        self._looked_at = time.monotonic()
        own = os.fstat(self._file.fileno())
        self._size, self._rotatable = own.st_size, self._max_bytes > 0 and stat.S_ISREG(own.st_mode)

    def _is_named(self) -> bool:
        """Whether the file's name still means the file that is open. Raises OSError."""
        own = os.fstat(self._file.fileno())
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def _follow_rotation(self) -> None:
        """Open the file anew where its name means another one, or none. Raises OSError, and then the old one is kept."""
        self._looked_at = time.monotonic()
        if not self._is_named():
            opened = self._path.open("ab", buffering=0)
            self._file.close()
            self._file = opened
        self._look()

    def _rotate(self) -> None:
        """Rename the file, and those renamed before, unless another process has done so. Raises OSError."""
        # Processes that share the file have it open: one of them renames at a time, and the next one sees it. A lock ends with
        # its file.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._is_named():
            names = [
                self._path,
                *(self._path.with_name(f"{self._path.name}.{number + 1}") for number in range(KEPT_FILES)),
            ]
            for older, name in zip(names[:0:-1], names[-2::-1], strict=True):
                with contextlib.suppress(FileNotFoundError):
                    name.rename(older)
        self._follow_rotation()

    def _take_back(self, written: int) -> None:
        """Remove a torn line, which would spoil the next one, too, unless another process has written behind it."""
        fd = self._file.fileno()
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - written)


class LineWriter:
    """Appends lines to a LineFile by a thread of its own, which makes them, too: the caller's event loop waits for no disk. Lines
    that wait hold MAX_WAITING_BYTES together; those beyond are lost."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """As LineFile."""
        self._file = LineFile(path, max_bytes)
        self._waiting: queue.SimpleQueue[tuple[Callable[[], bytes], int] | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # one thread writes each
        self._refused = 0
        self._refusing = False
        self._closed = False
        # Begun with the first line, after a service has forked.
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Lines that were not written, or not in full."""
        return self._file.lost + self._refused

    def append(self, make: Callable[[], bytes], size: int) -> None:
        """Write the line that `make` gives, which must not change meanwhile. `size`: about the bytes that it holds until then."""
        if self._closed or self._put_bytes - self._taken_bytes + size > MAX_WAITING_BYTES:
            self._refused += 1
            if not self._refusing:
                self._refusing = True
                log.error("lines are lost", reason="closed" if self._closed else "too many wait for the disk")
            return
        self._refusing = False
        self._put_bytes += size
        self._waiting.put((make, size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most, and close the file."""
        self._closed = True
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("lines are lost", reason="the disk is stuck")
                return
            self._thread = None
        self._file.close()

    def _write(self) -> None:
        while (taken := self._waiting.get()) is not None:
            make, size = taken
            try:
                line = make()
            except Exception as error:  # one line that cannot be made must not cost all that follow
                self._file.lose(repr(error))
            else:
                self._file.append(line)
            self._taken_bytes += size
            del taken, make  # what the line was made of is not kept until the next one


class LostLines(Collector):
    """Tells Prometheus how many lines of a service's file are `lost`."""

    def __init__(self, service: str, lost: Callable[[], int]) -> None:
        self._name = f"pointsman_{service}_lost_lines"
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        """The counter."""
        yield CounterMetricFamily(self._name, "Lines of its file that the disk did not take", self._lost())
