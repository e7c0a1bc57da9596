"""The cells of `python -m studies.admission`: scenarios, ways to admit, and the order of their trials. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import msgspec

from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.simulate_command import SyntheticSessions
from pointsman_lab.experiments.trials import Cell, TraceSource, Workload
from pointsman_lab.simulation.config import SimulationConfig, Tenant
from pointsman_lab.workload.mixture import Mixture
from pointsman_lab.workload.session_starts import Arrivals
from pointsman_lab.workload.subagents import Subagents
from pointsman_lab.workload.synthetic_trace import SMALL
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings

AGENTIC, CHAT = "agentic_coding_1214.jsonl.gz", "mooncake_conversation.jsonl.gz"
# Instances for which the scenarios' rates are, and KV blocks of each.
INSTANCES, KV_BLOCKS = 8, 31_250
BURST = Arrivals("burst", rate=0.6, burst_rate=1.8)
# Share of sessions with sub-agents, as in vllm-project/vllm issue 57103.
SUBAGENT_SHARE = 0.44


@dataclass(frozen=True)
class Scenario:
    """Traffic and clients: what differs from coding agents that give up when they are refused. `about`: for the reader."""

    about: str
    arrivals: Arrivals  # rates for INSTANCES instances
    trace: str = AGENTIC  # file name in the folder of the traces
    mix: float = 0.0  # share of the sessions that are of CHAT, 0 to below 1
    one_turn: bool = False  # whether only the first turns of the sessions of CHAT are used
    subagents: Subagents = field(default_factory=Subagents)  # default: none
    clients: Mapping[str, object] = field(default_factory=dict)  # fields of SimulationConfig that differ


SCENARIOS: Mapping[str, Scenario] = {
    "burst": Scenario("0.6, ten minutes at 1.8, 0.6 for twenty; refused clients give up", BURST),
    "small burst": Scenario("the same with 1.2 in place of 1.8", replace(BURST, burst_rate=1.2)),
    "burst, retries": Scenario(
        "refused clients retry three times, when they are told to", BURST, clients={"retries": 3}
    ),
    "burst, impatient": Scenario(
        "clients leave after 60 s without a token", BURST, clients={"retries": 3, "leaves_after_s": 60.0}
    ),
    "burst, chat": Scenario("half of the sessions are recorded chats", BURST, mix=0.5),
    "burst, one turn": Scenario("half of the sessions are first turns of chats", BURST, mix=0.5, one_turn=True),
    "burst, sub-agents": Scenario(
        "44 % of the sessions have one to three sub-agents", BURST, subagents=Subagents(SUBAGENT_SHARE)
    ),
    "burst, no names": Scenario("no session is named: only prefixes tell", BURST, clients={"unnamed_share": 1.0}),
    "burst, tenants": Scenario(
        "two pools; of two tenants with equal shares one has nine tenths of the sessions",
        BURST,
        clients={"pools": 2, "tenants": (Tenant("large", sessions=9), Tenant("small", sessions=1))},
    ),
    "light": Scenario("two hours at 0.5", Arrivals("sustained", rate=0.5)),
    # Without admission, session times of two hours at 0.7 do not grow, at 0.8 the fleet collapses in some draws, at 1.0 in all.
    "knee": Scenario("two hours at 0.7", Arrivals("sustained", rate=0.7)),
    "limit": Scenario("two hours at 0.8", Arrivals("sustained", rate=0.8)),
    "overload": Scenario("two hours at 1.0", Arrivals("sustained", rate=1.0)),
    "chat": Scenario(
        "recorded chats alone, 20 minutes at 1.0", Arrivals("sustained", rate=1.0, sustained_s=1200.0), CHAT
    ),
}


@dataclass(frozen=True)
class Admission:
    """A way to admit: fields of the router's StateSettings and of SimulationConfig that differ. `about`: for the reader."""

    about: str
    router: Mapping[str, object] = field(default_factory=dict)
    simulation: Mapping[str, object] = field(default_factory=dict)


def _capped(requests: int, kv_usage: float = 0.0) -> Mapping[str, object]:
    queue = QueueSettings(timeout_s=30.0, expiry="refuse" if requests else "place")
    return {"limits": SaturationLimits(requests, kv_usage), "queue": queue}


def _router_admits(bound_s: float) -> Admission:
    about = f"the router's admission of sessions; a new session is parked for {bound_s:g} s at most, then refused"
    return Admission(about, {"admission": AdmissionSettings(on=True, standard_s=bound_s)})


NONE, OURS = "none", "Pointsman, 480 s"
ADMISSIONS: Mapping[str, Admission] = {
    NONE: Admission("no admission"),
    "Pointsman, 120 s": _router_admits(120.0),
    "Pointsman, 30 s": _router_admits(30.0),
    "Pointsman, 480 s": _router_admits(480.0),
    "Pointsman, 900 s": _router_admits(900.0),
    "ThunderAgent": Admission("its rule, with its choice of instances", simulation={"lab_admission": "thunderagent"}),
    "ThunderAgent in Dynamo": Admission(
        "the port of its rule in NVIDIA Dynamo", simulation={"lab_admission": "thunderagent_dynamo"}
    ),
    "Progress-TTL": Admission(
        "the rule of vllm-router 0.1.17's program scheduling, with its choice of instances",
        simulation={"lab_admission": "progress_ttl"},
    ),
    "llm-d LAS": Admission(
        "llm-d's flow control: while the engines are saturated, the program with the least attained service goes first",
        simulation={"lab_admission": "least_attained"},
    ),
    "CONCUR": Admission("its rule, H_low 0.2", simulation={"lab_admission": "concur"}),
    "CONCUR 0.5": Admission("its rule, H_low 0.5", simulation={"lab_admission": "concur_h50"}),
    "12 requests": Admission("at most 12 requests on an instance, held 30 s, then refused", _capped(12)),
    "8 requests": Admission("at most 8 requests on an instance, held 30 s, then refused", _capped(8)),
    "85 % of KV": Admission("no instance with waiting requests gets more from 85 % of its KV on", _capped(0, 0.85)),
}


