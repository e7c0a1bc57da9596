"""Writes a log of one JSON line for each attempt (the breakdown log) or request (the usage log)."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pointsman.common.io.line_file import LineWriter

Line = TypeVar("Line", bound=msgspec.Struct)

# About what a line that waits holds.
_LINE_BYTES = 2_000


class LineLog(Generic[Line]):
    """Appends lines to a file, which may be renamed meanwhile; without one it does nothing."""

    def __init__(self, file: Path | None, max_bytes: int = 0) -> None:
        """`max_bytes`: the file is rotated before it is larger; 0: never. Raises OSError for a file that cannot be opened."""
        self._file = LineWriter(file, max_bytes) if file is not None else None
        # One offset for all lines: a clock that is set while requests run does not make their parts negative.
        self._offset = time.time() - time.monotonic()

    @property
    def lost(self) -> int:
        """Lines that the disk did not take."""
        return self._file.lost if self._file is not None else 0

    @property
    def on(self) -> bool:
        """Whether anybody reads it."""
        return self._file is not None

    def unix(self, monotonic: float) -> float:
        """A moment on the monotonic clock as unix s."""
        return round(self._offset + monotonic, 6)

    def write(self, line: Line) -> None:
        """Append one, which does not change any more, unless the disk is full."""
        if self._file is not None:
            self._file.append(partial(msgspec.json.encode, line), _LINE_BYTES)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
