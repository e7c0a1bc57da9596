"""Trace files: reading any known format, plain or gzip, and writing the pointsman format."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import msgspec

from pointsman_lab.workload.trace_formats import READERS, LineError, format_of
from pointsman_lab.workload.traces import TraceError, TraceRequest

AUTO = "auto"


def read_trace(path: Path, trace_format: str = AUTO) -> Iterator[TraceRequest]:
    """Yield requests in the file's order. Raises TraceError while reading; the message names file, line and field.

    `trace_format` is a key of pointsman_lab.workload.trace_formats.READERS. "auto" detects it from the first line's fields.
    """
    if trace_format not in (AUTO, *READERS):
        raise TraceError(f"{trace_format}: unknown trace format; known formats: {', '.join((AUTO, *READERS))}")
    try:
        # A caller that keeps the error of a bad line also keeps this frame, so the file is closed explicitly.
        with closing(lines_of(path)) as lines:
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{path}: the trace has no requests")
            name = format_of(*first) if trace_format == AUTO else trace_format
            yield from READERS[name](chain([first], lines))
    except LineError as error:
        raise TraceError(f"{path}:{error.number}: {error}") from error


def load_trace(path: Path, trace_format: str = AUTO) -> list[TraceRequest]:
    """Return the whole trace, ordered by time. Raises as read_trace does."""
    return sorted(read_trace(path, trace_format), key=lambda request: request.timestamp_ms)


def save_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests in the pointsman format as they arrive (gzip if the name ends with .gz); return how many there were.

    The same requests give the same bytes. Raises TraceError if the file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as raw:
            # The header has neither a time nor the file's name, so that equal requests give equal bytes.
            file = gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw
            with file:
                for written, request in enumerate(requests, 1):  # noqa: B007
                    file.write(encoder.encode(request) + b"\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error
    return written


def lines_of(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that are not blank, with their numbers from 1. Raises TraceError while reading."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if stripped := line.strip():
                    yield number, stripped
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
