"""A quick `pointsman agree` on emulated engines: which runs it makes, stores and does not make again. Times are not checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from pointsman_lab.live.agree_command import AgreeSettings, run
from pointsman_lab.live.agreement import StoredRun
from pointsman_lab.report.bundle import read_bundle
from pointsman_lab.report.request_record import RequestRecord

# Ten processes start.
pytestmark = pytest.mark.timeout(600)


def settings(out: Path, **more: Any) -> AgreeSettings:
    quick: dict[str, Any] = {"emulated": 2, "speedup": 5.0, "rates": [1.0], "rounds": 1, "sessions": 3, "span_s": 1.0}
    quick |= {"time_scale": 0.05, "token_scale": 1 / 16, "profile_repeats": 1, "profile_pause_s": 0.0}
    # Times are not checked, so a run that is disturbed is as good as any.
    quick |= {"max_wake_delay_s": 60.0}
    return AgreeSettings(**(quick | {"policies": ["unified", "foresight+admission"], "out": out} | more))


def stored(out: Path) -> list[StoredRun]:
    return [msgspec.json.decode(line, type=StoredRun) for line in (out / "runs.jsonl").read_bytes().splitlines()]


def lengths(records: list[RequestRecord]) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    return {(record.session, record.turn): (record.prompt_tokens, record.output_tokens) for record in records}


def test_every_policy_runs_live_and_simulated_and_a_stored_run_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(settings(out))
    runs = stored(out)
    assert [(run.kind, run.policy) for run in runs] == [
        ("live", "unified"),
        ("live", "foresight+admission"),
        ("simulated", "unified"),
        ("simulated", "foresight+admission"),
    ]
    for live, simulated in zip(runs[:2], runs[2:], strict=True):
        assert live.measures["failed"] == simulated.measures["failed"] == 0
        assert live.measures["requests"] == simulated.measures["requests"] > 3
        assert live.measures["sessions"] == simulated.measures["sessions"] == 3
        assert live.costs == simulated.costs == 1
        # The simulation has the tokens that were sent.
        bundle = read_bundle(out / live.case.name / "live")
        assert sum(record.prompt_tokens or 0 for record in bundle.records) > 0
        # Each run has a router of its own, with the policy.
        assert bundle.breakdown
        assert {row["policy"] for row in bundle.breakdown["requests"]} == {live.policy.partition("+")[0]}
    assert "| 1 | foresight+admission - unified | TTFT mean |" in (out / "agreement.md").read_text()
    # With the live runs there, only what is missing is simulated, without engines.
    (out / "runs.jsonl").write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs[:3]) + b'{"kind": "li')
    run(settings(out))
    assert stored(out)[3].measures == runs[3].measures
    with pytest.raises(typer.Exit, match="2"):
        run(settings(out, token_scale=1 / 8))
    assert "runs with other settings: token_scale" in capsys.readouterr().err


def test_a_router_that_does_not_start_ends_it_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit, match="2"):
        run(settings(tmp_path, policies=["no-such-policy"]))
    assert "router ended with status" in capsys.readouterr().err
