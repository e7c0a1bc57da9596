"""What `pointsman up` prints on a terminal: one screen, and nothing more while all is well."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.support.mixed_traffic import MixedTraffic
from tests.support.processes.pointsman import flag_words, pointsman_command, pointsman_process
from tests.support.processes.process import free_port
from tests.support.processes.terminal import OnTerminal
from tests.support.waiting import until

# How long clients send requests, and how many lines may be printed meanwhile: 10 in 5 minutes are a nuisance already.
TRAFFIC_S, MOST_LINES = 20.0, 0
CLIENTS = 6
ANSWERED = ("stream", "whole", "session", "tools")
REFUSED = {"no json": 400, "no model": 404, "too long": 400, "no path": 404}


def traffic_at_a_terminal(folder: Path, seconds: float) -> tuple[list[str], list[str], Counter[tuple[str, int]]]:
    """Run `up` on a terminal with two engines under mixed traffic. Return the lines until it serves, those after that, and the
    requests by kind and status."""
    ports = [free_port(), free_port()]
    engines = [
        pointsman_process(f"engine-{port}", folder, "emulate", "--port", str(port), "--speedup", "10") for port in ports
    ]
    listen = f"127.0.0.1:{free_port()}"
    nowhere = dict.fromkeys(("router-listen", "router-metrics", "agent-metrics", "console"), "127.0.0.1:0")
    flags = {
        "engine": [f"http://127.0.0.1:{port}" for port in ports],
        "listen": listen,
        "state-dir": folder / "state",
        **nowhere,
    }
    for engine in engines:
        engine.start()
    try:
        for engine in engines:
            until(lambda log=engine.log: "emulated engine" in log.read_text(), within_s=60.0, what="an engine")  # type: ignore[misc]
        up = OnTerminal(pointsman_command("up", *flag_words(flags)), folder)
        try:
            until(lambda: any(line.startswith("policy") for line in up.lines), within_s=60.0, what="the screen")
            until(lambda: "2 of 2 ready" in "\n".join(up.lines), within_s=60.0, what="both engines")
            screen = up.lines
            traffic = MixedTraffic(f"http://{listen}")
            asyncio.run(traffic.run(seconds, CLIENTS))
            after = up.lines[len(screen) :]
            assert up.process.poll() is None
        finally:
            up.stop()
        return screen, after, traffic.counts
    finally:
        for engine in engines:
            engine.stop(within_s=40)


def test_up_is_quiet_while_clients_send_leave_and_are_refused(tmp_path: Path) -> None:
    screen, after, counts = traffic_at_a_terminal(tmp_path, TRAFFIC_S)
    assert len(screen) <= 10, screen
    assert len(after) <= MOST_LINES, after
    for kind in ANSWERED:
        assert counts[kind, 200] > 0
    for kind, status in REFUSED.items():
        assert counts[kind, status] > 0, counts
    assert counts["left", 0] > 0
    kinds = {*ANSWERED, *REFUSED, "left"}
    assert all(kind in kinds for kind, _ in counts), counts
