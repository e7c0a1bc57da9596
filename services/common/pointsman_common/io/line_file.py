"""Files that a service appends lines to. A disk that is full, slow or stuck loses lines, but never blocks or fails the service.

Another program may rotate a file by a rename or a removal: the service opens the name again within a second.

The handlers of `logging` do not give this. A QueueHandler's queue is bounded by records, not bytes, and nothing counts what its
listener loses. A RotatingFileHandler follows no other program's rotation, lets each of the processes that share a file rename it
(the second one renames the new file), and lets the file grow after a refused rename. A WatchedFileHandler never rotates. All of
them leave the written part of a line on a full disk, so that the next line continues it. Each line would also be formatted in the
event loop, instead of in the thread.
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

# Minimum interval between two checks whether another program has rotated the file, s.
LOOK_AGAIN_S = 1.0
# Number of rotated files that are kept; FILE.1 is the newest.
KEPT_FILES = 4
# Maximum size of all lines that wait for the disk, bytes. More than the busiest service writes in a second.
MAX_WAITING_BYTES = 64 << 20
# Maximum time that close() waits until the waiting lines are written, s.
CLOSE_S = 5.0


class LineFile:
    """Appends whole lines to a file. `lost` counts the lines that could not be written. Several processes may share a file."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: maximum size of the file; it is rotated before a line that would exceed it (0: never). KEPT_FILES rotated
        files are kept. Raises OSError if the file cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._losing = 0
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._look()

    def append(self, line: bytes) -> None:
        """Append one line, or count it as lost."""
        line += b"\n"
        try:
            if time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
                self._follow_rotation()
            if self._rotatable and self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            written = self._file.write(line)
            if written < len(line):
                self._take_back(written)
                raise OSError("only a part of the line was written")
        except OSError as error:
            self.lose(str(error))
            return
        self._size += written
        if self._losing:
            log.warning("lines are written again", path=str(self._path), lost=self._losing)
            self._losing = 0

    def lose(self, reason: str) -> None:
        """Count a lost line. Log the first of several in a row."""
        self.lost += 1
        self._losing += 1
        if self._losing == 1:
            log.error("lines are lost", path=str(self._path), reason=reason)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _look(self) -> None:
        """Read the open file's size and type. Another process may have appended to the file."""
        self._looked_at = time.monotonic()
        own = os.fstat(self._file.fileno())
        self._size, self._rotatable = own.st_size, self._max_bytes > 0 and stat.S_ISREG(own.st_mode)

    def _is_named(self) -> bool:
        """Return whether the path still refers to the open file. Raises OSError."""
        own = os.fstat(self._file.fileno())
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def _follow_rotation(self) -> None:
        """Open the path again if it refers to another file or to none. Raises OSError; the old file then stays open."""
        self._looked_at = time.monotonic()
        if not self._is_named():
            opened = self._path.open("ab", buffering=0)
            self._file.close()
            self._file = opened
        self._look()

    def _rotate(self) -> None:
        """Rename the file and the earlier rotated files, unless another process has done so. Raises OSError."""
        # The lock lets one of the processes that share the file rename at a time; the next one then sees the new file. Closing
        # the file releases the lock.
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
        """Remove a partly written line, so that the next line does not continue it. Keep it if another process has written
        after it."""
        fd = self._file.fileno()
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - written)


class LineWriter:
    """Formats lines and appends them to a LineFile in a thread, so that the caller's event loop does not wait for the disk.

    Waiting lines hold up to MAX_WAITING_BYTES together; further lines are lost.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """As LineFile."""
        self._file = LineFile(path, max_bytes)
        self._waiting: queue.SimpleQueue[tuple[Callable[[], bytes], int] | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # each is written by one thread only
        self._refused = 0
        self._refusing = False
        self._closed = False
        # Started with the first line, so after a service has forked.
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Number of lines that were not written, or not in full."""
        return self._file.lost + self._refused

    def append(self, make: Callable[[], bytes], size: int) -> None:
        """Queue the line that `make` returns when the thread calls it. The data that `make` reads must not change until then.
        `size`: approximate memory that `make` holds until then, bytes."""
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
        """Write the waiting lines, for CLOSE_S at most, and close the file."""
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
            except Exception as error:  # one line that cannot be formatted must not end the thread
                self._file.lose(repr(error))
            else:
                self._file.append(line)
            self._taken_bytes += size
            del taken, make  # free the line's data now, not when the next line arrives


class LostLines(Collector):
    """Prometheus collector of the number of lines that a service has lost."""

    def __init__(self, service: str, lost: Callable[[], int]) -> None:
        self._name = f"pointsman_{service}_lost_lines"
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        """The counter."""
        yield CounterMetricFamily(self._name, "Lines that could not be written to the service's files", self._lost())
