"""A log file with one JSON line for each attempt (the breakdown file) or request (the usage file)."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pointsman_common.io.line_file import LineWriter

Line = TypeVar("Line", bound=msgspec.Struct)

# Approximate memory of a line that waits to be written, bytes.
_LINE_BYTES = 2_000


class LineLog(Generic[Line]):
    """Appends lines to a file, which may be renamed meanwhile. Without a file it does nothing."""

    def __init__(self, file: Path | None, max_bytes: int = 0) -> None:
        """`max_bytes`: maximum size before the file is rotated (0: never). Raises OSError if the file cannot be opened."""
        self._file = LineWriter(file, max_bytes) if file is not None else None
        # All lines use one offset, so that setting the clock during a request causes no negative durations.
        self._offset = time.time() - time.monotonic()

    @property
    def lost(self) -> int:
        """Number of lines that could not be written."""
        return self._file.lost if self._file is not None else 0

    @property
    def on(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def unix(self, monotonic: float) -> float:
        """Return a time of the monotonic clock as unix s."""
        return round(self._offset + monotonic, 6)

    def write(self, line: Line) -> None:
        """Append a line, which must not change afterwards. It is lost if the disk is full."""
        if self._file is not None:
            self._file.append(partial(msgspec.json.encode, line), _LINE_BYTES)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
