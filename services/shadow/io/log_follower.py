"""Follows a file that another process appends to, line by line, over its rotations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

LOOK_S = 0.2
PIECE = 1 << 20
MAX_LINE = 64 << 20


async def follow(path: Path) -> AsyncIterator[bytes]:
    """Lines written to `path` from now on. A file that is replaced is read to its end and the new one from its beginning, as is
    one that was cut, or that is not there yet. A line of more than MAX_LINE bytes is left out."""
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
