"""Files of traces: reading them in any known format, plain or gzip, and writing our own."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import msgspec

from pointsman.lab.workload.trace_formats import READERS, LineError, format_of
from pointsman.lab.workload.traces import TraceError, TraceRequest

AUTO = "auto"


def read_trace(path: Path, trace_format: str = AUTO) -> Iterator[TraceRequest]:
    """Requests in the file's order, one at a time. Raises TraceError while it reads: file, line and field are in the message.

    `trace_format` is a name of pointsman.lab.workload.trace_formats.READERS; with "auto" the first line's fields tell it.
    """
    if trace_format not in (AUTO, *READERS):
        raise TraceError(f"{trace_format}: no format of traces; known are {', '.join((AUTO, *READERS))}")
    try:
        # Who is told of a bad line may keep the error, and with it this frame.
        with closing(lines_of(path)) as lines:
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{path}: the trace has no requests")
            name = format_of(*first) if trace_format == AUTO else trace_format
            yield from READERS[name](chain([first], lines))
    except LineError as error:
        raise TraceError(f"{path}:{error.number}: {error}") from error


def load_trace(path: Path, trace_format: str = AUTO) -> list[TraceRequest]:
    """The whole trace, ordered by time. Raises as read_trace."""
    return sorted(read_trace(path, trace_format), key=lambda request: request.timestamp_ms)


def save_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace in our own format, as requests come (gzip when the name ends so); how many there were.

    The same requests give the same bytes. Raises TraceError when the file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as raw:
            # Neither the time nor the file's name belongs in the bytes.
            file = gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw
            with file:
                for written, request in enumerate(requests, 1):  # noqa: B007
                    file.write(encoder.encode(request) + b"\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error}") from error
    return written


def lines_of(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """The lines of a file that are not blank, with their numbers, from 1. Raises TraceError while it reads."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if stripped := line.strip():
                    yield number, stripped
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
