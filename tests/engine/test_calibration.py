"""A small calibration on the session's real engines: its output is complete, every request answered. Times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pointsman_lab.engine.cost_profile import read_profile
from pointsman_lab.live.calibrate_command import CalibrateSettings, run
from pointsman_lab.report.bundle import read_bundle
from pointsman_lab.workload.traces import TraceRequest
from tests.support.engines.servers import Engine
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def trace() -> list[TraceRequest]:
    """Two sessions that share a beginning, three turns each, that grow."""
    return [
        TraceRequest(
            timestamp_ms=1_000.0 * turn + 300.0 * session,
            session_id=f"s{session}",
            turn=turn,
            input_length=512 * (turn + 1),
            output_length=64,
            hash_ids=(1, *range(100 * session, 100 * session + turn)),
            block_size=512,
        )
        for turn in (1, 2, 3)
        for session in (1, 2)
    ]


def test_two_engines_are_measured_replayed_and_simulated(
    plane: ControlPlane,
    engines: list[Engine],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POINTSMAN_OPERATOR_TOKEN", plane.tokens["operator"])
    # Enough batch sizes to separate the costs; their accuracy is not checked.
    monkeypatch.setattr("pointsman_lab.live.profile_command.BATCHES", (1, 4))
    monkeypatch.setattr("pointsman_lab.live.engine_client.EVENTS_WITHIN_S", 0.5)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, trace())))
    out = tmp_path / "out"
    settings = CalibrateSettings(
        url=plane.gateway_url,
        engines=[engine.url for engine in engines],
        router=plane.router_address,
        tokenizer=model_folder,
        trace=file,
        token_scale=0.25,
        time_scales=[1.0],
        profile_seconds=600.0,
        profile_repeats=1,
        profile_longest=400,
        profile_pause_s=0.0,
        out=out,
    )
    run(settings)
    calibration = json.loads((out / "calibration.json").read_text())
    profile = read_profile(out / "profile.json")
    # The values that hold for both engines: the larger blocks, and the smaller cache less the block that vLLM never fills.
    assert calibration["engine"]["block_size"] == profile.engine["block_size"] == 64
    assert calibration["engine"]["kv_blocks"] == 8_192 // 64 - 1
    assert calibration["engine"]["max_model_len"] == 4_096
    assert profile.costs.prefill_token_s > 0
    assert all(row["seconds"] > 0 < row["fitted"] for row in calibration["measured"])
    assert {"prefill", "decode"} == {row["what"].partition(" ")[0] for row in calibration["measured"]}
    (figures,) = calibration["loads"].values()
    assert figures.keys() == {"TTFT p50", "TTFT p90", "E2E p50", "E2E p90", "cached tokens"}
    assert all(figure["live"] > 0 and figure["simulated"] > 0 for figure in figures.values())
    assert len((out / "calibration.md").read_text().splitlines()) == 2 + 5
    runs = [read_bundle(out / "load-1" / name).records for name in ("live", "simulated")]
    for records in runs:
        assert len(records) == 6
        assert all(record.ok for record in records)
    live, simulated = ({(record.session, record.turn): record for record in records} for records in runs)
    assert live.keys() == simulated.keys()
    for name, record in live.items():
        assert record.prompt_tokens == simulated[name].prompt_tokens
        assert record.output_tokens == simulated[name].output_tokens
    # Turns may be placed differently, but most of them must find the blocks of their session.
    for records in runs:
        assert sum((record.cached_tokens or 0) >= 64 for record in records if record.turn > 1) >= 2
