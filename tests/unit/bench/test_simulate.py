"""The process in which the simulator is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import until

MAIN = """
from bench.simulate import _run
from pointsman_lab.workload.synthetic_trace import generate

_run("figure", generate(200, 60.0, seed=1), 4, "")
"""


def test_it_ends_with_its_parent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def measured() -> bool:
        return any(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.read_text().split())

    try:
        until(measured, within_s=60.0, what="the process starts")
        process.terminate()
        # The output ends when no process has it open any longer.
        process.communicate(timeout=15)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
