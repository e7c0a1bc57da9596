"""One trial of the scoreboard with real processes: nginx and Pointsman in front of emulated engines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.rivals.contenders import contenders
from studies.scoreboard.__main__ import BoardRun, Plan
from studies.scoreboard.board import Cell, Results
from studies.scoreboard.page import write_page
from studies.scoreboard.traffic import Load

TINY = Cell("tiny", "tiny", Load("tiny", 1.0, 3), count=2, speedup=20.0)


@pytest.mark.timeout(600)
def test_a_tiny_board_runs_and_is_not_run_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "board.jsonl")
    results.save_plan([TINY], {"rounds": 1})
    among = [contender for contender in contenders() if contender.name in ("nginx least_conn", "pointsman auto")]
    said: list[str] = []
    plan = Plan(1, 1, time.monotonic() + 600, "abc", tmp_path)
    assert BoardRun(results, among, plan, said.append).run([TINY])
    # A round, and the held-out draw without nginx.
    assert len(said) == 3, said
    stored = Results(tmp_path / "board.jsonl")
    found = {trial.contender: trial.measures for trial in stored.trials if trial.round == 1}
    own, nginx = found["pointsman auto"], found["nginx least_conn"]
    assert own is not None
    assert nginx is not None
    assert (own.failed, nginx.failed) == (0, 0), (own.errors, nginx.errors)
    assert own.requests == nginx.requests > 3
    assert own.output_tokens == nginx.output_tokens > 0
    # Each service's processes are found, and took CPU time.
    assert {"serve", "agent"} <= own.cpu_ms.keys()
    assert all(own.cpu_ms[name] > 0 for name in ("serve", "agent"))
    assert own.hit_ratio is not None
    assert own.hit_ratio > 0
    assert all(trial.lab is not None and trial.wall_s > 0 for trial in stored.trials)
    assert BoardRun(stored, among, plan, said.append).run([TINY])
    assert len(said) == 3
    # A second round would pass the limit.
    late = Plan(2, 2, time.monotonic() + 1.0, "abc", tmp_path)
    assert not BoardRun(stored, among, late, said.append).run([TINY])
    assert len(said) == 3
    write_page(stored, tmp_path / "scoreboard.md")
    assert "| nginx least_conn |" in (tmp_path / "scoreboard.md").read_text()
