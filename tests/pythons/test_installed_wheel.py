"""The wheel with all extras, installed as a user installs it today, on each version of Python that the project names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.http_request import ask, serves
from tests.support.processes.process import Process, free_port
from tests.support.pythons import NoPython, Python, find
from tests.support.repository import REPOSITORY, VERSION
from tests.support.wheel import (
    INSTALL_S,
    PLATFORMS,
    PYTHONS,
    UV,
    clean_environment,
    resolve,
    skip_if_unreachable,
    with_extras,
)

STATE = REPOSITORY / ".state/pythons"
READY_WITHIN_S = 120.0
COMMAND_S = 300.0
# Imports each module of the wheel; that it uses what a later Python drops is an error.
IMPORT_ALL = """
import importlib, pkgutil, sys, warnings
warnings.filterwarnings("error", module="pointsman")
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
"""

pytestmark = pytest.mark.timeout(INSTALL_S + COMMAND_S)


@dataclass
class Installed:
    """An environment with the wheel and what the package index has for it now. `version`: of Python, as 3.13."""

    version: str
    python: Python
    folder: Path
    environment: dict[str, str] = field(repr=False)

    def command(self, program: str, *arguments: str | Path) -> list[str]:
        """Return the command of a program of the environment."""
        return self.python.command(self.folder / "bin" / program, *arguments)

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run a program of the environment, which must end well and complain of nothing; return what it prints."""
        ended = subprocess.run(
            self.command(program, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            cwd=self.folder,
            env=self.environment,
        )
        assert ended.returncode == 0, ended.stdout
        assert "Traceback" not in ended.stdout
        assert "Warning" not in ended.stdout
        return ended.stdout


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    version: str = request.param
    try:
        python = find(version, STATE)
    except NoPython as why:
        pytest.skip(str(why))
    folder = tmp_path_factory.mktemp(f"python{version}-")
    environment = python.environment(clean_environment(folder / "home", COLUMNS="200"))
    place = folder / "environment"
    for words in (
        ("venv", "--quiet", "--python", python.path, place),
        ("pip", "install", "--quiet", "--python", place / "bin/python", with_extras(built)),
    ):
        ended = subprocess.run(
            python.command(UV, *words), capture_output=True, text=True, timeout=INSTALL_S, cwd=folder, env=environment
        )
        skip_if_unreachable(ended)
        assert ended.returncode == 0, ended.stderr
    return Installed(version, python, place, environment)


def test_every_command_is_there(installed: Installed) -> None:
    assert installed.run("python", "--version").startswith(f"Python {installed.version}.")
    assert installed.run("pointsman", "--version") == f"pointsman {VERSION}\n"
    assert "Not installed" not in installed.run("pointsman", "--help")
    for command in ("up", "router", "gateway", "agent", "serve", "emulate", "demo", "shadow", "simulate"):
        assert "Usage" in installed.run("pointsman", command, "--help")


def test_no_module_uses_what_a_later_python_drops(installed: Installed) -> None:
    (modules,) = installed.folder.glob("lib/*/site-packages")
    packages = sorted(path for path in modules.glob("pointsman*") if (path / "__init__.py").exists())
    assert len(packages) >= 7
    installed.run("python", "-W", "error", "-m", "compileall", "-q", "-f", *packages)
    installed.run("python", "-c", IMPORT_ALL, *(path.name for path in packages))


def test_the_demo_answers_all_requests_and_explains_a_placement(installed: Installed) -> None:
    ports = [f"--{name}-port={free_port()}" for name in ("listen", "router", "console")]
    told = installed.run("pointsman", "demo", *ports, "--time-scale=0.05")
    assert "demo: 78 requests of 16 sessions" in told
    assert "none failed" in told
    assert "the engine said: " in told


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in reversed(started):
        process.stop(within_s=30)


def test_an_engine_an_agent_and_serve_answer_a_chat(
    installed: Installed, processes: list[Process], tmp_path: Path
) -> None:
    engine, router, gateway = (f"127.0.0.1:{free_port()}" for _ in range(3))
    commands: dict[str, list[str | Path]] = {
        "emulate": ["--port", engine.rpartition(":")[2]],
        "agent": ["--engines", f"http://{engine}", "--routers", router, "--state-dir", str(tmp_path), "--metrics-listen", ""],
        "serve": [],
    }  # fmt: skip
    parts = {"ROUTER_LISTEN": router, "ROUTER_METRICS_LISTEN": "", "GATEWAY_LISTEN": gateway}
    environment = installed.environment | {f"POINTSMAN_{name}": value for name, value in parts.items()}
    for name, words in commands.items():
        argv = installed.command("pointsman", name, *words)
        processes.append(Process(name, argv, tmp_path / f"{name}.log", env=environment, cwd=tmp_path, only_env=True))
        processes[-1].start()
    processes[-1].wait_ready(partial(serves, f"http://{gateway}"), within_s=READY_WITHIN_S)
    question = {"model": "pointsman-emulated", "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 3}
    answer = ask(f"http://{gateway}/v1/chat/completions", question).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert "READY" in installed.run("pointsman", "instances", "--router", router)
    assert [process.stop() for process in reversed(processes)] == [0, 0, 0]
    for process in processes:
        assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_index_has_wheels_of_all_packages(python: str, platform: str, built: Path) -> None:
    assert {"grpcio", "scipy", "tokenizers", "uvloop"} <= resolve(with_extras(built), python, platform).keys()
