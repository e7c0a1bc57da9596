"""CPU time of the simulator for one run of a trace, in a separate process."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.figures import Figure
from pointsman_common.io.child_command import end_with
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.trace_files import load_trace
from pointsman_lab.workload.traces import TINY_TRACE, TraceRequest
from pointsman_router.core.policy.registry import DEFAULT_POLICY

GOAL_S = 2.0
# The file is beside the repository on the machines where the project is developed. Without it the tiny trace of the package is
# used, and the figure's note names it.
TRACE = Path(__file__).parents[2] / "shared" / "traces" / "agentic_coding_1214.jsonl.gz"
ENGINE = EngineConfig(max_model_len=200_000)


def simulate() -> list[Figure]:
    """Return the CPU time of one run under the default policy, in s: a trace on 8 instances, and 2,000 sessions on 1,000."""
    trace = TRACE if TRACE.exists() else TINY_TRACE
    crowd = generate(2_000, 60.0, seed=1)
    return [
        _run("sim_run_s", load_trace(trace), 8, f"{trace.name}; baseline is the goal for agentic_coding_1214"),
        _run("sim_1000_instances_s", crowd, 1_000, "generated sessions", goal_s=None),
    ]


def _run(metric: str, requests: list[TraceRequest], instances: int, note: str, goal_s: float | None = GOAL_S) -> Figure:
    # A separate process, as for a trial of `pointsman compare`: garbage of earlier benchmarks would be collected during the run.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, end_with, (os.getpid(),)) as process:
        spent_s = process.submit(_spent_s, requests, instances).result()
    return Figure(metric, spent_s, "s", goal_s, f"{len(requests):,} requests on {instances:,} instances; {note}")


def _spent_s(requests: list[TraceRequest], instances: int) -> float:
    simulator = Simulator(requests, SimulationConfig(policy=DEFAULT_POLICY, instances=instances, engine=ENGINE))
    started = time.process_time()
    simulator.run()
    return time.process_time() - started
