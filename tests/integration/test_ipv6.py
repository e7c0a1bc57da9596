"""Fleets at IPv6 addresses alone, and of both families: `up`, its engines with KV events, commands, pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.http_request import ask
from tests.support.processes.pointsman import flag_words, pointsman_command, pointsman_process
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_command
from tests.support.repository import REPOSITORY
from tests.support.router import running
from tests.support.waiting import eventually, until

START_S = 120.0
PROMPT = "set the points for the night train to the north " * 20


@contextmanager
def fleet(folder: Path, engines: list[str], listen: str, processes: int) -> Iterator[dict[str, int]]:
    """Run emulated engines at the hosts `engines`, and `up` in front of them, which listens at the host `listen`. Yield the ports
    by name."""
    names = ("listen", "picker", "router_listen", "router_metrics", "console", "agent_metrics")
    ports = {name: free_port() for name in names}
    parts = {
        host: pointsman_process(f"engine{number}", folder, "emulate", "--host", host, "--port", str(free_port()),
                                "--speedup", "20", cwd=REPOSITORY)
        for number, host in enumerate(engines)
    }  # fmt: skip
    log = folder / "plane.log"
    try:
        for part in parts.values():
            part.start()
        for part in parts.values():
            part.wait_ready(partial(_has_printed, part.log), within_s=START_S)
        urls = [_printed(part.log) for part in parts.values()]
        flags = {name: f"{listen}:{port}" for name, port in ports.items()}
        given = {**flags, "engine": urls, "state_dir": folder / "agent"}
        # Off the loopback interface a router needs tokens, or this.
        env = {"POINTSMAN_ROUTER_INSECURE": "1", "POINTSMAN_GATEWAY_PROCESSES": str(processes)}
        parts["plane"] = plane = pointsman_process("plane", folder, "up", *flag_words(given), env=env, cwd=REPOSITORY)
        plane.start()
        plane.wait_ready(lambda: "OpenAI API" in log.read_text(), within_s=START_S)
        yield ports
    finally:
        for part in reversed(parts.values()):
            if part.alive:
                part.stop(within_s=40)
    assert "Traceback (most recent" not in log.read_text(), parts["plane"].tail()


def _printed(log: Path) -> str:
    found = re.search(r"emulated engine (http\S+)", log.read_text())
    return found[1] if found else ""


def _has_printed(log: Path) -> bool:
    return bool(_printed(log))


def run(*words: str) -> str:
    """Return what a command prints."""
    ended = subprocess.run(pointsman_command(*words), capture_output=True, text=True, timeout=60, env=os.environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("engines", "listen", "hosts", "processes"),
    [
        pytest.param(["::1"], "[::1]", ["[::1]"], 1, id="IPv6 alone"),
        pytest.param(["::1"], "[::1]", ["[::1]"], 2, id="IPv6 alone, gateway processes"),
        pytest.param(["127.0.0.1", "::1"], "[::]", ["127.0.0.1", "[::1]"], 1, id="both families"),
    ],
)
def test_a_fleet_serves_and_is_examined(
    tmp_path: Path, engines: list[str], listen: str, hosts: list[str], processes: int
) -> None:
    with fleet(tmp_path, engines, listen, processes) as ports:
        for host in hosts:
            gateway, router = f"http://{host}:{ports['listen']}", f"{host}:{ports['router_listen']}"
            until(partial(_exact, gateway), within_s=60, what="exact tokens")
            # The gateway serves as soon as one engine does.
            until(partial(_all_known, router, len(engines)), within_s=60, what="all engines")
            model = ask(f"{gateway}/v1/models").json()["data"][0]["id"]
            for _ in range(2 * len(engines)):
                asked = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
                assert ask(f"{gateway}/v1/chat/completions", asked).json()["choices"], "an answer"
            for page, path in (("router_metrics", "/metrics"), ("agent_metrics", "/metrics"), ("console", "/")):
                assert ask(f"http://{host}:{ports[page]}{path}").status == 200
            listed = _instances(router)
            assert all(instance["instance"]["prefix_mode"] == "PREFIX_MODE_EXACT" for instance in listed)
            agent = f"http://{host}:{ports['agent_metrics']}"
            found = run("doctor", "--router", router, "--gateway", gateway, "--agent", agent)
            assert "FAIL" not in found
            assert "warn" not in found
        # The keys come by the engines' KV events.
        until(lambda: any(int(instance.get("keys", 0)) for instance in _instances(router)), within_s=60, what="keys")


async def test_a_router_keeps_its_state_in_a_redis_at_an_ipv6_address(tmp_path: Path) -> None:
    port = free_port()
    redis = Process("redis", redis_command(port, tmp_path, "--bind", "::1"), tmp_path / "redis.log")
    redis.start()
    try:
        url = f"redis://[::1]:{port}/0"
        async with running(redis_url=url, listen="[::1]:0") as (server, client):
            assert server.router.store.address == f"[::1]:{server.port}"
            await eventually(lambda: server.router.ready, "that it has read Redis")
            listed = await client.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=10.0)
            assert (listed.this_replica.store, listed.this_replica.degraded) == ("redis", False)
    finally:
        redis.kill()


def _exact(gateway: str) -> bool:
    return bool(ask(f"{gateway}/health").json()["status"] == "ok")


def _all_known(router: str, count: int) -> bool:
    return len(_instances(router)) == count


def _instances(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("instances", "--router", router, "--json"))["instances"]
    return found
