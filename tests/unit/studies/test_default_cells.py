"""The study of the default policy: its cells can be run, it resumes where it stopped, and adds seeds where they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace

from pointsman_lab.workload.synthetic_trace import SMALL
from pointsman_lab.workload.traces import TINY_TRACE, by_session
from studies.default import __main__ as default_command
from studies.default.__main__ import DefaultStudySettings, run
from studies.default.cells import (
    BASELINE,
    ONE_TURN,
    DefaultCell,
    Generated,
    Mixed,
    Recorded,
    default_cells,
)

TINY = Generated(6, SMALL, 10.0)


def settings(tmp_path: Path, **changes: Any) -> DefaultStudySettings:
    values: dict[str, Any] = {
        "traces": tmp_path,
        "results": tmp_path / "trials.jsonl",
        "out": tmp_path / "findings.md",
        "seeds": 2,
    }
    return DefaultStudySettings(**(values | changes))


def test_a_run_is_resumed_and_its_table_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [DefaultCell("one", TINY, 1.0, instances=2), DefaultCell("other", TINY, 2.0, instances=2)]
    monkeypatch.setattr(default_command, "default_cells", lambda _: cells)
    asked = settings(tmp_path)
    run(asked)
    lines, text = asked.results.read_bytes(), asked.out.read_text()
    assert len(lines.splitlines()) == 8
    assert "| one | 2 |" in text
    assert text.count("<!-- default -->") == 1
    assert "of 2 cells" in text
    asked.results.write_bytes(lines[:-20])
    run(settings(tmp_path, render_only=True))
    assert "| other | 1 |" in asked.out.read_text()
    asked.results.write_bytes(b"".join(lines.splitlines(keepends=True)[:-1]))
    run(asked)
    assert asked.out.read_text() == text
    assert len(asked.results.read_bytes().splitlines()) == 8
    run(settings(tmp_path, cells="oth*"))
    assert "| one |" not in asked.out.read_text()
    with pytest.raises(typer.Exit):
        run(settings(tmp_path, cells="none"))


def test_cells_of_missing_traces_are_left_out_and_all_keys_differ(tmp_path: Path) -> None:
    generated = default_cells(tmp_path)
    assert not [workload for workload in generated if isinstance(workload.source, Recorded | Mixed)]
    keys = {workload.key(policy) for workload in generated for policy in (BASELINE, "auto")}
    assert len(keys) == 2 * len(generated)
    assert len({workload.name for workload in generated}) == len(generated)


def test_a_recorded_turn_without_a_pause_gets_one() -> None:
    recorded = Recorded(TINY_TRACE)(1)
    assert all(turn.think_ms is not None for turn in recorded)
    assert by_session(recorded).keys() == by_session(Recorded(TINY_TRACE)(2)).keys()


def test_mixed_traffic_has_all_parts_and_nothing_in_common() -> None:
    parts = (TINY, replace_shape(TINY), TINY)
    mixed = Mixed(parts)(3)
    assert len(mixed) == sum(len(part(3)) for part in parts)
    blocks = [
        {hash_id for turn in mixed if turn.session.startswith(f"{number}/") for hash_id in turn.hash_ids}
        for number in range(3)
    ]
    assert not blocks[0] & blocks[1] | blocks[0] & blocks[2] | blocks[1] & blocks[2]
    assert [replace(turn, session_id="", hash_ids=()) for turn in mixed[: len(TINY(3))]] == [
        replace(turn, session_id="", hash_ids=()) for turn in TINY(3)
    ]


def replace_shape(part: Generated) -> Generated:
    return Generated(part.sessions, ONE_TURN, part.span_s)
