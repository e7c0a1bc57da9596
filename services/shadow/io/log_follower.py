"""Follows a file that another process appends to, line by line and across rotations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

# Interval between two reads of a file without new lines, s.
LOOK_S = 0.2
# Maximum number of bytes of one read.
PIECE = 1 << 20
# Maximum length of a line without its end, bytes.
MAX_LINE = 64 << 20


async def follow(path: Path) -> AsyncIterator[bytes]:
    """Yield the lines that are written to `path` from now on, until cancelled.

    A file that is replaced is read to its end, and the new file from its beginning. A truncated file, or one that does not exist
    yet, is read from its beginning, too. Of a line of more than MAX_LINE bytes the first MAX_LINE or more are dropped.
    """
    file = _open(path)
    if file is not None:
        file.seek(0, 2)
    rest = b""
    try:
        while True:
            piece = file.read(PIECE) if file is not None else b""
            if piece:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > MAX_LINE:
                    rest = b""
                continue
            if file is None or _replaced(file, path):
                if file is not None:
                    file.close()
                file, rest = _open(path), b""
                if file is not None:
                    continue
            await asyncio.sleep(LOOK_S)
    finally:
        if file is not None:
            file.close()


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _replaced(file: IO[bytes], path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file.fileno())
    return (there.st_ino, there.st_dev) != (own.st_ino, own.st_dev) or there.st_size < file.tell()
