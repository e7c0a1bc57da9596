"""Files that may change while a process runs: certificates, keys, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")
Stamps = tuple[tuple[int, int, int], ...]

log = structlog.get_logger()


def stamps(files: Sequence[Path]) -> Stamps:
    """Return a value that changes when a file is written or replaced, or its link is moved (as in a mounted secret). Raises
    OSError."""
    found = [file.stat() for file in files]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


class ReloadingFile(Generic[T]):
    """The result of `make`, which reads `files`; `make` is called again after a change of the files.

    Changed files that cannot be used leave the value as it is and are logged once. If the files cannot be used at first, the
    constructor raises the errors of `make`: OSError and ValueError.
    """

    def __init__(self, files: Sequence[Path], make: Callable[[], T]) -> None:
        self._files = files
        self._make = make
        self._seen = stamps(files)
        self.value = make()

    def reload_if_changed(self) -> T | None:
        """Read changed files and return the new value; None if the value did not change. May be called from any thread."""
        try:
            found = stamps(self._files)
        except OSError:
            found = ()  # a file is missing: `make` raises a better error, and this value logs it only once
        if found == self._seen:
            return None
        self._seen = found
        try:
            self.value = self._make()
        except (OSError, ValueError) as error:
            log.error("changed files cannot be used; the previous content stays in use", error=str(error))
            return None
        log.info("changed files read", files=[str(file) for file in self._files])
        return self.value
