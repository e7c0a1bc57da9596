"""Each version is set in one place: a file that names another version is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import versions


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the files that name versions."""
    patterns = [
        "CHANGELOG.md",
        "Makefile",
        "pyproject.toml",
        *(file for places in versions.PLACES.values() for file, _ in places),
    ]
    for file in {file for pattern in patterns for file in versions.ROOT.glob(pattern)}:
        copy = tmp_path / file.relative_to(versions.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return tmp_path


def test_every_place_names_the_version_that_is_set(copied: Path) -> None:
    assert list(versions.check(copied)) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("connector/pyproject.toml", "project"),
        ("deploy/compose/compose.yaml", "project"),
        ("deploy/k8s/components/images/kustomization.yaml", "project"),
        ("deploy/docker/Dockerfile", "python minor"),
        ("deploy/docker/engine.Dockerfile", "vllm"),
        ("deploy/docker/engine.Dockerfile", "mooncake"),
        ("connector/pointsman_connector/vllm_version.py", "vllm minor"),
        ("services/common/pointsman_common/core/vllm_versions.py", "vllm minor"),
        ("requirements/engine.in", "torch"),
    ],
)
def test_a_place_that_was_forgotten_is_found(copied: Path, file: str, name: str) -> None:
    version = versions.versions(copied)[name]
    text = (copied / file).read_text()
    (copied / file).write_text(text.replace(version, "9.9"))
    assert f"{file}: {name} is {version}, not 9.9" in " ".join(versions.check(copied))


def test_a_file_that_names_no_version_any_more_is_found(copied: Path) -> None:
    (copied / "docs/upgrade.md").write_text("")
    assert [line for line in versions.check(copied) if line.startswith("docs/upgrade.md: nothing matches")]


def test_extras_that_ask_for_different_versions_are_found(copied: Path) -> None:
    file = copied / "pyproject.toml"
    file.write_text(file.read_text().replace('"pyzmq>=27"', '"pyzmq>=26"', 1))
    assert list(versions.check(copied)) == ["pyproject.toml: pyzmq>=26 and pyzmq>=27 differ"]


def test_changed_code_under_a_released_version_is_found(copied: Path) -> None:
    version = versions.versions(copied)["project"]
    file = copied / "CHANGELOG.md"
    said = [f"pyproject.toml: {version} is released, and CHANGELOG.md names changes since"]
    file.write_text(f"# Changelog\n\n## [Unreleased]\n\n- A change.\n\n## [{version}] - 2027-01-01\n\n- Another.\n")
    assert list(versions.check(copied)) == said
    file.write_text(file.read_text().replace("- A change.\n\n", ""))
    assert list(versions.check(copied)) == []
