"""The parent of a gateway's processes, with children that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from pointsman_gateway.io.processes import parent
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman_gateway.io.settings import GatewaySettings

PROCESSES = 2
MAIN = """
from tests.unit.gateway.test_parent import main
main()
"""


def waiting(settings: GatewaySettings, siblings: SiblingProcesses, ready: Connection) -> None:
    ready.send(None)
    print(f"pid {os.getpid()}", flush=True)
    time.sleep(600)


def main() -> None:
    parent.PAUSE_S = 60.0
    parent.run_processes(GatewaySettings(listen="127.0.0.1:0", processes=PROCESSES), waiting)


def test_a_signal_ends_the_pause_before_processes_are_replaced() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        children = [int(process.stdout.readline().removeprefix("pid ")) for _ in range(PROCESSES)]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        assert "a gateway process died" in process.stdout.readline()
        process.terminate()
        output, _ = process.communicate(timeout=15)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "pid" not in output
    assert process.returncode == 0
