"""The simulator: CPU of one run of a trace."""

from __future__ import annotations

import time
from pathlib import Path

from bench.figures import Figure
from lab.engine_events import EngineConfig
from lab.generate import generate
from lab.simulation import Simulation
from lab.simulator import Simulator
from lab.trace_files import load_trace
from lab.traces import TINY_TRACE, TraceRequest

GOAL_S = 2.0
# Beside the repository where the project is developed; elsewhere the tiny trace that is shipped is taken, and the note says so.
TRACE = Path(__file__).parents[2] / "shared" / "traces" / "agentic_coding_1214.jsonl.gz"
ENGINE = EngineConfig(max_model_len=200_000)


def simulate() -> list[Figure]:
    """CPU seconds of one run under the default policy: a trace on 8 instances, and many small sessions on 1,000."""
    trace = TRACE if TRACE.exists() else TINY_TRACE
    crowd = generate(2_000, 60.0, seed=1)
    return [
        _run("sim_run_s", load_trace(trace), 8, f"{trace.name}; baseline is the goal for agentic_coding_1214"),
        _run("sim_1000_instances_s", crowd, 1_000, "generated sessions", goal_s=None),
    ]


def _run(metric: str, requests: list[TraceRequest], instances: int, note: str, goal_s: float | None = GOAL_S) -> Figure:
    simulator = Simulator(requests, Simulation(instances=instances, engine=ENGINE))
    started = time.process_time()
    simulator.run()
    spent_s = time.process_time() - started
    return Figure(metric, spent_s, "s", goal_s, f"{len(requests):,} requests on {instances:,} instances; {note}")
