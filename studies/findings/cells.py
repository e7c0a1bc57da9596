"""The cells of `python -m studies.findings`: loads, policies, request sources and fleets, and the order of their trials. Pure.

A load is a rate of session starts; the trace's times within a session are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from pointsman_lab.engine.cost_profile import TIER_COSTS, Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.latency_bounds import BOUNDS, FLOOR
from pointsman_lab.experiments.simulate_command import SYNTHETIC_SESSIONS, SyntheticSessions
from pointsman_lab.experiments.trials import Cell, TraceSource, Workload
from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Arrivals
from pointsman_lab.workload.synthetic_trace import AGENTIC, SMALL, SessionShape, shape_with
from pointsman_router.core.policy.registry import DEFAULT_POLICY

REAL, GENERATED, CHAT = "agentic", "generated", "chat"
FILES = {REAL: "agentic_coding_1214.jsonl.gz", CHAT: "mooncake_conversation.jsonl.gz"}
# Number of the chat trace's first sessions that are used.
CHAT_SESSIONS = 1_000
# long_prefill_token_threshold of the cells that set one, tokens.
THRESHOLD = 4_096
# Maximum number of trials of the cells that are neither of the main loads without a threshold nor of tiers.
FEWER_TRIALS = 3
# Times of a router's round trip (s) and of a fast tokenizer (s per token).
PLACEMENT_S, TOKENISE_TOKEN_S = 0.002, 1e-6


@dataclass(frozen=True)
class Load:
    """Load on the fleet: sessions start `rate` times as fast as recorded, and steps take `slow` times as long."""

    rate: float
    slow: float = 1.0
    kv_blocks: int = 31_250


MAIN = ("light", "full", "saturated")
SLOW, OVERLOADED = "slow", "overloaded"
LOADS = {
    "light": Load(0.5),
    "full": Load(1.0),
    "saturated": Load(1.25),
    SLOW: Load(0.35, slow=2.5, kv_blocks=17_500),
    OVERLOADED: Load(2.5),
}

BASE, OURS = "unified", "foresight"
# Policies that were best in some cell or are widely used. They run in all cells, all other policies under the main loads only.
CONTENDERS = (BASE, OURS, DEFAULT_POLICY, "lpwl", "lmetric1", "additive", "elastic", "dynamo_kv", "preble")
# Policies with other settings, which the claims mention.
LOOSER = "unified (of 2.0, dw 0)"
VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    LOOSER: ("unified", {"overload_factor": 2.0, "decode_weight": 0.0}),
    "elastic (heuristic)": ("elastic", {"decider": "heuristic"}),
    "migrate (cache_rich)": ("migrate", {"picker": "cache_rich"}),
}
ABLATIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    f"{OURS} {name}": (OURS, settings)
    for name, settings in {
        "without slices": {"slice_factor": 0.0},
        "without holding": {"heavy_wait_factor": 1e6, "light_wait_factor": 1e6},
        "without placing light requests at once": {"light_factor": 0.0},
        "without a price on leaving a cache": {"lost_cache_weight": 0.0},
        "without a price on answers beside slices": {"remainder_weight": 0.0},
        "without a price on interference with decodes": {"interference": 0.0, "busy_interference": 0.0},
        "without a price on full KV": {"overflow_factor": 0.0},
        "slices five times as long": {"slice_factor": 1.5, "slice_min_tokens": 4096.0},
    }.items()
}


@dataclass(frozen=True)
class Tiers:
    """Tiers below an engine's own cache. `host_tier`: size of each host tier as a multiple of the KV blocks (0: none). `storage`:
    whether the host tiers share storage. `reported`: whether agents report both."""

    host_tier: float = 0.0
    storage: bool = False
    reported: bool = True


@dataclass(frozen=True)
class Setup:
    """A source of requests and the fleet that they go to.

    `name`: name of the source in a trial's key. `rate` and `kv`: factors on the load's rate and KV blocks. `sessions`: number of
    the source's first sessions to use (0: all). `trials`: maximum trials of each cell (0: unlimited).
    """

    source: TraceSource  # a trace file, or generated sessions
    name: str
    sessions: int = 0
    rate: float = 1.0
    instances: int = 8  # of the fleet; 2 instead in a quick run
    step_tokens: int = 8_192  # maximum tokens of an engine's step
    kv: float = 1.0
    trials: int = 0
    tiers: Tiers = Tiers()  # below each engine's own cache; default: none


def _sensitivity_case(
    sessions: int = 115,
    rate: float = 0.93,
    changes: Mapping[str, object] | None = None,
    base: SessionShape = AGENTIC,
    instances: int = 4,
    step_tokens: int = 8_192,
    kv: float = 1.0,
) -> Setup:
    shape = shape_with(base, changes or {})
    name = f"{GENERATED} {sessions} {asdict(shape)}"
    return Setup(SyntheticSessions(sessions, shape), name, 0, rate, instances, step_tokens, kv, trials=2)


# Fleets, engines and sessions other than the main study's, where the same settings of a policy must work, too. Their rates give
# an engine, at the floor, as much to compute per second as the main study's rates do on eight engines.
SENSITIVITY_CASES: Mapping[str, Setup] = {
    "4 instances": _sensitivity_case(),
    "2 instances": _sensitivity_case(58, 0.84, instances=2),
    "16 instances": _sensitivity_case(460, 1.15, instances=16),
    "steps of 2,048 tokens": _sensitivity_case(step_tokens=2_048),
    "steps of 16,384 tokens": _sensitivity_case(step_tokens=16_384),
    "half the KV blocks": _sensitivity_case(kv=0.5),
    "twice the KV blocks": _sensitivity_case(kv=2.0),
    "12 turns, contexts of 50k": _sensitivity_case(
        60, 0.94, {"context_tokens": 50_000, "growth_tokens": 3_000, "mean_turns": 12}
    ),
    "1.3 turns": _sensitivity_case(150, 0.79, {"mean_turns": 1.3}),
    "many sub-agents": _sensitivity_case(80, 1.59, {"subagent_chance": 0.5}),
    "people, not tools": _sensitivity_case(115, 1.45, {"human_share": 0.8}),
    "answers of 800 tokens": _sensitivity_case(115, 1.01, {"output_tokens": 800}),
    "short and very long": _sensitivity_case(
        200, 1.23, {"context_tokens": 3_000, "context_spread": 2.0, "system_tokens": 2_000}
    ),
    "small sessions": _sensitivity_case(400, 1.48, base=SMALL),
}
# The floor is the only bound here: the loss by limited caches is a question of the main study.
SENSITIVITY_POLICIES, SENSITIVITY_LOADS = (FLOOR, BASE, OURS, "lpwl", "preble"), ("full", "saturated")

# Tiers below the engines' own caches, on the first trace at full load. The cells without any are the main study's.
TIER_LOAD, TIER_POLICIES = "full", (BASE, OURS)
NOT_REPORTED = ", not reported"
TIER_CASES: Mapping[str, Tiers] = {
    f"{name}{suffix}": replace(tiers, reported=not suffix)
    for name, tiers in {
        "host tier 2 x": Tiers(2.0),
        "host tier 8 x": Tiers(8.0),
        "host tier 2 x, shared storage": Tiers(2.0, storage=True),
    }.items()
    for suffix in ("", NOT_REPORTED)
}


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the study: its place in the tables, the cell to run, the name of its `source` and the number of seeds."""

    trace: str  # REAL, GENERATED or CHAT, or key of SENSITIVITY_CASES or TIER_CASES
    load: str  # key of LOADS
    threshold: int  # long_prefill_token_threshold of the engines, tokens; 0: none
    policy: str  # name of a policy, bound, variant or ablation
    cell: Cell  # with all settings, ready to run
    source: str
    trials: int  # number of seeds, the first ones of the study

    @property
    def tier(self) -> int:
        """Order of running, lowest first.

        0: bounds, BASE and OURS, except under overload. 1: other policies on the recorded agentic trace at the main loads without
        a threshold. 2: the rest of the main study, and TIER_CASES. 3: SENSITIVITY_CASES.
        """
        if self.trace in SENSITIVITY_CASES:
            return 3
        if self.trace in TIER_CASES:
            return 2
        own = self.policy in (*BOUNDS, BASE, OURS) and self.load != OVERLOADED
        return 0 if own else 1 if self.trace == REAL and self.load in MAIN and not self.threshold else 2

    @property
    def key(self) -> str:
        """JSON of everything that a trial depends on, except its seed."""
        asked = self.cell.simulation
        workload = self.cell.workload
        # Without a host tier a trial does not depend on what there is below it.
        no_tiers = () if asked.engine.host_blocks else ("host_blocks", *TIER_COSTS)
        depends_on = {
            "source": self.source,
            "arrivals": asdict(workload.arrivals),
            "sessions": workload.sessions,
            "policy": asked.policy,
            # All settings, including defaults: a changed default makes another policy.
            "settings": {} if asked.policy in BOUNDS else dict(self._settings()),
            "engine": _without(asdict(asked.engine) | {"vocabulary": ""}, no_tiers),
            "profile": _without(asked.profile.nonzero, no_tiers),
        }
        if asked.engine.host_blocks:
            depends_on["tiers"] = {"storage": asked.shared_storage, "reported": asked.tiers_reported}
        return msgspec.json.encode(depends_on, order="sorted").decode()

    def _settings(self) -> Mapping[str, object]:
        policy, settings = self.cell.simulation.policy, self.cell.simulation.policy_settings
        return (make_policy(policy, settings) if isinstance(policy, str) else policy).ref().settings


