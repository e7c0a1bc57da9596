"""Measures the engines behind a gateway and the overhead of requests, for the costs of a simulation of that fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from statistics import fmean

from pydantic import Field
from pydantic_settings import BaseSettings

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_lab.engine.cost_fit import fit
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.live.model_accuracy import smallest_engine
from pointsman_lab.live.profile_command import SHORTEST, Measurements, ProfileSettings, measure
from pointsman_lab.live.replay_command import ReplaySettings
from pointsman_lab.live.request_overhead import measure_overhead
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer


class MeasureSettings(BaseSettings):
    """Settings of the measurements."""

    tokenizer: Path = Field(TOKENIZER_DIR, description="folder of the engines' tokenizer and chat template")
    max_num_batched_tokens: int = Field(
        8_192, ge=1, description="maximum tokens per engine step, used if KV events do not show it"
    )
    profile_seconds: float = Field(60.0, gt=0, description="time of one measurement of an engine, in s")
    profile_longest: int = Field(
        2_048, ge=0, description="longest prompt measured, in tokens; 0: the longest that the engines allow"
    )
    profile_repeats: int = Field(2, ge=1, description="number of repetitions of each probe per measurement")
    profile_pause_s: float = Field(0.3, ge=0, description="idle time before each measured prefill, in s")


@dataclass(frozen=True)
class FleetCosts:
    """The costs of a simulated fleet: of its engines' steps, and of a request outside its engine up to the first token, in s
    and in s per prompt token."""

    engine: EngineConfig
    profile: Profile
    request_s: float
    prompt_token_s: float


async def measure_fleet(settings: MeasureSettings, engines: Sequence[str], url: str, chunk: int = 0) -> Measurements:
    """Measure the engines one after the other, then the request overhead through the gateway at `url`. All must be idle.

    `chunk`: the engines' max_num_batched_tokens, 0 if unknown. Raises EngineError.
    """
    found = []
    for engine in engines:
        asked = ProfileSettings(
            url=engine,
            seconds=settings.profile_seconds,
            repeats=settings.profile_repeats,
            longest=settings.profile_longest,
            pause_s=settings.profile_pause_s,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        found.append(await measure(asked, chunk))
    measured = together(found)
    longest = max(prefill.new + prefill.cached for prefill in measured.prefills)
    return await with_overhead(settings, measured, engines, url, (SHORTEST, longest // 4, longest // 2))


async def with_overhead(
    settings: MeasureSettings, measured: Measurements, engines: Sequence[str], url: str, lengths: Sequence[int]
) -> Measurements:
    """Measure the request overhead with prompts of these lengths, in tokens; return `measured` with it. Raises EngineError."""
    tokenizer = ChatTokenizer(settings.tokenizer)
    target = ReplaySettings(url=url)
    front = await measure_overhead(
        target, engines, tokenizer, lengths, settings.profile_repeats, settings.profile_pause_s
    )
    measured.frontend_s = (front.request_s, front.prompt_token_s)
    measured.streamed_decodes = list(front.decodes)
    return measured


def together(measured: Sequence[Measurements]) -> Measurements:
    """Merge measurements as if they were of one engine."""
    whole = Measurements(engine=reduce(smallest_engine, (measurements.engine for measurements in measured)))
    for measurements in measured:
        whole.prefills += measurements.prefills
        whole.decodes += measurements.decodes
        whole.streamed_decodes += measurements.streamed_decodes
    whole.frontend_s = (
        fmean(measurements.frontend_s[0] for measurements in measured),
        fmean(measurements.frontend_s[1] for measurements in measured),
    )
    return whole


def engine_config(settings: MeasureSettings, measured: Measurements) -> EngineConfig:
    """Return the configuration of the measured engines in a simulation, whose blocks have the size of the router's keys."""
    engine = measured.engine
    return EngineConfig(
        kv_blocks=engine["kv_blocks"] * engine["block_size"] // KEY_TOKENS,
        max_model_len=engine["max_model_len"],
        max_num_batched_tokens=engine.get("max_num_batched_tokens", settings.max_num_batched_tokens),
    )


def costs_of(settings: MeasureSettings, measured: Measurements) -> FleetCosts:
    """Return the costs that were measured. Raises FitError if the measurements do not determine them."""
    profile = fit([*measured.prefills, *measured.decodes]).with_streaming_cost(measured.streamed_decodes)
    return FleetCosts(engine_config(settings, measured), profile, *measured.frontend_s)
