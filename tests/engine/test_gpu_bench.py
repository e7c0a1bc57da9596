"""`python -m bench gpu` runs on a CPU in its smallest form, and its figures are those of transfers that were right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.results import COMPLETE, file_of, load
from tests.support.repository import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]


def test_transfers_between_two_engines_are_measured(tmp_path: Path) -> None:
    words = [
        "--device",
        "cpu",
        "--smallest",
        "--parts",
        "a",
        "--again",
        "--out",
        str(tmp_path),
        "--page",
        str(tmp_path / "gpu.md"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", *words],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    result = load(file_of(tmp_path, "a", "cpu"))
    assert result is not None, done.stderr
    assert (result.status, done.returncode) == (COMPLETE, 0), result.problem
    found = {figure.metric: figure for figure in result.figures}
    for length in ("256", "512"):
        row = f"Qwen3, 4 layers of 256 / {length} tokens / overhead layer by layer"
        assert {f"{row}, {load}" for load in ("idle", "16 decodes")} <= found.keys()
    assert found["tokens loaded"].ratio == found["fetched prefixes found"].ratio == 1.0
    assert found["requests checked by checksums"].value > 0
    assert found["requests with wrong checksums"].value == 0
    assert found["answer equal after aborts"].value == 1.0
    assert "| 512 tokens | 2.1 MB |" in (tmp_path / "gpu.md").read_text()
