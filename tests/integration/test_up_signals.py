"""Commands that start others end them, however they end themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from pointsman_cli.up import SAME_SIGNAL_S
from pointsman_common.core.addresses import parse_address
from pointsman_common.io.listening import bound_socket
from tests.support.processes.pointsman import (
    plane_process,
    pointsman_command,
    pointsman_process,
    wait_until_it_serves,
)
from tests.support.processes.process import alive, free_port
from tests.support.waiting import until


def start_up(folder: Path, gateway_processes: int) -> tuple[subprocess.Popen[bytes], list[str]]:
    """Start `pointsman up` in front of an engine that does not answer; return it, and its addresses, when its agent runs."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    names = ("--listen", "--router-listen", "--router-metrics", "--agent-metrics")
    flags = [word for pair in zip(names, addresses, strict=True) for word in pair]
    engine = f"http://127.0.0.1:{free_port()}"
    log_file = folder / "log"
    with log_file.open("wb") as log:
        up = subprocess.Popen(
            pointsman_command("up", "--engine", engine, "--console", "", "--state-dir", str(folder), *flags),
            stdout=log,
            stderr=log,
            env=os.environ | {"POINTSMAN_GATEWAY_PROCESSES": str(gateway_processes)},
        )
    try:
        until(lambda: "the engine does not answer" in log_file.read_text(), within_s=60.0, what="the agent runs")
    except BaseException:
        up.terminate()
        up.wait(60.0)
        raise
    return up, addresses


def descendants(pid: int) -> set[int]:
    """Return the ids of a process's children, of theirs, and so on."""
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return children.union(*map(descendants, children))


@pytest.mark.parametrize(("gateway_processes", "services"), [(1, 2), (2, 3)])
def test_signals_in_a_row_leave_no_child(tmp_path: Path, gateway_processes: int, services: int) -> None:
    """`timeout` sends its signal to its child and at once to the process group, so that the child receives it twice."""
    up, _ = start_up(tmp_path, gateway_processes)
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    for _ in range(5):
        up.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    up.wait(60.0)
    assert len(children) == services
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("gateway_processes", [1, 2])
def test_what_a_killed_up_has_started_ends_and_leaves_the_addresses(tmp_path: Path, gateway_processes: int) -> None:
    up, addresses = start_up(tmp_path, gateway_processes)
    if gateway_processes > 1:
        until(lambda: len(descendants(up.pid)) >= 3 + gateway_processes, within_s=60.0, what="the gateway's processes")
    started = descendants(up.pid)
    up.kill()
    up.wait(60.0)
    until(lambda: not any(map(alive, started)), within_s=30.0, what="the end of all that up has started")
    for address in addresses:
        bound_socket(parse_address(address)).close()


def test_what_a_killed_demo_has_started_ends(tmp_path: Path) -> None:
    names = ("--listen-port", "--router-port", "--console-port")
    ports = [word for name in names for word in (name, str(free_port()))]
    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen(
            pointsman_command("demo", "--engines", "2", *ports),
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
    try:
        # The engines, `up`, and what it starts.
        until(lambda: len(descendants(demo.pid)) >= 5, within_s=120.0, what="the demo's fleet")
        started = descendants(demo.pid)
    finally:
        demo.kill()
        demo.wait(60.0)
    until(lambda: not any(map(alive, started)), within_s=30.0, what="the end of all that the demo has started")


def test_up_prints_its_screen_at_any_port_of_all_interfaces(tmp_path: Path) -> None:
    engine = free_port()
    emulated = pointsman_process("engine", tmp_path, "emulate", "--port", str(engine))
    nowhere = dict.fromkeys(("router-listen", "router-metrics", "agent-metrics", "console"), "127.0.0.1:0")
    flags = {"engine": f"http://127.0.0.1:{engine}", "listen": ":0", "state-dir": tmp_path / "state", **nowhere}
    up = pointsman_process("up", tmp_path, "up", flags=flags)
    emulated.start()
    try:
        up.start()
        until(lambda: "policy " in up.log.read_text(), within_s=60.0, what="the screen")
        [url] = re.findall(r"OpenAI API   (\S+)   \(on all interfaces\)\n", up.log.read_text())
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            assert json.load(answer)["data"]
        assert "engines      1 of 1 ready\n" in up.log.read_text()
        [router] = re.findall(r"--router (\S+)\)\n", up.log.read_text())
        instances = [*pointsman_command("instances", "--router", router)]
        assert f"127.0.0.1:{engine}" in subprocess.run(instances, capture_output=True, text=True, check=True).stdout
    finally:
        up.stop(within_s=40)
        emulated.stop(within_s=40)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_wait_for_open_requests(tmp_path: Path, number: signal.Signals) -> None:
    engine = free_port()
    emulated = pointsman_process("engine", tmp_path, "emulate", "--port", str(engine))
    listen, router = (f"127.0.0.1:{free_port()}" for _ in range(2))
    plane = plane_process(tmp_path, listen, router, [engine])
    emulated.start()
    try:
        plane.start()
        wait_until_it_serves(plane)
        started = descendants(plane.pid)
        body = {
            "model": "pointsman-emulated",
            "prompt": "go on",
            "max_tokens": 100_000,
            "ignore_eos": True,
            "stream": True,
        }
        asked = urllib.request.Request(
            f"http://{listen}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
            os.kill(plane.pid, number)
            until(lambda: "for 1 open request;" in plane.log.read_text(), within_s=20.0, what="what is waited for")
            assert all(map(alive, started))
            time.sleep(1.1 * SAME_SIGNAL_S)  # a signal that comes sooner is the first once more
            os.kill(plane.pid, number)
            # Far less than the 30 s for which open requests may go on.
            until(lambda: not alive(plane.pid), within_s=15.0, what="the end of up")
        until(lambda: not any(map(alive, started)), within_s=10.0, what="the end of all that up has started")
        assert "killing" not in plane.log.read_text()
        assert "warning" not in plane.log.read_text()
    finally:
        plane.stop(within_s=40)
        emulated.stop(within_s=40)
