"""Every command that listens at an address which is taken says so in one sentence, with what holds the address."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import free_port

NOWHERE = "127.0.0.1:1"
ENGINE = f"http://{NOWHERE}"
AGENT = ("agent", "--engines", ENGINE, "--routers", NOWHERE)
GATEWAY = ("gateway", "--routers", NOWHERE)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("router", "--metrics-listen", ""), "--listen"),
        (("router", "--listen", "FREE"), "--metrics-listen"),
        (("router", "--listen", "FREE", "--metrics-listen", ""), "--console-listen"),
        (GATEWAY, "--listen"),
        ((*GATEWAY, "--processes", "2"), "--listen"),
        ((*GATEWAY, "--listen", "FREE"), "--ext-proc-listen"),
        (AGENT, "--metrics-listen"),
        ((*AGENT, "--metrics-listen", ""), "--step-loads-listen"),
        (("emulate",), "--port"),
        (("up", "--engine", ENGINE), "--listen"),
        (("up", "--engine", ENGINE, "--listen", "FREE"), "--router-listen"),
    ],
)
def test_a_used_port_is_one_sentence(command: tuple[str, ...], flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = {"--port": str(port), "--step-loads-listen": f"tcp://127.0.0.1:{port}"}.get(flag, f"127.0.0.1:{port}")
        words = [f"127.0.0.1:{free_port()}" if word == "FREE" else word for word in command]
        words += ["--log-level", "error"]
        if command[0] == "up":
            words += [word for name in ("router-metrics", "agent-metrics", "console") for word in (f"--{name}", "")]
        ended = subprocess.run(
            pointsman_command(*words, flag, value), capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
    shown = value if flag != "--port" else f"127.0.0.1:{port}"
    assert ended.stderr == f"pointsman {command[0]}: {flag} {shown}: another process listens there\n"
    assert ended.returncode == 1
