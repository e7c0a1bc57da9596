"""`pointsman calibrate`: replays a trace live and simulates it with costs measured on the same engines, and compares the two.

The engines must be idle and behind the given gateway. They should be alike, because simulated engines are. The trace is first
replayed once as a warm-up, so that one-time delays do not count. Before the first load and after each load all engines are
measured, one after the other. Then the request overhead is measured: the time outside the engine up to the first token, and the
cost of each token that is streamed to the client. A load is simulated with the measurements right before and after it, because a
machine's speed changes from one minute to the next. The slowdown of engines that share a machine is not simulated.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import typer
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from pointsman_common.io.settings import Entries, Numbers
from pointsman_lab.engine.cost_fit import Fit, FitError, fit
from pointsman_lab.live.engine_client import EngineError
from pointsman_lab.live.fleet_costs import MeasureSettings, costs_of, measure_fleet, together
from pointsman_lab.live.model_accuracy import (
    GOAL,
    LiveComparison,
    as_sent,
    compare_runs,
    largest_error,
    table,
    to_json,
    with_unique_ids,
)
from pointsman_lab.live.profile_command import Measurements, profile_of, table_of
from pointsman_lab.live.replay_command import ReplayError, ReplayResult, ReplaySettings, replay, save
from pointsman_lab.report.bundle import write_bundle
from pointsman_lab.report.run_summary import summarise
from pointsman_lab.report.terminal import make_console
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.trace_files import load_trace, save_trace
from pointsman_lab.workload.traces import TINY_TRACE, TraceError, TraceRequest, first_sessions
from pointsman_router.core.policy.registry import DEFAULT_POLICY


class CalibrateSettings(MeasureSettings):
    """Settings of one calibration."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_CALIBRATE_")

    url: str = Field("http://127.0.0.1:8080", description="base URL of the gateway")
    engines: Entries = Field(min_length=1, description="base URL of each engine behind the gateway (repeat)")
    router: str = Field("", description="the router, as for `pointsman instances`, for the live runs' bundles")
    trace: Path = Field(TINY_TRACE, description="trace file")
    sessions: int = Field(0, ge=0, description="number of sessions used, the first ones of the trace; 0: all")
    token_scale: float = Field(0.08, gt=0, description="factor on prompt and answer lengths")
    time_scales: Numbers = Field([1.0, 0.5, 0.25], description="factors on the trace's times, one for each load")
    policy: str = Field(DEFAULT_POLICY, description="placement policy of the router")
    out: Path = Field(
        Path("runs/calibration"), description="folder of calibration.json, calibration.md and the bundles"
    )


class CalibrationError(RuntimeError):
    """A calibration failed; the message says why."""