@dataclass(frozen=True)
class Tier:
    """All combinations of these scenarios, policies and ways to admit. `seeds`: maximum number of trials of each cell."""

    scenarios: tuple[str, ...]
    policies: tuple[str, ...]
    admissions: tuple[str, ...]
    seeds: int = 2


# In the order in which they are run.
PLAN = (
    Tier(("burst",), ("foresight",), (NONE, OURS, "ThunderAgent", "CONCUR", "Pointsman, 120 s"), seeds=5),
    Tier(("knee", "limit", "light", "chat"), ("foresight",), (NONE, OURS, "ThunderAgent")),
    Tier(("burst",), ("unified",), (NONE, OURS)),
    Tier(("burst",), ("foresight",), ("Pointsman, 30 s", "Pointsman, 900 s")),
    Tier(("burst",), ("foresight",), ("ThunderAgent in Dynamo", "Progress-TTL", "llm-d LAS")),
    Tier(("burst",), ("foresight",), ("CONCUR 0.5", "12 requests", "8 requests", "85 % of KV")),
    Tier(
        (
            "burst, sub-agents",
            "burst, one turn",
            "burst, retries",
            "burst, impatient",
            "burst, chat",
            "burst, no names",
            "burst, tenants",
            "small burst",
            "overload",
        ),
        ("foresight",),
        (NONE, OURS),
    ),
)


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the study by its names, and the order of its tier: lower tiers are run first, each for all seeds."""

    scenario: str  # key of SCENARIOS
    policy: str  # name of a policy of the router, with its default settings
    admission: str  # key of ADMISSIONS
    tier: int  # index of its tier in PLAN, from 0 on
    seeds: int  # maximum number of its trials
    cell: Cell  # with all settings, ready to run

    @property
    def key(self) -> str:
        """JSON of everything that a trial depends on, except its seed and the code."""
        scenario, admission = SCENARIOS[self.scenario], ADMISSIONS[self.admission]
        depends_on = {
            "scenario": {**asdict(scenario), "about": ""},
            "policy": self.policy,
            "admission": {**asdict(admission), "about": ""},
            "instances": self.cell.simulation.instances,
            "arrivals": asdict(self.cell.workload.arrivals),
        }
        return msgspec.json.encode(depends_on, order="sorted").decode()


def plan_cells(traces: Path, instances: int = INSTANCES, *, quick: bool = False) -> list[PlannedCell]:
    """Return all cells; `traces` is the folder of the trace files, and cells of missing files are left out.

    The rates of the scenarios are for INSTANCES instances; with another number of `instances` all rates are divided by the same.
    `quick`: small made-up sessions for a few minutes.
    """
    cells = []
    for number, tier in enumerate(PLAN):
        for name, policy, admission in product(tier.scenarios, tier.policies, tier.admissions):
            scenario = SCENARIOS[name]
            source = _source(traces, scenario) if not quick else SyntheticSessions(1_600, SMALL)
            if source is not None and not (quick and scenario.mix):
                cell = _cell(name, policy, admission, source, instances, quick=quick)
                cells.append(PlannedCell(name, policy, admission, number, tier.seeds, cell))
    return cells


def _source(traces: Path, scenario: Scenario) -> TraceSource | None:
    files: Iterable[Path] = [traces / scenario.trace, *([traces / CHAT] if scenario.mix else [])]
    if not all(file.exists() for file in files):
        return None
    if scenario.mix:
        return Mixture(traces / scenario.trace, traces / CHAT, scenario.mix, scenario.one_turn)
    return traces / scenario.trace


def _cell(name: str, policy: str, admission: str, source: TraceSource, instances: int, *, quick: bool) -> Cell:
    scenario, admit = SCENARIOS[name], ADMISSIONS[admission]
    arrivals, part = scenario.arrivals, instances / INSTANCES
    arrivals = replace(arrivals, rate=arrivals.rate * part, burst_rate=arrivals.burst_rate * part)
    if quick:
        arrivals = replace(arrivals, before_burst_s=30.0, burst_s=30.0, after_burst_s=60.0, sustained_s=120.0)
    blocks, longest = (2_500, 40_000) if quick else (KV_BLOCKS, 200_000)
    asked = {
        "instances": instances,
        "timing": "think",
        "retries": 0,
        "gives_up": True,
        "router": StateSettings(**admit.router),  # type: ignore[arg-type]
        "engine": EngineConfig(kv_blocks=blocks, max_model_len=longest),
    }
    simulation = SimulationConfig(policy=policy, **(asked | dict(scenario.clients) | dict(admit.simulation)))  # type: ignore[arg-type]
    return Cell(f"{policy}, {admission}", name, Workload(source, arrivals, subagents=scenario.subagents), simulation)
