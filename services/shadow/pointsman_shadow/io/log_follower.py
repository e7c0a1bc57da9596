"""Follows a file that another process appends to, line by line and across rotations."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

# Interval between two reads of a file without new lines, s.
LOOK_S = 0.2
# Maximum time for which a replaced file is read while lines are still added to it, s.
REPLACED_S = 5.0
# Maximum number of bytes of one read.
PIECE = 1 << 20
# Maximum length of a line without its end, bytes.
MAX_LINE = 64 << 20


async def follow(path: Path) -> AsyncIterator[bytes]:
    """Yield the lines that are written to `path` from now on, until cancelled.

    A file that is replaced is read until nothing is added to it for LOOK_S, because its writer may open the new one later. It is
    read for REPLACED_S at most, because another writer may keep it, such as a proxy that drains beside its successor. Then the
    new file is read from its beginning, as are a truncated file and one that does not exist yet. Lines of more than MAX_LINE
    bytes are left out.
    """
    file = _open(path)
    if file is not None:
        file.seek(0, 2)
    lines = _Lines()
    replaced, replaced_at = False, math.inf  # before the last read; when that was seen first
    try:
        while True:
            piece = file.read(PIECE) if file is not None else b""
            if piece:
                for line in lines.add(piece):
                    yield line
                replaced = False
                continue
            if file is None or replaced or time.monotonic() - replaced_at >= REPLACED_S or _truncated(file):
                if file is not None:
                    file.close()
                file, lines, replaced, replaced_at = _open(path), _Lines(), False, math.inf
                if file is not None:
                    continue
            replaced = file is not None and _replaced(file, path)
            if replaced:
                replaced_at = min(replaced_at, time.monotonic())
            await asyncio.sleep(LOOK_S)
    finally:
        if file is not None:
            file.close()


class _Lines:
    """Splits pieces of a file into lines, without those of more than MAX_LINE bytes."""

    def __init__(self) -> None:
        # The pieces of the line that has not ended yet, and their size; the size alone if the line is too long.
        self._rest: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that end in `piece`. Mutates."""
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._append(part)
            if self._size <= MAX_LINE:
                yield b"".join(self._rest)
            self._rest, self._size = [], 0
        self._append(rest)

    def _append(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= MAX_LINE:
            self._rest.append(part)
        else:
            self._rest = []


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _truncated(file: IO[bytes]) -> bool:
    return os.fstat(file.fileno()).st_size < file.tell()


def _replaced(file: IO[bytes], path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file.fileno())
    return (there.st_ino, there.st_dev) != (own.st_ino, own.st_dev)
