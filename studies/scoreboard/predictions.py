"""What the lab predicts of a trial: the same sessions, engines and rule, simulated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.rivals.contenders import ADMISSION, OWN
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.router_state import StateSettings
from studies.scoreboard.board import Cell
from studies.scoreboard.costs import Costs, Way
from studies.scoreboard.fleet import EMULATED
from studies.scoreboard.measures import Measures, measure
from studies.scoreboard.traffic import Draw

# Router -> the fields of SimulationConfig that differ. `python -m studies.rival_rules` compares Dynamo's and SGLang's rules with
# their programs; nginx's is the fewest open requests. There are no such readings of vllm-router's rules, nor of SMG's: it
# places what matches nothing by loads that it asks engines for every 10 s, with what it has sent since.
SIMULATED: Mapping[str, Mapping[str, object]] = {
    OWN: {"policy": "auto"},
    f"{OWN}{ADMISSION}": {"policy": "auto", "router": StateSettings(admission=AdmissionSettings(on=True))},
    "dynamo kv": {"policy": "dynamo_kv"},
    "dynamo thunderagent": {"policy": "dynamo_kv", "lab_admission": "thunderagent"},
    "sglang-router cache_aware": {"policy": "sglang_cache_aware"},
    "nginx least_conn": {"policy": "least_requests"},
}


def predict(cell: Cell, drawn: Draw, contender: str, number: int, costs: Costs | None = None) -> Measures | None:
    """Return the measures of the simulated trial, with times as a live client would see them; None for a router that the lab has
    no reading of. Without `costs` of the machine an engine's steps take what the modelled engine's do, and a router's way
    nothing."""
    if contender not in SIMULATED:
        return None
    profile = Profile().slowed(cell.time_scale)
    way = Way(0.0, 0.0, 0.0)
    if costs is not None and costs.speedup == cell.speedup:
        way = costs.ways.get(contender, way)
        profile = replace(costs.profile, decode_sequence_s=costs.profile.decode_sequence_s + way.streamed_token_s)
    config = SimulationConfig(
        instances=cell.count,
        timing=cell.load.timing,
        time_scale=cell.time_scale,
        seed=number,
        # A live client does not retry, and its chats repeat the trace's answers, not the engines'.
        retries=0,
        prompts_include_answers=False,
        # The emulated engines announce no connector.
        kv_transfers=False,
        frontend_s=way.request_s,
        tokenise_token_s=way.prompt_token_s,
        engine=EngineConfig(**EMULATED),  # type: ignore[arg-type]
        profile=profile,
        **SIMULATED[contender],  # type: ignore[arg-type]
    )
    records = Simulator(iter(drawn.sessions), config, None).run()
    counted = {
        "cpu_s": {},
        "beside_cpu_s": 0.0,
        "engines_cpu_s": 0.0,
        "rss_mb": 0.0,
        "cached": float(sum(record.cached_tokens or 0 for record in records)),
        "asked": float(sum(record.prompt_tokens or 0 for record in records if record.ok)),
        "idle": 0.0,
    }
    span_s = max((record.t_send + record.e2e_s for record in records), default=0.0)
    return measure(records, counted, span_s)
