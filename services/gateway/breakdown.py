"""Where the time of each attempt went, one JSON object a line, for those who ask for a file of it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from services.common.lines import LineFile
from services.common.moments import Moments


class Breakdown(Moments, kw_only=True, omit_defaults=True):
    """One placed attempt; moments that it did not come to are absent. Token counts are the engine's own. No prompts, no
    sessions."""

    request_id: str
    decision_id: str
    model: str
    stream: bool
    outcome: str
    status: int
    instances: list[str]  # in the order of the plan's steps, as it came
    fallback: str = ""  # what failed of the plan
    error: str = ""
    degraded: bool = False
    input_tokens: int = 0  # as counted for the placement
    predicted_cached_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class BreakdownLog:
    """Appends lines to a file; without one it does nothing."""

    def __init__(self, file: Path | None) -> None:
        """Raises OSError for a file that cannot be opened."""
        self._file = LineFile(file) if file is not None else None
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

    def unix(self, monotonic: float) -> float | None:
        """A moment on the monotonic clock as unix s; None for 0, which stands for never."""
        return round(self._offset + monotonic, 6) if monotonic else None

    def write(self, line: Breakdown) -> None:
        """Append one, unless the disk is full."""
        if self._file is not None:
            self._file.append(msgspec.json.encode(line))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
