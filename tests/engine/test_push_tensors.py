"""The script that measures layer-wise push on a GPU runs on any device."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.repository import REPOSITORY


def test_every_layer_arrives_both_ways(tmp_path: Path) -> None:
    script = REPOSITORY / "connector/push_tensors.py"
    small = ["--device", "cpu", "--layers", "3", "--tokens", "64", "--layer-ms", "1", "--rounds", "2"]
    # The script fails if the other process has other bytes.
    done = subprocess.run([ENGINE_PYTHON, script, *small], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "tail after the prefill" in done.stdout
    assert "tail layer by layer" in done.stdout
