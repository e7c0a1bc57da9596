"""`pipx run` and `uvx`: the demo by one command, for someone with an empty home folder and no checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.process import free_port
from tests.support.wheel import INSTALL_S, UV, clean_environment, skip_if_unreachable, with_extras

COMMANDS = {
    "pipx": (UV, "tool", "run", "--python", sys.executable, "pipx", "run", "--python", sys.executable, "--spec"),
    "uvx": (UV, "tool", "run", "--python", sys.executable, "--from"),
}


def run(kind: str, requirement: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `pointsman ARGUMENTS` in `folder`; its packages are downloaded."""
    folder.mkdir()
    return subprocess.run(
        [*map(str, COMMANDS[kind]), requirement, "pointsman", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_S,
        cwd=folder,
        env=clean_environment(folder.with_name("home"), COLUMNS="200"),
    )


@pytest.mark.timeout(INSTALL_S + 60)
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_demo_runs_by_one_command(kind: str, built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    ports = [f"--{name}-port={free_port()}" for name in ("listen", "router", "console")]
    ended = run(kind, with_extras(built), folder, "demo", *ports)
    skip_if_unreachable(ended)
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout
    assert "demo: 78 requests of 16 sessions" in ended.stdout
    assert "none failed" in ended.stdout
    assert "the engine said: " in ended.stdout
    assert {path.name for path in folder.iterdir()} == {"runs"}


def test_without_extras_the_demo_says_what_to_run(built: Path, tmp_path: Path) -> None:
    ended = run("uvx", str(built), tmp_path / "nowhere", "demo")
    skip_if_unreachable(ended)
    said = ended.stdout.splitlines()[-1]
    assert said.startswith("pointsman demo: ")
    assert said.endswith(" is not installed; install pointsman[agent,gateway,lab,router]")
