"""aiperf, an outside load client (.venv-aiperf), as the sender of a draw: its own texts, its own clock, its own counts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from pointsman_lab.report.request_record import RequestRecord
from studies.scoreboard.traffic import Draw
from tests.support.aiperf import AIPERF, TOKENIZER, deltas, hub_cache


def send_with_aiperf(
    drawn: Draw, folder: Path, url: str, model: str, tokenizer: Path, time_scale: float, timeout_s: float
) -> list[RequestRecord]:
    """Let aiperf send a draw with its lengths, shared openings, starts and pauses; return its records. What it has not reported
    within `timeout_s` has failed. Raises FileNotFoundError without .venv-aiperf."""
    if not AIPERF.exists():
        raise FileNotFoundError(f"{AIPERF}: make env-aiperf")
    requests = [request for turns in drawn.sessions for request in turns]
    trace, out = folder / "aiperf.jsonl", folder / "aiperf"
    lines = deltas(requests, lambda turn: (turn.think_ms or 0.0) * time_scale, time_scale)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = {
        "--model": model, "--url": url, "--endpoint-type": "chat", "--tokenizer": TOKENIZER, "--input-file": trace,
        "--custom-dataset-type": "mooncake_trace", "--session-header": "X-Session-ID", "--extra-inputs": "ignore_eos:true",
        "--random-seed": 1, "--workers-max": 2, "--output-artifact-dir": out, "--ui": "none",
    }  # fmt: skip
    switches = [
        "--streaming",
        "--fixed-schedule",
        "--fixed-schedule-auto-offset",
        "--no-server-metrics",
        "--no-gpu-telemetry",
    ]
    command = [str(AIPERF), "profile", *switches, *(str(part) for flag in flags.items() for part in flag)]
    offline = {"HF_HOME": str(hub_cache(folder / "hf", tokenizer)), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with (folder / "aiperf.log").open("wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | offline, timeout=timeout_s, check=False
        )
    exported = out / "profile_export.jsonl"
    exported_lines = exported.read_text().splitlines() if exported.exists() else []
    records = [_record(json.loads(line)) for line in exported_lines]
    # What aiperf did not report was not answered.
    missing = max(len(lines) - len(records), 0)
    return records + [RequestRecord(session="", turn=0, error="NotReported: by aiperf") for _ in range(missing)]


def _record(exported: dict[str, Any]) -> RequestRecord:
    about, found = exported["metadata"], exported.get("metrics") or {}

    def value(name: str) -> float | None:
        return float(found[name]["value"]) if name in found else None

    error = exported.get("error") or {}
    ttft, latency = value("time_to_first_token"), value("request_latency")
    prompt, cached, output = (value(f"usage_{name}_tokens") for name in ("prompt", "prompt_cache_read", "completion"))
    return RequestRecord(
        session=str(about["x_correlation_id"]),
        turn=int(about["turn_index"]) + 1,
        status=int(error.get("code") or 0) if error else 200,
        error=str(error.get("type") or error)[:200] if error else "",
        t_send=float(about["request_start_ns"]) / 1e9,
        ttft_s=None if ttft is None else ttft / 1e3,
        e2e_s=(latency or 0.0) / 1e3,
        prompt_tokens=None if prompt is None else int(prompt),
        cached_tokens=None if cached is None else int(cached),
        output_tokens=None if output is None else int(output),
    )
