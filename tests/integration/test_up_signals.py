"""`pointsman up` ends all that it started, however often it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import free_port
from tests.support.waiting import until


@pytest.mark.parametrize(("gateway_processes", "services"), [(1, 2), (2, 3)])
def test_signals_in_a_row_leave_no_child(tmp_path: Path, gateway_processes: int, services: int) -> None:
    """`timeout` sends its signal to its child and at once to the process group, so that the child receives it twice."""
    gateway, *others = (f"127.0.0.1:{free_port()}" for _ in range(4))
    names = ("--router-listen", "--router-metrics", "--agent-metrics")
    flags = [word for pair in zip(names, others, strict=True) for word in pair]
    engine = f"http://127.0.0.1:{free_port()}"
    log_file = tmp_path / "log"
    with log_file.open("wb") as log:
        up = subprocess.Popen(
            pointsman_command(
                "up", "--engine", engine, "--listen", gateway, "--console", "", "--state-dir", str(tmp_path), *flags
            ),
            stdout=log,
            stderr=log,
            env=os.environ | {"POINTSMAN_GATEWAY_PROCESSES": str(gateway_processes)},
        )
    children: list[str] = []
    try:
        until(lambda: "the engine does not answer" in log_file.read_text(), within_s=60.0, what="the agent runs")
        children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    finally:
        for _ in range(5):
            up.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        up.wait(60.0)
    assert len(children) == services
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
