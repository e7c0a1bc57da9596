"""A write of many pieces arrives: a long prompt's blocks are scattered, and each is a piece in each layer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.repository import REPOSITORY


def test_as_many_pieces_arrive_as_a_long_prompt_has(tmp_path: Path) -> None:
    # 8 blocks of 48 layers, 50 of 48, 400 of 100 with K and V apart, and 170 of 48 by each of ten threads.
    counts = (384, 2_400, 80_000, 8_000)
    script = REPOSITORY / "tests/support/engines/write_many_pieces.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    done = subprocess.run(
        [ENGINE_PYTHON, script, *map(str, counts)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(REPOSITORY / "connector")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [*(f"{count} 0 True" for count in counts), "[0]"], done.stderr[-2_000:]
