"""`pointsman up` before emulated engines, and every question people ask it, as commands."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.engine.processes import Process, free_port

REPOSITORY = Path(__file__).parents[2]
READY_WITHIN_S = 90.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


@dataclass
class Fleet:
    """A running fleet's addresses, and a way to ask it."""

    gateway: str
    router: str
    console: str
    engines: list[str]
    tree: Process

    def ask(self, *arguments: str, status: int = 0) -> str:
        """What a `pointsman` command prints; its exit status must be `status`."""
        ended = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("up")
    engines = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    started = []
    for number, url in enumerate(engines):
        port = url.rpartition(":")[2]
        flags = ["--port", port, "--speedup", "50"]
        started.append(
            Process(f"engine{number}", command("emulate", *flags), folder / f"e{number}.log", cwd=REPOSITORY)
        )
    gateway, router, console = (f"127.0.0.1:{free_port()}" for _ in range(3))
    flags = ["--listen", gateway, "--router-listen", router, "--router-metrics", "", "--agent-metrics", ""]
    flags += ["--console", console]
    flags += [part for url in engines for part in ("--engine", url)]
    up = Process("up", command("up", *flags, "--state-dir", str(folder / "agent")), folder / "up.log", cwd=REPOSITORY)
    started.append(up)
    try:
        for process in started:
            process.start()
        up.wait_ready(lambda: "OpenAI API" in up.log.read_text(), within_s=READY_WITHIN_S)
        yield Fleet(f"http://{gateway}", router, f"http://{console}", engines, up)
    finally:
        for process in reversed(started):
            process.stop(within_s=40)


def test_up_serves_and_its_decisions_can_be_questioned(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.gateway}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "set the points " * 40}],
            max_tokens=4,
            extra_headers={"X-Session-ID": "asked"},
        )
    decision, instance = answer.headers["X-Pointsman-Decision"], answer.headers["X-Pointsman-Instance"]
    listed = json.loads(fleet.ask("instances", "--router", fleet.router, "--json"))
    assert {one["instance"]["url"] for one in listed["instances"]} == set(fleet.engines)
    assert all(one["state"] == "INSTANCE_STATE_READY" for one in listed["instances"])
    assert instance in fleet.ask("instances", "--router", fleet.router)
    assert decision in fleet.ask("decisions", "--router", fleet.router, "--session", "asked")
    explained = fleet.ask("explain", decision, "--router", fleet.router)
    assert "lmetric_fallback" in explained
    assert instance in explained
    assert "the engine said: 0 cached" in explained
    assert "NOT_FOUND" in _failed("explain", "nothing", "--router", fleet.router)


def test_a_prompt_in_a_file_is_explained_and_not_sent(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("where would this go " * 30)
    before = fleet.ask("decisions", "--router", fleet.router, "--json")
    told = json.loads(fleet.ask("explain", "--prompt", str(file), "--gateway", fleet.gateway, "--json"))
    assert told["outcome"] == "DRY_RUN"
    assert len(told["candidates"]) == 2
    assert fleet.ask("decisions", "--router", fleet.router, "--json") == before


def test_the_doctor_finds_a_sound_fleet_sound_and_says_what_is_wrong(fleet: Fleet) -> None:
    flags = ["--router", fleet.router, "--gateway", fleet.gateway]
    healthy = fleet.ask("doctor", *flags)
    assert "FAIL" not in healthy
    assert "warn" not in healthy
    assert "gives the engine's own tokens" in healthy
    nowhere = f"127.0.0.1:{free_port()}"
    sick = fleet.ask(
        "doctor", "--router", nowhere, "--gateway", f"http://{nowhere}", "--redis-url", f"redis://{nowhere}", status=1
    )
    assert sick.count("FAIL") == 3
    assert "routers place degraded without it" in sick


def test_the_console_is_where_up_says(fleet: Fleet) -> None:
    assert f"console      {fleet.console}" in fleet.tree.log.read_text()
    with urllib.request.urlopen(fleet.console, timeout=10) as page:
        assert "<title>Pointsman</title>" in page.read().decode()


def test_draining_by_command(fleet: Fleet) -> None:
    name = fleet.engines[0].removeprefix("http://")
    assert "is DRAINING" in fleet.ask("drain", name, "--router", fleet.router)
    assert "is READY" in fleet.ask("drain", name, "--router", fleet.router, "--resume")


def test_up_ends_with_the_reason_when_a_part_cannot_start(fleet: Fleet, tmp_path: Path) -> None:
    taken = fleet.router
    flags = [
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--router-listen",
        taken,
        "--router-metrics",
        "",
        "--agent-metrics",
        "",
        "--console",
        "",
    ]
    ended = subprocess.run(
        command("up", "--engine", fleet.engines[0], *flags, "--state-dir", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPOSITORY,
    )
    assert ended.returncode == 1
    assert "router ended with status 1" in ended.stderr


def _failed(*arguments: str) -> str:
    ended = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert ended.returncode == 1
    return ended.stderr
