"""Simulates a large fleet: 1,000 instances of ten models, and a million requests. Not run by default: it takes an hour.

`python -m bench large_fleet`; POINTSMAN_BENCH_LARGE_FLEET sets another number of requests.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from itertools import count

from msgspec.structs import replace

from bench.figures import Figure
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.traces import by_session
from pointsman_router.core.router_state import StateSettings

INSTANCES = 1_000
POOLS = 10
REQUESTS = 1_000_000
# SESSIONS start per window of WINDOW_S. About 290 requests of 13k tokens arrive per second; a fleet of these engines serves about
# 500.
WINDOW_S = 10.0
SESSIONS = 600
# Block ids below this number are of the system prompts, which all windows share.
SYSTEMS = SMALL.agents * int(SMALL.system_tokens) // SMALL.block_size
ENGINE = EngineConfig(kv_blocks=5_000, max_model_len=70_000)


def large_fleet() -> list[Figure]:
    """Return the run's CPU time in s, and the process's peak of memory in MB."""
    wanted = int(os.environ.get("POINTSMAN_BENCH_LARGE_FLEET", REQUESTS))
    simulation = SimulationConfig(
        instances=INSTANCES, pools=POOLS, engine=ENGINE, router=StateSettings(max_keys=16_000_000)
    )
    simulator = Simulator(_sessions(wanted), simulation)
    started, ended, failed, latest = time.process_time(), 0, 0, 0.0
    for record in simulator.play():
        ended += 1
        failed += not record.ok
        latest = max(latest, record.t_send + record.e2e_s)
    spent_s = time.process_time() - started
    note = f"{ended:,} requests on {INSTANCES:,} instances of {POOLS} models, {latest:,.0f} s of their time; {failed} failed"
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Figure("sim_large_fleet_s", spent_s, "s", None, note),
        Figure("sim_large_fleet_mb", peak_mb, "MB", None, note),
    ]


def _sessions(requests: int) -> Iterator[Session]:
    """Yield sessions in the order of their starts, drawn window by window, until they have at least `requests` requests."""
    windows = (_window(number) for number in count())
    made = 0
    for session in (session for window in windows for session in window):
        if made >= requests:
            return
        made += len(session)
        yield session


def _window(number: int) -> Iterator[Session]:
    drawn = by_session(generate(SESSIONS, WINDOW_S, number, SMALL))
    ordered = sorted(drawn.values(), key=lambda turns: turns[0].timestamp_ms)
    shift = number * 10_000_000
    for turns in ordered:
        yield [
            replace(
                turn,
                session_id=f"{number}:{turn.session}",
                timestamp_ms=turn.timestamp_ms + number * WINDOW_S * 1e3,
                hash_ids=tuple([hash_id if hash_id < SYSTEMS else hash_id + shift for hash_id in turn.hash_ids]),
            )
            for turn in turns
        ]
