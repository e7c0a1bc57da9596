"""A file that a service appends lines to. A disk that is full costs lines, and never the work that they tell of.

Whoever rotates the file renames or removes it: within a second it is opened anew by its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0


class LineFile:
    """Appends whole lines. `lost` counts those that the disk did not take."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for a file that cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._losing = 0
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._looked_at = time.monotonic()

    def append(self, line: bytes) -> None:
        """Append one line, or lose it."""
        line += b"\n"
        try:
            if time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
                self._follow_rotation()
            written = self._file.write(line)
            if written < len(line):
                self._take_back(written)
                raise OSError("only a part of it was taken")
        except OSError as error:
            self.lost += 1
            self._losing += 1
            if self._losing == 1:
                log.error("lines are lost", path=str(self._path), reason=str(error))
            return
        if self._losing:
            log.warning("lines are kept again", path=str(self._path), lost=self._losing)
            self._losing = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _follow_rotation(self) -> None:
        """Open the file anew where its name means another one, or none. Raises OSError, and then the old one is kept."""
        self._looked_at = time.monotonic()
        own = os.fstat(self._file.fileno())
        try:
            named = self._path.stat()
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            opened = self._path.open("ab", buffering=0)
            self._file.close()
            self._file = opened

    def _take_back(self, written: int) -> None:
        """Remove a torn line, which would spoil the next one, too, unless another process has written behind it."""
        fd = self._file.fileno()
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - written)


class LostLines(Collector):
    """Tells Prometheus how many lines of a service's file are `lost`."""

    def __init__(self, service: str, lost: Callable[[], int]) -> None:
        self._name = f"pointsman_{service}_lost_lines"
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        """The counter."""
        yield CounterMetricFamily(self._name, "Lines of its file that the disk did not take", self._lost())
