"""A trace replayed on real engines: what the bundle says is what the engines say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pointsman_lab.live.replay_command import ReplaySettings, replay, save
from pointsman_lab.report.bundle import read_bundle
from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.trace_files import save_trace
from tests.support.processes.control_plane import ControlPlane


async def test_a_replays_bundle_agrees_with_the_engines(
    plane: ControlPlane, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_OPERATOR_TOKEN", plane.tokens["operator"])
    shape = replace(SMALL, agents=1, mean_turns=3.0, max_tokens=16_000, block_size=256)
    save_trace(tmp_path / "trace.jsonl", generate(4, 2.0, seed=2, shape=shape))
    settings = ReplaySettings(
        trace=tmp_path / "trace.jsonl",
        url=plane.gateway_url,
        router=plane.router_address,
        tokenizer=model_folder,
        time_scale=0.05,
        token_scale=1 / 8,
        # One request at a time: blocks that are still being computed can be found by a request, but not predicted.
        max_sessions=1,
        out=tmp_path / "run",
    )
    save(settings, await replay(settings))
    bundle = read_bundle(tmp_path / "run")
    assert bundle.records
    assert all(record.ok and record.rule for record in bundle.records), bundle.records
    assert bundle.breakdown
    assert bundle.caches
    for row in bundle.breakdown["requests"]:
        assert row["predicted_cached_tokens"] == row["cached_tokens"], row
    seen = sum(record.cached_tokens or 0 for record in bundle.records)
    assert seen > sum(record.prompt_tokens or 0 for record in bundle.records) * 0.4
    assert sum(cache["local_hit_tokens"] for cache in bundle.caches.values()) == seen
    for engine in plane.engines:
        cache = bundle.caches[engine.instance_id]
        assert (cache["prefix_source"], cache["keys"]) == ("EVENTS", engine.cached_keys())
