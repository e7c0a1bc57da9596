"""The study of fetches: it resumes where it stopped, and its table tells both ways of each cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_lab.workload.forks import Forks
from pointsman_lab.workload.synthetic_trace import SMALL
from studies.default.cells import DefaultCell, Generated
from studies.fetch import __main__ as fetch_command
from studies.fetch.__main__ import SEEDS, FetchStudySettings, run
from studies.fetch.cells import READER, Documents, FetchCell, Parents, cells, run_cell

SMALL_CELL = DefaultCell("", Generated(6, SMALL, 10.0), 1.0, instances=3)


def test_a_run_is_resumed_and_its_table_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_command, "cells", lambda _: {"small": FetchCell(SMALL_CELL, Forks(0.5, most=4))})
    settings = FetchStudySettings(traces=tmp_path, results=tmp_path / "trials.jsonl", out=tmp_path / "findings.md")
    run(settings)
    lines, text = settings.results.read_bytes().splitlines(keepends=True), settings.out.read_text()
    assert len(lines) == SEEDS * 2
    assert text.count("<!-- fetch -->") == 1
    assert "| small | `auto` |" in text
    settings.results.write_bytes(b"".join(lines[:-1]))
    run(settings)
    assert settings.out.read_text() == text
    assert settings.results.read_bytes().splitlines(keepends=True)[:-1] == lines[:-1]


def test_without_the_traces_there_are_generated_cells(tmp_path: Path) -> None:
    assert "generated, forks" in cells(tmp_path)
    assert not any("recorded" in name for name in cells(tmp_path))


def test_the_readers_of_a_document_share_it_and_nothing_else() -> None:
    requests = Documents(number=2, tokens=1_280, readers=3)(1)
    assert Documents(number=2, tokens=1_280, readers=3)(1) == requests
    assert len({request.session for request in requests}) == 2 * (1 + 3)
    shared = [set(a.hash_ids) & set(b.hash_ids) for a in requests for b in requests if a.session < b.session]
    assert {len(ids) for ids in shared} == {0, 20}
    assert sum(request.session.startswith(READER) for request in requests) == 2 * 3 * 2
    assert all(request.input_length > 1_280 for request in requests)
    assert all(len(request.hash_ids) == request.input_length // 64 for request in requests)


def test_parents_have_prompts_of_one_length_and_nothing_in_common() -> None:
    requests = Parents(number=3, tokens=640)(1)
    assert [request.input_length for request in requests if request.turn == 1] == [640] * 3
    assert len({request.hash_ids[0] for request in requests}) == 3


def test_an_instance_that_joins_or_is_drained_is_measured() -> None:
    # Both change the fleet while the sessions run; a drained instance gets no request that is sent later.
    busy = DefaultCell("", Generated(60, SMALL, 20.0), 1.0, instances=2)
    joined = run_cell(FetchCell(busy, joins_at_s=5.0), 1, transfers=True)
    assert joined.filled_s > 0
    assert any(record.instance == "joined" for record in joined.records)
    drained = run_cell(FetchCell(busy, drains_at_s=5.0), 1, transfers=True)
    assert drained.filled_s == 0
    assert len({record.session for record in drained.sharing}) == len(drained.sharing) > 0
    [name] = {record.instance for record in drained.records} - {
        record.instance for record in drained.records if record.t_send > 6.0
    }
    assert all(record.instance != name for record in drained.sharing)