def run(settings: CalibrateSettings) -> None:
    """Calibrate, print the table and write it. Exits with 2 if the calibration fails, with 130 on Ctrl-C."""
    console = make_console()
    scales = settings.time_scales
    loads = []
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(_replay(settings, 0, min(scales)))
        measured = [asyncio.run(_measure(settings))]
        for number, scale in enumerate(scales, 1):
            asked, replayed = asyncio.run(_replay(settings, number, scale))
            save(asked, replayed)
            measured.append(asyncio.run(_measure(settings, measured[-1].engine.get("max_num_batched_tokens", 0))))
            around = together(measured[-2:])
            _fit_to(settings, asked.out.parent, around)
            loads.append(_simulate(settings, asked, replayed, around))
        whole = together(measured)
        found = _fit_to(settings, settings.out, whole)
    except (CalibrationError, EngineError, FitError, ReplayError, TraceError) as error:
        typer.echo(f"pointsman calibrate: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console.print(table_of(found))
    text = table(loads)
    result = {
        "profile": asdict(found.profile),
        "engine": whole.engine,
        "residual": found.residual,
        "measured": [
            {"what": str(measurement), "seconds": measurement.seconds, "fitted": fitted}
            for measurement, fitted in found.rows
        ],
        "loads": to_json(loads),
    }
    (settings.out / "calibration.json").write_text(json.dumps(result, indent=2) + "\n")
    (settings.out / "calibration.md").write_text(text)
    console.print(text, highlight=False)
    console.print(f"greatest error {largest_error(loads):.1%} (goal: {GOAL:.0%}); {settings.out}", highlight=False)


async def _measure(settings: CalibrateSettings, chunk: int = 0) -> Measurements:
    """Measure engines and request overhead. `chunk`: max_num_batched_tokens, 0 if unknown."""
    return await measure_fleet(settings, settings.engines, settings.url, chunk)


def _fit_to(settings: CalibrateSettings, folder: Path, measured: Measurements) -> Fit:
    """Fit the costs to the measurements and write the profile to the folder's profile.json."""
    found = fit([*measured.prefills, *measured.decodes])
    (folder / "profile.json").write_bytes(profile_of(" ".join(settings.engines), measured, found).encode())
    return found


async def _replay(settings: CalibrateSettings, number: int, scale: float) -> tuple[ReplaySettings, ReplayResult]:
    """Replay the trace live, with session ids and texts that no other `number` has. Raises CalibrationError if a request
    failed."""
    folder = settings.out / (f"load-{number}" if number else "warm-up")
    trace = folder / "trace.jsonl"
    requests = with_unique_ids(first_sessions(load_trace(settings.trace), settings.sessions), number)
    save_trace(trace, requests)
    asked = ReplaySettings(
        trace=trace,
        url=settings.url,
        router=settings.router,
        tokenizer=settings.tokenizer,
        token_scale=settings.token_scale,
        time_scale=scale,
        timing="trace",
        max_sessions=len(requests),  # the simulation has no limit either
        out=folder / "live",
    )
    replayed = await replay(asked)
    if replayed.interrupted:
        raise KeyboardInterrupt
    if failed := [record for record in replayed.records if not record.ok]:
        raise CalibrationError(f"{len(failed)} of {len(replayed.records)} live requests failed: {failed[0].error}")
    return asked, replayed


def _simulate(
    settings: CalibrateSettings, asked: ReplaySettings, replayed: ReplayResult, measured: Measurements
) -> tuple[str, list[LiveComparison]]:
    """Simulate the replayed trace, and compare the two runs; return the load's label and the comparisons."""
    requests = load_trace(asked.trace)
    tokenizer = ChatTokenizer(settings.tokenizer)
    sent = as_sent(requests, ChatMaker(requests, tokenizer.words, settings.token_scale), tokenizer)
    _check_tokens(sent, {(record.session, record.turn): record.prompt_tokens for record in replayed.records})
    simulated = Simulator(sent, _simulation(settings, measured, asked.time_scale)).run()
    config = {"kind": "simulation", "time_scale": asked.time_scale, "token_scale": settings.token_scale}
    write_bundle(asked.out.parent / "simulated", config, simulated, summarise(simulated))
    compared = compare_runs(replayed.records, simulated, measured.engine["block_size"])
    span_s = max(record.t_send for record in replayed.records) or 1.0
    return f"{len(requests) / span_s:.2f} requests/s", compared


def _check_tokens(sent: list[TraceRequest], prompt_tokens: dict[tuple[str, int], int | None]) -> None:
    for request in sent:
        tokens = prompt_tokens[request.session, request.turn]
        if tokens != request.input_length:
            raise CalibrationError(
                f"the engines count {tokens} tokens of a prompt and --tokenizer {request.input_length}: it is not their tokenizer"
            )


def _simulation(settings: CalibrateSettings, measured: Measurements, scale: float) -> SimulationConfig:
    costs = costs_of(settings, measured)
    return SimulationConfig(
        instances=len(settings.engines),
        policy=settings.policy,
        time_scale=scale,
        # The live chats repeat the trace's answers, not the engines' answers.
        prompts_include_answers=False,
        frontend_s=costs.request_s,
        tokenise_token_s=costs.prompt_token_s,
        engine=costs.engine,
        profile=costs.profile,
    )
