"""The wheel of this tree, and what a package index has for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

BIN = Path(sys.executable).parent
UV = BIN / "uv"
# The versions of Python that the project names, the oldest first.
PYTHONS: list[str] = re.findall(
    r"^Programming Language :: Python :: (\d\.\d+)$",
    "\n".join(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["classifiers"]),
    re.MULTILINE,
)
# As uv names them.
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
# Maximum times of a build and of an installation, s.
BUILD_S, INSTALL_S = 100.0, 600.0
# What uv and pip say where they reach no index.
UNREACHABLE = re.compile(
    r"error sending request|Failed to fetch|dns error|Temporary failure in name resolution|"
    r"Failed to establish a new connection"
)


def build(project: Path, out: Path) -> Path:
    """Build sdist and wheel of a project as `make dist` does, the wheel from the sdist; return the wheel."""
    command = ["build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out), str(project)]
    subprocess.run([str(UV), *command], check=True, capture_output=True, cwd=REPOSITORY, timeout=BUILD_S)
    (wheel,) = out.glob("*.whl")
    return wheel


def with_extras(wheel: Path, extras: str = "all") -> str:
    """Return the requirement of a wheel with its extras."""
    return f"{wheel.name.partition('-')[0]}[{extras}] @ {wheel.as_uri()}"


def resolve(asked: str, python: str, platform: str, *arguments: str | Path) -> dict[str, str]:
    """Return name -> version of what pip installs for requirements, one a line, on a version of Python and a platform, from
    wheels alone. No such interpreter is needed. Raises AssertionError with uv's words if that is impossible."""
    command = [UV, "pip", "compile", "--no-python-downloads", "--python-version", python, "--python-platform", platform]
    ended = subprocess.run(
        [*map(str, command), "--only-binary", ":all:", "--no-header", "--no-annotate", *map(str, arguments), "-"],
        input=asked,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        cwd="/",
    )
    skip_if_unreachable(ended)
    assert ended.returncode == 0, ended.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)", ended.stdout, re.MULTILINE))


def skip_if_unreachable(ended: subprocess.CompletedProcess[str]) -> None:
    """Skip the test if a command failed because it reached no package index."""
    if ended.returncode and (said := UNREACHABLE.search((ended.stderr or "") + ended.stdout)):
        pytest.skip(f"no package index: {said[0]}")


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """Return an environment in which nothing of this repository is found, with an empty home, and what reaches the index."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POINTSMAN_", "PYTHON", "XDG_"))}
    home.mkdir(parents=True, exist_ok=True)
    return kept | {"HOME": str(home)} | more
