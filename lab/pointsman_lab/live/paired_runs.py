"""Makes one run of a comparison of live and simulated fleets: a draw of sessions, sent live or simulated as it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pointsman_lab.live.fleet_costs import FleetCosts
from pointsman_lab.live.model_accuracy import as_sent, with_unique_ids
from pointsman_lab.live.replay_command import ReplayError, ReplaySettings, replay, save
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.session_starts import Arrivals, draw_sessions
from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.trace_files import load_trace, save_trace
from pointsman_lab.workload.traces import TraceRequest, first_sessions
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.router_state import StateSettings

# Ending of the name of a policy with session admission.
WITH_ADMISSION = "+admission"
# Sessions whose contexts are bounded, so that a small cache holds several of them.
SHAPE = replace(SMALL, max_tokens=30_000)
# Interval of the task that measures how late it wakes up, s.
NAP_S = 0.01


@dataclass(frozen=True)
class Draws:
    """Source of the sessions of a seed: the first `sessions` of `trace` with other starts over the trace's span, or, without a
    trace, new synthetic sessions that start within `span_s` (s)."""

    trace: Path | None
    sessions: int
    span_s: float

    def draw(self, seed: int, rate: float, number: int) -> list[TraceRequest]:
        """Return the requests of a seed's draw at `rate` times its rate of session starts, with session and block ids that no
        other `number` has."""
        if self.trace is None:
            requests, starts = generate(self.sessions, self.span_s, seed, SHAPE), Arrivals("trace", rate=rate)
        else:
            requests = list(first_sessions(load_trace(self.trace), self.sessions))
            starts = Arrivals("resample", rate=rate)
        drawn = [turn for turns in draw_sessions(requests, starts, seed) for turn in turns]
        return with_unique_ids(sorted(drawn, key=lambda turn: turn.timestamp_ms), number)


@dataclass(frozen=True)
class Variant:
    """The settings of a router: a policy, and the time in s for which new sessions are parked at most; None: all are admitted."""

    policy: str
    admission_bound_s: float | None

    @classmethod
    def of(cls, name: str, admission_bound_s: float) -> Variant:
        """Return the variant that a name stands for: a policy, or a policy and `+admission`."""
        policy = name.removesuffix(WITH_ADMISSION)
        return cls(policy, None if policy == name else admission_bound_s)

    @property
    def environment(self) -> dict[str, str]:
        """Settings of a real router."""
        environment = {"POINTSMAN_ROUTER_POLICY": self.policy}
        if self.admission_bound_s is not None:
            environment["POINTSMAN_ROUTER_SESSION_ADMISSION"] = "true"
            environment["POINTSMAN_ROUTER_ADMISSION_STANDARD_S"] = f"{self.admission_bound_s:g}"
        return environment

    @property
    def state(self) -> StateSettings:
        """Settings of a simulated router."""
        if self.admission_bound_s is None:
            return StateSettings()
        return StateSettings(admission=AdmissionSettings(on=True, standard_s=self.admission_bound_s))


@dataclass(frozen=True)
class Scale:
    """Factors on the trace's lengths and times."""

    tokens: float
    times: float


async def run_live(
    requests: Sequence[TraceRequest], folder: Path, url: str, router: str, tokenizer: Path, scale: Scale
) -> tuple[list[RequestRecord], float]:
    """Send the requests to the gateway at `url` and write a bundle to `folder`; return the records and the mean delay, in s, of a
    task that sleeps meanwhile. Raises ReplayError, and CancelledError if it is cancelled."""
    trace = folder / "trace.jsonl"
    save_trace(trace, requests)
    asked = ReplaySettings(
        trace=trace,
        url=url,
        router=router,
        tokenizer=tokenizer,
        timing="think",
        token_scale=scale.tokens,
        time_scale=scale.times,
        max_sessions=len(requests),
        out=folder / "live",
    )
    delays: list[float] = []
    watching = asyncio.create_task(_measure_delays(delays))
    try:
        replayed = await replay(asked)
    finally:
        watching.cancel()
    save(asked, replayed)
    if replayed.interrupted:
        # Not KeyboardInterrupt: asyncio.run() makes one of it after Ctrl-C, and another signal's exception stays as it is.
        raise asyncio.CancelledError
    if not any(record.ok for record in replayed.records):
        raise ReplayError(f"no live request was answered: {replayed.records[0].error}")
    return replayed.records, fmean(delays or [0.0])


def simulate(
    requests: Sequence[TraceRequest],
    seed: int,
    variant: Variant,
    instances: int,
    costs: FleetCosts,
    tokenizer: Path,
    scale: Scale,
) -> list[RequestRecord]:
    """Simulate the requests as run_live() sends them; return the records."""
    tokens = ChatTokenizer(tokenizer)
    config = SimulationConfig(
        instances=instances,
        policy=variant.policy,
        router=variant.state,
        timing="think",
        time_scale=scale.times,
        seed=seed,
        # A live client does not retry.
        retries=0,
        # The live chats repeat the trace's answers, not the engines' answers.
        prompts_include_answers=False,
        frontend_s=costs.request_s,
        tokenise_token_s=costs.prompt_token_s,
        engine=costs.engine,
        profile=costs.profile,
    )
    return Simulator(as_sent(requests, ChatMaker(requests, tokens.words, scale.tokens), tokens), config).run()


async def _measure_delays(delays: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(NAP_S)
        delays.append(time.monotonic() - began - NAP_S)
