"""Writes the usage log: one JSON line for each request of a tenant, for billing."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from pointsman.common.io.line_file import LineFile
from pointsman.gateway.core.request_usage import UsageLine


class UsageLog:
    """Appends lines to a file, which may be renamed meanwhile; without one it does nothing."""

    def __init__(self, file: Path | None) -> None:
        """Raises OSError for a file that cannot be opened."""
        self._file = LineFile(file) if file is not None else None
        # One offset for all lines, as in the breakdown log.
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
        return round(self._offset + monotonic, 3)

    def write(self, line: UsageLine) -> None:
        """Append one, unless the disk is full."""
        if self._file is not None:
            self._file.append(msgspec.json.encode(line))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
