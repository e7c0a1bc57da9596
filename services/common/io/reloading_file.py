"""Files that are written anew while a process runs: certificates, keys, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")
Stamps = tuple[tuple[int, int, int], ...]

log = structlog.get_logger()


def stamps(files: Sequence[Path]) -> Stamps:
    """Changes when a file is written, replaced, or its link points elsewhere (as a mounted secret's does). Raises OSError."""
    found = [file.stat() for file in files]
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


class ReloadingFile(Generic[T]):
    """What `make` made of `files`, made again when they have changed. Files that cannot be used then change nothing, and are
    said once. Raises what `make` raises when they cannot be used at first: OSError and ValueError."""

    def __init__(self, files: Sequence[Path], make: Callable[[], T]) -> None:
        self._files = files
        self._make = make
        self._seen = stamps(files)
        self.value = make()

    def reload_if_changed(self) -> T | None:
        """What is new; None when nothing is. May be called by any thread."""
        try:
            found = stamps(self._files)
        except OSError:
            found = ()  # one is gone, which `make` says better; callers ask often
        if found == self._seen:
            return None
        self._seen = found
        try:
            self.value = self._make()
        except (OSError, ValueError) as error:
            log.error("renewed files cannot be used; what was made of those before stays", error=str(error))
            return None
        log.info("files read again", files=[str(file) for file in self._files])
        return self.value
