"""The study of fetches: it resumes where it stopped, and its table tells both ways of each cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_lab.workload.forks import Forks
from pointsman_lab.workload.synthetic_trace import SMALL
from studies.default.cells import DefaultCell, Generated
from studies.fetch import __main__ as fetch_command
from studies.fetch.__main__ import POLICIES, SEEDS, FetchStudySettings, cells, run


def test_a_run_is_resumed_and_its_table_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = DefaultCell("", Generated(6, SMALL, 10.0), 1.0, instances=3)
    monkeypatch.setattr(fetch_command, "cells", lambda _: {"small": (cell, Forks(0.5, most=4))})
    settings = FetchStudySettings(traces=tmp_path, results=tmp_path / "trials.jsonl", out=tmp_path / "findings.md")
    run(settings)
    lines, text = settings.results.read_bytes().splitlines(keepends=True), settings.out.read_text()
    assert len(lines) == len(POLICIES) * SEEDS * 2
    assert text.count("<!-- fetch -->") == 1
    assert all(f"| small | `{policy}` |" in text for policy in POLICIES)
    settings.results.write_bytes(b"".join(lines[:-1]))
    run(settings)
    assert settings.out.read_text() == text
    assert settings.results.read_bytes().splitlines(keepends=True)[:-1] == lines[:-1]


def test_without_the_traces_there_are_generated_cells(tmp_path: Path) -> None:
    assert list(cells(tmp_path)) == ["generated, forks"]
