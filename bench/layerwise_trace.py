"""Replays a trace under `migrate` on two real engines, with layer-wise push and with vLLM's own connector.

Each run starts with empty engines. Migrations depend on the load at the moment, so the runs do not move the same requests.
Requests that moved in both runs are compared as pairs, all requests as two distributions.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import Figure, percentile
from pointsman_lab.live.replay_command import ReplaySettings, replay
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.trace_files import save_trace
from tests.support.engines.fault_switches import installed
from tests.support.engines.servers import LAYERWISE, MOONCAKE, EngineSpec, make_model, running_engines
from tests.support.processes.control_plane import ControlPlane

# Prompts of 400 to 5,000 tokens and answers of 100, so that instances have load to move away from.
SHAPE = replace(SMALL, mean_turns=3.0, output_tokens=400, max_tokens=24_000, block_size=256)
SESSIONS, RATE_PER_S, SEED = 14, 2.0, 4
SCALE, TIME_SCALE = 1 / 4, 0.2
# With these settings every request with new tokens moves to an engine that has no more load.
SETTINGS = {"min_new_tokens": 1, "min_prefill_decode_busy": 0, "min_load_gap": 0, "target_load_ratio": 1.0}

Key = tuple[str, int]


@dataclass(frozen=True)
class ComparedRun:
    """A run: each request's record and, if it moved, its row of the latency breakdown (moments in s)."""

    records: Mapping[Key, RequestRecord]
    moved: Mapping[Key, Mapping[str, Any]]

    def ttfts(self, keys: Iterable[Key]) -> list[float]:
        """Return the TTFT of each of the requests that has one, in s."""
        found = (self.records[key].ttft_s for key in keys)
        return [ttft for ttft in found if ttft is not None]

    def between(self, begin: str, end: str) -> float:
        """Return the median time between two moments of the requests that moved, in s; NaN if no request has both."""
        return _median(
            row[end] - row[begin]
            for row in self.moved.values()
            if row.get(begin) is not None and row.get(end) is not None
        )


def layerwise_trace() -> list[Figure]:
    """Return TTFT of all requests and of those that moved in both runs, and the parts of the time of the requests that moved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        trace = folder / "trace.jsonl"
        save_trace(trace, generate(SESSIONS, RATE_PER_S, seed=SEED, shape=SHAPE))
        site = installed(folder)
        after = _run(folder / "after", model, trace, MOONCAKE, site)
        push = _run(folder / "push", model, trace, LAYERWISE, site)
    both = sorted(after.moved.keys() & push.moved.keys())
    failed = sum(not record.ok for run in (after, push) for record in run.records.values())
    seen = f"{len(push.records)} requests, moved {len(push.moved)} and {len(after.moved)}, {failed} failed"
    faster = sum(one < other for one, other in zip(push.ttfts(both), after.ttfts(both), strict=True))

    def figure(metric: str, of: Callable[[ComparedRun], float], note: str) -> Figure:
        return Figure(f"layerwise_trace_{metric}", of(push), "s", of(after), note)

    return [
        figure("ttft_p50_s", lambda run: _median(run.ttfts(run.records)), f"{seen}; baseline: vLLM's connector"),
        figure("ttft_p90_s", lambda run: percentile(run.ttfts(run.records), 0.9), "the same"),
        figure("moved_ttft_s", lambda run: _median(run.ttfts(both)), f"{len(both)} moved in both, {faster} faster"),
        figure("placing_s", lambda run: run.between("t_recv", "t_placed"), "of those that moved: the control plane"),
        figure("prefill_s", lambda run: run.between("t_prefill_sent", "t_prefill_done"), "... P, queue included"),
        figure("tail_s", lambda run: run.between("t_prefill_done", "t_first_token"), "... from P's answer on"),
    ]


def _run(folder: Path, model: Path, trace: Path, kv_transfer: Mapping[str, Any], site: Path) -> ComparedRun:
    folder.mkdir()
    specs = [
        EngineSpec(
            name,
            kv_transfer=kv_transfer,
            max_model_len=8_192,
            extra_args=("--max-num-batched-tokens", "1024"),
            env={"PYTHONPATH": str(site)},
        )
        for name in ("one", "two")
    ]
    log = folder / "moments.jsonl"
    with running_engines(specs, model, folder) as engines:
        plane = ControlPlane(
            engines,
            folder,
            router_flags={
                "--policy": "migrate",
                "--policy-settings": json.dumps(SETTINGS),
                "--migration-window-s": 0,
            },
            gateway_flags={"--breakdown-file": log},
        )
        with plane.running():
            os.environ["POINTSMAN_OPERATOR_TOKEN"] = plane.tokens["operator"]
            settings = ReplaySettings(
                trace=trace,
                url=plane.gateway_url,
                router=plane.router_address,
                tokenizer=model,
                time_scale=TIME_SCALE,
                token_scale=SCALE,
                max_sessions=12,
                breakdown_file=log,
                out=folder / "run",
            )
            replayed = asyncio.run(replay(settings))
    assert replayed.breakdown is not None
    rows = {(row["session"], row["turn"]): row for row in replayed.breakdown["requests"]}
    return ComparedRun(
        {(record.session, record.turn): record for record in replayed.records},
        {key: row for key, row in rows.items() if row["rule"] == "migrate" and not row["notes"]},
    )


def _median(values: Iterable[float]) -> float:
    return median(found) if (found := list(values)) else float("nan")