def plan_cells(traces: Path, trials: int, *, quick: bool) -> list[PlannedCell]:
    """Return all cells of the study; `traces` is the folder of the trace files, and cells of missing files are left out. `quick`:
    few policies and sessions, two instances."""
    files = {name: traces / file for name, file in FILES.items() if (traces / file).exists()}
    setups = {name: Setup(file, file.name, CHAT_SESSIONS if name == CHAT else 0) for name, file in files.items()}
    setups[GENERATED] = Setup(SyntheticSessions(SYNTHETIC_SESSIONS, AGENTIC), GENERATED)
    main = [name for name in (REAL, GENERATED, CHAT) if name in setups]
    setups |= SENSITIVITY_CASES
    setups |= {name: replace(setups[main[0]], tiers=tiers) for name, tiers in TIER_CASES.items()}
    return [
        _cell(trace, setups[trace], load, threshold, policy, trials, quick)
        for trace, load, threshold, policy in _places(main, quick)
    ]


def tier_cells(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return those of plan_cells() that the section on tiers needs: first its policies without tiers below, then TIER_CASES."""
    none = [cell for cell in cells if (cell.trace, cell.load, cell.threshold) == (cells[0].trace, TIER_LOAD, 0)]
    return [cell for cell in none if cell.policy in TIER_POLICIES] + [
        cell for cell in cells if cell.trace in TIER_CASES
    ]


def _places(traces: Sequence[str], quick: bool) -> Iterator[tuple[str, str, int, str]]:
    """Yield trace, load, threshold and policy of each cell."""
    contenders: Sequence[str] = (*BOUNDS, *CONTENDERS)
    every: Sequence[str] = (*dict.fromkeys((*contenders, *POLICIES)), *VARIANTS)
    other = [(SLOW, 0), *((load, THRESHOLD) for load in LOADS if load != OVERLOADED)]
    if quick:
        every = contenders = (*BOUNDS, BASE, "lpwl", OURS)
        other = other[:1]
    for trace in traces:
        names = every if trace == REAL or REAL not in traces else contenders
        yield from ((trace, load, 0, name) for name, load in product(names, MAIN))
    if CHAT in traces and not quick:
        yield from ((CHAT, OVERLOADED, 0, name) for name in (*BOUNDS, BASE, OURS))
    for (load, threshold), name in product(other, contenders):
        yield traces[0], load, threshold, name
    cases = list(TIER_CASES)[: 1 if quick else None]
    yield from ((case, TIER_LOAD, 0, name) for case, name in product(cases, TIER_POLICIES))
    if not quick:
        yield from ((traces[0], load, 0, name) for load, name in product(("full", "saturated"), ABLATIONS))
        yield from product(SENSITIVITY_CASES, SENSITIVITY_LOADS, (0,), SENSITIVITY_POLICIES)


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _cell(trace: str, setup: Setup, load: str, threshold: int, name: str, trials: int, quick: bool) -> PlannedCell:
    asked = LOADS[load]
    policy, settings = {**VARIANTS, **ABLATIONS}.get(name, (name, {}))
    starts = Arrivals("jitter" if isinstance(setup.source, Path) else "trace", rate=asked.rate * setup.rate)
    cell = Cell(
        policy=name,
        load=f"{trace} {load} {threshold}",
        workload=Workload(setup.source, starts, sessions=15 if quick else setup.sessions),
        simulation=SimulationConfig(
            policy=policy,
            policy_settings=settings,
            instances=2 if quick else setup.instances,
            placement_s=PLACEMENT_S,
            tokenise_token_s=TOKENISE_TOKEN_S,
            engine=EngineConfig(
                max_model_len=200_000,
                kv_blocks=int(asked.kv_blocks * setup.kv),
                host_blocks=int(asked.kv_blocks * setup.kv * setup.tiers.host_tier),
                max_num_batched_tokens=setup.step_tokens,
                long_prefill_token_threshold=threshold,
            ),
            profile=Profile().slowed(asked.slow),
            shared_storage=setup.tiers.storage,
            tiers_reported=setup.tiers.reported,
        ),
    )
    fewer = FEWER_TRIALS if threshold or load not in MAIN or name in ABLATIONS else trials
    return PlannedCell(trace, load, threshold, name, cell, setup.name, min(trials, fewer, setup.trials or trials))
