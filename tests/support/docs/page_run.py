"""Runs the commands of a page of the documentation, as written, with the tests' own `pointsman`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.process import Process
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

WITHIN_S = 180.0


def run_page(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a shell script in `folder` with these variables and no others; return its output when it has ended."""
    file = folder / "page.sh"
    file.write_text(f"set -u\n{script}")
    (folder / "bin").mkdir()
    shim = folder / "bin/pointsman"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m pointsman_cli.main "$@"\n')
    shim.chmod(0o755)
    given = {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **environment}
    process = Process("page", ["bash", str(file)], folder / "log", env=given, cwd=folder)
    process.start()
    try:
        until(lambda: not process.alive, within_s=WITHIN_S, what="the page's commands are through")
    finally:
        process.kill()
    return process.log.read_text()
