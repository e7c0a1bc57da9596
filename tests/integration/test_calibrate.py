"""A small `pointsman calibrate` on an emulated engine, which runs the same engine model. Times are not checked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import typer

from pointsman_lab.emulator.emulated_engine import EmulateSettings, start
from pointsman_lab.engine.cost_profile import Profile, read_profile
from pointsman_lab.live.calibrate_command import CalibrateSettings, run
from pointsman_lab.report.bundle import read_bundle
from pointsman_lab.workload.traces import TraceRequest

FAST = Profile(step_s=0.002, prefill_token_s=1e-5, prefill_pair_s=1e-9, decode_sequence_s=1e-5, decode_kv_token_s=1e-9)


def trace() -> list[TraceRequest]:
    """Two sessions without shared blocks, so that cached tokens do not depend on when the other session's prompt was computed."""
    return [
        TraceRequest(
            timestamp_ms=500.0 * turn + 100.0 * session,
            session_id=session,
            turn=turn,
            input_length=256 * (turn + 1),
            output_length=32,
            hash_ids=tuple(range(100 * session, 100 * session + turn + 1)),
            block_size=256,
        )
        for turn in (1, 2, 3)
        for session in (1, 2)
    ]


async def test_the_model_is_true_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few batch sizes, but enough to separate the costs.
    monkeypatch.setattr("pointsman_lab.live.profile_command.BATCHES", (1, 4))
    monkeypatch.setattr("pointsman_lab.live.engine_client.EVENTS_WITHIN_S", 0.5)
    file, out = tmp_path / "trace.jsonl", tmp_path / "out"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, trace())))
    engine = await start(EmulateSettings(port=0, max_model_len=4_096, kv_blocks=1_000), FAST)
    settings = CalibrateSettings(
        url=engine.url,
        engines=[engine.url],
        trace=file,
        token_scale=0.5,
        time_scales=[1.0, 0.5],
        profile_seconds=600.0,
        profile_repeats=1,
        profile_longest=400,
        profile_pause_s=0.0,
        out=out,
    )
    try:
        await asyncio.to_thread(run, settings)
    finally:
        await engine.stop()
    calibration = json.loads((out / "calibration.json").read_text())
    known = {"block_size": 16, "kv_blocks": 1_000, "max_model_len": 4_096, "max_num_batched_tokens": 8_192}
    assert calibration["engine"] == known
    assert len(calibration["loads"]) == 2
    for figures in calibration["loads"].values():
        # The second load finds no blocks of the first one, and what is cached does not depend on time.
        assert figures["cached tokens"]["error"] == 0
        assert figures["cached tokens"]["live"] > 500
        assert figures["TTFT p50"].keys() == {"live", "simulated", "error"}
    # A replay before the loads warms up; each load is simulated with the costs measured around it.
    assert {path.parent.name for path in out.glob("*/trace.jsonl")} == {"warm-up", "load-1", "load-2"}
    assert not (out / "warm-up" / "live").exists()
    for number in (1, 2):
        around = read_profile(out / f"load-{number}" / "profile.json")
        # On a busy machine, costs as small as these may be measured as 0.
        assert (around.engine, around.costs.prefill_token_s >= 0) == (known, True)
        live, simulated = (
            {(record.session, record.turn): record for record in read_bundle(out / f"load-{number}" / name).records}
            for name in ("live", "simulated")
        )
        assert len(live) == 6
        assert {
            name: (record.prompt_tokens, record.output_tokens, record.cached_tokens) for name, record in live.items()
        } == {
            name: (record.prompt_tokens, record.output_tokens, record.cached_tokens)
            for name, record in simulated.items()
        }


def test_without_an_engine_it_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit, match="2"):
        run(CalibrateSettings(url="http://127.0.0.1:9", engines=["http://127.0.0.1:9"], out=tmp_path))
    assert "pointsman calibrate: http://127.0.0.1:9" in capsys.readouterr().err
