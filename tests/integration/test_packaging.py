"""What `pip install pointsman[EXTRA]` brings, in an empty environment for each extra: the versions of the lock, nothing of other
parts, and enough for its part to run. What runs on other versions of Python is in tests/pythons."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import grimp
import pytest

from tests.support.http_request import ask, serves
from tests.support.processes.process import Process, free_port
from tests.support.repository import REPOSITORY
from tests.support.wheel import BIN, PLATFORMS, PYTHONS, build, resolve, with_extras

ROOT = REPOSITORY
READY_WITHIN_S = 60.0
# What an image runs to install its part, of which PART names the extra.
INSTALL = re.findall(
    r"^RUN ((?:.*\\\n)*.*\bPART\b.*(?:\n .*)*)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE
)[0]
# Extra -> packages of other parts.
NOT_ITS_OWN = {
    "agent": {
        *("grpcio-health-checking", "hiredis", "httptools", "huggingface-hub", "jinja2", "matplotlib", "numpy"),
        *("opentelemetry-sdk", "redis", "scipy", "tokenizers"),
    },
    "router": {"httptools", "huggingface-hub", "jinja2", "matplotlib", "numpy", "nvidia-ml-py", "pyzmq", "scipy", "tokenizers"},
    "gateway": {"aiohttp", "matplotlib", "numpy", "nvidia-ml-py", "pyzmq", "redis", "scipy"},
    "lab": {"httptools", "nvidia-ml-py", "opentelemetry-sdk", "redis"},
    "shadow": {"matplotlib", "nvidia-ml-py", "pyzmq", "redis", "scipy"},
    "cli": {"aiohttp", "matplotlib", "numpy", "nvidia-ml-py", "pyzmq", "tokenizers"},
}  # fmt: skip
# Modules of pointsman_cli that are made of other parts.
OF_OTHER_PARTS = ("main", "one_process", "trace_convert")
# Imports everything that the files of a part import, also inside functions, without those modules and what a later Python has.
IMPORT_ALL = """
import ast, importlib, pathlib, sys
part = pathlib.Path(importlib.import_module("pointsman_" + sys.argv[1]).__path__[0])
for file in {*part.rglob("*.py")} - {part / f"{name}.py" for name in sys.argv[2:]}:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "compression.zstd":
            importlib.import_module(node.module)
"""
# Nothing of this repository can be imported. Bytecode is written, so that the next start need not compile again.
OUTSIDE = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": ""}


@dataclass
class Installed:
    """The wheel, and an environment for each extra that a test has used."""

    wheel: Path
    folder: Path
    made: set[str] = field(default_factory=set)

    def bin(self, extra: str) -> Path:
        """The programs of the environment with `extra`, which the Dockerfile's command makes when it is asked for first."""
        place = self.folder / extra
        if extra not in self.made:
            command = INSTALL.replace("/opt/pointsman", str(place)).replace("/dist/", f"{self.wheel.parent}/")
            run("env", "-C", ROOT, f"PART={extra}", f"PATH={BIN}:{os.environ['PATH']}", "sh", "-ec", command)
            self.made.add(extra)
        return place / "bin"

    def packages(self, extra: str) -> dict[str, str]:
        """Name -> version of all that is installed with `extra`."""
        self.bin(extra)
        listed: list[dict[str, Any]] = json.loads(self.uv(extra, "list", "--format", "json"))
        return {package["name"]: package["version"] for package in listed}

    def uv(self, extra: str, verb: str, *arguments: str | Path) -> str:
        return run(BIN / "uv", "pip", verb, "--python", self.folder / extra / "bin/python", *arguments)


