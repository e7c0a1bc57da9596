"""Has the router's history take up how the fleet is, in turns that no placement notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pointsman.router.core.history.fleet_history import FleetHistory
from pointsman.router.core.history.fleet_sampler import take_sample
from pointsman.router.core.router_state import RouterState

# Two samples in each of a pool's buckets (rows.POOL_STEP_S): one that comes late leaves no gap.
SAMPLE_S = 2.5
# How long a sample may keep placements waiting, and how long they are alone then.
TURN_S = 0.0005
PAUSE_S = 0.005


async def keep_history(state: RouterState, history: Callable[[], FleetHistory]) -> None:
    """Sample `state` every SAMPLE_S for whatever `history` gives, until cancelled."""
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
