"""Samples the router's state into its history, in parts that are too short to delay placements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pointsman_router.core.history.fleet_history import FleetHistory
from pointsman_router.core.history.fleet_sampler import take_sample
from pointsman_router.core.router_state import RouterState

# Interval between two samples, s. Half of a pool's bucket (rows.POOL_STEP_S), so that a late sample leaves no bucket empty.
SAMPLE_S = 2.5
# Longest time that a sample may block the event loop at once, s.
TURN_S = 0.0005
# Pause after each such time, in which placements run, s.
PAUSE_S = 0.005


async def keep_history(state: RouterState, history: Callable[[], FleetHistory]) -> None:
    """Add a sample of `state` to the history that `history()` returns, every SAMPLE_S, until cancelled."""
    while True:
        begun = time.monotonic()
        await _sample(state, history(), begun)
        await asyncio.sleep(max(begun + SAMPLE_S - time.monotonic(), PAUSE_S))


async def _sample(state: RouterState, history: FleetHistory, now: float) -> None:
    until = time.perf_counter() + TURN_S
    for _ in take_sample(state, history, now):
        if time.perf_counter() > until:
            await asyncio.sleep(PAUSE_S)
            until = time.perf_counter() + TURN_S
