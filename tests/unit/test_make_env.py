"""What `make env` says of a Python that is too old."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.repository import REPOSITORY


def test_a_python_that_is_too_old_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    command = ["make", "env", "MIN_PYTHON=9.9", f"PYTHON={sys.executable}"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    said = (
        f"Pointsman needs Python 9.9 or newer, and {sys.executable} is {own}: name another one, as in PYTHON=python9.9"
    )
    assert refused.stderr.splitlines()[0] == said
    assert refused.returncode == 2
    assert not (tmp_path / ".venv").exists()