def run(*command: str | Path, status: int = 0, within_s: float = 100) -> str:
    """Run a command, which must end with `status`; return its stdout, or its stderr if `status` is not 0."""
    ended = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=within_s,
        cwd="/",
        env=os.environ | OUTSIDE,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stderr if status else ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    dist, folder = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("environments")
    # A build writes metadata beside the packages, with which engines of other tests would load the plug-ins.
    connector = folder / "connector"
    shutil.copytree(ROOT / "connector", connector, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build(connector, dist / "connector")
    return Installed(build(ROOT, dist), folder)


def test_the_wheel_has_the_packages_of_all_parts_and_the_license(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    info = f"{'-'.join(installed.wheel.name.split('-')[:2])}.dist-info"
    packages = {path.name for folder in ("services/*", "lab") for path in ROOT.glob(f"{folder}/pointsman_*")}
    assert len(packages) == 7
    assert {name.split("/")[0] for name in names} == packages | {"pointsman", info}
    assert {name.split("/")[1] for name in names if name.startswith("pointsman/")} == {"agent", "gateway", "router"}
    assert f"{info}/licenses/LICENSE" in names
    assert (ROOT / "connector/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_sdist_has_what_its_readme_links_to(installed: Installed) -> None:
    (sdist,) = installed.wheel.parent.glob("pointsman-*.tar.gz")
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert {"docs/console.png", "SECURITY.md", "services/gateway/README.md"} <= set(links)
    assert set(links) - names == set()


def test_what_is_built_can_be_uploaded(installed: Installed) -> None:
    built = sorted(installed.wheel.parent.rglob("pointsman*"))
    assert [path.suffix for path in built] == [".whl", ".gz", ".whl", ".gz"]
    run(BIN / "twine", "check", "--strict", *built)
    assert sum(path.stat().st_size for path in built) < 4 << 20


def test_all_extras_together_have_every_command(installed: Installed) -> None:
    pointsman = installed.bin("all") / "pointsman"
    assert "Not installed" not in run(pointsman, "--help")
    for part in ("up", "router", "agent", "gateway", "serve", "emulate", "demo", "doctor"):
        assert "Usage" in run(pointsman, part, "--help")


@pytest.mark.timeout(300)
def test_the_demo_needs_no_checkout(installed: Installed, tmp_path: Path) -> None:
    ports = [f"--{name}-port={free_port()}" for name in ("listen", "router", "console")]
    pointsman = installed.bin("all") / "pointsman"
    said = run("env", "-C", tmp_path, "COLUMNS=200", pointsman, "demo", *ports, "--time-scale=0.05", within_s=200)
    assert "demo: 78 requests of 16 sessions" in said
    assert "none failed" in said
    assert "the engine said: " in said
    (prompt,) = re.findall(r"pointsman explain --prompt (\S+)", said)
    assert (tmp_path / prompt).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_each_python_needs_as_wheels(installed: Installed, python: str, platform: str) -> None:
    lock = ROOT / "requirements/dev.lock"
    locked = resolve(lock.read_text(), python, platform, "--no-deps")
    needed = resolve(with_extras(installed.wheel), python, platform, "--constraints", lock)
    assert {"grpcio", "scipy", "tokenizers", "uvloop"} <= needed.keys()
    assert needed.items() <= locked.items()


@pytest.mark.parametrize("extra", sorted(NOT_ITS_OWN))
def test_an_extra_brings_what_its_part_imports_in_the_versions_of_the_lock(installed: Installed, extra: str) -> None:
    found = installed.packages(extra)
    assert not found.keys() & NOT_ITS_OWN[extra]
    lock = (ROOT / "requirements/dev.lock").read_text()
    locked = dict(line.split(" ")[0].split("==") for line in lock.splitlines() if "==" in line)
    assert found.items() <= (locked | {"pointsman": found["pointsman"]}).items()
    run(installed.bin(extra) / "python", "-c", IMPORT_ALL, extra, *OF_OTHER_PARTS)


def test_an_extra_names_no_package_that_its_part_does_not_import() -> None:
    parts = [path.name for folder in ("services/*", "lab") for path in ROOT.glob(f"{folder}/pointsman_*")]
    graph = grimp.build_graph(*parts, include_external_packages=True)
    for module in OF_OTHER_PARTS:
        graph.remove_module(f"pointsman_cli.{module}")
    of_module = metadata.packages_distributions()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in NOT_ITS_OWN:
        named = {re.split(r"[\[<>=]", requirement)[0] for requirement in extras[extra]} - {"pointsman"}
        upstream = graph.find_upstream_modules(f"pointsman_{extra}", as_package=True)
        roots = {module.partition(".")[0] for module in upstream}
        imported = {name.lower().replace("_", "-") for root in roots for name in of_module.get(root, ())}
        assert named - imported == set(), extra


def test_the_command_line_names_the_extra_that_is_missing(installed: Installed) -> None:
    pointsman = installed.bin("agent") / "pointsman"
    output = run(pointsman, "--help")
    assert "Run a node's agent, " in output
    assert "Not installed: pointsman[lab]." in output
    for words, extra in (("replay --trace t", "lab"), ("decisions verify f", "cli")):
        said = run(pointsman, *words.split(), status=1)
        assert said.startswith(f"pointsman {words.split()[0]}: ")
        assert said.endswith(f" is not installed; install pointsman[{extra}]\n")
        assert said.count("\n") == 1


def test_rivals_policies_come_with_the_lab_alone(installed: Installed) -> None:
    pointsman, refused = (
        installed.bin("router") / "pointsman",
        "policy 'dynamo_kv' belongs to the lab, which is not installed: pointsman[lab]\n",
    )
    assert run(pointsman, "policies", "dynamo_kv", status=1) == f"pointsman: {refused}"
    assert run(pointsman, "router", "--policy", "dynamo_kv", status=2) == f"pointsman router: --policy: {refused}"
    program = "from pointsman_cli.installed_policies import installed_policies; print(*installed_policies())"
    assert {
        extra: "dynamo_kv" in run(installed.bin(extra) / "python", "-c", program) for extra in ("router", "lab")
    } == {
        "router": False,
        "lab": True,
    }


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in reversed(started):
        process.stop(within_s=20)


def test_each_service_runs_with_its_own_packages_alone(
    installed: Installed, processes: list[Process], tmp_path: Path
) -> None:
    engine, router, agent, gateway = (f"127.0.0.1:{free_port()}" for _ in range(4))
    commands = {
        "lab": ["emulate", "--port", engine.rpartition(":")[2]],
        "router": ["router", "--listen", router, "--metrics-listen", ""],
        "agent": ["agent", "--engines", f"http://{engine}", "--routers", router, "--state-dir", str(tmp_path / "agent"),
                  "--metrics-listen", agent],
        "gateway": ["gateway", "--listen", gateway, "--routers", router],
    }  # fmt: skip
    for extra, words in commands.items():
        argv = [str(installed.bin(extra) / "pointsman"), *words]
        processes.append(Process(extra, argv, tmp_path / f"{extra}.log", env=OUTSIDE, cwd=tmp_path))
        processes[-1].start()
    for process, address in zip(processes[2:], (agent, gateway), strict=True):
        process.wait_ready(partial(serves, f"http://{address}"), within_s=READY_WITHIN_S)
    body = {"model": "pointsman-emulated", "prompt": "Which way?", "max_tokens": 2}
    assert ask(f"http://{gateway}/v1/completions", body).json()["usage"]["completion_tokens"] == 2
    assert "READY" in run(installed.bin("router") / "pointsman", "instances", "--router", router)
    assert [process.stop() for process in reversed(processes)] == [0, 0, 0, 0]
