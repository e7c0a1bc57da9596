"""`pointsman simulate`: a trace and a policy over modelled instances, into a bundle like a replay's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from lab.analysis import make_console, print_summary, summarise
from lab.bundle import write_bundle
from lab.engine_events import EngineConfig
from lab.profile import Profile, load_profile
from lab.simulator import Simulation, SimulationError, Simulator
from lab.trace_files import load_trace
from lab.traces import TINY_TRACE
from services.router.queue import QueueSettings
from services.router.saturation import Limits
from services.router.state import StateSettings


class SimulateSettings(BaseSettings):
    """One simulation."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_SIMULATE_")

    trace: Path = Field(TINY_TRACE, description="trace file (jsonl, jsonl.gz)")
    instances: int = Field(8, ge=1, le=1024, description="modelled instances")
    policy: str = Field("unified", description="placement policy")
    policy_settings: str = Field("{}", description="JSON object of the policy's settings that differ from its defaults")
    timing: Literal["trace", "think"] = Field("trace", description="as in replay")
    time_scale: float = Field(1.0, gt=0, description="factor on the trace's times")
    profile: Path | None = Field(None, description="JSON file of what an engine's steps cost; without, the reference's")
    kv_blocks: int = Field(20_000, ge=1, description="KV blocks of 16 tokens for each instance")
    max_model_len: int = Field(200_000, ge=2, description="prompt and answer together, in tokens")
    max_num_batched_tokens: int = Field(8_192, ge=1, description="tokens per engine step")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="prefill tokens per step of one request; 0 is no limit"
    )
    max_requests_per_instance: int = Field(0, ge=0, description="as the router's setting of that name")
    max_kv_usage: float = Field(0.0, ge=0, le=1, description="as the router's setting of that name")
    queue_size: int = Field(256, ge=0, description="as the router's setting of that name")
    queue_timeout_s: float = Field(30.0, gt=0, description="as the router's setting of that name")
    retries: int = Field(10, ge=0, description="times that a client refused for the moment asks again")
    layerwise: bool = Field(False, description="KV is pushed layer by layer while it is computed")
    tokenise_us_per_token: float = Field(0.0, ge=0, description="time to tokenise a prompt, in us per token")
    placement_ms: float = Field(0.0, ge=0, description="mean time of asking the router, both ways, in ms")
    report_delay_s: float = Field(0.0, ge=0, description="agents' reports come so much later")
    report_loss: float = Field(0.0, ge=0, lt=1, description="share of agents' reports that never come")
    seed: int = Field(0, ge=0, description="seed of policies that draw")
    out: Path = Field(Path("runs/simulate"), description="folder of the run's bundle")


def run(settings: SimulateSettings) -> None:
    """Simulate, write the bundle and print its summary. Exits with 2 when it cannot be run as asked, 1 when a request failed."""
    began = time.perf_counter()
    try:
        simulator = Simulator(load_trace(settings.trace), _simulation(settings))
        records = simulator.run()
    except ValueError as error:
        typer.echo(f"pointsman simulate: {error}", err=True)
        raise typer.Exit(2) from None
    summary = summarise(records) | {"sim_run_s": round(time.perf_counter() - began, 3)}
    write_bundle(settings.out, settings.model_dump(mode="json"), records, summary)
    console = make_console()
    print_summary(console, summary, str(settings.out))
    console.print(f"simulated in {summary['sim_run_s']:.1f} s", highlight=False)
    if summary["failed"]:
        raise typer.Exit(1)


def _simulation(settings: SimulateSettings) -> Simulation:
    policy: Any = json.loads(settings.policy_settings)
    if not isinstance(policy, dict):
        raise SimulationError("policy_settings must be a JSON object")
    engine = EngineConfig(
        kv_blocks=settings.kv_blocks,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
    )
    router = StateSettings(
        limits=Limits(settings.max_requests_per_instance, settings.max_kv_usage),
        queue=QueueSettings(size=settings.queue_size, timeout_s=settings.queue_timeout_s),
    )
    return Simulation(
        instances=settings.instances,
        policy=settings.policy,
        policy_settings=policy,
        timing=settings.timing,
        time_scale=settings.time_scale,
        seed=settings.seed,
        retries=settings.retries,
        layerwise=settings.layerwise,
        tokenise_token_s=settings.tokenise_us_per_token / 1e6,
        placement_s=settings.placement_ms / 1e3,
        report_delay_s=settings.report_delay_s,
        report_loss=settings.report_loss,
        router=router,
        engine=engine,
        profile=load_profile(settings.profile) if settings.profile else Profile(),
    )
