"""Whether a folder can be written, before work is done whose results go there."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_writable(folder: Path) -> None:
    """Make a folder, if it is not there, and write a file in it, which is gone at the end. Raises OSError if either fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
