"""`pointsman simulate`: simulates a trace under a policy on modelled instances, and writes a bundle as a replay does."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_lab.admission.registry import RULES
from pointsman_lab.engine.cost_profile import Profile, load_profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.trials import Cell, Workload, run_trial
from pointsman_lab.report.bundle import write_bundle
from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.run_summary import print_summary, summarise
from pointsman_lab.report.terminal import make_console
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.workload.forks import Forks
from pointsman_lab.workload.session_starts import Arrivals, Starts
from pointsman_lab.workload.subagents import Subagents
from pointsman_lab.workload.synthetic_trace import SHAPES, SessionShape, generate
from pointsman_lab.workload.traces import TINY_TRACE, TraceRequest
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings

# Number of synthetic sessions and the time over which they start, s: about 1,200 requests.
SYNTHETIC_SESSIONS, SYNTHETIC_SPAN_S = 230, 600.0
_ROUTER = StateSettings()


class RunSettings(BaseSettings):
    """Settings of a simulated run, except for its policy and its seed."""

    trace: Path = Field(
        TINY_TRACE,
        description="trace file (jsonl, jsonl.gz), or agentic or small: synthetic sessions, drawn anew for each seed",
    )
    sessions: int = Field(0, ge=0, description="number of sessions used, the first ones of the trace; 0: all")
    starts: Starts = Field(
        "trace",
        description="starts of sessions: as in the trace; jitter: each moved by up to jitter_s; resample: drawn anew over "
        "the trace's span; sustained: a Poisson process for sustained_s, with the trace's sessions drawn again and again; "
        "burst: the same with burst_rate for burst_s",
    )
    jitter_s: float = Field(30.0, ge=0, description="maximum shift of a session's start, in s, to either side")
    burst_rate: float = Field(
        1.8, gt=0, description="factor on the rate of session starts in a burst, in place of rate"
    )
    before_burst_s: float = Field(600.0, ge=0, description="time until the burst, in s")
    burst_s: float = Field(600.0, ge=0, description="length of the burst, in s")
    after_burst_s: float = Field(1200.0, ge=0, description="time after the burst in which sessions start, in s")
    sustained_s: float = Field(7200.0, gt=0, description="time in which sustained sessions start, in s")
    rate: float = Field(
        1.0, gt=0, description="factor on the rate of session starts; the times between turns are unchanged"
    )
    max_sessions: int = Field(0, ge=0, description="maximum sessions in flight; 0: unlimited")
    timing: Literal["trace", "think"] = Field(
        "trace", description="time of a turn; trace: its timestamp; think: think_ms after the previous answer"
    )
    time_scale: float = Field(1.0, gt=0, description="factor on the trace's times, including those between turns")
    instances: int = Field(8, ge=1, le=1024, description="number of modelled instances")
    profile: Path | None = Field(
        None, description="cost profile of an engine, a JSON file; default: the built-in profile"
    )
    kv_blocks: int = Field(20_000, ge=1, description="KV blocks of 16 tokens per instance")
    host_tier: float = Field(
        0.0, ge=0, description="size of each instance's host tier, as a multiple of kv_blocks; 0: none"
    )
    shared_storage: bool = Field(
        False, description="host tiers copy their blocks to storage that all instances of a model share"
    )
    tiers_reported: bool = Field(True, description="agents report the blocks in host tiers and storage")
    max_model_len: int = Field(200_000, ge=2, description="maximum tokens of prompt and answer together")
    max_num_batched_tokens: int = Field(8_192, ge=1, description="maximum tokens per engine step")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="maximum prefill tokens of one request per engine step; 0: unlimited"
    )
    max_requests_per_instance: int = Field(
        _ROUTER.limits.max_requests, ge=0, description="maximum open requests per instance; 0: unlimited"
    )
    max_kv_usage: float = Field(
        _ROUTER.limits.max_kv_usage,
        ge=0,
        le=1,
        description="KV usage (0 to 1) from which an instance with waiting requests gets no more requests; 0: unlimited",
    )
    queue_size: int = Field(_ROUTER.queue.size, ge=0, description="maximum requests held per model; 0: none")
    queue_timeout_s: float = Field(
        _ROUTER.queue.timeout_s, gt=0, description="maximum time that a request is held, in s"
    )
    admission: bool = Field(False, description="admit new sessions only while the caches have room for them")
    admission_bound_s: float = Field(
        _ROUTER.admission.standard_s, gt=0, description="maximum time that a new session is parked, in s"
    )
    retries: int = Field(10, ge=0, description="maximum retries of a request that was refused with Retry-After")
    gives_up: bool = Field(
        False, description="a session ends with a request that failed; otherwise its next turn follows"
    )
    leaves_after_s: float | None = Field(
        None, gt=0, description="time without a token after which a client disconnects, in s; default: never"
    )
    unnamed_share: float = Field(0.0, ge=0, le=1, description="share of the sessions that send no session id")
    subagent_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the sessions with several turns that wait for one to three others, their sub-agents",
    )
    fork_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the sessions with several turns that fork: 2 to 40 sub-agents begin with all of their context",
    )
    lab_admission: str = Field(
        "", description=f"admission rule of the lab in front of the gateway: {', '.join(RULES)}; empty: none"
    )
    kv_transfers: bool = Field(True, description="engines send KV to each other")
    layerwise: bool = Field(False, description="push KV layer by layer while it is computed")
    tokenise_us_per_token: float = Field(0.0, ge=0, description="time to tokenise a prompt, in us per token")
    placement_ms: float = Field(0.0, ge=0, description="mean round trip from gateway to router, in ms")
    api_ms: float = Field(
        0.0, ge=0, description="mean time from sending a step to an engine until its scheduler has it, in ms"
    )
    report_delay_s: float = Field(0.0, ge=0, description="delay of agents' reports, in s")
    report_loss: float = Field(0.0, ge=0, lt=1, description="share of agents' reports that are lost")
    pools: int = Field(1, ge=1, description="number of models; instances and sessions are assigned to them in turn")
    routers: int = Field(1, ge=1, description="number of router replicas; each pool is owned by one of them")
    owner_dies_at_s: float | None = Field(
        None, ge=0, description="time at which the owner of the first pool dies, in s; default: never"
    )
    takeover_s: float = Field(1.5, ge=0, description="time from an owner's death until its pools are taken over, in s")
    owner_back_after_s: float | None = Field(
        None, ge=0, description="time from the owner's death until its replica is back, in s; default: never"
    )
    hand_over_at_s: float | None = Field(
        None, ge=0, description="time at which the first pool is handed to another replica, in s; default: never"
    )


class SimulateSettings(RunSettings):
    """One simulation."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_SIMULATE_")

    policy: str = Field(
        DEFAULT_POLICY,
        description="placement policy, NAME or NAME:SETTING=VALUE,..., or floor, the lower bound: no queues, and every block "
        "cached on every instance",
    )
    policy_settings: str = Field(
        "{}", description="JSON object of the policy's settings that differ from their defaults"
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    out: Path = Field(Path("runs/simulate"), description="folder of the run's bundle")


def run(settings: SimulateSettings) -> None:
    """Simulate, write the bundle and print its summary. Exits with 2 if the settings cannot be run, with 1 if a request
    failed."""
    began = time.perf_counter()
    try:
        policy = json.loads(settings.policy_settings)
        if not isinstance(policy, dict):
            raise SimulationError("policy_settings must be a JSON object")
        cell = cell_of(settings, settings.policy, policy)
        samples: list[InstanceSample] = []
        records, measures = run_trial(cell, settings.seed, samples.append)
    except ValueError as error:
        typer.echo(f"pointsman simulate: {error}", err=True)
        raise typer.Exit(2) from None
    summary = summarise(records) | {"sim_run_s": round(time.perf_counter() - began, 3), "measures": measures}
    write_bundle(settings.out, {"kind": "simulation"} | settings.model_dump(mode="json"), records, summary, samples)
    console = make_console()
    print_summary(console, summary, str(settings.out))
    console.print(f"simulated in {summary['sim_run_s']:.1f} s", highlight=False)
    if summary["failed"]:
        raise typer.Exit(1)


def cell_of(
    settings: RunSettings, policy: str, policy_settings: dict[str, Any], name: str = "", load: str = ""
) -> Cell:
    """Return the cell that the settings describe, under a policy; `name` (default: the policy's name) and `load` are its labels.

    Raises ValueError for settings that do not fit together, or for a profile that cannot be read.
    """
    engine = EngineConfig(
        kv_blocks=settings.kv_blocks,
        host_blocks=int(settings.host_tier * settings.kv_blocks),
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
    )
    router = StateSettings(
        limits=SaturationLimits(settings.max_requests_per_instance, settings.max_kv_usage),
        queue=QueueSettings(size=settings.queue_size, timeout_s=settings.queue_timeout_s),
        admission=AdmissionSettings(settings.admission, standard_s=settings.admission_bound_s),
    )
    simulation = SimulationConfig(
        instances=settings.instances,
        policy=policy,
        policy_settings=policy_settings,
        timing=settings.timing,
        time_scale=settings.time_scale,
        max_sessions=settings.max_sessions,
        retries=settings.retries,
        gives_up=settings.gives_up,
        leaves_after_s=settings.leaves_after_s,
        unnamed_share=settings.unnamed_share,
        lab_admission=settings.lab_admission,
        layerwise=settings.layerwise,
        kv_transfers=settings.kv_transfers,
        tokenise_token_s=settings.tokenise_us_per_token / 1e6,
        placement_s=settings.placement_ms / 1e3,
        api_s=settings.api_ms / 1e3,
        report_delay_s=settings.report_delay_s,
        report_loss=settings.report_loss,
        pools=settings.pools,
        routers=settings.routers,
        owner_dies_at_s=settings.owner_dies_at_s,
        takeover_s=settings.takeover_s,
        owner_back_after_s=settings.owner_back_after_s,
        hand_over_at_s=settings.hand_over_at_s,
        shared_storage=settings.shared_storage,
        tiers_reported=settings.tiers_reported,
        router=router,
        engine=engine,
        profile=load_profile(settings.profile) if settings.profile else Profile(),
    )
    arrivals = Arrivals(
        settings.starts,
        settings.jitter_s,
        settings.rate,
        settings.burst_rate,
        settings.before_burst_s,
        settings.burst_s,
        settings.after_burst_s,
        settings.sustained_s,
    )
    subagents, forks = Subagents(settings.subagent_share), Forks(settings.fork_share)
    if (shape := str(settings.trace)) in SHAPES:
        source = SyntheticSessions(settings.sessions or SYNTHETIC_SESSIONS, SHAPES[shape])
        workload = Workload(source, arrivals, subagents=subagents, forks=forks)
    else:
        workload = Workload(settings.trace, arrivals, settings.sessions, subagents, forks)
    return Cell(name or policy, load, workload, simulation)


@dataclass(frozen=True)
class SyntheticSessions:
    """Source of sessions of a shape, with a fresh draw for each seed. Equal sources compare equal, so that knees() can find the
    cells that differ by their rate alone."""

    sessions: int
    shape: SessionShape

    def __call__(self, seed: int) -> list[TraceRequest]:
        """Return the requests of a seed's draw."""
        return generate(self.sessions, SYNTHETIC_SPAN_S, seed, self.shape)
