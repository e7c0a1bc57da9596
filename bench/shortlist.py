"""Simulates how much quality a decision on a part of a large pool loses: the shortlist against all instances.

`python -m bench shortlist` runs policies that see only a shortlist (core/shortlist.py) and the same policies that see
all instances, on the same draws. Not run by default: it takes an hour. POINTSMAN_BENCH_SHORTLIST sets other cases, each
POLICY:INSTANCES:LOAD:DRAWS, separated by commas.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from bench.figures import Figure
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.paired_statistics import Estimate, paired_difference
from pointsman_lab.experiments.trials import Cell, Trial, Workload, run_cells
from pointsman_lab.report.measures import ALL
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Arrivals
from pointsman_lab.workload.synthetic_trace import AGENTIC, generate
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyRef, PolicyResult, PoolFacts
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.router_state import StateSettings

VARIABLE = "POINTSMAN_BENCH_SHORTLIST"
CASES = ",".join(
    f"{policy}:{instances}:{load}:3"
    for instances in (128, 256)
    for policy in ("unified", "foresight")
    for load in ("light", "knee")
)
# Sessions that start per instance and second: 230 in 600 s on eight instances is the knee of the study in docs/findings.md.
KNEE = 230 / 600 / 8
LOADS = {"light": 0.5 * KNEE, "knee": KNEE}
# Time over which sessions start, s; longer than most sessions last.
SPAN_S = 150.0
# The engine of the study in docs/findings.md.
ENGINE = EngineConfig(max_model_len=200_000, kv_blocks=31_250)
METRICS = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p99_s", "hit_ratio")
FIRST_SEED = 100


class Case(NamedTuple):
    """A comparison to run. `load` is one of LOADS; `draws` is the number of draws of the workload."""

    policy: str
    instances: int
    load: str
    draws: int


@dataclass(frozen=True)
class _Shown(Policy):
    """Wrapper of a policy; the subclass sets which instances it is shown."""

    inner: Policy

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        return self.inner.choose(request, view, rng)

    def without_holds(self, facts: PoolFacts) -> Policy | None:
        without = self.inner.without_holds(facts)
        return None if without is None else type(self)(without)

    def ref(self) -> PolicyRef:
        return self.inner.ref()


class _ShownAll(_Shown):
    name: ClassVar[str] = "all"


class _Shortlisted(_Shown):
    name: ClassVar[str] = "shortlist"
    uses_shortlist: ClassVar[bool] = True


def shortlist() -> list[Figure]:
    """Return latencies and the hit ratio with a shortlist and, as baseline, with all instances, and their paired ratio."""
    return [figure for case in cases(os.environ.get(VARIABLE, CASES)) for figure in _figures(case)]


def cases(text: str) -> list[Case]:
    """Parse the cases of the variable. Raises ValueError for an invalid case, SettingError for an unknown policy."""
    found = []
    for case in text.split(","):
        words = case.split(":")
        if len(words) != len(Case._fields) or words[2] not in LOADS:
            raise ValueError(f"{VARIABLE}: {case!r} is not POLICY:INSTANCES:LOAD:DRAWS with LOAD {' or '.join(LOADS)}")
        policy, instances, load, draws = words
        make_policy(policy)
        found.append(Case(policy, int(instances), load, int(draws)))
    return found


def _figures(case: Case) -> Iterator[Figure]:
    policy = make_policy(case.policy)
    cells = [_cell(case, shown(policy)) for shown in (_Shortlisted, _ShownAll)]
    seeds = range(FIRST_SEED, FIRST_SEED + case.draws)
    # One process, since a run of 256 instances takes gigabytes. Pair by pair, so that the printed trials can be compared early.
    trials = [trial for seed in seeds for trial in run_cells(cells, [seed], processes=1, on_trial=partial(_tell, case))]
    short, every = ([trial.measures[ALL] for trial in trials if trial.policy == name] for name in ("shortlist", "all"))
    for metric in METRICS:
        pairs = [(one[metric], other[metric]) for one, other in zip(short, every, strict=True)]
        ratio = _ratio(pairs)
        sure = "" if ratio.half_width is None else f", {math.exp(ratio.low):.3f} to {math.exp(ratio.high):.3f}"
        yield Figure(
            f"shortlist_{case.policy}_{case.instances}_{case.load}_{metric}",
            math.fsum(shown for shown, _ in pairs) / len(pairs),
            "" if metric == "hit_ratio" else "s",
            math.fsum(other for _, other in pairs) / len(pairs),
            f"baseline: all scored; paired ratio {math.exp(ratio.mean):.3f}{sure} ({case.draws} draws of "
            f"{short[0]['requests']:,.0f} requests)",
        )


def _ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return the paired difference of logarithms: its interval is that of value / baseline, and draws of all sizes count
    equally."""
    return paired_difference([math.log(shown) for shown, _ in pairs], [math.log(other) for _, other in pairs])


def _cell(case: Case, policy: Policy) -> Cell:
    sessions = round(LOADS[case.load] * case.instances * SPAN_S)
    keys = case.instances * ENGINE.kv_blocks
    simulation = SimulationConfig(
        instances=case.instances, policy=policy, engine=ENGINE, router=StateSettings(max_keys=2 * keys)
    )
    return Cell(policy.name, case.load, Workload(partial(_sessions, sessions), Arrivals("trace")), simulation)


def _sessions(sessions: int, seed: int) -> list[TraceRequest]:
    return generate(sessions, SPAN_S, seed, AGENTIC)


def _tell(case: Case, trial: Trial) -> None:
    shown = ", ".join(f"{metric} {trial.measures[ALL][metric]:.3f}" for metric in METRICS)
    print(
        f"{case.policy} {case.instances} {case.load}, {trial.policy} shown, seed {trial.seed}: {shown}", file=sys.stderr
    )
