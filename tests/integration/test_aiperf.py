"""NVIDIA's aiperf, an external load client, plays agentic sessions against the gateway and counts tokens as the gateway does."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.trace_files import load_trace
from tests.support.aiperf import AIPERF, TOKENIZER, deltas, hub_cache
from tests.support.processes.emulated_fleet import emulated_fleet
from tests.support.processes.process import Process
from tests.support.waiting import until

PLAY_S = 300.0
SESSIONS = 24


@pytest.mark.timeout(900)
def test_sessions_played_by_aiperf_are_kept_and_counted_alike(tmp_path: Path) -> None:
    if not AIPERF.exists():
        pytest.fail(f"{AIPERF} is missing: `make env-aiperf` makes it (requirements/aiperf.lock)", pytrace=False)
    shape = replace(SMALL, agents=2, system_tokens=512, context_tokens=500, growth_tokens=150, output_tokens=20)
    lines = deltas(generate(SESSIONS, 4.0, seed=3, shape=replace(shape, mean_turns=3.0, max_tokens=6_000)))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The lab can read the same file as aiperf.
    assert len(load_trace(trace)) == len(lines)
    with emulated_fleet(tmp_path) as fleet:
        out = tmp_path / "out"
        flags = {
            "--model": "pointsman-emulated",
            "--url": fleet.gateway_url,
            "--endpoint-type": "chat",
            "--tokenizer": TOKENIZER,
            "--input-file": trace,
            "--custom-dataset-type": "mooncake_trace",
            "--session-header": "X-Session-ID",
            "--extra-inputs": "ignore_eos:true",
            "--random-seed": 1,
            "--workers-max": 2,
            "--output-artifact-dir": out,
            "--ui": "none",
        }
        switches = ["--streaming", "--fixed-schedule", "--fixed-schedule-auto-offset"]
        switches += ["--no-server-metrics", "--no-gpu-telemetry"]
        command = [str(AIPERF), "profile", *switches, *(str(part) for flag in flags.items() for part in flag)]
        offline = {"HF_HOME": str(hub_cache(tmp_path / "hf")), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        client = Process("aiperf", command, tmp_path / "aiperf.log", offline)
        client.start()
        try:
            until(lambda: not client.alive, within_s=PLAY_S, what="the end of aiperf")
        finally:
            status = client.stop()
        assert status == 0, client.tail()
        placed = fleet.decisions(len(lines))
    played = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    assert len(played) == len(placed) == len(lines)
    assert not [record["error"] for record in played if record.get("error")]

    asked: dict[str, list[Any]] = {}
    for record in sorted(played, key=lambda record: int(record["metadata"]["turn_index"])):
        asked.setdefault(record["metadata"]["x_correlation_id"], []).append(record["metrics"])
    decided = {
        session: list(of)
        for session, of in groupby(
            sorted(placed, key=lambda decision: decision.session_id), lambda decision: decision.session_id
        )
    }
    assert asked.keys() == decided.keys()
    assert len(decided) == SESSIONS
    wanted = {session: list(of) for session, of in groupby(lines, lambda line: line["session_id"])}
    for session, turns in decided.items():
        for metrics, decision in zip(asked[session], turns, strict=True):
            done = decision.finished
            counted = {
                "usage_prompt_tokens": done.prompt_tokens,
                "usage_completion_tokens": done.output_tokens,
                "usage_prompt_cache_read_tokens": done.cached_tokens,
            }
            assert {name: metrics[name]["value"] for name in counted} == counted
            # The token count and the prediction that were made before an engine received the request.
            assert decision.input_tokens == done.prompt_tokens
            assert decision.cached_tokens <= done.cached_tokens
        for before, after in pairwise(turns):
            # The session's owner is known, and a turn that is placed on the owner finds the previous turn cached there.
            assert after.session_owner == before.steps[-1].instance.instance_id
            if after.steps[-1].instance.instance_id == after.session_owner:
                assert after.finished.cached_tokens > before.finished.prompt_tokens - 16
        name = next(name for name in wanted if session.endswith(name))
        assert [turn.finished.output_tokens for turn in turns] == [line["output_length"] for line in wanted[name]]
