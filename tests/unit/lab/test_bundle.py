"""Bundles and summaries of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab.report.bundle import BundleError, read_bundle, read_records, write_bundle
from pointsman_lab.report.instance_samples import GpuSample, InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import percentiles, summarise


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
    assert {name: (instance["requests"], instance["hit_ratio"]) for name, instance in summary["instances"].items()} == {
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


def test_a_whole_bundle_comes_back(tmp_path: Path) -> None:
    gpu = GpuSample(index=1, utilisation=0.5, memory_used=7, memory_total=9)
    samples = [InstanceSample(t=0.5, instance="i1", num_requests=3), InstanceSample(t=1.5, instance="i1", gpus=(gpu,))]
    caches = {"i1": {"keys": 3}}
    breakdown: dict[str, Any] = {"parts_s": {}, "requests": []}
    write_bundle(tmp_path, {"kind": "replay"}, RECORDS, summarise(RECORDS), samples, caches, breakdown)
    bundle = read_bundle(tmp_path)
    assert (bundle.records, bundle.samples, bundle.caches, bundle.breakdown) == (RECORDS, samples, caches, breakdown)
    assert (tmp_path / "gpu_util.csv").read_text().splitlines() == [
        "time_s,instance,gpu,utilisation,memory_used_bytes,memory_total_bytes",
        "1.5,i1,1,0.5,7,9",
    ]
    # Another run in the same folder leaves nothing of this one.
    write_bundle(tmp_path, {}, RECORDS, summarise(RECORDS))
    bundle = read_bundle(tmp_path)
    assert (bundle.samples, bundle.caches, bundle.breakdown) == ((), None, None)
    assert not (tmp_path / "gpu_util.csv").exists()
    (tmp_path / "config.json").unlink()
    with pytest.raises(BundleError, match=r"config\.json: cannot be read: its run has not ended"):
        read_bundle(tmp_path)
