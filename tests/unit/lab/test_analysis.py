"""Bundles and summaries of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.analysis import analyze, percentiles, summarise
from lab.bundle import BundleError, read_records, write_bundle
from lab.records import RequestRecord


def record(
    session: str, turn: int, instance: str, ttft: float, prompt: int, cached: int, output: int = 11
) -> RequestRecord:
    return RequestRecord(
        session=session,
        turn=turn,
        instance=instance,
        status=200,
        t_send=turn,
        ttft_s=ttft,
        e2e_s=ttft + 1.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
    )


RECORDS = [
    record("a", 1, "i1", 0.1, 100, 0),
    record("a", 2, "i1", 0.2, 200, 150),
    record("b", 1, "i2", 0.3, 100, 50, output=1),
    RequestRecord(session="b", turn=2, instance="i2", status=503, error="no instance"),
    RequestRecord(session="c", turn=1, error="ClientError: gone"),
]


def test_a_summary_counts_complete_answers_only() -> None:
    summary = summarise(RECORDS)
    assert summary["requests"] == 5
    assert summary["failed"] == 2
    assert summary["errors"] == {"503": 1, "ClientError": 1}
    assert summary["sessions"] == 3
    assert summary["span_s"] == 3.2
    assert summary["hit_ratio"] == 0.5
    assert summary["prompt_tokens"] == 400
    assert summary["output_tokens"] == 23
    assert summary["ttft_s"] == {"p50": 0.2, "p90": 0.28, "p99": 0.298, "mean": 0.2, "count": 3}
    # One token has no time per token; the others took 1 s for 10 tokens after the first.
    assert summary["tpot_s"]["p50"] == pytest.approx(0.1)
    assert summary["tpot_s"]["count"] == 2
    assert {name: (one["requests"], one["hit_ratio"]) for name, one in summary["instances"].items()} == {
        "": (1, None),
        "i1": (2, 0.5),
        "i2": (2, 0.5),
    }
    assert percentiles([]) is None
    assert summarise([])["ttft_s"] is None


def test_a_bundle_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    write_bundle(folder, {"trace": "x"}, RECORDS, summarise(RECORDS))
    assert read_records(folder) == RECORDS
    assert json.loads((folder / "metrics.summary.json").read_text()) == summarise(RECORDS)
    assert set(json.loads((folder / "config.json").read_text())) == {"trace", "git_commit"}


def test_a_broken_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"metrics\.jsonl"):
        read_records(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"session": "a", "turn": 1}\n{"session": "a", "turn": "x"}\n')
    with pytest.raises(BundleError, match=r"metrics\.jsonl:2: .*turn"):
        read_records(tmp_path)


def test_analyze_prints_bundles_side_by_side(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(analyze)
    for name in ("one", "two"):
        write_bundle(tmp_path / name, {}, RECORDS, summarise(RECORDS))
    shown = CliRunner().invoke(app, [str(tmp_path / "one"), str(tmp_path / "two")])
    assert shown.exit_code == 0
    assert shown.output.count("5 requests of 3 sessions") == 2
    assert shown.output.count("200.0 ms") >= 3
    missing = CliRunner().invoke(app, [str(tmp_path / "three")])
    assert missing.exit_code == 2
    assert "metrics.jsonl" in missing.output
